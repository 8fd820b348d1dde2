"""Makes the file of an output from its scratch Zarr, once all blocks are written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...base import system_errors, usable_cores
from ..levels import Rule
from .file_formats import ending_of
from .file_sink import FileSink, scratch_of
from .georeference import Georeference
from .pyramid import add_levels, level_of, levels_to_add
from .tensorstore import TensorStoreSource
from .write_cog import write_cog
from .write_nifti import write_nifti
from .write_tiff import write_ome_tiff

_PLANAR = (3, 4)
"""The axes along which levels of an OME-TIFF are smaller: each plane has its own."""


def make_file(
    sink: FileSink, rule: Rule, levels: int | str | None, progress: Callable[[int], None]
) -> bool:
    """Make a file of its scratch, and remove the scratch.

    Args:
        sink: The output, in which all blocks are written.
        rule: How voxels become one of a coarser level.
        levels: The number of levels in all, or ``none``; None for as many as are sensible.
        progress: Told the number of voxels that are read or made; it may raise to end early.

    Returns:
        False if an earlier start has made it.

    Raises:
        UsageError: The file cannot be written.
    """
    if sink.made:
        return False
    scratch = scratch_of(sink.path)
    work = scratch.with_name(f"made{ending_of(sink.path.name)}")
    with system_errors(f"--out-spec {sink.name}"):
        for rest in scratch.parent.glob("*.tif*"):  # of a start that was killed
            rest.unlink()
        _write(sink, work, rule, levels, progress)
        with work.open("rb+") as written:
            os.fsync(written.fileno())
        work.replace(sink.path)
        # At once, so that no later start takes a half of the scratch for all of it.
        scratch.rename(scratch.with_name("gone.zarr"))
        sink.clear()
    sink.made = True
    return True


def _write(
    sink: FileSink, work: Path, rule: Rule, levels: int | str | None,
    progress: Callable[[int], None],
) -> None:  # fmt: skip
    scratch = str(scratch_of(sink.path))
    image, says = level_of(scratch, 0, ""), _record_in(scratch)
    if sink.tiles is not None:
        count = sink.tiles.levels(levels)
        for level in range(1, count):
            sink.tiles.make_overview(level, rule, usable_cores(), progress)
        names = [shown.get("label", "") for shown in image.omero]
        write_cog(work, sink.tiles, Georeference(**says["place"]), names, count, progress)
    elif sink.kind == "nifti":
        write_nifti(work, image, says["affine"], progress)
    else:
        below = _levels_of(scratch, rule, levels, progress)
        write_ome_tiff(work, [image, *below], progress)


def _record_in(scratch: str) -> Mapping[str, Any]:
    """What the scratch says of the file besides its frame."""
    document = json.loads(Path(scratch, "zarr.json").read_text(encoding="utf-8"))
    record: Mapping[str, Any] = document["attributes"]["penstock"]
    return record


def _levels_of(
    scratch: str, rule: Rule, levels: int | str | None, progress: Callable[[int], None]
) -> list[TensorStoreSource]:
    """The levels below the first, which are made in the scratch."""
    if levels == "none":
        return []
    count = None if levels is None else int(levels)
    add_levels(
        scratch, rule=rule, count=count, again=False, threads=usable_cores(), progress=progress,
        axes=_PLANAR,
    )  # fmt: skip
    added = levels_to_add(scratch, count, axes=_PLANAR)
    return [level_of(scratch, number, "") for number in range(1, len(added) + 1)]
