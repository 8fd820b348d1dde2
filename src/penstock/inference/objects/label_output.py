"""The output of a labelling: one OME-Zarr, created when its dtype is known, by one run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ...base import InferConfig, LabelConfig, UsageError, plural, usable_cores
from ...data import (
    Box,
    Grid,
    Sink,
    Source,
    add_levels,
    levels_below,
    make_file,
    open_sink,
    open_source,
    register_label,
)


def output_of(
    config: LabelConfig, source: Source, domain: Box, dtype: Any, *, overwrite: bool,
    resume: bool = False,
) -> Sink:  # fmt: skip
    """The output of a labelling as it would be with a dtype. Nothing is created."""
    sink = open_sink(
        config.out_spec, domain=domain, dtype=np.dtype(dtype), like=source, chunks=config.chunks,
        shards=config.shards, resume=resume, overwrite=overwrite, files=True,
        rule=None if config.levels == "none" else "mode", name="OUT",
    )  # fmt: skip
    absent = getattr(getattr(sink, "georeference", None), "nodata", None)
    if absent is not None and float(absent):
        raise UsageError(
            f"OUT {sink.name}: {float(absent):g}, which stands for no data, would be an object's "
            "number; leave --raw out, or give an OME-Zarr"
        )
    return sink


def check_count(sink: Sink, count: int) -> None:
    """Raise `UsageError` if an output does not hold the numbers of so many objects."""
    if sink.dtype.kind not in "iu" or count > np.iinfo(sink.dtype).max:
        raise UsageError(
            f"OUT {sink.name}: {sink.dtype} does not hold {plural(count, 'object')}; leave "
            "--dtype out for the smallest that does"
        )


def add_label_levels(config: LabelConfig, source: Source, sink: Any) -> int:
    """Add the levels of an OME-Zarr in which all blocks are written, and list it as a label of its
    image; or make a file of the blocks. Returns the number of levels of an OME-Zarr, also of those
    that an earlier start has added."""
    place, count = str(config.out_spec), 1 if config.levels == "none" else config.levels
    if hasattr(sink, "making_bytes"):
        make_file(sink, "mode", count, lambda voxels: None)
    if not getattr(sink, "documents", None):
        return 0
    levels = len(levels_below(sink.domain.shape, source.scale, count))
    add_levels(place, rule="mode", count=count, again=False, threads=usable_cores(), name="OUT")
    register_label(place, "OUT")
    return levels


@dataclass(frozen=True)
class RoundWork:
    """What a round does with each block, which is handed to other processes."""

    config: LabelConfig
    grid: Grid
    folder: Path
    """The folder of what is found of each block."""

    def __getstate__(self) -> dict[str, Any]:
        """What is open stays here, as few arrays can be sent: each process opens its own."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @cached_property
    def source(self) -> Source:
        """The input."""
        return open_input(self.config)

    def opened(self) -> AbstractContextManager[None]:
        """The context in which blocks are done."""
        return contextlib.nullcontext()

    def files(self, number: int) -> list[Path]:
        """The files of what is found of a block."""
        return [self.folder / f"{number:06}.npz"]

    def lacking(self, numbers: Iterable[int]) -> list[int]:
        """Those of some blocks of which nothing is found, or half of it."""
        return [n for n in numbers if not all(file.is_file() for file in self.files(n))]


def open_input(config: LabelConfig | InferConfig) -> Source:
    """The input of a labelling, or of the scores that it labels."""
    settings = {name: getattr(config, name) for name in ("level", "axes", "series", "raw")}
    return open_source(config.in_spec, **settings, name="IN")
