"""A job, opened with torch: its model is loaded, and may be run on a patch of the input.

`run` carries it out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...base import torch_threads
from ...data import Source
from ...models import Model, find_devices, load_model
from ..planning.memory import resident_bytes
from ..run_folder.reader import threads_of
from ..tiling.geometry import PatchShape, block_halo
from . import identity
from .device_peak import with_workspaces
from .draft import Draft, Kinds
from .head_kinds import Seen, head_kinds, seen_patches
from .heads import HeadPart
from .net import Net, check_graphs, fit_net


class Job(Draft):
    """One inference, opened and planned, that can be run."""

    devices: list[torch.device]
    net: Net

    def _open(self, part: tuple[int, ...] | None) -> None:
        self.config = self.config.model_copy(update={"threads": threads_of(self.config)})
        with torch_threads(self.config.threads):
            super()._open(part)

    def _find_model(self) -> Model:
        config = self.config
        self.devices = find_devices(config.devices)
        check_graphs(config, self.devices)
        model = load_model(
            config.model_type, config.weights, config.in_channels, trust=config.trust_model
        )
        # Before the first forward, as what the net caches in it does not count.
        self.attributes = identity.attributes(model.module)
        return model

    def _fit(self, model: Model, shape: PatchShape, dtype: np.dtype[Any]) -> Net:
        net = fit_net(self.config, self.devices, model, shape, dtype)
        return with_workspaces(net, self.config, self.devices)

    def _kinds(self, source: Source, parts: Sequence[HeadPart]) -> tuple[Kinds, int]:
        before: list[int] = []

        def candidates() -> Iterator[Seen]:
            before.append(resident_bytes())
            net = self.net
            yield from seen_patches(self.config, source, self.volumes[0], net.shape.patch, net.clip)

        kinds = head_kinds(self.config, parts, self.net, candidates())
        return kinds, max(0, resident_bytes() - before[0]) if before else 0

    def maker(self) -> dict[str, Any]:
        """The code, versions and machine, which may change the last bits of voxels."""
        return identity.maker((self.source, *self.sinks), self.devices, self.config.threads)

    def fingerprint(self) -> dict[str, Any]:
        """The facts that must be equal in two runs for them to write the same voxels into the same
        units."""
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
