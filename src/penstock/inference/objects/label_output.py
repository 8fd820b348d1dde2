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

from ...base import LabelConfig, UsageError, plural, usable_cores
from ...data import Box, Grid, Sink, Source, open_sink, open_source


@dataclass(frozen=True)
class LabelOutput:
    """Where labels are written to."""

    config: LabelConfig
    source: Source
    domain: Box

    def sink(self, dtype: Any, *, overwrite: bool, resume: bool = False) -> Sink:
        """The output as it would be with a dtype. Nothing is created."""
        config = self.config
        return open_sink(
            config.out_spec, domain=self.domain, dtype=np.dtype(dtype), like=self.source,
            chunks=config.chunks, shards=config.shards, resume=resume, overwrite=overwrite,
            name="OUT",
        )  # fmt: skip

    def made(self, count: int, *, goes_on: bool, anew: bool) -> Sink:
        """The output for a number of objects. Nothing is created.

        Args:
            count: The number of objects.
            goes_on: True if blocks of it are written.
            anew: True if what stands in its place may be replaced.

        Returns:
            The output.

        Raises:
            UsageError: It exists and is not ours, or does not hold so many numbers.
        """
        dtype = self.config.dtype or np.min_scalar_type(count)
        sink = self.sink(dtype, resume=goes_on, overwrite=anew and not goes_on)
        if sink.dtype.kind not in "iu" or count > np.iinfo(sink.dtype).max:
            raise UsageError(
                f"OUT {sink.name}: {sink.dtype} does not hold {plural(count, 'object')}; leave "
                "--dtype out for the smallest that does"
            )
        return sink

    def add_levels(self, sink: Sink) -> int:
        """Add the levels of an OME-Zarr, and list it as a label of its image.

        Args:
            sink: The output, in which all blocks are written.

        Returns:
            The number of levels that were added.
        """
        from ...data import add_levels, register_label

        config, place = self.config, str(self.config.out_spec)
        if not getattr(sink, "documents", None):
            return 0
        levels = []
        if config.levels != "none":
            levels = add_levels(
                place, rule="mode", count=config.levels, again=False, threads=usable_cores(),
                name="OUT",
            )  # fmt: skip
        register_label(place, "OUT")
        return len(levels)


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


def open_input(config: LabelConfig) -> Source:
    """The input of a labelling."""
    settings = {name: getattr(config, name) for name in ("level", "axes", "series", "raw")}
    return open_source(config.in_spec, **settings, name="IN")
