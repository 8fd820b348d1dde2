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
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..base import (
    Budget,
    Channel,
    Flow,
    Incomplete,
    InferConfig,
    Pool,
    StageError,
    Stopped,
    UsageError,
    as_settings,
    begin_output,
    build,
    cuda_flags_kept,
    describe,
    end_output,
    frozen_garbage,
    in_threads,
    keep_traceback_in,
    modes_kept,
    speaks_python,
    usable_cores,
    writing_output,
)
from ..data import ChunkCounter, Claims, Histogram, Scaling, Source, block_scaling, reflect
from ..instruments import Probe, Sampler, bottleneck, export_reference
from ..models import set_cuda_flags
from .geometry import Block, block_halo
from .heads import Clipped
from .job import Job, Volume
from .journal import Journal
from .lane import Finished, Lane, LaneSettings, Loaded
from .plan import Plan
from .reading import pieces_of, read_channels
from .stitch import Assembly, Unit
from .summary import Progress, Summary
from .traffic import read_range
from .values import cast


@speaks_python(InferConfig, model_type="model")
def run_inference(
    in_spec: Any,
    out_spec: Any,
    *,
    model: Any,
    progress: Callable[[Progress], None] | None = None,
    **knobs: Any,
) -> Summary:
    """Run ``model`` over ``in_spec`` and write the result to ``out_spec``.

    Specs are paths, URLs, TensorStore specs or numpy arrays of 2 to 5 axes (t c z y x, the last
    ones); ``model`` is a name, a reference, a file or an ``nn.Module`` that maps (batch, channels,
    z, y, x) to the same spatial shape. ``knobs`` are the fields of `InferConfig`, which are the
    flags of ``penstock infer``.

    Raises `UsageError` before anything is created, `StageError` when a stage fails, `Incomplete`
    when a block is missing at the end.
    """
    with modes_kept(model):
        return run_job(_job(in_spec, out_spec, model, knobs), progress)


@speaks_python(InferConfig, model_type="model")
def plan_inference(in_spec: Any, out_spec: Any, *, model: Any, **knobs: Any) -> Plan:
    """What `run_inference` would do, without doing it. Takes the same arguments."""
    with modes_kept(model):
        return _job(in_spec, out_spec, model, knobs).plan


def _job(in_spec: Any, out_spec: Any, model: Any, knobs: dict[str, Any]) -> Job:
    named = {"in_spec": in_spec, "out_spec": out_spec, "model_type": model}
    return Job(build(InferConfig, named, knobs))


def run_job(job: Job, progress: Callable[[Progress], None] | None = None) -> Summary:
    """Carry the plan out. On success every planned block has been written."""
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
        for sink in job.sinks:  # or a list of what is in the old output would be lost for nothing
            sink.check()
        claims = Claims.take(job.sinks, journal.run, journal.check_maker)
        with contextlib.closing(claims):
            summary = _carry_out(job, journal, claims, progress)
    with _forgoing(f"--run-dir {job.run_dir}: summary.json"):
        journal.save("summary.json", asdict(summary))
    return summary


def _carry_out(
    job: Job, journal: Journal, claims: Claims, progress: Callable[[Progress], None] | None
) -> Summary:
    """Write every unit to outputs that are this run's from here to the end."""
    _say_unlocked(claims.lacking, job.config.require_lock)
    with _naming(f"--run-dir {job.run_dir}"):
        journal.lock()
        _say_unlocked(journal.lacking, job.config.require_lock)
        # Before the output is made anew, or a kill in between would leave a list of units that
        # were written to the old one. And before a trace is: another run may be writing both.
        journal.begin(as_settings(job.config), locked=not claims.lacking)
    claims.name()
    run = _Inference(job, journal, claims)
    for sink in job.sinks:
        sink.create()
    with run.watched(), frozen_garbage():
        run.statistics()
        run.pipeline(progress)
    summary = run.summary()
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


class _Inference:
    """The moving parts of a job that is under way."""

    def __init__(self, job: Job, journal: Journal, claims: Claims) -> None:
        self.job, self.journal, self.claims = job, journal, claims
        self.plan, self.geometry = job.plan, job.plan.geometry
        self.probe = Probe(job.config.trace)
        self.flow = Flow()
        self.read_pool = Pool(self.plan.read_buffer_bytes)
        self.block_pool = Pool(self.plan.block_buffer_bytes)
        self.unit_pool = Pool(self.plan.unit_buffer_bytes)
        self.scalings: dict[int, Scaling] = {}
        self.lanes = len(job.devices)
        self.readers = max(1, job.config.prep_workers // self.lanes)
        self.room = [Budget(self.flow, self.plan.block_budget) for _ in job.devices]
        self.loaded: list[Channel[Loaded]] = [Channel(self.flow, self.readers) for _ in job.devices]
        self.computed: Channel[tuple[int, Finished]] = Channel(self.flow, self.lanes)
        self.write_room = Budget(self.flow, self.plan.write_budget)
        self.whole: Channel[Unit] = Channel(self.flow)
        self.blocks = self._wanted_blocks()
        self.ticket = threading.Lock()
        self.tickets = [threading.Lock() for _ in job.devices]
        self.places = [itertools.count() for _ in job.devices]
        self.patches_done = [0] * self.lanes
        self.clipped = [0] * len(job.heads)
        self.values = [0] * len(job.heads)
        self.counting = threading.Lock()
        self.chunks = ChunkCounter(job.source, job.volumes, job.config.missing)
        self.sampler: Sampler | None = None
        self.cpu_seconds = 0.0

    # --- before the first block ----------------------------------------------------------------

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Sample queues and machine while the job runs; write what was asked for at its end."""
        config = self.job.config
        rows = self.journal.path("metrics.jsonl")
        if rows is None and config.metrics_json is not None:
            rows = config.metrics_json.with_suffix(".jsonl")
        cpu = os.times()
        with contextlib.ExitStack() as stack:
            stack.callback(self.probe.close)
            if rows is not None:
                self.sampler = Sampler(rows, config.metrics_interval, self._gauges, self._queues())
                if config.metrics_json is not None:
                    if self.journal.folder is None:
                        begin_output(rows)
                        stack.callback(end_output, rows)
                    stack.callback(_export, rows, config.metrics_json, config.replace)
                stack.enter_context(self.sampler)
            yield
        now = os.times()
        self.cpu_seconds = now.user + now.system - cpu.user - cpu.system

    def _queues(self) -> dict[str, int]:
        blocks = self.lanes * self.plan.block_budget // self.plan.largest_block_bytes
        return {"prep": blocks, "stitch": blocks, "write-0": self.job.config.writer_workers + 1}

    def _gauges(self) -> dict[str, float]:
        return {
            "prep": sum(len(channel) for channel in self.loaded),
            "stitch": len(self.computed),
            "write-0": len(self.whole),
            "blocks_written": self.journal.written,
        }

    def statistics(self) -> None:
        """Scalings that do not depend on the block: exact percentiles of each volume, or fixed."""
        config = self.job.config
        if config.normalize == "percentile":
            return
        for number, volume in enumerate(self.job.volumes):
            if config.normalize == "none":
                self.scalings[number] = Scaling()
            elif config.normalize == "fixed":
                low, high = config.norm_lower, config.norm_upper
                self.scalings[number] = Scaling.of_range(low, high, low, high, config.eps)
            else:
                self.scalings[number] = self._global_scaling(number, volume)

    def _global_scaling(self, number: int, volume: Volume) -> Scaling:
        config = self.job.config
        saved = self.journal.statistics.get(str(number))
        if saved is not None:
            return Scaling(saved["lower"], saved["scale"])
        source = self.job.norm_source
        histogram = Histogram(source.dtype)
        while not histogram.done:
            self._stream(source, number, volume, histogram)
            histogram.advance((config.norm_lower, config.norm_upper))
        scaling = histogram.scaling(config.norm_lower, config.norm_upper, config.eps)
        found = {
            "t": volume.t,
            "c": list(volume.channels),
            "percentiles": [config.norm_lower, config.norm_upper],
            "count": histogram.count,
            **asdict(scaling),
        }
        with self._stage("statistics", self.journal.path("statistics.json"), timed=False):
            self.journal.save_statistics(number, found)
        return scaling

    def _stream(self, source: Source, number: int, volume: Volume, histogram: Histogram) -> None:
        """Pass a volume through the histogram once, in whole chunks, read side by side by as many
        as the plan has room for."""
        flow, lock = Flow(), threading.Lock()
        grid, chunks = (
            pieces_of(source),
            ChunkCounter(source, self.job.volumes, self.job.config.missing),
        )
        pieces = iter(grid)
        memory = self.plan.memory
        room = memory.total - memory.base - memory.runtime
        # As decoded, and once more where it is put.
        held = 2 * math.prod(grid.step) * len(volume.channels) * source.dtype.itemsize

        def work() -> None:
            while not flow.failed:
                with lock:
                    piece = next(pieces, None)
                if piece is None:
                    return
                with self._stage("read", f"statistics at {piece} of {source.name}"):
                    array = np.empty((len(volume.channels), *piece.shape), source.dtype)
                    read_channels(source, volume, piece, array)
                    if self.job.config.missing == "error":  # else the blocks will be counted
                        chunks.look(number, piece, piece, array)
                with lock, self.probe.span("statistics", piece):
                    histogram.add(array)

        for i in range(max(1, min(self.job.config.prep_workers, room // held))):
            flow.spawn(f"statistics-{i}", work)
        flow.join()

    # --- the pipeline --------------------------------------------------------------------------

    def pipeline(self, progress: Callable[[Progress], None] | None) -> None:
        for lane, device in enumerate(self.job.devices):
            for i in range(self.readers):
                self._spawn(f"read-{lane}.{i}", partial(self._read, lane))
            self._spawn(f"forward-{lane}", partial(self._compute, lane, device))
        self._spawn("stitch", self._stitch)
        for i in range(self.job.config.writer_workers):
            self._spawn(f"write-{i}", self._write)
        self.flow.join(lambda: progress(self._progress()) if progress else None)
        if progress:
            progress(self._progress())

    def _spawn(self, name: str, work: Callable[[], None]) -> None:
        """Start a thread in which torch uses as many threads as --threads says."""
        self.flow.spawn(name, partial(in_threads, self.job.config.threads, work))

    def _wanted_blocks(self) -> Iterator[Block]:
        """Blocks in visiting order, renumbered without those all of whose units are written."""
        number = itertools.count()
        for volume in range(len(self.job.volumes)):
            for block in self.geometry.blocks(volume=volume):
                if self._is_wanted(block):
                    yield replace(block, number=next(number))

    def _is_wanted(self, block: Block) -> bool:
        if not self.journal.done:
            return True
        support = block.support & self.geometry.regions[block.region]
        touched = self.geometry.units.touching(support)
        spans = (range(a, b) for a, b in zip(touched.start, touched.stop, strict=True))
        return any((block.volume, *i) not in self.journal.done for i in itertools.product(*spans))

    def _read(self, lane: int) -> None:
        """Read blocks until there are none; find the percentiles of each where they are its own."""
        while True:
            # Room is taken with the ticket in hand: were two readers to swap, the later block
            # could hold the room that the earlier one waits for.
            with self.tickets[lane]:
                with self.ticket:
                    block = next(self.blocks, None)
                if block is None:
                    break
                place = next(self.places[lane])
                with self.probe.waiting("read"):
                    self.room[lane].acquire(self.plan.block_bytes(block))
            with self._stage("read", f"{block} of {self.job.source.name}"):
                array = self._fetch(block)
            with self._stage("normalise", block):
                loaded = self._prepare(block, array)
            self.loaded[lane].put(loaded, place)
        self.loaded[lane].close()

    def _fetch(self, block: Block) -> NDArray[Any]:
        """The voxels that a block sees, reflected where it reaches past the volume's edge; a view
        of an array of the pool."""
        job, domain = self.job, self.geometry.domain
        # Every voxel past the edge has its mirror image in ``inside``; both lie in ``hull``.
        inside = read_range(block.read, domain)
        hull = block.read.hull(inside)
        shape = (job.model.in_channels, *hull.shape)
        whole = self.read_pool.take(shape, job.source.dtype)
        part = whole[(slice(None), *inside.within(hull))]
        read_channels(job.source, job.volumes[block.volume], inside, part)
        owned = block.core & self.geometry.regions[block.region]
        self.chunks.look(block.volume, owned, inside, part)
        for axis in range(3):
            low, high = domain.start[axis], domain.stop[axis]
            if low <= hull.start[axis] and hull.stop[axis] <= high:
                continue
            seen = np.arange(block.read.start[axis], block.read.stop[axis])
            outside = seen[(seen < low) | (seen >= high)]
            planes = np.moveaxis(whole, axis + 1, 0)
            origin = hull.start[axis]
            planes[outside - origin] = planes[reflect(outside, low, high) - origin]
        return whole[(slice(None), *block.read.within(hull))]

    def _prepare(self, block: Block, array: NDArray[Any]) -> Loaded:
        """Find the block's scaling and set aside what is not finite."""
        scaling = self.scalings.get(block.volume)
        if scaling is None:
            scaling = self._own_scaling(block, array)
        if array.dtype.kind != "f":
            return Loaded(block, array, scaling)
        support = block.support.within(block.read)
        invalid: NDArray[np.bool_] | None = None
        for z in range(array.shape[1]):  # plane by plane: a mask of all of it has its weight
            plane = array[:, z]
            spoilt = ~np.isfinite(plane)
            if not spoilt.any():
                continue
            plane[spoilt] = scaling.lower
            if invalid is None:
                invalid = np.zeros(block.support.shape, np.bool_)
            if support[0].start <= z < support[0].stop:
                invalid[z - support[0].start] = spoilt.any(axis=0)[support[1:]]
        return Loaded(block, array, scaling, invalid)

    def _own_scaling(self, block: Block, array: NDArray[Any]) -> Scaling:
        """Percentiles of the write unit and its halo."""
        config, geometry = self.job.config, self.geometry
        unit = geometry.regions[block.region]
        halo = block_halo(config, geometry)
        seen = unit.grow(halo, halo) & geometry.domain
        part = array[(slice(None), *seen.within(block.read))]
        return block_scaling(part, config.norm_lower, config.norm_upper, config.eps)

    def _compute(self, number: int, device: torch.device) -> None:
        """Run one lane from its first block to its last."""
        with self._stage("forward", device, timed=False):
            if device.type == "cuda":
                torch.cuda.set_device(device)
            lane = Lane(
                device,
                self.job.model,
                self.geometry,
                self._lane_settings(),
                self.probe,
                (self.read_pool, self.block_pool),
                partial(self._before_batch, number),
            )
        block: Block | None = None
        channel, coming = self.loaded[number], None
        with lane.autocast():
            while True:
                loaded, coming = coming, None
                if loaded is None:
                    with self.probe.waiting("forward"):
                        loaded = channel.get()
                block = loaded.block if loaded is not None else block
                with self._stage("forward", block, timed=False):
                    if loaded is not None:
                        lane.upload(loaded)
                        if channel.ready and (coming := channel.get()) is not None:
                            lane.upload(coming)  # while the net is at work on this one
                    done = lane.push(loaded) if loaded is not None else lane.flush()
                    for finished in done:
                        self.computed.put((number, finished), finished.block.number)
                if loaded is None:
                    break
        self.computed.close()

    def _before_batch(self, number: int, patches: int) -> None:
        """A lane is about to run so many patches: stop it here if the job has failed."""
        self.flow.check()
        self.patches_done[number] += patches

    def _lane_settings(self) -> LaneSettings:
        job = self.job
        return LaneSettings(
            batch=job.batch,
            forward=job.forward,
            model_axes=job.shape.model_axes,
            channels_last=job.footprint.channels_last,
            amp=job.amp,
            compile_mode=job.config.compile_mode if job.config.compile else None,
            compile_dynamic={"auto": None, "true": True, "false": False}[
                job.config.compile_dynamic
            ],
            clip=job.clip or None,
            min_blend_weight=job.config.min_blend_weight,
            carrier=job.carrier,
            returns=job.footprint.heads,
            heads=job.heads,
        )

    def _stitch(self) -> None:
        """Join blocks, in order, into whole units."""
        assembly = Assembly(
            self.geometry,
            self._empty_unit,
            [head.blended for head in self.job.heads],
            lambda volume, index: (volume, *index) not in self.journal.done,
        )
        while True:
            with self.probe.waiting("stitch"):
                item = self.computed.get()
            if item is None:
                break
            lane, finished = item
            with (
                self._stage("forward", finished.block, timed=False),
                self.probe.waiting("stitch"),
            ):
                finished.wait()
            with self._stage("stitch", finished.block, timed=False):
                for number, head in enumerate(self.job.heads):
                    if not head.blended:
                        count, size = finished.clipped[number], finished.outputs[number].numel()
                        self._count_clipped(number, count, size)
                units = assembly.add(finished.block, finished.heads())
                while True:
                    with self.probe.span("stitch", finished.block):
                        unit = next(units, None)
                    if unit is None:
                        break
                    with self.probe.waiting("stitch"):
                        self.write_room.acquire(self._unit_bytes(unit))
                    self.whole.put(unit)
                for buffer in finished.buffers:
                    self.block_pool.give(buffer)
            self.room[lane].release(self.plan.block_bytes(finished.block))
        self.whole.close()

    def _empty_unit(self, head: int, shape: tuple[int, ...]) -> NDArray[Any]:
        plan = self.job.heads[head]
        array = self.unit_pool.take((plan.channels, *shape), plan.kept)
        if plan.blended:
            array.fill(0)
        return array

    def _count_clipped(self, head: int, clipped: int, values: int) -> None:
        with self.counting:
            self.clipped[head] += clipped
            self.values[head] += values

    def _unit_bytes(self, unit: Unit) -> int:
        pairs = zip(unit.arrays, self.job.sinks, strict=True)
        return sum(array.size * sink.dtype.itemsize for array, sink in pairs)

    def _write(self) -> None:
        """Write whole units and note each one that is safe."""
        while True:
            with self.probe.waiting("write"):
                unit = self.whole.get()
            if unit is None:
                return
            for head, output in enumerate(self.job.outputs):
                sink = output.sink
                with self._stage("write", f"block {unit.index} {unit.box} of {sink.name}"):
                    array = unit.arrays[head]
                    if self.job.heads[head].blended:
                        sums, array = array, self.unit_pool.take(array.shape, sink.dtype)
                        self._count_clipped(head, cast(sums, array), array.size)
                        self.unit_pool.give(sums)
                    self.claims.check()
                    sink.write(output.box(unit.volume, unit.box), array[None])
                    self.unit_pool.give(array)
            where = f"block {unit.index} {unit.box}, noting it in {self.journal.path('done.log')}"
            with self._stage("write", where, timed=False):
                self.journal.note((unit.volume, *unit.index), unit.box.size)
            self.write_room.release(self._unit_bytes(unit))

    # --- watching ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _stage(self, name: str, where: object, timed: bool = True) -> Iterator[None]:
        """Time a stage, and say which stage and block an error came from."""
        try:
            with self.probe.span(name, where) if timed else contextlib.nullcontext():
                yield
        except (Stopped, StageError):
            raise
        except Exception as error:
            raise StageError(name, str(where), error) from error

    def _progress(self) -> Progress:
        plan, seconds = self.plan, self.probe.elapsed
        units = plan.num_units - self.journal.skipped
        # Which patches a resumed run can leave out is known only as it comes to them.
        patches = round(plan.num_patches * units / plan.num_units)
        done = min(patches, sum(self.patches_done))
        share = done / plan.num_patches
        return Progress(
            patches if self.journal.written == units else done,
            patches,
            self.journal.written,
            units,
            seconds,
            share * plan.input_bytes / seconds / 1e6,
        )

    def summary(self) -> Summary:
        plan, seconds = self.plan, self.probe.elapsed
        order = ("statistics", "read", "normalise", "forward", "stitch", "write")
        totals = self.probe.totals()
        stages = {name: totals[name] for name in order if name in totals}
        return Summary(
            seconds=seconds,
            voxels=self.journal.voxels,
            input_bytes=round(plan.input_bytes * self.journal.voxels / plan.voxels),
            units_written=self.journal.written,
            units_skipped=self.journal.skipped,
            units_planned=plan.num_units,
            stages=stages,
            bound_by=bottleneck(stages, seconds, self.cpu_seconds, usable_cores()),
            cpu_seconds=self.cpu_seconds,
            peak_rss=self.sampler.peak_rss if self.sampler else None,
            planned_peak=plan.memory.total,
            clipped=tuple(
                Clipped(head.name, sink.name, sink.dtype.name, clipped, values)
                for head, sink, clipped, values in zip(
                    self.job.heads, self.job.sinks, self.clipped, self.values, strict=True
                )
            ),
            chunks=self.chunks.count,
            unlocked=(*self.claims.lacking, *self.journal.lacking),
        )


def _export(rows: Path, metrics: Path, replace: bool) -> None:
    with _forgoing(f"--metrics-json {metrics}"), writing_output(metrics, replace=replace) as draft:
        export_reference(rows, draft)


@contextlib.contextmanager
def _forgoing(what: str) -> Iterator[None]:
    """That a record cannot be written is no reason to lose a job."""
    try:
        yield
    except (OSError, UsageError) as error:
        why = getattr(error, "strerror", None) or describe(error)
        warnings.warn(f"{what}: {why}", RuntimeWarning, stacklevel=4)


@contextlib.contextmanager
def _naming(what: str) -> Iterator[None]:
    """Before a job has begun, what the system does not let be done was asked wrongly."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{what}: {error.strerror}") from error
