"""One going of a labelling: its journal and lock, and the rounds that are left.

    decode views ─▶ join ┐
    count background ─▶ join ┴─▶ count objects ─▶ join, number, create OUT ─▶ write ─▶ levels, table

Each round is done block by block, by any processes. What ends a round is done by one process alone,
and its file says that the round has ended. So whoever opens the run folder knows what is next.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import (
    RUN_FILE,
    SUMMARY_FILE,
    Refused,
    format_bytes,
    read_json,
    usable_cores,
)
from ...data import OutputLock, flatten, open_source, unflatten
from ..run_folder.block_log import Key
from ..run_folder.folder import is_complete, read_run
from ..run_folder.journal import Journal, Prepared, noting_end
from ..run_folder.names import (
    AMBIGUOUS_FILE,
    HOLES,
    HOLES_FILE,
    IDS_FILE,
    OBJECTS,
    OWNERS_FILE,
    STARTS_FILE,
    VIEWS,
)
from ..stages.beginning import begin, entered, removed
from .block_record import load_table, save_array, save_table
from .block_work import BlockWork, Round
from .components import HoleTable
from .decoded_views import Owners, ViewWork, owners_of
from .face_joins import Contacts, Joining, Totals, numbered, touches
from .label_job import LabelJob
from .label_output import add_label_levels, check_count
from .object_table import (
    Cutout,
    PlaneEnds,
    cutouts_of,
    ends_at_planes,
    merged_measures,
    object_columns,
    write_table,
)


@dataclass(frozen=True)
class LabelSummary:
    """What a labelling did."""

    objects: int
    left_out: int
    taken: str
    connectivity: int
    dtype: str
    blocks: int
    block: tuple[int, ...]
    levels: int
    ends: PlaneEnds | None = None
    """None if objects were not measured."""
    joined: int | None = None
    """Objects that several views see, as for ``cut``; None for components."""
    cut: int | None = None
    """Objects that the halo of their owner does not hold."""
    ambiguous: int = 0
    largest: tuple[int, ...] = ()
    """The numbers of the largest of them."""
    ambiguous_file: Path | None = None
    """The rows of all of them; None if there are none."""
    cutouts: Sequence[Cutout] = ()
    """The largest; empty if an earlier start has drawn them."""

    @classmethod
    def read(cls, folder: Path) -> LabelSummary:
        """The summary of a labelling that is complete."""
        facts = read_json(folder / SUMMARY_FILE)
        ends = facts["ends"] and PlaneEnds(**facts["ends"])
        sides = {name: tuple(facts.get(name, ())) for name in ("block", "largest")}
        listed = folder / AMBIGUOUS_FILE if facts["ambiguous"] else None
        return cls(**{**facts, **sides, "ends": ends, "ambiguous_file": listed})


class LabelRun:
    """A labelling that is under way in its folder."""

    def __init__(self, labelling: LabelJob, journal: Journal, lock: OutputLock) -> None:
        self.labelling, self.journal, self.lock = labelling, journal, lock
        self.folder = labelling.folder
        self._joined: dict[str, Joining] = {}
        """The last join, with its round, which the table needs again."""

    @cached_property
    def counting(self) -> BlockWork:
        """The work that counts objects, and writes them once the output is there."""
        written = read_run(self.folder).get("output") or {}
        return replace(self.labelling.work, dtype=written.get("dtype", ""), run=self.journal.run)

    def next_round(self) -> Round | None:
        """The round that is not ended; None if all blocks are written."""
        labelling, run = self.labelling, self.journal.run
        self.journal.refresh()
        if len(self.journal.done) >= len(labelling.work.grid):
            return None
        if labelling.views is not None and not (self.folder / OWNERS_FILE).is_file():
            return Round("decode", "decode", labelling.views, run)
        if labelling.config.fill_holes and not (self.folder / HOLES_FILE).is_file():
            around = labelling.work.rule.background()
            work = replace(labelling.work, rule=around, folder=self.folder / HOLES)
            return Round("fill", "count", work, run)
        if not (self.folder / STARTS_FILE).is_file():
            return Round("count", "count", labelling.work, run)
        return Round("write", "write", self.counting, run)

    def lacking(self, each: Round, numbers: range) -> list[int]:
        """Those blocks of a round that are not done."""
        each.work.folder.mkdir(parents=True, exist_ok=True)
        if each.name != "write":
            return each.work.lacking(numbers)
        return [number for number in numbers if self._key(number) not in self.journal.done]

    def note(self, each: Round, number: int, check: str) -> None:
        """Note that a block is done: one that is written, in the log. What a block was counted to
        have lies in a file of its own."""
        if each.name == "write":
            self.journal.note(self._key(number), each.work.grid[number].size, [check])
        elif isinstance(each.work, BlockWork) and self.journal.writer is None:
            self._joining(each.work, number)  # meanwhile others count
        self.lock.check()

    def _key(self, number: int) -> Key:
        """The name of a block in the log."""
        cells = self.labelling.work.grid.cells
        t, c, *index = unflatten(number, cells)
        return (flatten((t, c), cells[:2]), *index)

    def end_round(self, each: Round) -> None:
        """Join what is found of all blocks, which one process does. A round that was ended before
        it noted so is ended again, with the same result."""
        if isinstance(each.work, ViewWork):
            save_table(self.folder / OWNERS_FILE, owners_of(each.work, usable_cores()))
        elif each.name == "fill":
            totals, groups, _ = self._join(each.work)
            outside = touches(totals, groups, int(groups.max(initial=-1)) + 1)
            holes = HoleTable(each.work.rule.connectivity, ~outside[groups], totals.starts)
            save_table(self.folder / HOLES_FILE, holes)
        elif each.name == "count":
            self._number(each.work)

    def _joining(self, work: BlockWork, *numbers: int) -> Joining:
        """The join of the objects of blocks, to which some are added."""
        if (place := str(work.folder)) not in self._joined:
            by_keys, connectivity = work.views is not None, work.rule.connectivity
            load = partial(work.load, without="measures")
            self._joined = {place: Joining(work.grid, connectivity, by_keys, load)}
        joining, limit = self._joined[place], self.labelling.limit
        for number in numbers:
            joining.add(number)
            if (needed := self.labelling.joining_takes(joining.objects)) > limit:
                raise Refused(
                    f"joining {joining.objects:,} objects of blocks takes about "
                    f"{format_bytes(needed)}, and --max-memory allows {format_bytes(limit)}; what "
                    "is counted stays: go on with --resume and more, or begin anew with a larger "
                    "--block"
                )
        return joining

    def _join(self, work: BlockWork) -> tuple[Totals, NDArray[np.int64], list[Contacts]]:
        """The objects of all blocks, the group of each, and faces between blocks."""
        return self._joining(work, *range(len(work.grid))).whole

    def _number(self, work: BlockWork) -> None:
        """Number all objects, and create the output."""
        config, run = self.labelling.config, read_run(self.folder)
        totals, groups, _ = self._join(work)
        numbering = numbered(totals, groups, config.min_size, config.clear_border)
        save_array(self.folder / IDS_FILE, numbering.ids)
        # An output that this run has noted may be there already, made by a start that was killed.
        goes_on, anew = bool(self.journal.done), run["overwrites"] or "output" in run
        dtype = config.dtype or np.min_scalar_type(numbering.kept)
        sink = self.labelling.output(dtype, resume=goes_on, overwrite=anew and not goes_on)
        check_count(sink, numbering.kept)
        # Noted before the old output goes, so that a run that is killed knows what it had begun.
        facts = {"dtype": sink.dtype.name, "objects": numbering.kept, "all": numbering.objects}
        self.journal.fingerprint["dtypes"] = [self.labelling.source.dtype.name, sink.dtype.name]
        self.journal.save(
            RUN_FILE, {**run, "output": facts, "fingerprint": self.journal.fingerprint}
        )
        self.lock.check()  # to create it removes what lies there
        sink.create()
        self.__dict__.pop("counting", None)  # it has a dtype now
        # Last, as this file says that the round has ended.
        save_array(self.folder / STARTS_FILE, numbering.starts)

    def finish(self) -> LabelSummary:
        """Close the output, in which all blocks are written; write the table; remove what was
        found of blocks. A labelling that is complete stays as it is."""
        labelling = self.labelling
        if is_complete(self.folder):
            clear(labelling)  # a start that was killed may have left some
            return LabelSummary.read(self.folder)
        work, output = self.counting, read_run(self.folder)["output"]
        sink = labelling.output(output["dtype"], overwrite=False, resume=True)
        sink.close()
        levels = add_label_levels(labelling.config, labelling.source, sink)
        checks: dict[str, Any] = {}
        if work.measured and (self.folder / STARTS_FILE).is_file():
            checks = self._checked(work, sink)  # else an earlier start has come as far as that
        summary = LabelSummary(
            output["objects"], output["all"] - output["objects"], labelling.taken,
            work.rule.connectivity, output["dtype"], len(work.grid), work.grid.step[2:], levels,
            **checks,
        )  # fmt: skip
        here = ("ambiguous_file", "cutouts")
        facts = {key: value for key, value in vars(summary).items() if key not in here}
        facts["ends"] = summary.ends and summary.ends._asdict()
        # Before anything is removed: without these files no other start could tell all of this.
        self.journal.save(SUMMARY_FILE, facts)
        clear(labelling)
        return summary

    def _checked(self, work: BlockWork, sink: Any) -> dict[str, Any]:
        """Write the table, if there is to be one. Returns what it tells of the blocks."""
        config, source, views = self.labelling.config, self.labelling.source, work.views
        totals, groups, contacts = self._join(self.labelling.work)
        numbering = numbered(totals, groups, config.min_size, config.clear_border)
        total = merged_measures(work, numbering, contacts)
        checks: dict[str, Any] = {"ends": ends_at_planes(total, work.grid, (0, 0, 0))}
        rows = np.zeros(0, np.int64)
        if views is not None:
            owners = load_table(self.folder / OWNERS_FILE, Owners)
            ids = numbering.ids[np.isin(totals.keys, owners.ambiguous)]
            total["ambiguous"] = np.isin(np.arange(1, numbering.kept + 1), ids)
            rows = np.flatnonzero(total["ambiguous"])
            rows = rows[np.argsort(-total["voxels"][rows], kind="stable")]  # the largest first
            checks = {
                "joined": owners.joined,
                "cut": owners.cut,
                "ends": ends_at_planes(total, views.grid, views.halo),
                "ambiguous": len(rows),
            }
        columns = object_columns(total, source, sink, work, self.labelling.place)
        if config.table is not None:
            # A start that was killed may have written it.
            write_table(config.table, columns, source, replace=config.overwrite or config.resumes)
        if len(rows):
            some = {name: column[rows] for name, column in columns.items()}
            file = checks["ambiguous_file"] = self.folder / AMBIGUOUS_FILE
            write_table(file, some, source, replace=True)
            labels = open_source(config.out_spec, name="OUT")
            checks["cutouts"] = cutouts_of(total, rows, source, labels)
            checks["largest"] = tuple(each.number for each in checks["cutouts"])
        return checks


def clear(labelling: LabelJob) -> None:
    """Remove what was found of blocks. The mark that it is all there goes first."""
    for name in (STARTS_FILE, IDS_FILE, HOLES_FILE, OWNERS_FILE):
        (labelling.folder / name).unlink(missing_ok=True)
    for name in (VIEWS, HOLES, OBJECTS):
        shutil.rmtree(labelling.folder / name, ignore_errors=True)


@contextlib.contextmanager
def begun(labelling: LabelJob, prepared: Prepared | None = None) -> Iterator[LabelRun]:
    """Begin a labelling, or go on with one. The output stays locked until the context ends, or
    longer if the lock is handed over.

    ``prepared`` says how several processes share it. Raises `UsageError` if the output exists,
    another process writes it, or the run folder cannot be used.
    """
    config = labelling.config
    journal = _journal(labelling, resume=config.resume)
    if _is_gone(labelling, journal):  # what was noted of its blocks is worth nothing
        journal = _journal(labelling, resume=False)
    before = journal.before
    if not before:
        # Of some dtype, as the count of objects decides it. What is checked is the place.
        labelling.output("uint32", overwrite=config.overwrite).check()
    with entered(journal, [labelling.sink], take_over=config.take_over, retry_for=None) as lock:
        if not before:  # what an earlier run has found, before this one has a name
            journal.lock()
            clear(labelling)
            for suffix in (".csv", ".png"):
                (labelling.folder / AMBIGUOUS_FILE).with_suffix(suffix).unlink(missing_ok=True)
        facts = {
            **labelling.facts(),
            "overwrites": config.overwrite or before.get("overwrites", False),
        }
        if "output" in before:
            facts["output"] = before["output"]
            journal.fingerprint["dtypes"] = before["fingerprint"]["dtypes"]
        # To begin removes the summary, by which a labelling that is complete is known.
        if not is_complete(labelling.folder) or len(journal.done) < len(labelling.work.grid):
            begin(journal, lock, facts, prepared, retry_for=None)
        with noting_end(journal.save):
            yield LabelRun(labelling, journal, lock)


@contextlib.contextmanager
def joined(labelling: LabelJob, writer: str | None) -> Iterator[LabelRun]:
    """Join a labelling that --prepare has begun.

    ``writer`` names this process's own files; None for the one that ends a round, which takes the
    lock of the output. Raises as `begun`, and `PenstockError` if the output was removed.
    """
    Prepared.read(labelling.folder)
    journal = _journal(labelling, resume=True)
    journal.writer = writer
    if _is_gone(labelling, journal):
        raise removed(labelling.sink.name)
    take_over, member = labelling.config.take_over, writer is not None
    with entered(
        journal, [labelling.sink], take_over=take_over, retry_for=None, member=member
    ) as lock:
        journal.join()  # with a lock: one process ends a round
        yield LabelRun(labelling, journal, lock)


def _is_gone(labelling: LabelJob, journal: Journal) -> bool:
    """Whether there is no output, although blocks of it are noted."""
    if not journal.done:
        return False
    dtype = journal.before["output"]["dtype"]
    return not labelling.output(dtype, overwrite=False, resume=True).exists


def _journal(labelling: LabelJob, *, resume: bool) -> Journal:
    return Journal.open(labelling.folder, labelling.fingerprint, labelling.maker, resume=resume)
