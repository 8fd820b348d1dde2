"""A job that is planned: source and sinks are open, settings are checked, and the plan is made.

Opening changes nothing: a job may be planned, shown and thrown away. A `Draft` needs no torch, but
a model whose facts are known. A `Job` opens the model itself, and can run.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...base import (
    HeadKind,
    InferConfig,
    MissingDependency,
    UsageError,
    check_folder,
    check_outputs,
    missing,
)
from ...data import Sink, Source, check_knows_chunks, open_source
from ...models import KnownModel, known_model, model_files
from ..planning.plan import make_plan
from ..run_folder.bucket import RemoteFolder
from ..run_folder.files import default_run_dir
from ..run_folder.journal import RUN_FILES, Prepared
from ..run_folder.reader import check_not_anew
from ..tiling.geometry import PatchShape, patch_shape
from .facts import gather_facts
from .heads import HeadPart, Origin, plan_heads, said_kinds, split
from .known_net import HostDevice, KnownNet, fit_known_net
from .outputs import open_outputs
from .selection import select, volumes_of

if TYPE_CHECKING:
    import torch

    from ...models import Model
    from .net import Net

Kinds = list[tuple[HeadKind, Origin]]


class Draft:
    """One inference, opened and planned without torch, for a model whose facts are known."""

    devices: Sequence[torch.device | HostDevice]
    net: Net | KnownNet

    def __init__(
        self, config: InferConfig, part: tuple[int, ...] | None = None, peers: int = 1
    ) -> None:
        """Open what the settings name.

        Args:
            config: The settings of the job.
            part: The shape of parts, z y x, if other processes already work on parts.
            peers: Number of processes of the job that share this machine's memory.

        Raises:
            UsageError: What the settings ask for cannot be done. Nothing was created.
            MissingDependency: The model, its weights or the devices need torch.
        """
        self.config, self.peers = config, peers
        self._open(part)

    def _open(self, part: tuple[int, ...] | None) -> None:
        config = self.config
        model = self._find_model()
        source = open_source(config.in_spec, level=config.level)
        shape = patch_shape(config, "z" in source.axes, model.spatial_axes)
        self.net = self._fit(model, shape, source.dtype)
        start, stop = source.domain.start, source.domain.stop
        times = select(config.t, start[0], stop[0], "--t")
        channels = select(config.c, start[1], stop[1], "--c")
        self.selected = times, channels
        parts = split(self.net.footprint.heads, len(config.out_spec), model.name)
        self.volumes = volumes_of(times, channels, model.in_channels)
        if config.missing == "error":
            check_knows_chunks(source)
        kinds, judging_bytes = self._kinds(source, parts)
        self.head_parts, self.head_kinds = parts, kinds
        try:
            self.outputs = open_outputs(
                config, source, (times, channels), model.in_channels, parts, kinds
            )
        except UsageError:
            if config.resumes:
                check_not_anew(config.out_spec, config.run_dir)
            raise
        dtypes, fine = [sink.dtype for sink in self.sinks], self.net.carrier.itemsize == 8
        self.heads = plan_heads(config, parts, kinds, dtypes, fine=fine)
        facts = gather_facts(
            config, source, self.devices, self.net, self.heads, self.outputs, len(self.volumes),
            judging_bytes, self.peers,
        )  # fmt: skip
        self.run_dir = config.run_dir or default_run_dir(self.sinks[0])
        if config.joins:
            part = Prepared.read(self.run_dir).part
        self.plan = make_plan(config, facts, shape, part)
        self.geometry = self.plan.geometry
        self.source = source.with_cache(self.plan.cache_bytes)
        self.norm_source = self.source
        if config.norm_level is not None:
            self.norm_source = open_source(config.in_spec, level=config.norm_level)
        self._check_files(source)

    @property
    def sinks(self) -> list[Sink]:
        return [output.sink for output in self.outputs]

    def _find_model(self) -> Model | KnownModel:
        """The model; also finds its devices."""
        config = self.config
        model = known_model(config.model_type, config.in_channels)
        if model is None:
            raise _needs_torch(f"--model-type {config.model_type}")
        if config.weights is not None:
            raise _needs_torch(f"--weights {config.weights}")
        if config.devices not in (("auto",), ("cpu",)):
            raise _needs_torch(f"--devices {' '.join(config.devices)}")
        self.devices = [HostDevice()]
        return model

    def _fit(self, model: Any, shape: PatchShape, dtype: np.dtype[Any]) -> Net | KnownNet:
        """The model that `_find_model` returned, fitted to patches of an input."""
        return fit_known_net(self.config, model, shape, dtype)

    def _kinds(self, source: Source, parts: Sequence[HeadPart]) -> tuple[Kinds, int]:
        """The kind of each head, and the bytes that the test of the heads left in the heap. Later
        forwards use these bytes again, and the plan counts the forwards."""
        kind = self.net.model.kind
        assert kind is not None
        said = said_kinds(self.config.head_kind, parts)
        return [(each, "said") if each else (kind, "known") for each in said], 0

    def _check_files(self, source: Source) -> None:
        """Refuse a run folder, a trace or metrics that would lie inside the input or an output, or
        replace a file of the run."""
        config = self.config
        if isinstance(config.run_dir, Path):
            check_folder(config.run_dir, "--run-dir")
        if isinstance(self.run_dir, str):
            self._check_apart(RemoteFolder(self.run_dir), source)
        here = self.run_dir if isinstance(self.run_dir, Path) else None
        places = [("input", source.address), *(("output", sink.address) for sink in self.sinks)]
        named = [("--trace", config.trace), ("--metrics-json", config.metrics_json)]
        if self.run_dir is None and config.metrics_json is not None:
            named.append(("the rows of --metrics-json", config.metrics_json.with_suffix(".jsonl")))
        ours = [("--run-dir", here), *named]
        for (flag, path), (what, address) in itertools.product(ours, places):
            if path is not None and f"{path.resolve()}/".startswith(f"{address}/"):
                raise UsageError(f"{flag} {path} lies inside the {what}")
        kept = {here.resolve() / name for name in RUN_FILES} if here else set()
        for flag, path in named:
            if path is not None and path.resolve() in kept:
                raise UsageError(f"{flag} {path} is a file of the run folder; give another name")
        given = [config.in_spec, config.weights, *config.out_spec, *model_files(config.model_type)]
        read = [Path(each) for each in given if isinstance(each, str | Path)]
        check_outputs(*named, replace=config.replace, inputs=read)

    def _check_apart(self, folder: RemoteFolder, source: Source) -> None:
        """Refuse a run folder in a bucket that lies inside the input or an output."""
        places = [("input", source.address), *(("output", sink.address) for sink in self.sinks)]
        for what, address in places:
            if f"{folder.address}/".startswith(f"{address}/"):
                raise UsageError(f"--run-dir {folder} lies inside the {what}")


def _needs_torch(what: str) -> MissingDependency:
    return MissingDependency(f"{what}: {missing('torch', 'infer')}")
