"""The job of a labelling, opened: its input, blocks and output, and what is known before it begins.

    IN ──▶ count (by blocks) ──▶ join, number (one process) ──▶ write (by blocks) ──▶ OUT, table

Each step has the same result whoever does which block, when and how often. What is counted lies in
the run folder until the end, so that a run that was killed goes on with it.
"""

from __future__ import annotations

from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np

from ...base import (
    DISTRIBUTION,
    LabelConfig,
    Refused,
    UsageError,
    as_settings,
    check_folder,
    check_outputs,
    format_bytes,
    installed_version,
    plural,
    usable_cores,
)
from ...data import (
    Box,
    Georeference,
    Grid,
    Sink,
    Source,
    file_notes,
    georeference_of,
    in_words,
    refuse_overlap,
)
from ...instruments import available_memory
from ..planning.cuts import block_shape
from ..run_folder.folder import check_outside
from ..run_folder.names import OBJECTS, VIEWS, default_run_dir
from .block_work import BlockWork
from .components import ComponentRule, checked_connectivity, matter_of
from .decoded_views import ViewWork, view_work
from .label_output import open_input, output_of

BLOCK_VOXELS = 2**23
"""The most voxels of a block that is chosen: a worker takes about 25 bytes for each."""
VOXEL_BYTES, PROCESS_BYTES = 24, 130 * 2**20
"""Bytes that a process takes for each voxel of its block, beside those of the input, and in all."""
MEASURING_BYTES = 20
"""Bytes for each voxel that come on top where objects are measured."""
JOINED_BYTES, MEASURED_BYTES = 100, 400
"""Bytes that the join takes for each object of a block, and those with what is measured."""
NUMBERED_BY = ("connected-components-3d", "fastremap")
"""The distributions that number the objects of a block."""
OF_ONE_START = frozenset(
    "in_spec out_spec overwrite resume workers block max_memory run_dir take_over levels prepare "
    "part finish cluster worker_timeout".split()
)
"""Settings that do not change what is written, or are compared as what they lead to."""


class LabelJob:
    """One labelling, opened: nothing is written."""

    def __init__(self, config: LabelConfig) -> None:
        """Open the input and look at the output.

        Raises `UsageError` if the labelling cannot be done as it is asked for.
        """
        self.config = config
        self.source = open_input(config)
        rule = _rule_of(config, self.source)
        self.taken = _taken(rule)
        self.domain = self.source.domain
        if config.decodes:  # a decoder makes one array of all channels
            self.domain = self.domain[:1] + Box((0,), (1,)) + self.domain[2:]
        self.output = partial(output_of, config, self.source, self.domain)
        # The output as it would be if there was none yet.
        self.sink = self.output(config.dtype or "uint32", overwrite=True)
        refuse_overlap("OUT", self.sink, {"the input": self.source})
        folder = config.run_dir or default_run_dir(self.sink)
        if folder is None:
            raise UsageError("--run-dir DIR is needed for an output that is no store")
        self.folder = folder
        if config.run_dir is not None:
            check_folder(self.folder, "--run-dir")
        check_outside(
            [("--run-dir", self.folder), ("--table", config.table)], self.source, [self.sink]
        )
        given = [Path(each) for each in (config.in_spec, config.intensity) if isinstance(each, str)]
        replaces = config.overwrite or config.resumes
        check_outputs(("--table", config.table), replace=replaces, inputs=given)
        cell, space = self.sink.write_grid[2:], self.sink.domain.shape[2:]
        block = block_shape(config.block, cell, space, BLOCK_VOXELS)
        grid = Grid(self.domain, (1, 1, *block), self.sink.grid_origin)
        self.views: ViewWork | None = None
        if config.decodes:
            self.views = view_work(config, self.source, self.domain, self.folder / VIEWS)
            self.taken = f"what {config.decoder} gives for {plural(len(self.views.grid), 'block')}"
        self.work = BlockWork(config, grid, self.folder / OBJECTS, rule, self.views)
        _check_image(self.work.image, config, self.source, self.sink)
        self.place: Georeference | None = None
        """Of a raster, for the table."""
        if config.table is not None and getattr(self.source, "georeferenced", False):
            where = f"IN {self.source.name}"
            self.place = georeference_of(self.source, (0,) * 5, self.sink.dtype, where)
        self.limit = config.max_memory or int(0.8 * available_memory())
        """Bytes that the processes of this machine may take."""
        self.workers = config.workers or max(1, min(usable_cores(), self.limit // self.each_takes))

    @property
    def each_takes(self) -> int:
        """The most bytes that a process takes, without what a user's decoder allocates."""
        views = 0
        if self.views is not None:
            seen = np.add(self.views.grid.step[2:], np.multiply(2, self.views.halo))
            views = int(np.prod(np.minimum(seen, self.domain.shape[2:])))
        each = VOXEL_BYTES + self.source.dtype.itemsize + MEASURING_BYTES * self.work.measured
        return PROCESS_BYTES + each * max(self.work.grid[0].size, views)

    @property
    def joined_bytes(self) -> int:
        """Bytes that the join takes for each object of a block."""
        return MEASURED_BYTES if self.work.measured else JOINED_BYTES

    def joining_takes(self, objects: int) -> int:
        """Bytes of a join of so many objects of blocks, beside processes that wait for it."""
        return objects * self.joined_bytes + self.workers * PROCESS_BYTES

    @property
    def scratch_bytes(self) -> int:
        """The most bytes of the faces of blocks, and of views, in the run folder, and of what an
        output that is one file is made of."""
        z, y, x = self.work.grid.step[2:]
        faces = 2 * (z * y + z * x + y * x) * len(self.work.grid)
        views = self.domain.size if self.views is not None else 0
        file = getattr(self.sink, "scratch_bytes", 0)
        return 4 * (faces * (1 + self.config.fill_holes) + views) + file

    def plan_lines(self) -> list[tuple[str, str]]:
        """What is known before the work begins, with a word before each."""
        grid, rounds = self.work.grid, self.config.rounds
        processes, takes = plural(self.workers, "process"), self.workers * self.each_takes
        lines = {
            "blocks": f"{len(grid):,} of {in_words(grid.step[2:])} (z y x), in "
            f"{plural(len(rounds), 'round')}: {', '.join(rounds)}",
            "memory": f"{format_bytes(takes)} at most for {processes}, then {self.joined_bytes} "
            f"bytes for each object of a block to join; limit {format_bytes(self.limit)}",
            "scratch": f"{format_bytes(self.scratch_bytes)} at most in {self.folder}, and 100 "
            "bytes for each object of a block",
        }
        notes = getattr(self.source, "notes", ()), file_notes(self.source, [self.sink], look=True)
        return [*lines.items(), *(("note", note) for note in chain(*notes))]

    def refuse(self) -> None:
        """Raise `Refused` if the processes would take more memory than they may."""
        at_the_end = getattr(self.sink, "making_bytes", 0)
        if (needed := max(self.workers * self.each_takes, at_the_end)) > self.limit:
            raise Refused(
                f"{plural(self.workers, 'process')} would take {format_bytes(needed)}, and "
                f"--max-memory allows {format_bytes(self.limit)}; give fewer --workers, or a "
                f"smaller --block (now {in_words(self.work.grid.step[2:])})"
            )

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What must be equal in two starts for them to write the same."""
        settings, config, image = as_settings(self.config), self.config, self.work.image
        start, stop = self.domain.start, self.domain.stop
        places = [list(each) for each in product(*map(range, self.sink.domain.start[:2],
                                                       self.sink.domain.stop[:2]))]  # fmt: skip
        return {key: value for key, value in settings.items() if key not in OF_ONE_START} | {
            "input": self.source.fingerprint,
            "decoder": _decoder_facts(config.decoder or "components"),
            "intensity": None if image is None else image.fingerprint,
            "table": config.table is not None,
            "domain": [start, stop],
            "block": self.work.grid.step[2:],
            "outputs": [self.sink.fingerprint],
            "places": [[1, places]],
            "volumes": places,
            "factors": [["1", "1", "1"]],
            "heads": [["labels", "labels"]],
        }

    @property
    def maker(self) -> dict[str, Any]:
        """The code that labels, and numbers the objects of a block alike in all rounds."""
        versions = {name: installed_version(name) for name in NUMBERED_BY}
        return {"penstock": installed_version(DISTRIBUTION), **versions}

    def facts(self) -> dict[str, Any]:
        """What run.json says besides."""
        cells = self.work.grid.cells
        return {
            "verb": "label",
            "blocks": len(self.work.grid),
            "cells": [(0, cells[:2].size), *zip(cells.start[2:], cells.stop[2:], strict=True)],
            "settings": as_settings(self.config),
            "name": self.folder.name.removesuffix(".penstock"),
        }


def _decoder_facts(name: str) -> list[str]:
    """The name of a decoder, and a hash of its file, if it has one, with what that imports."""
    place, _, function = name.rpartition(":")
    file = Path(place).resolve()
    if not file.is_file():
        return [name]
    from ..opening.identity import hash_of_files  # it loads torch, which other labellings spare

    return [f"{file.name}:{function}", hash_of_files([(file, file.parent)])]


def _rule_of(config: LabelConfig, source: Source) -> ComponentRule:
    """The rule of components. Where a decoder makes objects, the rule of those that touch."""
    connectivity = checked_connectivity(config.connectivity, source.axes)
    if config.decodes:
        return ComponentRule("mask", connectivity)
    matter = matter_of(source, config.threshold, config.equal)
    if matter == "labels" and config.fill_holes:
        raise UsageError(
            "--fill-holes: a hole may lie between several labels; give --no-equal for a mask"
        )
    return ComponentRule(matter, connectivity, config.threshold or 0.0, config.nan_background)


def _taken(rule: ComponentRule) -> str:
    """What counts as an object, in words."""
    texts = {"mask": "all that is not 0", "labels": "voxels of equal value"}
    return texts.get(rule.matter, f"what is above {rule.threshold:g}")


def _check_image(image: Source | None, config: LabelConfig, source: Source, sink: Sink) -> None:
    """Refuse an image that does not lie over the input, voxel by voxel, or that is the output."""
    if image is None:
        return
    refuse_overlap("OUT", sink, {"the image of --intensity": image})
    ours, theirs = ((s.domain[:1] + s.domain[2:]) for s in (source, image))
    if ours != theirs:
        raise UsageError(
            f"--intensity {image.name}: has t z y x {in_words(theirs.shape)}, and the input has "
            f"{in_words(ours.shape)}"
        )
    channels = range(image.domain.start[1], image.domain.stop[1])
    for channel in config.channels or ():
        if channel not in channels:
            raise UsageError(f"--channels {channel}: {image.name} has {len(channels)}")
