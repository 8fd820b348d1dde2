"""A job, opened: its source, model and sinks are open, its settings checked, its plan made.

Opening changes nothing: a `Job` may be planned, shown and thrown away. `run` carries it out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..base import HeadKind, InferConfig, UsageError, check_local, check_outputs, torch_threads
from ..data import Sink, Source, check_knows_chunks, open_source
from ..models import find_devices, load_model
from . import identity
from .facts import gather_facts
from .geometry import block_halo, patch_shape
from .head_kinds import Seen, head_kinds, seen_patches, split
from .heads import HeadPart, Origin, plan_heads
from .journal import default_run_dir
from .memory import resident_bytes
from .net import fit_net
from .outputs import open_outputs
from .plan import make_plan
from .selection import select, volumes_of


class Job:
    """One inference, opened and planned."""

    def __init__(self, config: InferConfig) -> None:
        """Open what the settings name.

        Args:
            config: The settings of the job.

        Raises:
            UsageError: What the settings ask for cannot be done. Nothing was created.
        """
        self.config = config
        with torch_threads(config.threads):
            self._open()

    def _open(self) -> None:
        config = self.config
        self.devices = find_devices(config.devices)
        model = load_model(
            config.model_type, config.weights, config.in_channels, trust=config.trust_model
        )
        # Before the net is run: what it caches in a forward is no part of it.
        self.attributes = identity.attributes(model.module)
        source = open_source(config.in_spec, level=config.level)
        shape = patch_shape(config, "z" in source.axes, model.spatial_axes)
        self.net = fit_net(config, self.devices, model, shape, source.dtype)
        start, stop = source.domain.start, source.domain.stop
        times = select(config.t, start[0], stop[0], "--t")
        channels = select(config.c, start[1], stop[1], "--c")
        parts = split(self.net.footprint.heads, len(config.out_spec), model.name)
        self.volumes = volumes_of(times, channels, model.in_channels)
        if config.missing == "error":
            check_knows_chunks(source)
        kinds, judging_bytes = self._kinds(source, parts)
        self.outputs = open_outputs(
            config, source, (times, channels), model.in_channels, parts, kinds
        )
        dtypes, fine = [sink.dtype for sink in self.sinks], self.net.carrier == torch.float64
        self.heads = plan_heads(config, parts, kinds, dtypes, fine=fine)
        facts = gather_facts(
            config, source, self.devices, self.net, self.heads, self.outputs, len(self.volumes),
            judging_bytes,
        )  # fmt: skip
        self.plan = make_plan(config, facts, shape)
        self.geometry = self.plan.geometry
        self.source = source.with_cache(self.plan.cache_bytes)
        self.norm_source = self.source
        if config.norm_level is not None:
            self.norm_source = open_source(config.in_spec, level=config.norm_level)
        self.run_dir = config.run_dir or default_run_dir(self.sinks[0])
        self._check_files(source)

    @property
    def sinks(self) -> list[Sink]:
        return [output.sink for output in self.outputs]

    def _kinds(
        self, source: Source, parts: Sequence[HeadPart]
    ) -> tuple[list[tuple[HeadKind, Origin]], int]:
        """The kind of each head, and the bytes that finding out left in the heap. Later forwards
        use these bytes again, and the plan counts those."""
        before: list[int] = []

        def candidates() -> Iterator[Seen]:
            before.append(resident_bytes())
            net = self.net
            yield from seen_patches(self.config, source, self.volumes[0], net.shape.patch, net.clip)

        kinds = head_kinds(self.config, parts, self.net, candidates())
        return kinds, max(0, resident_bytes() - before[0]) if before else 0

    def _check_files(self, source: Source) -> None:
        """Refuse a run folder, a trace or metrics that would lie inside the input or an output."""
        config = self.config
        if config.run_dir is not None:
            check_local(config.run_dir, "--run-dir")
        places = [("input", source.address), *(("output", sink.address) for sink in self.sinks)]
        named = [("--trace", config.trace), ("--metrics-json", config.metrics_json)]
        if self.run_dir is None and config.metrics_json is not None:
            named.append(("the rows of --metrics-json", config.metrics_json.with_suffix(".jsonl")))
        ours = [("--run-dir", self.run_dir), *named]
        for (flag, path), (what, address) in itertools.product(ours, places):
            if path is not None and f"{path.resolve()}/".startswith(f"{address}/"):
                raise UsageError(f"{flag} {path} lies inside the {what}")
        given = (config.in_spec, config.model_type, config.weights, *config.out_spec)
        read = [Path(each) for each in given if isinstance(each, str | Path)]
        check_outputs(*named, replace=config.replace, inputs=read)

    def maker(self) -> dict[str, Any]:
        """What may change the last bits of voxels though the fingerprint is the same."""
        return identity.maker(self.source, self.sinks, self.devices)

    def fingerprint(self) -> dict[str, Any]:
        """What must be equal in two runs for them to write the same voxels into the same units."""
        config, geometry, model = self.config, self.geometry, self.net.model
        return {
            "input": identity.of_input(self.source, resumes=config.resumes),
            "domain": [self.source.domain.start, self.source.domain.stop],
            "outputs": [sink.fingerprint for sink in self.sinks],
            "places": [[output.channels, output.places] for output in self.outputs],
            "dtypes": [self.source.dtype.name, *[sink.dtype.name for sink in self.sinks]],
            "model": [Path(model.name).name, model.code, model.in_channels],
            "sources": identity.sources(model.reference, model.module),
            "weights": identity.weights(model.module),
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
            "clip": self.net.clip,
            "denormalize": config.denormalize,
            "heads": [[head.name, head.kind, head.work.name] for head in self.heads],
            "halo": block_halo(config, geometry),
            "arithmetic": [str(self.net.amp), config.tf32, config.compile],
            "compile_dynamic": config.compile and config.compile_dynamic,
            "devices": sorted({device.type for device in self.devices}),
        }
