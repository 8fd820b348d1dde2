"""Run a model over a volume larger than memory.

    source -> read -> normalise -> forward -> stitch -> write -> sink

The stages stand below in the order in which a block meets them: `_read` brings blocks in and finds
their percentiles, a `Lane` normalises them, runs the net and puts patches back into blocks,
`_stitch` joins blocks into write units, and `_write` writes each unit once and notes that it did.
Restoring the visiting order before stitching is what makes the result the same to the bit whatever
the number of workers or devices.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray

from ..base import (
    Incomplete,
    InferConfig,
    UsageError,
    as_settings,
    build,
    cuda_flags_kept,
    frozen_garbage,
    in_threads,
    keep_traceback_in,
    modes_kept,
    speaks_python,
)
from ..data import Claims
from ..models import set_cuda_flags
from .geometry import Block
from .job import Job
from .journal import Journal
from .lane import Lane
from .plan import Plan
from .queues import Queues
from .reading import BlockReader, wanted_blocks
from .statistics import find_scalings
from .stitch import Assembly, Unit
from .summary import Progress, Summary
from .values import cast
from .watch import Watch, forgoing


@speaks_python(InferConfig, model_type="model")
def run_inference(
    in_spec: Any,
    out_spec: Any,
    *,
    model: Any,
    progress: Callable[[Progress], None] | None = None,
    **knobs: Any,
) -> Summary:
    """Run a model over a volume and write the result.

    Args:
        in_spec: The input: a path, a URL, a TensorStore spec or a numpy array. It has 2 to 5 axes,
            the last ones of t c z y x.
        out_spec: The output, like the input; several of them for a model of several heads.
        model: A name, a reference, a file or an ``nn.Module`` that maps (batch, channels, z, y, x)
            to the same spatial shape.
        progress: A function that is called with the progress while the job runs.
        knobs: The fields of `InferConfig`, which are the flags of ``penstock infer``.

    Returns:
        The times of the stages, and what was written.

    Raises:
        UsageError: The job cannot be done as asked. Nothing was created.
        Refused: The memory of the host or of a device does not hold the job.
        StageError: A stage failed. The error names the stage and the block.
        Incomplete: A block is missing at the end.
    """
    with modes_kept(model):
        return run_job(_job(in_spec, out_spec, model, knobs), progress)


@speaks_python(InferConfig, model_type="model")
def plan_inference(in_spec: Any, out_spec: Any, *, model: Any, **knobs: Any) -> Plan:
    """Plan what `run_inference` would do, without doing it.

    Args:
        in_spec: As for `run_inference`.
        out_spec: As for `run_inference`.
        model: As for `run_inference`.
        knobs: As for `run_inference`.

    Returns:
        Counts, bytes and memory of the job.

    Raises:
        UsageError: The job cannot be done as asked. Nothing was created.
    """
    with modes_kept(model):
        return _job(in_spec, out_spec, model, knobs).plan


def _job(in_spec: Any, out_spec: Any, model: Any, knobs: dict[str, Any]) -> Job:
    named = {"in_spec": in_spec, "out_spec": out_spec, "model_type": model}
    return Job(build(InferConfig, named, knobs))


def run_job(job: Job, progress: Callable[[Progress], None] | None = None) -> Summary:
    """Carry out the plan of a job. On success every planned block has been written.

    Args:
        job: The job, opened.
        progress: A function that is called with the progress while the job runs.

    Returns:
        The times of the stages, and what was written.

    Raises:
        UsageError: Another process writes the output, or the run folder cannot be used.
        Refused: The memory of the host or of a device does not hold the job.
        StageError: A stage failed. The error names the stage and the block.
        Incomplete: A block is missing at the end.
    """
    job.plan.refuse()
    resume = job.config.resumes and all(sink.exists for sink in job.sinks)
    with _naming(f"--run-dir {job.run_dir}"):
        journal = Journal.open(
            job.run_dir,
            job.fingerprint() if job.run_dir else {},
            job.maker() if job.run_dir else {},
            resume=resume,
            anyway=job.config.resume_anyway,
        )
    with contextlib.closing(journal), cuda_flags_kept(), keep_traceback_in(job.run_dir):
        set_cuda_flags(job.config.tf32, job.config.cudnn_benchmark)
        for sink in job.sinks:  # before the list of what is in the old output is lost
            sink.check()
        claims = Claims.take(job.sinks, journal.run, journal.check_maker)
        with contextlib.closing(claims):
            summary = _carry_out(job, journal, claims, progress)
    with forgoing(f"--run-dir {job.run_dir}: summary.json"):
        journal.save("summary.json", asdict(summary))
    return summary


def _carry_out(
    job: Job, journal: Journal, claims: Claims, progress: Callable[[Progress], None] | None
) -> Summary:
    """Write every unit. From here to the end the outputs belong to this run."""
    _say_unlocked(claims.lacking, job.config.require_lock)
    with _naming(f"--run-dir {job.run_dir}"):
        journal.lock()
        _say_unlocked(journal.lacking, job.config.require_lock)
        # Before the output is replaced: a kill in between would leave a list of units that were
        # written to the old one. And before a trace is begun: another run may be writing both.
        journal.begin(as_settings(job.config), locked=not claims.lacking)
    claims.name()
    queues = Queues(job)
    watch = Watch(job, journal, queues)
    for sink in job.sinks:
        sink.create()
    with watch.sampling(), frozen_garbage():
        reader = BlockReader(job, find_scalings(job, journal, watch), queues.read_pool)
        Pipeline(job, journal, claims, queues, watch, reader).run(progress)
    summary = watch.summary(reader.chunks.count, (*claims.lacking, *journal.lacking))
    if summary.units_written + summary.units_skipped != summary.units_planned:
        raise Incomplete(
            f"{summary.units_written} of {summary.units_planned} blocks were written; "
            "run again with --resume"
        )
    claims.confirm()
    for sink in job.sinks:
        sink.close()
    return summary


def _say_unlocked(reasons: Sequence[str], required: bool) -> None:
    for why in reasons:
        if required:
            raise UsageError(f"--require-lock: {why}")
        warnings.warn(f"{why}; see that nobody else writes it", RuntimeWarning, stacklevel=4)


@contextlib.contextmanager
def _naming(what: str) -> Iterator[None]:
    """Turn an error of the system into a `UsageError` that names ``what``."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{what}: {error.strerror}") from error


class Pipeline:
    """The threads of a running job: the stages, and what each hands to the next."""

    def __init__(
        self,
        job: Job,
        journal: Journal,
        claims: Claims,
        queues: Queues,
        watch: Watch,
        reader: BlockReader,
    ) -> None:
        self.job, self.journal, self.claims = job, journal, claims
        self.queues, self.watch, self.probe, self.reader = queues, watch, watch.probe, reader
        self.blocks = wanted_blocks(job, journal.done)
        self.ticket = threading.Lock()
        self.tickets = [threading.Lock() for _ in job.devices]
        self.places = [itertools.count() for _ in job.devices]

    def run(self, progress: Callable[[Progress], None] | None) -> None:
        """Start the threads and wait for them. Raises the first error of any."""
        for lane, device in enumerate(self.job.devices):
            for i in range(self.queues.readers):
                self._spawn(f"read-{lane}.{i}", partial(self._read, lane))
            self._spawn(f"forward-{lane}", partial(self._compute, lane, device))
        self._spawn("stitch", self._stitch)
        for i in range(self.job.config.writer_workers):
            self._spawn(f"write-{i}", self._write)
        self.queues.flow.join(lambda: progress(self.watch.progress()) if progress else None)
        if progress:
            progress(self.watch.progress())

    def _spawn(self, name: str, work: Callable[[], None]) -> None:
        """Start a thread in which torch uses as many threads as --threads says."""
        self.queues.flow.spawn(name, partial(in_threads, self.job.config.threads, work))

    def _read(self, lane: int) -> None:
        """Read blocks until none is left, and prepare each for its lane."""
        while True:
            # Room is taken while the ticket is held. If two readers could swap, the later block
            # might take the room that the earlier one waits for.
            with self.tickets[lane]:
                with self.ticket:
                    block = next(self.blocks, None)
                if block is None:
                    break
                place = next(self.places[lane])
                with self.probe.waiting("read"):
                    self.queues.room[lane].acquire(self.job.plan.block_bytes(block))
            with self.watch.stage("read", f"{block} of {self.job.source.name}"):
                array = self.reader.fetch(block)
            with self.watch.stage("normalise", block):
                loaded = self.reader.prepare(block, array)
            self.queues.loaded[lane].put(loaded, place)
        self.queues.loaded[lane].close()

    def _compute(self, number: int, device: torch.device) -> None:
        """Run one lane from its first block to its last."""
        with self.watch.stage("forward", device, timed=False):
            if device.type == "cuda":
                torch.cuda.set_device(device)
            lane = Lane(
                device,
                self.job,
                self.probe,
                (self.queues.read_pool, self.queues.block_pool),
                partial(self._before_batch, number),
            )
        block: Block | None = None
        channel, coming = self.queues.loaded[number], None
        with lane.forward.autocast():
            while True:
                loaded, coming = coming, None
                if loaded is None:
                    with self.probe.waiting("forward"):
                        loaded = channel.get()
                block = loaded.block if loaded is not None else block
                with self.watch.stage("forward", block, timed=False):
                    if loaded is not None:
                        lane.transfers.upload(loaded)
                        if channel.ready and (coming := channel.get()) is not None:
                            lane.transfers.upload(coming)  # while the net works on this one
                    done = lane.push(loaded) if loaded is not None else lane.flush()
                    for finished in done:
                        self.queues.computed.put((number, finished), finished.block.number)
                if loaded is None:
                    break
        self.queues.computed.close()

    def _before_batch(self, number: int, patches: int) -> None:
        """Count the patches of a lane's next batch. Stops the lane if the job has failed."""
        self.queues.flow.check()
        self.watch.patches_done[number] += patches

    def _stitch(self) -> None:
        """Join blocks, in order, into whole units."""
        assembly = Assembly(
            self.job.geometry,
            self._empty_unit,
            [head.blended for head in self.job.heads],
            lambda volume, index: (volume, *index) not in self.journal.done,
        )
        while True:
            with self.probe.waiting("stitch"):
                item = self.queues.computed.get()
            if item is None:
                break
            lane, computed = item
            with (
                self.watch.stage("forward", computed.block, timed=False),
                self.probe.waiting("stitch"),
            ):
                computed.wait()
            with self.watch.stage("stitch", computed.block, timed=False):
                for number, head in enumerate(self.job.heads):
                    if not head.blended:
                        count, size = computed.clipped[number], computed.outputs[number].numel()
                        self.watch.count_clipped(number, count, size)
                units = assembly.add(computed.block, computed.arrays())
                while True:
                    with self.probe.span("stitch", computed.block):
                        unit = next(units, None)
                    if unit is None:
                        break
                    with self.probe.waiting("stitch"):
                        self.queues.write_room.acquire(self._unit_bytes(unit))
                    self.queues.whole.put(unit)
                for buffer in computed.buffers:
                    self.queues.block_pool.give(buffer)
            self.queues.room[lane].release(self.job.plan.block_bytes(computed.block))
        self.queues.whole.close()

    def _empty_unit(self, head: int, shape: tuple[int, ...]) -> NDArray[Any]:
        plan = self.job.heads[head]
        array = self.queues.unit_pool.take((plan.channels, *shape), plan.kept)
        if plan.blended:
            array.fill(0)
        return array

    def _unit_bytes(self, unit: Unit) -> int:
        pairs = zip(unit.arrays, self.job.sinks, strict=True)
        return sum(array.size * sink.dtype.itemsize for array, sink in pairs)

    def _write(self) -> None:
        """Write whole units, and note each one once it is written."""
        while True:
            with self.probe.waiting("write"):
                unit = self.queues.whole.get()
            if unit is None:
                return
            for head, output in enumerate(self.job.outputs):
                sink = output.sink
                with self.watch.stage("write", f"block {unit.index} {unit.box} of {sink.name}"):
                    array = unit.arrays[head]
                    if self.job.heads[head].blended:
                        sums, array = array, self.queues.unit_pool.take(array.shape, sink.dtype)
                        self.watch.count_clipped(head, cast(sums, array), array.size)
                        self.queues.unit_pool.give(sums)
                    self.claims.check()
                    sink.write(output.box(unit.volume, unit.box), array[None])
                    self.queues.unit_pool.give(array)
            where = f"block {unit.index} {unit.box}, noting it in {self.journal.path('done.log')}"
            with self.watch.stage("write", where, timed=False):
                self.journal.note((unit.volume, *unit.index), unit.box.size)
            self.queues.write_room.release(self._unit_bytes(unit))
