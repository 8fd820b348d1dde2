"""Labels an array: alone, on workers that somebody else gives blocks to, or as a step of an array.

    --prepare       makes the run folder and locks the output
    --part i/n      does a share of the blocks of the round that is next
    --finish        ends the round: joins what is found, or closes the output after the last one

After ``--prepare``, the other two follow each other once for each round. Only ``--finish`` goes to
the next round, so a part that comes late or twice does nothing or the same again. A ``--finish``
that comes twice changes nothing: it finds a round of which no block is done, or no round.
"""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from ...base import (
    LOCK_SUFFIX,
    SUMMARY_FILE,
    Incomplete,
    InferConfig,
    LabelConfig,
    UsageError,
    as_settings,
    nth_share,
    number_ranges,
    plural,
    share_of,
)
from ..run_folder.folder import check_same, is_complete, read_run
from ..run_folder.journal import Journal, Prepared
from .block_work import Over, Round, processes
from .components import checked_connectivity
from .decoders import check_decoder
from .label_job import OF_ONE_START, LabelJob
from .label_output import open_input, output_of
from .label_run import LabelRun, LabelSummary, begun, joined

Show = Callable[[int], None]
_DONE = {"decode": "decoded", "fill": "searched for holes", "count": "counted", "write": "written"}


Step = tuple[str, LabelSummary | None]
"""The sentence on what a step of an array has done; and from the last step the summary of all."""


class Labelling(LabelJob):
    """One labelling, opened: nothing is written before `run` or `step`."""

    @property
    def voxels(self) -> int:
        """Voxels that this process labels, counted once for each round."""
        if self.config.part is not None:
            return self.domain.size // share_of(self.config.part)[1]
        return self.domain.size * len(self.config.rounds)

    def run(self, show: Show = lambda voxels: None, over: Over | None = None) -> LabelSummary:
        """Label.

        Args:
            show: Called with the number of voxels done, of `voxels`.
            over: Does a round for some blocks; by default processes of this machine do.

        Returns:
            What was done.

        Raises:
            UsageError: The output exists, or is too narrow; or a value cannot be labelled.
            Refused: The memory does not hold the work.
        """
        self.refuse()
        with begun(self) as run, contextlib.ExitStack() as stack:
            over = over or stack.enter_context(processes(self.workers))
            while (each := run.next_round()) is not None:
                before = self.domain.size * self.config.rounds.index(each.name)
                self._do(run, each, range(len(each.work.grid)), before, show, over)
                run.end_round(each)
            return run.finish()

    def step(self, show: Show = lambda voxels: None) -> Step:
        """Do the step of an array that the settings name.

        Args:
            show: Called with the number of voxels done, of `voxels`.

        Returns:
            What was done.

        Raises:
            UsageError: An earlier step is missing; or as `run`.
            Incomplete: --finish found that blocks are missing.
        """
        self.refuse()
        if self.config.prepare:
            return self._prepare()
        if self.config.part is not None:
            return self._part(*share_of(self.config.part), show)
        return self._finish()

    def _prepare(self) -> Step:
        elements, rounds = self.config.workers or 1, len(self.config.rounds)
        with begun(self, Prepared(self.work.grid.step[2:], elements)) as run:
            run.lock.hand_over()
        done = (
            f"Prepared {plural(len(self.work.grid), 'block')} in {self.folder}; next "
            f"{plural(rounds, 'time')}: --part i/{elements} for each i, then --finish"
        )
        return done, None

    def _part(self, element: int, elements: int, show: Show) -> Step:
        # Each start has files of its own, so its name ends with what no other start has.
        name = f"part-{element}-of-{elements}-{uuid.uuid4().hex[:8]}"
        with joined(self, name) as run:
            each = run.next_round()
            if each is None:
                return "All blocks are written; next --finish", None
            size = len(each.work.grid)
            numbers = nth_share(element - 1, elements, size)
            try:
                with processes(self.workers) as over:
                    self._do(run, each, numbers, 0, show, over)
            finally:  # a log without a summary is that of a process that was killed
                run.journal.save(run.journal.own_name(SUMMARY_FILE), {"round": each.name})
        count = plural(len(numbers), "block")
        return f"{count} of {size} {_DONE[each.name]}; after all parts --finish", None

    def _finish(self) -> Step:
        with joined(self, None) as run:
            each = run.next_round()
            if each is None:
                return "Complete: all blocks are written", run.finish()
            run.lock.hand_over()  # to the parts of the next round, or once more of this one
            if lacking := run.lacking(each, range(len(each.work.grid))):
                raise self._incomplete(each, lacking)
            run.end_round(each)
        return f"All blocks are {_DONE[each.name]}; next --part i/n for each i, then --finish", None

    def _incomplete(self, each: Round, lacking: list[int]) -> Incomplete:
        """The error that says which parts are to be started again."""
        elements, size = Prepared.read(self.folder).elements, len(each.work.grid)
        # The inverse of the shares in `_part`.
        again = sorted({((number + 1) * elements - 1) // size + 1 for number in lacking})
        # An earlier --finish may have ended the round before, or the parts of this one were lost.
        done, run = _DONE[each.name], "run again with"
        some = f"{len(lacking):,} of {size:,} blocks are not {done}"
        if len(lacking) == size:
            some, run = f"no block is {done} yet", "run"
        return Incomplete(
            f"{some}; {run} --part i/{elements} for each i of {number_ranges(again)}, then --finish"
        )

    def _do(
        self, run: LabelRun, each: Round, numbers: range, before: int, show: Show, over: Over
    ) -> None:  # fmt: skip
        """Do a round for some blocks. ``before`` are the voxels that count as done."""
        grid, lacking = each.work.grid, run.lacking(each, numbers)
        before += sum(grid[n].size for n in numbers) - sum(grid[n].size for n in lacking)
        show(before)
        for number, check in over(each, lacking):
            run.note(each, number, check)
            before += grid[number].size
            show(before)


def check_instances(scores: InferConfig, label: LabelConfig) -> None:
    """Refuse objects that cannot be made or written, before their scores are computed.

    Args:
        scores: The settings of the run that writes scores.
        label: Those of the labelling of these.

    Raises:
        UsageError: The decoder cannot be imported, or does not fit the axes; or the output cannot
            be written.
    """
    check_decoder(label)
    source = open_input(scores)
    checked_connectivity(label.connectivity, source.axes)
    replaces = label.overwrite or label.resume
    sink = output_of(label, source, source.domain, "uint32", overwrite=replaces)
    if hasattr(sink, "making_bytes"):  # the scratch of scores has no CRS that it could get
        raise UsageError(
            f"--instances writes an OME-Zarr, and no {sink.name}; write scores, and label those"
        )


def lacking_of_instances(
    scores: InferConfig, label: LabelConfig
) -> tuple[Literal["scores", "objects"], ...]:
    """What a start of ``infer --instances`` has still to do: write scores, label objects, or both.
    Processes that share the job write all scores before any of them labels.

    Args:
        scores: The settings of the run that writes scores.
        label: Those of the labelling of these.

    Returns:
        Both, or for a step that joins them the one that is not complete; empty if all is there.

    Raises:
        UsageError: All is there, and made with other settings than a start with --resume has.
    """
    folder = _folder_of(label)
    if not scores.joins:
        if label.resume and is_complete(folder) and Path(label.out_spec).exists():
            remove_scratch(label)  # a start that was killed may have removed half of it
            _check_as_before(scores, label, folder)
            return ()
        return "scores", "objects"
    assert scores.run_dir is not None
    if not is_complete(scores.run_dir):
        return ("scores",)
    return () if is_complete(folder) else ("objects",)


def _check_as_before(scores: InferConfig, label: LabelConfig, folder: Path) -> None:
    """Raise `UsageError` if objects that are complete were made with other settings."""
    from ..opening.job import Job  # it loads torch

    before = read_run(folder)["settings"]
    now = dict.fromkeys(before) | as_settings(label)
    check_same(folder, before, {name: now[name] for name in now if name not in OF_ONE_START})
    job = Job(scores)
    assert job.run_dir is not None
    Journal.open(job.run_dir, job.fingerprint, job.maker, resume=True)


def remove_scratch(label: LabelConfig) -> None:
    """Remove the scores of ``infer --instances``, if all objects are written."""
    scratch = Path(label.in_spec)
    if is_complete(_folder_of(label)):
        # It may be gone since an earlier start. But what cannot be removed must be said.
        shutil.rmtree(scratch, ignore_errors=not scratch.exists())
        scratch.with_name(scratch.name + LOCK_SUFFIX).unlink(missing_ok=True)


def _folder_of(label: LabelConfig) -> Path:
    return Path(f"{label.out_spec}.penstock")
