"""A job: all that the settings name is opened, checked and planned, and can be run.

Opening changes nothing: a job may be planned, shown and thrown away. `run` carries it out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ...base import InferConfig, torch_threads, usable_cores
from ...data import (
    Box,
    FilledMask,
    NormalisedSource,
    ResampledSource,
    Sink,
    Source,
    check_knows_chunks,
    file_notes,
    why_no_lock,
)
from ...instruments import available_memory
from ...models import (
    Model,
    Recipe,
    Reduction,
    as_trained,
    find_devices,
    load_model,
    of_views,
    reduced,
)
from ..planning.memory import Facts, resident_bytes
from ..planning.plan import make_plan
from ..run_folder.journal import Prepared
from ..run_folder.names import default_run_dir
from ..run_folder.reader import as_begun
from ..tiling.geometry import block_halo
from . import identity
from .as_its_makers import normalised_as, obeyed_heads, sliding_of, with_defaults
from .heads import HeadFacts, facts_of_heads, is_long, is_wide, plan_heads
from .net import fit_net, spoilt_masks, with_kinds
from .network_voxels import frame_of_outputs, network_grid
from .outputs import check_own_files, dtype_notes, level_bytes, open_outputs, sizes_of_heads
from .sample import box_of, cropped, open_sample
from .seam_error import SeamTrial
from .seams import aligned, fitted, patch_shape, tiled
from .selection import (
    channels_of,
    open_input,
    select,
    uneven,
    volumes_of,
    with_bands,
)


class Job:
    """One inference, opened and planned, that can be run."""

    def __init__(
        self,
        config: InferConfig,
        part: tuple[int, ...] | None = None,
        peers: int = 1,
        *,
        trial: bool = False,
    ) -> None:
        """Open what the settings name.

        Args:
            config: The settings of the job.
            part: The shape of parts, z y x, if other processes already work on parts.
            peers: Number of processes of the job that share this machine's memory.
            trial: True for a job that is opened to be compared or timed: nothing is measured of
                its seams, which takes up to a twentieth of a job.

        Raises:
            UsageError: What the settings ask for cannot be done. Nothing was created.
        """
        config, self.begun = as_begun(config)
        self.config = fitted(config, lambda other: Job(other, part, peers, trial=True))
        self.peers, self.trial = peers, trial
        self.notes: list[str] = []
        """Sentences on what was decided for the user, which the plan prints."""
        with torch_threads(self.config.threads):
            self._open(part)

    def _open(self, part: tuple[int, ...] | None) -> None:
        """Each step takes what those above it have decided. Where the user leaves a setting open,
        it is decided once: by the network's makers, by what the input holds, or by the patch."""
        overlap_is_open = self.config.overlap is None
        model = self._load_model()
        model = self._select(model)
        source = self._on_network_grid(model)
        model = self._with_outputs(model)
        self.sample = open_sample(self.config, self.input, source)
        heads = self._cut(source, model, overlap_is_open)
        config = self.config  # nothing is open from here on
        self.head_facts, judging_bytes = with_kinds(
            config, heads, self.net, self.values, source, self.volumes[0]
        )
        self._open_outputs(source, model.recipe)
        facts = _gather_facts(self, source, judging_bytes)
        self.run_dir = config.run_dir or default_run_dir(self.sinks[0])
        if config.joins:
            part = Prepared.read(self.run_dir).part
        self.plan = make_plan(config, facts, self.net.shape, part)
        if self.tiled.measured and not self.trial:
            self.plan = _seam_trial(self, source).measured(self.plan)
        self.geometry = self.plan.geometry
        self.source = source.with_cache(self.plan.memory.cache)
        self.norm_source = self.source if self.values.as_seen(self.way) else self.input
        if config.norm_level is not None:
            self.norm_source = open_input(config, config.norm_level)
        check_own_files(config, self.run_dir, source, self.sinks)

    @property
    def masked_box(self) -> Box:
        """The box of the input that its mask is of, where values are masked."""
        return self.crop or self.input.domain[2:]

    @property
    def sinks(self) -> list[Sink]:
        return [output.sink for output in self.outputs]

    def _load_model(self) -> Model:
        """The model and its devices. What its makers say decides what the user leaves open."""
        config = self.config
        self.devices = find_devices(config.devices)
        self.bare = model = load_model(
            config.model_type, config.weights, config.in_channels, trust=config.trust_model
        )
        config, notes = with_defaults(config, model.recipe)
        self.notes += notes
        self.reduction = None if config.reduce is None else Reduction.parse(config.reduce)
        self.config, self.values = normalised_as(config, model.recipe)
        return model

    def _select(self, model: Model) -> Model:
        """The model as it takes the channels of the input; also opens this, and finds the volumes
        and the box that the job is of."""
        config = self.config
        self.input = open_input(config)
        start, stop = self.input.domain.start, self.input.domain.stop
        times = select(config.t, start[0], stop[0], "--t")
        channels, picked = channels_of(config, self.input, model.recipe)
        self.selected = times, channels
        model, at_once = with_bands(config, model, self.input, len(channels))
        self.volumes = volumes_of(times, channels, model, len(self.values.each))
        self.config, cut = cropped(config, model.recipe, self.input, self.volumes, self.begun)
        self.notes += [*picked, *at_once, *cut, *uneven(self.selected)]
        return model

    def _on_network_grid(self, model: Model) -> Source:
        """The input as the network sees it."""
        config, recipe = self.config, model.recipe
        self.crop = box_of(config, self.input) if recipe and recipe.crops else None
        self.way, resized = network_grid(config, self.input, recipe, self.crop)
        self.notes += resized
        self.values = self.values.in_order(recipe, self.way, everywhere=config.mask is None)
        source = NormalisedSource(self.input) if self.values.first else self.input
        self.back, self.inner = None, self.crop
        if self.way is not None:
            source = ResampledSource(source, self.way)
            if self.way.inner is not None:
                self.inner = self.way.inner[1]
            if config.output_voxel_size == "input":
                self.back = self.way.back(min(self.way.order, recipe.back_order if recipe else 1))
        if config.missing == "error":
            check_knows_chunks(source)
        return source

    @property
    def finishes_later(self) -> bool:
        """Whether probabilities are made, and scores reduced, once blocks are whole. A voxel that
        is trimmed, on the grid of the outputs, comes from one patch: it needs no other."""
        return self.config.seam_mode == "blend" or self.back is not None

    def _with_outputs(self, model: Model) -> Model:
        """The model with the heads that its outputs take."""
        rescaled, later = self.config.denormalize, self.finishes_later
        # What the user says of the heads wins over what their training recorded.
        if self.config.head_kind is None:
            model, notes = as_trained(model, rescaled=rescaled, later=later)
            self.notes += notes
        if self.config.tta is not None:
            model = of_views(model, self.config.tta)
        if self.reduction is not None:
            model = reduced(model, self.reduction, later=later)
        # Before the first forward, as what the net caches in it does not count.
        self.attributes = identity.attributes(model.module)
        return model

    def _cut(self, source: Source, model: Model, overlap_is_open: bool) -> list[HeadFacts]:
        """Decide patch and overlap, fit the net to them, and return its heads. Their grids may
        change an overlap that is open."""
        has_z, bare = "z" in source.axes, replace(self.bare, in_channels=model.in_channels)
        self.tiled = tiled(
            self.config, bare, source.domain.shape[2:], source.chunks[2:], has_z, self.begun
        )
        config = self.tiled.config
        shape = patch_shape(config, has_z, model.spatial_axes)
        net = fit_net(config, self.devices, model, shape, source.dtype)
        heads = facts_of_heads(
            net.footprint.heads,
            len(config.out_spec),
            model.name,
            obeyed_heads(config, model.recipe, self.input),
            self.reduction,
            later=self.finishes_later,
        )
        fits = aligned(shape, heads, may_change=overlap_is_open, back=self.back)
        self.net = replace(net, shape=fits)
        if fits != shape:
            config = config.model_copy(update={"overlap": fits.overlap})
        self.config = config
        return heads

    def _open_outputs(self, source: Source, recipe: Recipe | None) -> None:
        """Open the outputs, and decide what is done to each head and where patches lie."""
        config, net = self.config, self.net
        frame = frame_of_outputs(config, self.input, self.way)
        self.written = frame.domain
        self.outputs = open_outputs(
            config, frame, self.selected, net.model.in_channels, self.head_facts,
            mask=None if self.sample is None else self.sample.mask,
        )  # fmt: skip
        self.heads = plan_heads(
            config, self.head_facts, self.sinks, carrier=str(net.carrier).removeprefix("torch."),
            scalings=len(self.values.each), corner=source.domain.start[2:],
            resampled=self.back is not None,
        )  # fmt: skip
        self.sliding = sliding_of(config, recipe, self.heads)

    @cached_property
    def maker(self) -> dict[str, Any]:
        """The code, versions and machine, which may change the last bits of voxels."""
        return identity.maker((self.input, *self.sinks), self.devices, self.config.threads)

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """The facts that must be equal in two runs for them to write the same voxels into the same
        blocks."""
        return _fingerprint_of(self)


def _fingerprint_of(job: Job) -> dict[str, Any]:
    config, geometry, model = job.config, job.geometry, job.net.model
    return {
        "input": identity.of_input(job.input, resumes=config.resumes),
        "domain": [job.written.start, job.written.stop],
        "voxels": job.way and [*job.source.domain.shape[2:], repr((job.way, job.back))],
        "outputs": [sink.fingerprint for sink in job.sinks],
        "places": [[output.channels, output.places] for output in job.outputs],
        "factors": [[*map(str, output.grid.factors)] for output in job.outputs],
        "dtypes": [job.input.dtype.name, *[sink.dtype.name for sink in job.sinks]],
        "model": [Path(model.name).name, model.code, model.in_channels],
        "sources": identity.sources(model.reference, model.module),
        "weights": identity.weights(model.module),
        "attributes": job.attributes,
        "volumes": [[v.t, list(v.channels)] for v in job.volumes],
        "sample": job.sample and job.sample.facts,
        "patch": geometry.patch,
        "overlap": geometry.overlap,
        "block": geometry.block,
        "seam": [geometry.seam, config.min_blend_weight, repr((job.sliding, geometry.inner))],
        "normalize": [
            config.normalize,
            config.norm_lower,
            config.norm_upper,
            config.norm_level,
            repr(job.values.each),
        ],
        "eps": config.eps,
        "clip": job.net.clip,
        "denormalize": config.denormalize,
        "heads": [[h.name, h.kind, h.work.name, h.gain, repr(h.recipe)] for h in job.heads],
        "halo": block_halo(config, geometry),
        "outputs_of": [config.tta, config.reduce],
        "arithmetic": [str(job.net.amp), config.tf32, config.compile],
        "compile_dynamic": config.compile and config.compile_dynamic,
        "devices": sorted({device.type for device in job.devices}),
    }


def _seam_trial(job: Job, source: Source) -> SeamTrial:
    """What measures the difference at seams."""
    return SeamTrial(
        job.net, job.values, source, job.volumes[0], job.devices[0],
        head=job.head_facts[0],
        sliding=job.sliding if job.heads[0].blended else None,
        floor=job.config.min_blend_weight, tf32=job.config.tf32,
    )  # fmt: skip


def _gather_facts(job: Job, source: Source, judging_bytes: int) -> Facts:
    """The facts that a plan needs, from the opened job and from the machine. The base leaves out
    ``judging_bytes``, which the test of the heads left in the heap: forwards use them again, and
    are counted themselves."""
    # First, because it makes a GPU's context, which takes memory of this process that base counts.
    device_bytes = _free_device_memory(job.devices)
    net, heads, devices = job.net, job.heads, job.devices
    counted = source if job.values.as_seen(job.way) else job.input
    masks = spoilt_masks(net, job.config) if source.dtype.kind == "f" else 0
    return Facts(
        domain=source.domain[2:],
        source_itemsize=source.dtype.itemsize,
        source_chunk=source.chunks[2:],
        chunk_bytes=math.prod(job.input.chunks) * job.input.dtype.itemsize,
        count_passes=job.values.passes(counted.dtype),
        steps=job.sliding.steps,
        inner=job.inner,
        way=job.way,
        back=job.back,
        stored_share=(job.input.domain.size * job.input.dtype.itemsize)
        / (source.domain.size * source.dtype.itemsize),
        packed_itemsize=getattr(source, "packed_itemsize", 0),  # stores of others need not know it
        source_origin=source.grid_origin[2:],
        flag_bytes=masks + 3 * (job.sample is not None),
        source_cache=source.cache_bytes or (None if source.with_cache(1).cache_bytes else 0),
        num_volumes=len(job.volumes),
        batch=net.batch,
        in_channels=net.model.in_channels,
        **sizes_of_heads(
            job.outputs, heads, source.domain[2:], job.written[2:], net.shape, bool(job.sample)
        ),
        write_grids=tuple(output.write_grid for output in job.outputs),
        anchor=job.outputs[0].anchor,
        weight_bytes=net.model.weight_bytes,
        forward_bytes=net.footprint.peak_bytes,
        devices=tuple(device.type for device in devices),
        base_bytes=resident_bytes() - judging_bytes,
        available_bytes=available_memory() // job.peers,
        cores=usable_cores(),
        device_bytes=device_bytes,
        cast_bytes=net.model.weight_bytes // 2 if net.amp is not None else 0,
        work_itemsize=max(
            net.carrier.itemsize,
            *(8 if head.kind == "labels" else head.work.itemsize for head in heads),
        ),
        said=(
            *([("sample", job.sample.line())] if job.sample else ()),
            ("values", job.values.line),
            *(("head", head.line()) for head in heads),
        ),
        sample_bytes=_sample_bytes(job),
        seams=job.tiled.line,
        arithmetic=identity.arithmetic_of(job.maker),
        notes=(*job.notes, *_notes(job, source)),
        level_bytes=level_bytes(job.config, job.sinks),
        making_bytes=max(getattr(sink, "making_bytes", 0) for sink in job.sinks),
    )


def _sample_bytes(job: Job) -> int:
    """Bytes of all that says where a volume holds what."""
    flags = job.sample.cache_bytes if job.sample else 0
    if job.values.masked:
        flags += len(job.volumes) * FilledMask.bytes_for(job.masked_box)
    return flags


def _free_device_memory(devices: Sequence[torch.device]) -> int | None:
    gpus = [device for device in devices if device.type == "cuda"]
    return min((torch.cuda.mem_get_info(device)[0] for device in gpus), default=None)


def _notes(job: Job, source: Source) -> Iterator[str]:
    """Sentences that the plan prints about how the model is run."""
    config, net = job.config, job.net
    yield from filter(None, map(why_no_lock, job.sinks))
    yield from getattr(job.input, "notes", ())  # stores of others need not have any
    yield from file_notes(source, job.sinks, look=not (job.trial or config.joins))
    yield from dtype_notes(config, source.dtype, job.head_facts, job.sinks)
    dtype = str(net.model.dtype).removeprefix("torch.")
    lossless = dtype == source.dtype or (dtype == "float64" and not is_long(source.dtype))
    if is_wide(source.dtype) and not lossless:
        yield f"the model takes {dtype}, which does not hold all digits of {source.dtype}"
    if config.normalize == "global" and config.model_fields_set & {"norm_lower", "norm_upper"}:
        yield (
            f"--norm-lower {config.norm_lower:g} and --norm-upper {config.norm_upper:g} are "
            "percentiles of the whole volume; for intensities give --normalize fixed --clip-norm "
            "0 1"
        )
    if not net.footprint.channels_last:
        yield "the model fails on tensors in channels last layout, and is slower without it"
    on_cuda = all(device.type == "cuda" for device in job.devices)
    if config.amp == "auto" and on_cuda and dtype == "float32" and net.amp is None:
        yield (
            "autocast is off, as values that are not normalised to a range may be too large for "
            "half precision; --normalize with --clip-norm, or --amp, turns it on"
        )
