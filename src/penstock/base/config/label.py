"""The knobs of ``penstock label``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, model_validator

from .knobs import Natural, Overwriting, Positive, Shape, flag, many

LabelDtype = Literal["uint8", "uint16", "uint32", "uint64"]


class LabelConfig(Overwriting):
    """The knobs of ``penstock label``."""

    groups: ClassVar = {
        "how the input is read": "level axes series raw",
        "how the output is written": "chunks shards levels dtype",
        "how the work is done": "block workers run_dir take_over",
    }

    in_spec: Any = flag(help="the array: a path, URL or spec")
    out_spec: Any = flag(help="the labels: an OME-Zarr, or any spec")
    threshold: float | None = flag(None, help="label what is above this value, such as a score")
    equal: bool | None = flag(
        None,
        help="each object is of one value; --no-equal: of all values but 0 (default: as the dtype "
        "says: bool and uint8 hold a mask, other integers hold labels)",
    )
    connectivity: Literal[4, 8, 6, 18, 26] | None = flag(
        None,
        help="voxels that are neighbours: 4 or 8 in a plane, 6, 18 or 26 in a volume (default: 4 "
        "or 6, those that share a face)",
    )
    min_size: Positive = flag(1, help="the fewest voxels of an object that stays")
    fill_holes: bool = flag(
        False,
        help="fill the background that objects enclose: it touches no face of the volume, by the "
        "connectivity that complements theirs",
    )
    clear_border: bool = flag(False, help="leave out objects that touch a face of the volume")
    table: Path | None = flag(None, help="write a row for each object: *.parquet, or *.csv")
    intensity: Any | None = flag(
        None, help="for the table: an image of the same voxels, for the mean and maximum of objects"
    )
    channels: Annotated[tuple[Natural, ...], BeforeValidator(many)] | None = flag(
        None, help="the channels of --intensity (default: all)"
    )
    resume: bool = flag(False, help="go on with a run that was killed")
    level: Natural = flag(0, help="the level of OME-Zarr or TIFF")
    axes: str | None = flag(None, help="the letters of the stored axes: tyx, zcyx")
    series: Natural | None = flag(None, help="the image to take of several")
    raw: bool = flag(False, help="read the numbers as they are stored, without scale and offset")
    chunks: Shape | None = flag(None, help="chunks of the output, z y x (default: as the input)")
    shards: Shape | None = flag(None, help="shards of the output, z y x (default: none)")
    levels: Literal["none"] | Positive | None = flag(
        None, help="levels of the output in all (default: until y and x have at most 256 voxels)"
    )
    dtype: LabelDtype | None = flag(
        None, help="dtype of the output (default: the smallest that holds the number of objects)"
    )
    block: Shape | None = flag(
        None,
        help="voxels that a worker labels at a time, z y x, in whole chunks of the output "
        "(default: about 8 million); the result does not depend on it",
    )
    workers: Positive | None = flag(None, help="processes that label (default: one for each core)")
    run_dir: Path | None = flag(
        None, help="folder for what is counted of blocks, until the end (default: beside OUT)"
    )
    take_over: bool = flag(
        False, help="take an output that another run has locked, if that run may have ended"
    )

    @model_validator(mode="after")
    def _fits(self) -> LabelConfig:
        if self.threshold is not None and self.equal:
            raise ValueError("--threshold makes a mask and --equal takes labels; give one")
        if self.intensity is not None and self.table is None:
            raise ValueError("--intensity is for a table; give --table FILE.parquet too")
        if self.channels is not None and self.intensity is None:
            raise ValueError("--channels are those of --intensity; give it too")
        if self.table is not None and self.table.suffix not in (".parquet", ".csv"):
            raise ValueError(f"--table {self.table}: give a name that ends in .parquet or .csv")
        return self
