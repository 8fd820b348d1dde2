"""Run a model over a volume larger than memory.

    source -> read -> normalise -> forward -> stitch -> write -> sink

A `Job` is opened (source, model and sinks are looked at, nothing is touched), planned, and run. The
stages stand below in the order in which a block meets them: `_read` brings blocks in and finds
their percentiles, a `Lane` normalises them, runs the net and puts patches back into blocks,
`_stitch` joins blocks into write units, and `_write` writes each unit once and notes that it did.
Restoring the visiting order before stitching is what makes the result the same to the bit whatever
the number of workers or devices.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from . import model as models
from .box import Box
from .config import InferConfig, as_settings, build
from .errors import Incomplete, StageError, UsageError
from .flow import Budget, Channel, Flow, Stopped
from .grid import Block, Grid, reflect
from .lane import Finished, Lane, LaneSettings, Loaded, as_dtype
from .journal import Journal
from .normalize import Histogram, Scaling, block_scaling
from .plan import Facts, Plan, make_plan, patch_shape, per_axis, read_range, select
from .probe import Probe, StageTotals, bottleneck
from .stitch import Assembly, Unit
from .store import Sink, Source, open_sink, open_source, same_array
from .telemetry import Sampler, export_reference
from .units import format_bytes, format_seconds

STATISTICS_VOXELS = 2**24
"""Voxels of the pieces in which a volume streams through the histogram."""


@dataclass(frozen=True, slots=True)
class Volume:
    """One pass of the model over space: one time point, one group of channels."""

    t: int
    channels: tuple[int, ...]
    sink_t: int
    group: int


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job has come."""

    units_done: int
    units_planned: int
    seconds: float
    bytes_done: float
    """Input bytes whose output has been written."""


@dataclass(frozen=True)
class Summary:
    """What a job did."""

    seconds: float
    voxels: int
    input_bytes: int
    """Raw bytes of the input that this run turned into output."""
    units_written: int
    units_skipped: int
    """Written by an earlier run and left alone."""
    units_planned: int
    stages: dict[str, StageTotals]
    bound_by: str
    peak_rss: int | None
    """Bytes, most seen in the process tree; None where it was not sampled."""
    planned_peak: int

    @property
    def mb_per_second(self) -> float:
        """Raw input bytes per second, in units of 10^6."""
        return self.input_bytes / self.seconds / 1e6

    @property
    def mvox_per_second(self) -> float:
        return self.voxels / self.seconds / 1e6

    def lines(self) -> Iterator[str]:
        """The summary for a reader."""
        yield f"Total time: {self.seconds:.2f} s"
        yield f"Throughput: {self.mb_per_second:.2f} MB/s"
        yield f"            {self.mvox_per_second:.2f} Mvox/s"
        for name, stage in self.stages.items():
            yield (
                f"  {name:<10} busy {format_seconds(stage.busy):>12}   waited "
                f"{format_seconds(stage.waited):>12}   in {stage.threads} thread(s)"
            )
        yield self.bound_by
        if self.peak_rss is not None:
            yield (
                f"Peak memory: {format_bytes(self.peak_rss)} of {format_bytes(self.planned_peak)} "
                "planned"
            )
        skipped = f", {self.units_skipped} by an earlier run" if self.units_skipped else ""
        yield f"Blocks written: {self.units_written} of {self.units_planned} planned{skipped}"


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
    config = build(
        InferConfig, {"in_spec": in_spec, "out_spec": out_spec, "model_type": model, **knobs}
    )
    return Job(config).run(progress)


def plan_inference(in_spec: Any, out_spec: Any, *, model: Any, **knobs: Any) -> Plan:
    """What `run_inference` would do, without doing it. Takes the same arguments."""
    config = build(
        InferConfig, {"in_spec": in_spec, "out_spec": out_spec, "model_type": model, **knobs}
    )
    return Job(config).plan


class Job:
    """One inference, opened and planned; `run` carries it out once."""

    def __init__(self, config: InferConfig) -> None:
        self.config = config
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.devices = models.devices(config.devices)
        self.model = models.load(config.model_type, config.weights, config.in_channels)
        source = open_source(config.in_spec, level=config.level)
        self.shape = patch_shape(config, "z" in source.axes, self.model.spatial_axes)
        self.amp = _amp(config, self.devices)
        batch_shape = (config.batch, self.model.in_channels, *self._model_patch())
        self.footprint = models.footprint(self.model, batch_shape)
        ts = select(config.t, source.domain.start[0], source.domain.stop[0], "--t")
        cs = select(config.c, source.domain.start[1], source.domain.stop[1], "--c")
        self.out_channels = self._split_heads()
        self.sinks = self._open_sinks(source, ts, cs)
        self.volumes = self._volumes(source, ts, cs)
        self.offset = tuple(
            b - a for a, b in zip(source.domain.start[2:], self.sinks[0].domain.start[2:], strict=True)
        )
        self.plan = make_plan(config, self._facts(source), self.shape)
        self.geometry = self.plan.geometry
        self.source = source.with_cache(self.plan.cache_bytes)
        self.run_dir = config.run_dir or _default_run_dir(self.sinks[0])
        self.clip = (0.0, 1.0) if config.clip_norm == () else config.clip_norm

    # --- opening -------------------------------------------------------------------------------

    def _model_patch(self) -> tuple[int, ...]:
        return self.shape.patch if self.shape.model_axes == 3 else self.shape.patch[1:]

    def _split_heads(self) -> tuple[int, ...]:
        """Channels for each sink: a head each, or the channels of the only head dealt out."""
        heads, num_sinks = self.footprint.heads, len(self.config.out_spec)
        if len(heads) == 1 and heads[0].channels == num_sinks:
            return (1,) * num_sinks
        if len(heads) != num_sinks:
            shown = ", ".join(f"{head.name} ({head.channels} channels)" for head in heads)
            raise UsageError(
                f"model {self.model.name} returns {len(heads)} head(s), {shown}, but --out-spec "
                f"names {num_sinks}"
            )
        return tuple(head.channels for head in heads)

    def _open_sinks(self, source: Source, ts: Sequence[int], cs: Sequence[int]) -> list[Sink]:
        config, step = self.config, self.model.in_channels
        if len(cs) % step:
            raise UsageError(
                f"--c names {len(cs)} channel(s) but the model takes {step} at once; "
                "name a multiple of it or set --in-channels"
            )
        sinks = []
        for spec, channels in zip(config.out_spec, self.out_channels, strict=True):
            shape = (len(ts), len(cs) // step * channels, *source.domain.shape[2:])
            sink = open_sink(
                spec,
                domain=Box.of((0,) * 5, shape),
                dtype=_dtype(config.out_dtype, source.dtype),
                like=source,
                chunks=config.chunks and per_axis(config.chunks, plane=False, thin=1),
                shards=config.shards and per_axis(config.shards, plane=False, thin=1),
                overwrite=config.overwrite,
                resume=config.resume,
            )
            self._check_sink(sink, source, shape, channels)
            sinks.append(sink)
        for sink, other in itertools.combinations(sinks, 2):
            if sink.address == other.address:
                raise UsageError(f"--out-spec names {sink.name} twice")
            if sink.domain.start[2:] != other.domain.start[2:]:
                raise UsageError(f"--out-spec {sink.name} and {other.name} differ in origin")
        return sinks

    def _check_sink(
        self, sink: Sink, source: Source, shape: tuple[int, ...], channels: int
    ) -> None:
        if same_array(source, sink):
            raise UsageError(f"--out-spec {sink.name} is the input itself")
        for axis, name in enumerate("tczyx"):
            have, want, whole = sink.domain.shape[axis], shape[axis], source.domain.shape[axis]
            if have not in ((want, whole) if axis < 2 else (want,)):
                raise UsageError(
                    f"--out-spec {sink.name} has {have} along {name} but this job writes {want}"
                )
        for axis, name, once in ((0, "t", 1), (1, "c", channels)):
            grid, have = sink.write_grid[axis], sink.domain.shape[axis]
            if once % grid and once < have:
                raise UsageError(
                    f"--out-spec {sink.name} keeps {grid} along {name} in one chunk but {once} "
                    "is written at a time; give it chunks of 1 there"
                )

    def _volumes(self, source: Source, ts: Sequence[int], cs: Sequence[int]) -> list[Volume]:
        """Passes over space, and where each lands: the same index where the sink has all of the
        source's, else its place among those selected."""
        step, domain = self.model.in_channels, self.sinks[0].domain
        groups = [tuple(cs[i : i + step]) for i in range(0, len(cs), step)]
        same_t = domain.shape[0] == source.domain.shape[0]
        same_c = step == 1 and domain.shape[1] == source.domain.shape[1] * self.out_channels[0]
        return [
            Volume(
                t,
                group,
                domain.start[0] + (t - source.domain.start[0] if same_t else i),
                group[0] - source.domain.start[1] if same_c else j,
            )
            for i, t in enumerate(ts)
            for j, group in enumerate(groups)
        ]

    def _facts(self, source: Source) -> Facts:
        domain = source.domain[2:]
        cached = source.with_cache(1)
        return Facts(
            domain=domain,
            source_itemsize=source.dtype.itemsize,
            source_chunk=source.chunks[2:],
            source_is_float=source.dtype.kind == "f",
            source_cache=source.cache_bytes or None,
            source_caches=cached.cache_bytes != 0,
            num_volumes=len(self.volumes),
            in_channels=self.model.in_channels,
            out_channels=self.out_channels,
            out_itemsizes=tuple(sink.dtype.itemsize for sink in self.sinks),
            write_grids=tuple(sink.write_grid[2:] for sink in self.sinks),
            anchor=tuple(-o for o in self.offset),
            weight_bytes=self.model.weight_bytes,
            forward_bytes=self.footprint.peak_bytes,
            devices=tuple(device.type for device in self.devices),
            base_bytes=psutil.Process().memory_info().rss,
            available_bytes=_available_memory(),
            device_bytes=_free_device_memory(self.devices),
        )

    # --- running -------------------------------------------------------------------------------

    def run(self, progress: Callable[[Progress], None] | None = None) -> Summary:
        """Carry the plan out. On success every planned block has been written."""
        self.plan.refuse()
        journal = Journal.open(self.run_dir, self.fingerprint(), resume=self.config.resume)
        torch.backends.cuda.matmul.allow_tf32 = self.config.tf32
        torch.backends.cudnn.allow_tf32 = self.config.tf32
        torch.backends.cudnn.benchmark = self.config.cudnn_benchmark
        for sink in self.sinks:
            sink.create()
        journal.begin(as_settings(self.config))
        run = _Run(self, journal)
        with contextlib.closing(journal), run.watched():
            run.statistics()
            run.pipeline(progress)
        summary = run.summary()
        if summary.units_written + summary.units_skipped != summary.units_planned:
            raise Incomplete(
                f"{summary.units_written} of {summary.units_planned} blocks were written; "
                "run again with --resume"
            )
        for sink in self.sinks:
            sink.close()
        journal.save("summary.json", asdict(summary))
        return summary

    def fingerprint(self) -> dict[str, Any]:
        """What must be equal for two runs to write the same voxels into the same units."""
        config, geometry = self.config, self.geometry
        return {
            "input": self.source.address,
            "domain": [self.source.domain.start, self.source.domain.stop],
            "outputs": [sink.address for sink in self.sinks],
            "dtypes": [self.source.dtype.name, *[sink.dtype.name for sink in self.sinks]],
            "model": self.model.name,
            "weights": _digest(self.model.module),
            "volumes": [[v.t, list(v.channels)] for v in self.volumes],
            "patch": geometry.patch,
            "overlap": geometry.overlap,
            "block": geometry.unit,
            "seam": [geometry.seam, config.min_blend_weight],
            "normalize": [config.normalize, config.norm_lower, config.norm_upper, config.norm_level],
            "clip": self.clip,
            "denormalize": config.denormalize,
            "halo": config.halo,
            "amp": str(self.amp),
        }


class _Run:
    """The moving parts of a job that is under way."""

    def __init__(self, job: Job, journal: Journal) -> None:
        self.job, self.journal = job, journal
        self.plan, self.geometry = job.plan, job.plan.geometry
        self.probe = Probe(job.config.trace)
        self.flow = Flow()
        self.scalings: dict[int, Scaling] = {}
        self.lanes = len(job.devices)
        self.readers = max(1, job.config.prep_workers // self.lanes)
        self.room = [Budget(self.flow, self.plan.block_budget) for _ in job.devices]
        self.loaded: list[Channel[Loaded]] = [
            Channel(self.flow, self.readers, in_order=True) for _ in job.devices
        ]
        self.computed: Channel[tuple[int, Finished]] = Channel(
            self.flow, self.lanes, in_order=True
        )
        self.write_room = Budget(self.flow, self.plan.write_budget)
        self.whole: Channel[Unit] = Channel(self.flow)
        self.blocks = self._wanted_blocks()
        self.ticket = threading.Lock()
        self.tickets = [threading.Lock() for _ in job.devices]
        self.places = [itertools.count() for _ in job.devices]
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
                    stack.callback(export_reference, rows, config.metrics_json)
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
                self.scalings[number] = Scaling.of_range(low, high, low, high)
            else:
                self.scalings[number] = self._global_scaling(number, volume)

    def _global_scaling(self, number: int, volume: Volume) -> Scaling:
        config = self.job.config
        saved = self.journal.statistics.get(str(number))
        if saved is not None:
            return Scaling(saved["lower"], saved["scale"])
        source = self.job.source
        if config.norm_level is not None:
            source = open_source(config.in_spec, level=config.norm_level)
        histogram = Histogram(source.dtype)
        while not histogram.done:
            self._stream(source, volume, histogram)
            histogram.advance((config.norm_lower, config.norm_upper))
        scaling = histogram.scaling(config.norm_lower, config.norm_upper)
        self.journal.save_statistics(
            number,
            {
                "t": volume.t,
                "c": list(volume.channels),
                "percentiles": [config.norm_lower, config.norm_upper],
                "count": histogram.count,
                **asdict(scaling),
            },
        )
        return scaling

    def _stream(self, source: Source, volume: Volume, histogram: Histogram) -> None:
        """Pass a volume through the histogram once, in whole chunks, read side by side."""
        flow, lock = Flow(), threading.Lock()
        pieces = iter(_pieces(source))

        def work() -> None:
            while not flow.failed:
                with lock:
                    piece = next(pieces, None)
                if piece is None:
                    return
                with self._stage("read", f"statistics at {piece} of {source.name}"):
                    array = _read_channels(source, volume, piece)
                with lock, self.probe.span("statistics", piece):
                    histogram.add(array)

        for i in range(self.job.config.prep_workers):
            flow.spawn(f"statistics-{i}", work)
        flow.join()

    # --- the pipeline --------------------------------------------------------------------------

    def pipeline(self, progress: Callable[[Progress], None] | None) -> None:
        for lane, device in enumerate(self.job.devices):
            for i in range(self.readers):
                self.flow.spawn(f"read-{lane}.{i}", lambda lane=lane: self._read(lane))  # type: ignore[misc]
            self.flow.spawn(f"forward-{lane}", lambda lane=lane, device=device: self._compute(lane, device))  # type: ignore[misc]
        self.flow.spawn("stitch", self._stitch)
        for i in range(self.job.config.writer_workers):
            self.flow.spawn(f"write-{i}", self._write)
        self.flow.join(lambda: progress(self._progress()) if progress else None)
        if progress:
            progress(self._progress())

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
        try:
            while True:
                # Room is taken with the ticket in hand: were two readers to swap, the later block
                # could hold the room that the earlier one waits for.
                with self.tickets[lane]:
                    with self.ticket:
                        block = next(self.blocks, None)
                    if block is None:
                        return
                    place = next(self.places[lane])
                    with self.probe.waiting("read"):
                        self.room[lane].acquire(self.plan.block_bytes(block))
                with self._stage("read", f"{block} of {self.job.source.name}"):
                    array = self._fetch(block)
                with self._stage("normalise", block):
                    loaded = self._prepare(block, array)
                self.loaded[lane].put(loaded, place)
        finally:
            self.loaded[lane].close()

    def _fetch(self, block: Block) -> NDArray[Any]:
        domain = self.geometry.domain
        inside = read_range(block.read, domain)
        array = _read_channels(self.job.source, self.job.volumes[block.volume], inside)
        if block.read in domain:
            return array
        for axis in range(3):
            start, stop = block.read.start[axis], block.read.stop[axis]
            low, high = domain.start[axis], domain.stop[axis]
            if start < low or stop > high:
                mirror = np.array(reflect(start, stop, low, high)) - inside.start[axis]
                array = array.take(mirror, axis + 1)
            else:
                keep = slice(start - inside.start[axis], stop - inside.start[axis])
                array = array[(slice(None),) * (axis + 1) + (keep,)]
        return np.ascontiguousarray(array)

    def _prepare(self, block: Block, array: NDArray[Any]) -> Loaded:
        """Find the block's scaling and set aside what is not finite."""
        scaling = self.scalings.get(block.volume)
        if scaling is None:
            scaling = self._own_scaling(block, array)
        if array.dtype.kind != "f":
            return Loaded(block, array, scaling)
        finite = np.isfinite(array)
        if finite.all():
            return Loaded(block, array, scaling)
        array[~finite] = scaling.lower
        invalid = ~finite.all(axis=0)[block.support.within(block.read)]
        return Loaded(block, array, scaling, invalid)

    def _own_scaling(self, block: Block, array: NDArray[Any]) -> Scaling:
        """Percentiles of the write unit and its halo."""
        config, geometry = self.job.config, self.geometry
        unit = geometry.regions[block.region]
        if config.halo is not None:
            halo = config.halo * 3 if len(config.halo) == 1 else config.halo
        elif config.seam_mode == "trim":
            halo = (config.trim_voxels,) * 3 if config.trim_voxels is not None else geometry.before
        else:
            halo = tuple(max(1, min(8, p // 8)) for p in geometry.patch)
        halo = halo if len(halo) == 3 else (0, *halo)
        seen = unit.grow(halo, halo) & geometry.domain & block.read
        part = array[(slice(None), *seen.within(block.read))]
        return block_scaling(part, config.norm_lower, config.norm_upper)

    def _compute(self, number: int, device: torch.device) -> None:
        """Run one lane from its first block to its last."""
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            settings, check = self._lane_settings(), self.flow.check
            lane = Lane(device, self.job.model, self.geometry, settings, self.probe, check)
            block: Block | None = None
            while True:
                with self.probe.waiting("forward"):
                    loaded = self.loaded[number].get()
                block = loaded.block if loaded is not None else block
                with self._stage("forward", block, timed=False):
                    done = lane.push(loaded) if loaded is not None else lane.flush()
                    for finished in done:
                        self.computed.put((number, finished), finished.block.number)
                if loaded is None:
                    return
        finally:
            self.computed.close()

    def _lane_settings(self) -> LaneSettings:
        job = self.job
        return LaneSettings(
            batch=job.config.batch,
            model_axes=job.shape.model_axes,
            amp=job.amp,
            compile_mode=job.config.compile_mode if job.config.compile else None,
            clip=job.clip or None,
            denormalize=job.config.denormalize,
            min_blend_weight=job.config.min_blend_weight,
            out_channels=job.out_channels,
            out_dtypes=tuple(sink.dtype for sink in job.sinks),
        )

    def _stitch(self) -> None:
        """Join blocks, in order, into whole units."""
        assembly = Assembly(
            self.geometry,
            self._empty_unit,
            len(self.job.sinks),
            lambda volume, index: (volume, *index) not in self.journal.done,
        )
        while True:
            with self.probe.waiting("stitch"):
                item = self.computed.get()
            if item is None:
                break
            lane, finished = item
            with self._stage("stitch", finished.block, timed=False):
                heads = finished.heads([sink.dtype for sink in self.job.sinks])
                units = assembly.add(finished.block, heads)
                while True:
                    with self.probe.span("stitch", finished.block):
                        unit = next(units, None)
                    if unit is None:
                        break
                    with self.probe.waiting("stitch"):
                        self.write_room.acquire(self._unit_bytes(unit))
                    self.whole.put(unit)
            self.room[lane].release(self.plan.block_bytes(finished.block))
        self.whole.close()

    def _empty_unit(self, head: int, shape: tuple[int, ...]) -> NDArray[Any]:
        channels = self.job.out_channels[head]
        if self.geometry.seam == "blend":
            return np.zeros((channels, *shape), np.float32)
        return np.empty((channels, *shape), self.job.sinks[head].dtype)

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
            for head, sink in enumerate(self.job.sinks):
                with self._stage("write", f"block {unit.index} {unit.box} of {sink.name}"):
                    array = unit.arrays[head]
                    if self.geometry.seam == "blend":
                        array = as_dtype(array, sink.dtype)
                    sink.write(self._target(unit, head), array[None])
            self.journal.note((unit.volume, *unit.index), unit.box.size)
            self.write_room.release(self._unit_bytes(unit))

    def _target(self, unit: Unit, head: int) -> Box:
        volume, channels = self.job.volumes[unit.volume], self.job.out_channels[head]
        first = self.job.sinks[head].domain.start[1] + volume.group * channels
        lead = Box.of((volume.sink_t, first), (1, channels))
        return lead + unit.box.shift(self.job.offset)

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
        plan = self.plan
        share = self.journal.voxels / plan.voxels if plan.voxels else 1.0
        return Progress(
            self.journal.written,
            plan.num_units - self.journal.skipped,
            self.probe.elapsed,
            share * plan.input_bytes,
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
            bound_by=bottleneck(stages, seconds, self.cpu_seconds, _cores()),
            peak_rss=self.sampler.peak_rss if self.sampler else None,
            planned_peak=plan.memory.total,
        )


# --- small facts -------------------------------------------------------------------------------


def _read_channels(source: Source, volume: Volume, box: Box) -> NDArray[Any]:
    """The channels of a volume over a spatial box, shape (channels, z, y, x)."""
    parts = []
    for _, run in itertools.groupby(enumerate(volume.channels), lambda pair: pair[1] - pair[0]):
        channels = [channel for _, channel in run]
        lead = Box((volume.t, channels[0]), (volume.t + 1, channels[-1] + 1))
        parts.append(source.read(lead + box)[0])
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _pieces(source: Source) -> Grid:
    """A volume in boxes of whole chunks, each small enough to hold."""
    domain, step = source.domain[2:], list(source.chunks[2:])
    for axis in (2, 1, 0):
        room = max(1, STATISTICS_VOXELS // math.prod(step))
        step[axis] *= min(room, -(-domain.shape[axis] // step[axis]))
    return Grid(domain, tuple(step))


def _default_run_dir(sink: Sink) -> Path | None:
    """Beside a local output; in this folder for a remote one; nowhere for an array in memory."""
    if sink.local_path is not None:
        return sink.local_path.with_name(sink.local_path.name + ".penstock")
    if "://" not in sink.address:
        return None
    return Path(sink.address.rstrip("/").rpartition("/")[2] + ".penstock")


def _dtype(name: str | None, otherwise: np.dtype[Any]) -> np.dtype[Any]:
    try:
        return np.dtype(name) if name else otherwise
    except TypeError:
        raise UsageError(f"--out-dtype {name!r} is no dtype; try uint16 or float32") from None


def _amp(config: InferConfig, devices: Sequence[torch.device]) -> torch.dtype | None:
    """fp16 on CUDA unless told otherwise: it keeps 11 bits of an intensity where bf16 keeps 8."""
    chosen = config.amp
    if chosen == "auto":
        chosen = "fp16" if all(device.type == "cuda" for device in devices) else "off"
    return {"fp16": torch.float16, "bf16": torch.bfloat16, "off": None}[chosen]


def _digest(module: torch.nn.Module) -> str:
    """A hash of every weight."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def _cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _available_memory() -> int:
    """Bytes that this process could still take: the machine's, or its cgroup's if that is less."""
    available = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        available = min(available, limit - used)
    return int(available)


def _free_device_memory(devices: Sequence[torch.device]) -> int | None:
    free = [torch.cuda.mem_get_info(device)[0] for device in devices if device.type == "cuda"]
    return min(free) if free else None
