"""Gathers the facts that a plan needs, from the opened job and from the machine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from ...base import InferConfig, usable_cores
from ...data import Source, why_no_lock
from ...instruments import available_memory
from ..planning.memory import Facts, resident_bytes
from .heads import HeadPlan, is_wide
from .identity import arithmetic_of, maker
from .net import Net
from .outputs import Output


def gather_facts(
    config: InferConfig,
    source: Source,
    devices: Sequence[torch.device],
    net: Net,
    heads: Sequence[HeadPlan],
    outputs: Sequence[Output],
    num_volumes: int,
    judging_bytes: int,
    values: str,
    peers: int = 1,
    notes: Sequence[str] = (),
) -> Facts:
    """The facts of a job. ``judging_bytes`` is the memory that the test of the heads left in the
    heap. The base does not count it, as forwards use it again and are counted themselves.
    ``values`` says how values are scaled."""
    # First, because it makes a GPU's context, which takes memory of this process that base counts.
    device_bytes = _free_device_memory(devices)
    return Facts(
        domain=source.domain[2:],
        source_itemsize=source.dtype.itemsize,
        source_chunk=source.chunks[2:],
        chunk_bytes=math.prod(source.chunks) * source.dtype.itemsize,
        packed_itemsize=getattr(source, "packed_itemsize", 0),  # stores of others need not know it
        source_origin=source.grid_origin[2:],
        source_is_float=source.dtype.kind == "f",
        source_cache=source.cache_bytes or None,
        source_caches=source.with_cache(1).cache_bytes != 0,
        num_volumes=num_volumes,
        batch=net.batch,
        in_channels=net.model.in_channels,
        out_channels=tuple(head.channels for head in heads),
        out_itemsizes=tuple(head.dtype.itemsize for head in heads),
        sum_itemsizes=tuple(head.blended * head.work.itemsize for head in heads),
        write_grids=tuple(output.sink.write_grid[2:] for output in outputs),
        anchor=outputs[0].anchor,
        weight_bytes=net.model.weight_bytes,
        forward_bytes=net.footprint.peak_bytes,
        devices=tuple(device.type for device in devices),
        base_bytes=resident_bytes() - judging_bytes,
        available_bytes=available_memory() // peers,
        cores=usable_cores(),
        device_bytes=device_bytes,
        cast_bytes=net.model.weight_bytes // 2 if net.amp is not None else 0,
        work_itemsize=max(
            net.carrier.itemsize,
            *(8 if head.kind == "labels" else head.work.itemsize for head in heads),
        ),
        patch_flops=net.patch_flops,
        heads=tuple(head.line() for head in heads),
        values=values,
        arithmetic=arithmetic_of(
            maker([source, *(o.sink for o in outputs)], devices, config.threads)
        ),
        notes=(*notes, *_notes(config, source, devices, net, outputs)),
    )


def _free_device_memory(devices: Sequence[torch.device]) -> int | None:
    gpus = [device for device in devices if device.type == "cuda"]
    return min((torch.cuda.mem_get_info(device)[0] for device in gpus), default=None)


def _notes(
    config: InferConfig,
    source: Source,
    devices: Sequence[torch.device],
    net: Net,
    outputs: Sequence[Output],
) -> Iterator[str]:
    """Sentences that the plan prints about how the model is run."""
    yield from filter(None, (why_no_lock(output.sink) for output in outputs))
    yield from getattr(source, "notes", ())  # stores of others need not have any
    dtype = str(net.model.dtype).removeprefix("torch.")
    if is_wide(source.dtype) and dtype != "float64":
        yield f"the model takes {dtype}, which does not hold all digits of {source.dtype}"
    if config.normalize == "global" and config.model_fields_set & {"norm_lower", "norm_upper"}:
        yield (
            f"--norm-lower {config.norm_lower:g} and --norm-upper {config.norm_upper:g} are "
            "percentiles of the whole volume; for intensities give --normalize fixed --clip-norm "
            "0 1"
        )
    if not net.footprint.channels_last:
        yield "the model fails on tensors in channels last layout, and is slower without it"
    on_cuda = all(device.type == "cuda" for device in devices)
    if config.amp == "auto" and on_cuda and dtype == "float32" and net.amp is None:
        yield (
            "autocast is off, as values that are not normalised to a range may be too large for "
            "half precision; --normalize with --clip-norm, or --amp, turns it on"
        )
