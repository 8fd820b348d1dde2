"""A job opened: source, model and sinks looked at, every knob checked, the plan made.

Opening touches nothing: a `Job` may be planned, shown and thrown away. `infer` carries it out.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from . import model as models
from .box import Box
from .config import InferConfig
from .errors import UsageError
from .plan import Facts, make_plan, patch_shape, per_axis, select
from .store import Sink, Source, open_sink, open_source, same_array

GPU_BATCH = 16
"""Patches in one forward on a GPU where the user does not say."""


@dataclass(frozen=True, slots=True)
class Volume:
    """One pass of the model over space: one time point, one group of channels."""

    t: int
    channels: tuple[int, ...]
    sink_t: int
    group: int


class Job:
    """One inference, opened and planned."""

    def __init__(self, config: InferConfig) -> None:
        self.config = config
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.devices = models.devices(config.devices)
        self.model = models.load(config.model_type, config.weights, config.in_channels)
        source = open_source(config.in_spec, level=config.level)
        self.shape = patch_shape(config, "z" in source.axes, self.model.spatial_axes)
        self.amp = _amp(config, self.devices)
        on_cpu = all(device.type == "cpu" for device in self.devices)
        self.batch = config.batch or (1 if on_cpu else GPU_BATCH)
        batch_shape = (1 if on_cpu else self.batch, self.model.in_channels, *self._model_patch())
        self.footprint = models.footprint(self.model, batch_shape)
        ts = select(config.t, source.domain.start[0], source.domain.stop[0], "--t")
        cs = select(config.c, source.domain.start[1], source.domain.stop[1], "--c")
        self.out_channels = self._split_heads()
        self.sinks = self._open_sinks(source, ts, cs)
        self.volumes = self._volumes(source, ts, cs)
        self.offset = tuple(
            b - a
            for a, b in zip(source.domain.start[2:], self.sinks[0].domain.start[2:], strict=True)
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
            batch=self.batch,
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
            "normalize": [
                config.normalize,
                config.norm_lower,
                config.norm_upper,
                config.norm_level,
            ],
            "clip": self.clip,
            "denormalize": config.denormalize,
            "halo": config.halo,
            "amp": str(self.amp),
        }


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
