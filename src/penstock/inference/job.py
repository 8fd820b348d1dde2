"""A job opened: source, model and sinks looked at, every knob checked, the plan made.

Opening touches nothing: a `Job` may be planned, shown and thrown away. `infer` carries it out.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from ..base import (
    HeadKind,
    InferConfig,
    UsageError,
    check_local,
    check_outputs,
    torch_threads,
    usable_cores,
)
from ..data import (
    Box,
    Sink,
    Source,
    check_knows_chunks,
    open_sink,
    open_source,
    overlap,
    same_array,
    why_no_lock,
)
from ..instruments import available_memory
from ..models import Footprint, Model, find_devices, load_model, measure_footprint, placed
from . import identity
from .geometry import block_halo, patch_shape, per_axis
from .head_kinds import Seen, head_kinds, patches, sample_scaling, shown, split
from .heads import HeadPlan, Origin, default_dtype, is_wide
from .memory import Facts
from .plan import make_plan, select

GPU_BATCH = 16
"""Patches in one forward on a GPU where the user does not say."""
CPU_FORWARD = 2
"""Patches in one forward on a CPU, whatever the batch, so that a result does not depend on it. Of a
single one torch takes small convolutions to kernels of its own that are a quarter to a third slower
than oneDNN's; more than two leave the cache."""


@dataclass(frozen=True, slots=True)
class Volume:
    """One pass of the model over space: one time point, one group of channels."""

    t: int
    channels: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Output:
    """A sink, and where in it the units of each volume land."""

    sink: Sink
    channels: int
    """Of the head that it takes."""
    offset: tuple[int, ...]
    """From the source's spatial coordinates to the sink's."""
    places: tuple[tuple[int, int], ...]
    """The time point and the first channel of each volume, in the sink's coordinates."""

    @property
    def anchor(self) -> tuple[int, ...]:
        """A corner of the sink's spatial chunk grid, in source coordinates."""
        lines = zip(self.sink.grid_origin[2:], self.offset, strict=True)
        return tuple(line - offset for line, offset in lines)

    def box(self, volume: int, unit: Box) -> Box:
        """A unit of a volume in the sink, t c z y x."""
        return Box.of(self.places[volume], (1, self.channels)) + unit.shift(self.offset)


class Job:
    """One inference, opened and planned."""

    def __init__(self, config: InferConfig) -> None:
        self.config = config
        with torch_threads(config.threads):
            self._open()

    def _open(self) -> None:
        config = self.config
        self.devices = find_devices(config.devices)
        self.model = load_model(
            config.model_type, config.weights, config.in_channels, trust=config.trust_model
        )
        # Before the net is tried: what it keeps of a forward is no part of what it is.
        self.attributes = identity.attributes(self.model.module)
        source = open_source(config.in_spec, level=config.level)
        self.shape = patch_shape(config, "z" in source.axes, self.model.spatial_axes)
        self.amp = _amp(config, self.devices, self.model.dtype)
        on_cpu = all(device.type == "cpu" for device in self.devices)
        self.carrier = self._carrier(source)
        if self.carrier == torch.float64 and not self.model.weight_bytes:
            with contextlib.suppress(UsageError):  # of a net that makes float32 of its own
                self._sized(on_cpu, wide := replace(self.model, weightless_dtype=torch.float64))
                self.model = wide
        self.forward, self.footprint = self._sized(on_cpu)
        self.batch = self.forward
        if on_cpu:
            self.batch = -(-(config.batch or CPU_FORWARD) // self.forward) * self.forward
        # All lanes on the CPU share this one.
        module = placed(self.model.module, torch.device("cpu"), self.footprint.channels_last)
        self.model = replace(self.model, module=module)
        ts = select(config.t, source.domain.start[0], source.domain.stop[0], "--t")
        cs = select(config.c, source.domain.start[1], source.domain.stop[1], "--c")
        self.clip = (0.0, 1.0) if config.clip_norm == () else config.clip_norm
        self.parts = split(self.footprint.heads, len(config.out_spec), self.model.name)
        self.volumes = self._volumes(ts, cs)
        if config.missing == "error":
            check_knows_chunks(source)
        self.held_by_judging = 0
        self.kinds = self._kinds(source)
        self.outputs = self._open_outputs(source, ts, cs)
        self.heads = self._heads(source)
        self.plan = make_plan(config, self._facts(source), self.shape)
        self.geometry = self.plan.geometry
        self.source = source.with_cache(self.plan.cache_bytes)
        self.norm_source = self.source
        if config.norm_level is not None:
            self.norm_source = open_source(config.in_spec, level=config.norm_level)
        self.run_dir = config.run_dir or _default_run_dir(self.sinks[0])
        if config.run_dir is not None:
            check_local(config.run_dir, "--run-dir")
        places = [("input", source.address), *(("output", sink.address) for sink in self.sinks)]
        for what, address in places:
            if self.run_dir and f"{self.run_dir.resolve()}/".startswith(f"{address}/"):
                raise UsageError(f"--run-dir {self.run_dir} lies inside the {what}")
        self._check_files(places)

    def _check_files(self, places: Sequence[tuple[str, str]]) -> None:
        """Refuse a trace or metrics in the place of something else."""
        config = self.config
        named = [("--trace", config.trace), ("--metrics-json", config.metrics_json)]
        if self.run_dir is None and config.metrics_json is not None:
            named.append(("the rows of --metrics-json", config.metrics_json.with_suffix(".jsonl")))
        for (flag, path), (what, address) in itertools.product(named, places):
            if path is not None and f"{path.resolve()}/".startswith(f"{address}/"):
                raise UsageError(f"{flag} {path} lies inside the {what}")
        told = (config.in_spec, config.model_type, config.weights, *config.out_spec)
        read = [Path(each) for each in told if isinstance(each, str | Path)]
        check_outputs(*named, replace=config.replace, inputs=read)

    @property
    def sinks(self) -> list[Sink]:
        return [output.sink for output in self.outputs]

    # --- opening -------------------------------------------------------------------------------

    def _model_patch(self) -> tuple[int, ...]:
        return self.shape.patch if self.shape.model_axes == 3 else self.shape.patch[1:]

    def _carrier(self, source: Source) -> torch.dtype:
        """What patches are normalised in: float64 where float32 does not hold the input."""
        can = all(device.type != "mps" for device in self.devices)
        return torch.float64 if can and is_wide(source.dtype) else torch.float32

    def _kinds(self, source: Source) -> list[tuple[HeadKind, Origin]]:
        """What each head is."""
        config, first = self.config, self.volumes[0]
        held: list[int] = []

        def candidates() -> Iterator[Seen]:
            held.append(_resident())
            for patch in patches(source, first.t, first.channels, self.shape.patch):
                yield shown(patch, sample_scaling(patch, config), self.clip or None)

        batch = (self.forward, self.model.in_channels, *self._model_patch())
        kinds = head_kinds(
            config.head_kind, self.parts, self.model, self.footprint, candidates(), batch
        )
        if held:  # what judging left in the heap serves the forwards, which the plan counts
            self.held_by_judging = max(0, _resident() - held[0])
        return kinds

    def _heads(self, source: Source) -> tuple[HeadPlan, ...]:
        """How each head gets to its output."""
        config = self.config
        heads = []
        for part, (kind, origin), sink in zip(self.parts, self.kinds, self.sinks, strict=True):
            fine = self.carrier == torch.float64 or part.dtype == "float64"
            wide = fine and is_wide(sink.dtype)
            heads.append(
                HeadPlan(
                    name=part.name,
                    channels=part.channels,
                    kind=kind,
                    origin=origin,
                    dtype=sink.dtype,
                    work=np.dtype(np.float64 if wide else np.float32),
                    blended=config.seam_mode == "blend" and kind != "labels",
                    denormalized=config.denormalize and kind == "intensity",
                )
            )
        return tuple(heads)

    def _volumes(self, ts: Sequence[int], cs: Sequence[int]) -> list[Volume]:
        step = self.model.in_channels
        if len(cs) % step:
            raise UsageError(
                f"--c names {len(cs)} channel(s) but the model takes {step} at once; "
                "name a multiple of it or set --in-channels"
            )
        groups = [tuple(cs[i : i + step]) for i in range(0, len(cs), step)]
        return [Volume(t, group) for t in ts for group in groups]

    def _open_outputs(self, source: Source, ts: Sequence[int], cs: Sequence[int]) -> list[Output]:
        config, groups = self.config, len(cs) // self.model.in_channels
        outputs: list[Output] = []
        dtypes = self._dtypes(source)
        for spec, part, dtype in zip(config.out_spec, self.parts, dtypes, strict=True):
            channels = part.channels
            shape = (len(ts), groups * channels, *source.domain.shape[2:])
            sink = open_sink(
                spec,
                domain=Box.of((0,) * 5, shape),
                dtype=dtype,
                like=source,
                chunks=self._chunks(),
                shards=config.shards and per_axis(config.shards, plane=False, thin=1),
                overwrite=config.overwrite,
                resume=config.resumes,
                at=(0, 0, *source.domain.start[2:]),
            )
            if same_array(source, sink):
                itself = sink.address == source.address
                how = "is the input itself" if itself else "and the input lie inside one another"
                raise UsageError(f"--out-spec {sink.name} {how}")
            outputs.append(self._output(sink, channels, source, ts, cs))
        for one, other in itertools.combinations(outputs, 2):
            if overlap(one.sink, other.sink):
                raise UsageError(f"--out-spec {one.sink.name} and {other.sink.name} overlap")
            for axis, grid in enumerate(other.sink.write_grid[2:]):
                if (one.anchor[axis] - other.anchor[axis]) % grid:
                    raise UsageError(
                        f"--out-spec {one.sink.name} and {other.sink.name}: their chunks begin at "
                        f"different places along {'zyx'[axis]}"
                    )
        return outputs

    def _dtypes(self, source: Source) -> list[np.dtype[Any]]:
        """The dtype of each output, where it is new."""
        said = self.config.out_dtype
        if said is None:
            pairs = zip(self.parts, self.kinds, strict=True)
            return [default_dtype(kind, part, source.dtype) for part, (kind, _) in pairs]
        if len(said) not in (1, len(self.parts)):
            raise UsageError(
                f"--out-dtype names {len(said)} dtypes but there are {len(self.parts)} outputs"
            )
        return [_dtype(name) for name in (said * len(self.parts) if len(said) == 1 else said)]

    def _sized(self, on_cpu: bool, model: Model | None = None) -> tuple[int, Footprint]:
        """Patches in one forward, and what that holds."""
        model = model or self.model
        shape, said = (model.in_channels, *self._model_patch()), self.config.batch
        # A net that was exported for one size of batch takes no other.
        if on_cpu:
            *sizes, last = (CPU_FORWARD, 1, said) if said else (CPU_FORWARD, 1)
        else:
            *sizes, last = (said,) if said else (GPU_BATCH, 1)
        for size in sizes:
            with contextlib.suppress(UsageError):
                return size, measure_footprint(model, (size, *shape))
        return last, measure_footprint(model, (last, *shape))

    def _chunks(self) -> tuple[int, ...] | None:
        """Chunks of a new output: what the user said, or what divides their block evenly; None,
        for those of any other output, where nothing of a sensible size does."""
        config = self.config
        if config.chunks is not None:
            return per_axis(config.chunks, plane=False, thin=1)
        if config.block is None or config.shards is not None:
            return None
        block = per_axis(config.block, plane=False, thin=1)
        sides = tuple(_chunk_side(n) for n in block)
        return sides if all(sides) else None

    def _output(
        self, sink: Sink, channels: int, source: Source, ts: Sequence[int], cs: Sequence[int]
    ) -> Output:
        """Check that a sink can take a head, and find where each volume lands in it.

        Along t and c a sink may hold just what is selected, in that order, or all that the source
        has, at the same indices; the latter along c only where each channel gives channels of its
        own.
        """
        step = self.model.in_channels
        groups, have, source_domain = len(cs) // step, sink.domain, source.domain

        def place(axis: int, selected: Sequence[int], size: int, whole: bool) -> list[int]:
            start, extent = source_domain.start[axis], source_domain.shape[axis]
            if have.shape[axis] == len(selected) * size:
                return [have.start[axis] + i * size for i in range(len(selected))]
            if whole and have.shape[axis] == extent * size:
                return [have.start[axis] + (i - start) * size for i in selected]
            raise UsageError(
                f"--out-spec {sink.name} has {have.shape[axis]} along {'tc'[axis]} but this job "
                f"writes {len(selected) * size}"
            )

        for axis, name in enumerate("zyx", start=2):
            if have.shape[axis] != source_domain.shape[axis]:
                raise UsageError(
                    f"--out-spec {sink.name} has {have.shape[axis]} along {name} but this job "
                    f"writes {source_domain.shape[axis]}"
                )
        for axis, name, once in ((0, "t", 1), (1, "c", channels)):
            grid = sink.write_grid[axis]
            if once % grid and once < have.shape[axis]:
                raise UsageError(
                    f"--out-spec {sink.name} keeps {grid} along {name} in one chunk but {once} "
                    "is written at a time; give it chunks of 1 there"
                )
        firsts = cs if step == 1 else range(groups)
        time_points = place(0, ts, 1, whole=True)
        first_channels = place(1, firsts, channels, whole=step == 1)
        offset = zip(source_domain.start[2:], have.start[2:], strict=True)
        return Output(
            sink,
            channels,
            tuple(there - here for here, there in offset),
            tuple(itertools.product(time_points, first_channels)),
        )

    def _facts(self, source: Source) -> Facts:
        domain = source.domain[2:]
        cached = source.with_cache(1)
        # Asking a GPU makes its context, which this process then holds: base counts it.
        device_bytes = _free_device_memory(self.devices)
        return Facts(
            domain=domain,
            source_itemsize=source.dtype.itemsize,
            source_chunk=source.chunks[2:],
            chunk_bytes=math.prod(source.chunks) * source.dtype.itemsize,
            source_origin=source.grid_origin[2:],
            source_is_float=source.dtype.kind == "f",
            source_cache=source.cache_bytes or None,
            source_caches=cached.cache_bytes != 0,
            num_volumes=len(self.volumes),
            batch=self.batch,
            in_channels=self.model.in_channels,
            out_channels=tuple(head.channels for head in self.heads),
            out_itemsizes=tuple(head.dtype.itemsize for head in self.heads),
            sum_itemsizes=tuple(head.blended * head.work.itemsize for head in self.heads),
            write_grids=tuple(sink.write_grid[2:] for sink in self.sinks),
            anchor=self.outputs[0].anchor,
            weight_bytes=self.model.weight_bytes,
            forward_bytes=self.footprint.peak_bytes,
            devices=tuple(device.type for device in self.devices),
            base_bytes=_resident() - self.held_by_judging,
            available_bytes=available_memory(),
            cores=usable_cores(),
            device_bytes=device_bytes,
            cast_bytes=self.model.weight_bytes // 2 if self.amp is not None else 0,
            work_itemsize=max(self._work_itemsizes()),
            heads=tuple(head.line() for head in self.heads),
            notes=tuple(self._notes(source)),
        )

    def _work_itemsizes(self) -> Iterator[int]:
        yield self.carrier.itemsize
        for head in self.heads:
            yield 8 if head.kind == "labels" else head.work.itemsize

    def _notes(self, source: Source) -> Iterator[str]:
        yield from filter(None, map(why_no_lock, self.sinks))
        if is_wide(source.dtype) and self.model.dtype != torch.float64:
            dtype = str(self.model.dtype).removeprefix("torch.")
            yield f"the model takes {dtype}: it does not see all digits of {source.dtype}"
        config = self.config
        if config.normalize == "global" and config.model_fields_set & {"norm_lower", "norm_upper"}:
            yield (
                f"--norm-lower {config.norm_lower:g} and --norm-upper {config.norm_upper:g} are "
                "percentiles of the whole volume; intensities are --normalize fixed --clip-norm 0 1"
            )
        if not self.footprint.channels_last:
            yield "the model fails on tensors that are laid out channels last: it is slower without"
        on_cuda = all(device.type == "cuda" for device in self.devices)
        full = self.model.dtype == torch.float32
        if self.config.amp == "auto" and on_cuda and full and self.amp is None:
            yield (
                "autocast is off, as values that are brought to no range are more than half "
                "precision holds; --normalize with --clip-norm, or --amp, turns it on"
            )

    def maker(self) -> dict[str, Any]:
        """What may change the last bits of a run that goes on with another of it."""
        return identity.maker(self.source, self.sinks, self.devices)

    def fingerprint(self) -> dict[str, Any]:
        """What must be equal for two runs to write the same voxels into the same units."""
        config, geometry = self.config, self.geometry
        return {
            "input": identity.of_input(self.source, resumes=config.resumes),
            "domain": [self.source.domain.start, self.source.domain.stop],
            "outputs": [sink.fingerprint for sink in self.sinks],
            "places": [[output.channels, output.places] for output in self.outputs],
            "dtypes": [self.source.dtype.name, *[sink.dtype.name for sink in self.sinks]],
            "model": [Path(self.model.name).name, self.model.code, self.model.in_channels],
            "sources": identity.sources(self.model.reference, self.model.module),
            "weights": _digest(self.model.module),
            "attributes": self.attributes,
            "volumes": [[v.t, list(v.channels)] for v in self.volumes],
            "patch": geometry.patch,
            "overlap": geometry.overlap,
            "block": geometry.unit,
            "seam": [geometry.seam, config.min_blend_weight],
            "normalize": [
                config.normalize,
                config.norm_lower,
                config.norm_upper,
                config.norm_level,
            ],
            "eps": config.eps,
            "clip": self.clip,
            "denormalize": config.denormalize,
            "heads": [[head.name, head.kind, head.work.name] for head in self.heads],
            "halo": block_halo(config, geometry),
            "arithmetic": [str(self.amp), config.tf32, config.compile],
            "compile_dynamic": config.compile and config.compile_dynamic,
            "devices": sorted({device.type for device in self.devices}),
        }


def _chunk_side(block: int) -> int:
    """The side of a chunk, nearest 128, that divides a block's evenly; 0 where none within 4 times
    of it does: one voxel is as many files, and one chunk for all takes the memory of all."""
    divisors = (n for n in range(1, min(block, 4 * 128) + 1) if block % n == 0)
    side = min(divisors, key=lambda n: max(n / 128, 128 / n))
    return side if side >= min(block, 128 // 4) else 0


def _default_run_dir(sink: Sink) -> Path | None:
    """Beside a local store; in this folder for a remote one; nowhere for an array in memory.

    Where the name alone does not say which array is meant, a hash of its address does.
    """
    store = sink.local_path
    if store is not None and str(store.resolve()) == sink.address:
        return store.with_name(store.name + ".penstock")
    if store is None:
        if "://" not in sink.address:
            return None
        store = Path(sink.address.rstrip("/").rpartition("/")[2])
    address = hashlib.sha256(sink.address.encode()).hexdigest()[:8]
    return store.with_name(f"{store.name}-{address}.penstock")


def _resident() -> int:
    """Bytes of memory that this process holds."""
    return int(psutil.Process().memory_info().rss)


def _dtype(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError:
        raise UsageError(f"--out-dtype {name!r} is no dtype; try uint16 or float32") from None


def _amp(
    config: InferConfig, devices: Sequence[torch.device], dtype: torch.dtype
) -> torch.dtype | None:
    """fp16 on CUDA unless told otherwise: it keeps 11 bits of an intensity where bf16 keeps 8. But
    it ends at 65,504, so it is only for values that are brought to a range, and it is for a net of
    ``dtype`` float32: one of half precision has what it wants."""
    chosen = config.amp
    if chosen == "auto":
        ranged = config.normalize in ("percentile", "global") or (
            config.normalize == "fixed" and config.clip_norm is not None
        )
        on_cuda = all(device.type == "cuda" for device in devices)
        chosen = "fp16" if on_cuda and ranged and dtype == torch.float32 else "off"
    return {"fp16": torch.float16, "bf16": torch.bfloat16, "off": None}[chosen]


def _digest(module: torch.nn.Module) -> str:
    """A hash of every weight, and of what else a module keeps with them."""
    digest = hashlib.sha256()
    state: dict[str, Any] = module.state_dict()
    for name, held in sorted(state.items()):
        if isinstance(held, torch.Tensor):
            digest.update(f"{name} {tuple(held.shape)} {held.dtype}".encode())
            raw = held.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            octets: Any = raw.numpy()
            digest.update(octets)
        else:  # by `get_extra_state`
            digest.update(f"{name} {held!r}".encode())
    return digest.hexdigest()[:16]


def _free_device_memory(devices: Sequence[torch.device]) -> int | None:
    free = [torch.cuda.mem_get_info(device)[0] for device in devices if device.type == "cuda"]
    return min(free) if free else None
