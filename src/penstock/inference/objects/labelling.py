"""Labels an array by blocks: counts the objects of each block, joins them, writes final numbers.

    IN ──▶ count (by blocks) ──▶ join, number (one process) ──▶ write (by blocks) ──▶ OUT, table

Each step has the same result whoever does which block, when and how often. What is counted lies in
a folder beside the output until the end, so that a run that was killed goes on with it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ...base import (
    RUN_FILE,
    LabelConfig,
    UsageError,
    append_line,
    as_settings,
    check_folder,
    check_outputs,
    held_alone,
    plural,
    read_json,
    scrubbed,
    usable_cores,
    write_json,
)
from ...data import (
    Box,
    Grid,
    OutputLock,
    Sink,
    Source,
    in_words,
    open_source,
    overlap,
)
from ..run_folder.names import default_run_dir
from .block_work import IDS_FILE, STARTS_FILE, BlockWork, over_blocks
from .components import ComponentRule, HoleTable, checked_connectivity, matter_of
from .decoded_views import ViewWork, save_array, view_work
from .face_joins import Contacts, Numbering, Totals, all_touching, groups_of, numbered, touches
from .label_output import LabelOutput, open_input
from .object_table import write_table
from .view_joins import DecodedRule, Owners, owners_of

BLOCK_VOXELS = 2**23
"""The most voxels of a block that is chosen: a worker takes about 25 bytes for each."""
_HOLES, _OBJECTS, _VIEWS, _WRITTEN = "holes", "objects", "views", "written.log"
_OF_ONE_START = {"overwrite", "resume", "workers", "run_dir", "take_over", "levels"}
Show = Callable[[int], None]


@dataclass(frozen=True)
class LabelSummary:
    """What a labelling did."""

    objects: int
    left_out: int
    connectivity: int
    dtype: str
    blocks: int
    block: tuple[int, ...]
    levels: int
    owners: Owners | None = None
    """The joins of what a decoder made; None for components."""


class Labelling:
    """One labelling, opened: nothing is written before `run`."""

    def __init__(self, config: LabelConfig) -> None:
        """Open the input and look at the output.

        Raises `UsageError` if the labelling cannot be done as it is asked for.
        """
        self.config = config
        self.source = open_input(config)
        rule = _rule_of(config, self.source)
        self.taken = _taken(rule)
        self.domain = _domain_of(config, self.source)
        dtype = config.dtype or "uint32"
        self.output = LabelOutput(config, self.source, self.domain)
        self.sink = self.output.sink(dtype, overwrite=True)  # as it would be if there was none
        if overlap(self.source, self.sink):
            raise UsageError(f"OUT {self.sink.name}: is the input, or lies in it")
        self.folder = config.run_dir or _beside(self.sink)
        if config.run_dir is not None:
            check_folder(self.folder, "--run-dir")
        self.goes_on = config.resume and (self.folder / RUN_FILE).is_file()
        if not self.goes_on:
            self.output.sink(dtype, overwrite=config.overwrite).check()
        given = [Path(each) for each in (config.in_spec, config.intensity) if isinstance(each, str)]
        check_outputs(("--table", config.table), replace=config.overwrite, inputs=given)
        block = _block_of(self.sink, config.block)
        grid = Grid(self.domain, (1, 1, *block), self.sink.grid_origin)
        measured = config.table is not None
        self.work = BlockWork(config, rule, grid, self.folder / _OBJECTS, measured)
        _check_image(config, self.source)
        self.views: ViewWork | None = None
        if config.decodes:
            self.views = view_work(config, self.source, self.domain, self.folder / _VIEWS)
            self.taken = f"what {config.decoder} gives for {plural(len(self.views.grid), 'block')}"
        self.workers = config.workers or usable_cores()
        self.run_id = uuid.uuid4().hex

    @property
    def voxels(self) -> int:
        """Voxels that are labelled, counted once for each time that they are."""
        more = self.config.fill_holes or self.config.decodes
        return self.domain.size * (3 if more else 2)

    def run(self, show: Show = lambda voxels: None) -> LabelSummary:
        """Label.

        Args:
            show: Called with the number of voxels done, of `voxels`.

        Returns:
            What was done.

        Raises:
            UsageError: The output exists, or is too narrow; or a value cannot be labelled.
        """
        total = 0

        def add(voxels: int) -> None:
            nonlocal total
            total += voxels
            show(total)

        with held_alone(self.folder / "lock", "labels"):
            begun = self._begin()
            work = self.work
            config, owners = self.config, None
            if self.views is not None:
                owners = self._decoded(self.views, add)
                rule = DecodedRule(replace(self.views), owners, work.rule.connectivity)
                work = replace(work, rule=rule)
            elif config.fill_holes:
                work = replace(work, rule=self._filled(add))
            totals, groups, contacts = self._count(work, add)
            numbering = numbered(totals, groups, config.min_size, config.clear_border)
            summary = self._write(work, numbering, begun, add)
            if config.table is not None:
                write_table(config, work, self.source, numbering, contacts, self.sink)
            self._clear()
        with contextlib.suppress(OSError):  # something of the user's is in it
            self.folder.rmdir()
        return replace(summary, owners=owners)

    def _begin(self) -> dict[str, Any]:
        """Begin a run folder, or go on with one. Returns what it says."""
        file, says = self.folder / RUN_FILE, self._says()
        if self.goes_on:
            before: dict[str, Any] = read_json(file)
            if differ := [key for key, value in says.items() if before.get(key) != value]:
                key = differ[0]
                raise UsageError(
                    f"--resume: the run in {self.folder} had {key} {before.get(key)!r}, and here "
                    f"it is {says[key]!r}; go on with the same, or leave --resume out"
                )
            return before
        self._clear()
        says |= {"run": self.run_id, "made": False}
        write_json(file, says)
        return says

    def _says(self) -> dict[str, Any]:
        settings = as_settings(self.config)
        settings |= {"input": self.source.fingerprint, "block": self.work.grid.step}
        kept = {key: value for key, value in settings.items() if key not in _OF_ONE_START}
        return json.loads(json.dumps(scrubbed(kept), default=str))

    def _decoded(self, views: ViewWork, add: Show) -> Owners:
        """Decode all views, and join them."""
        views.folder.mkdir(parents=True, exist_ok=True)
        for _ in self._over(views, "decode", views.lacking(), add):
            pass
        return owners_of(views, usable_cores())

    def _filled(self, add: Show) -> ComponentRule:
        """The rule with holes, which are counted first."""
        rule = self.work.rule
        assert isinstance(rule, ComponentRule)
        around = rule.background()
        work = replace(self.work, rule=around, folder=self.folder / _HOLES, measured=False)
        totals, groups, _ = self._count(work, add)
        outside = touches(totals, groups, int(groups.max(initial=-1)) + 1)
        holes = HoleTable(around.connectivity, ~outside[groups], totals.starts)
        return replace(rule, holes=holes)

    def _count(self, work: BlockWork, add: Show) -> tuple[Totals, Any, list[Contacts]]:
        """Count the objects of all blocks, and join them. Returns the group of each, too."""
        work.folder.mkdir(parents=True, exist_ok=True)
        lacking = [n for n in range(len(work.grid)) if not work.record(n).is_file()]
        for _ in self._over(work, "count", lacking, add):
            pass
        load = lru_cache(maxsize=64)(work.load)
        totals = Totals.of(map(work.load, range(len(work.grid))))
        pairs, contacts = all_touching(work.grid, totals, load, work.rule.connectivity)
        if isinstance(work.rule, DecodedRule):
            return totals, np.unique(totals.keys, return_inverse=True)[1], contacts
        return totals, groups_of(len(totals.first), pairs), contacts

    def _write(
        self, work: BlockWork, numbering: Numbering, begun: dict[str, Any], add: Show
    ) -> LabelSummary:
        """Write all blocks, and the levels below."""
        config = self.config
        save_array(self.folder / IDS_FILE, numbering.ids)
        save_array(self.folder / STARTS_FILE, numbering.starts)
        run = begun["run"]
        lock = OutputLock.take([self.sink], run, folder=self.folder, take_over=config.take_over)
        with contextlib.closing(lock):
            sink, there = self.output.created(lock, run, begun["made"], numbering.kept)
            log = self.folder / _WRITTEN
            if not there:
                log.unlink(missing_ok=True)
                write_json(self.folder / RUN_FILE, begun | {"made": True})
            self.sink, work = sink, replace(work, dtype=sink.dtype.name)
            with log.open("ab+") as file:
                file.seek(0)
                written = {int(line) for line in file.read().split(b"\n")[:-1] if line.isdigit()}
                lacking = [n for n in range(len(work.grid)) if n not in written]
                for number in self._over(work, "write", lacking, add):
                    append_line(file, str(number))
                    lock.check()
            sink.close()
            levels = self.output.add_levels(sink)
        return LabelSummary(
            numbering.kept, numbering.objects - numbering.kept, work.rule.connectivity,
            sink.dtype.name, len(work.grid), work.grid.step[2:], levels,
        )  # fmt: skip

    def _over(
        self, work: BlockWork | ViewWork, step: str, lacking: list[int], add: Show
    ) -> Iterator[int]:
        """Do a step for each block that lacks it, and yield its number. Those before it count as
        done."""
        add(work.grid.domain.size - sum(work.grid[n].size for n in lacking))
        for number, voxels in over_blocks(work, step, lacking, self.workers):
            yield number
            add(voxels)

    def _clear(self) -> None:
        """Remove what this verb writes into the folder."""
        for name in (_HOLES, _OBJECTS, _VIEWS):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        for name in (IDS_FILE, STARTS_FILE, _WRITTEN, RUN_FILE):
            (self.folder / name).unlink(missing_ok=True)


def _beside(sink: Sink) -> Path:
    run_dir = default_run_dir(sink)
    if run_dir is None:
        raise UsageError("--run-dir DIR is needed for an output that is no store")
    return run_dir.with_suffix(".labels")


def _block_of(sink: Sink, said: tuple[int, ...] | None) -> tuple[int, ...]:
    """The shape of a block: what is said, else whole chunks of about a size, nearly a cube."""
    cell, space = sink.write_grid[2:], sink.domain.shape[2:]
    if said is not None:
        block = (*cell[: 3 - len(said)], *said)
        ends = zip(block, cell, space, strict=True)
        if any(side % by and side < all_of for side, by, all_of in ends):
            words = " ".join(map(str, cell))
            raise UsageError(f"--block {said}: is not whole chunks of the output, {words} (z y x)")
        return block
    sides = list(cell)
    while True:
        shorter = [axis for axis in range(3) if sides[axis] < space[axis]]
        if not shorter or 2 * np.prod(sides) > BLOCK_VOXELS:
            return tuple(sides)
        sides[min(shorter, key=lambda axis: sides[axis])] *= 2


def _rule_of(config: LabelConfig, source: Source) -> ComponentRule:
    """The rule of components. Where a decoder makes objects, the rule of those that touch."""
    connectivity = checked_connectivity(config.connectivity, source.axes)
    if config.decodes:
        return ComponentRule("mask", connectivity)
    matter = matter_of(source, config.threshold, config.equal)
    if matter == "labels" and config.fill_holes:
        raise UsageError(
            "--fill-holes: a hole may lie between several labels; give --no-equal for a mask"
        )
    return ComponentRule(matter, connectivity, config.threshold or 0.0)


def _taken(rule: ComponentRule) -> str:
    """What counts as an object, in words."""
    texts = {"mask": "all that is not 0", "labels": "voxels of equal value"}
    return texts.get(rule.matter, f"what is above {rule.threshold:g}")


def _domain_of(config: LabelConfig, source: Source) -> Box:
    """The voxels to label: a decoder makes one array of all channels."""
    domain = source.domain
    return domain[:1] + Box((0,), (1,)) + domain[2:] if config.decodes else domain


def _check_image(config: LabelConfig, source: Source) -> None:
    """Refuse an image that does not lie over the input, voxel by voxel."""
    if config.intensity is None:
        return
    image = open_source(config.intensity, name="--intensity")
    ours, theirs = ((s.domain[:1] + s.domain[2:]) for s in (source, image))
    if ours != theirs:
        raise UsageError(
            f"--intensity {image.name}: has t z y x {in_words(theirs.shape)}, and the input has "
            f"{in_words(ours.shape)}"
        )
    channels = range(image.domain.start[1], image.domain.stop[1])
    for channel in config.channels or ():
        if channel not in channels:
            raise UsageError(f"--channels {channel}: {image.name} has {len(channels)}")
