"""Rasters by rasterio: VRT mosaics, JPEG 2000, JPEG and PNG, and TIFF files behind a URL.

A TIFF on this machine is read by `ometiff`, which decodes with all threads and knows all kinds of
TIFF, unless files beside it say more of it. GDAL reads of a remote file only the tiles that a
window needs.

A raster has a georeference: its CRS, transform and no-data value, which a GeoTIFF gets too.
"""

from __future__ import annotations

import math
import os
import re
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import UsageError, as_usage_error, causes_of, describe, plural, require, scrub
from .cf_packing import Packing, packing_of, same_in_all
from .frames import said_of, shown_channel, unit_name
from .protocols import Source, check_dtype, check_level, suffix_of
from .sliced import Asked, OpenedArray

GDAL_CACHE = 2**26
"""Bytes of decoded tiles that GDAL keeps. It takes this number once, for all of the process; its
own would be a share of all memory."""
GDAL_OPTIONS: dict[str, Any] = {
    "GDAL_CACHEMAX": GDAL_CACHE,
    # Listing the folder of a remote file would ask for every file beside it.
    "GDAL_DISABLE_READDIR_ON_OPEN": "EMPTY_DIR",
    # Several threads of GDAL lose the errors of tiles of JPEG 2000, and read what was in memory.
    "GDAL_NUM_THREADS": 1,
    # Read as a whole, a PNG that is cut off is 0 everywhere, without an error.
    "GDAL_PNG_WHOLE_IMAGE_OPTIM": "NO",
    # Two seconds of tries in all, as of other stores; a longer fault is tried again with its block.
    "GDAL_HTTP_MAX_RETRY": 4,
    "GDAL_HTTP_RETRY_DELAY": 0.1,
    "GDAL_HTTP_CONNECTTIMEOUT": 20,
    "GDAL_HTTP_LOW_SPEED_LIMIT": 1,
    "GDAL_HTTP_LOW_SPEED_TIME": 60,
}
_CUT_OFF = re.compile(r"CURL error|HTTP response code: (408|429|5\d\d)|[Rr]ead error|Cannot read")
"""Sentences of GDAL on a server that is away; of a tile it says only that no bytes came."""

_LOST = '["unretrievable'
"""GDAL's mark of the ellipsoid of a code that it does not know; it takes WGS 84 in its place."""
MASK_STAYS = "the input has a mask, which is not read: what it masks counts as values"
POINTS_STAY = "the input's ground control points or RPCs are not carried to any output"
TEXT_STAYS = "what the input's text for OME or ImageJ says is read of a file on this machine only"
UNITS_STAY = "the units that the input gives its bands ({}) are not carried to any output"
TURN_STAYS = "the input's tag Orientation, by which viewers turn it, is not applied"
AS_STORED = "the input is {}, and its numbers are read as stored"
ALPHA_IS_READ = "a band of the input is alpha, and is read as one more channel; --c leaves it out"
_OPENING = threading.Lock()
_SAID_BESIDE = (
    b"<NoDataValue", b"<Scale>", b"<Offset>", b"<SRS", b"<GeoTransform", b"<GCPList",
    b"<Description>",
)  # fmt: skip
"""Elements that matter in the ``.aux.xml`` of a raster; others hold statistics alone."""
_MOST_BESIDE = 2**24
"""Bytes of it that are looked at."""
_WORLD_FILES = (".tfw", ".tifw", ".tiffw", ".wld")


def gdal_options(place: str) -> dict[str, Any]:
    """GDAL's options for a raster. Files beside one on this machine count, and one in a bucket is
    on the server that AWS_ENDPOINT_URL names."""
    if "://" not in place and not place.startswith("/vsi"):
        return {name: value for name, value in GDAL_OPTIONS.items() if "READDIR" not in name}
    scheme, _, host = os.environ.get("AWS_ENDPOINT_URL", "").rstrip("/").partition("://")
    if not host or "AWS_S3_ENDPOINT" in os.environ:
        return GDAL_OPTIONS
    secure = "NO" if scheme == "http" else "YES"
    server = {"AWS_S3_ENDPOINT": host, "AWS_HTTPS": secure, "AWS_VIRTUAL_HOSTING": "FALSE"}
    return {**GDAL_OPTIONS, **server}


def is_explained_beside(path: Path, *, placed: bool) -> bool:
    """Whether GDAL's files beside a TIFF say of its numbers, its mask or its place what it does not
    say itself. ``placed`` is True if it has a place."""
    auxiliary = path.with_name(f"{path.name}.aux.xml")
    if auxiliary.is_file():
        with auxiliary.open("rb") as file:
            text = file.read(_MOST_BESIDE)
        if any(word in text for word in _SAID_BESIDE):
            return True
    world = not placed and any(path.with_suffix(ending).is_file() for ending in _WORLD_FILES)
    return world or path.with_name(f"{path.name}.msk").is_file()


class _Bands:
    """The bands of a raster, as c y x, or y x if it has one. A dataset of GDAL belongs to one
    thread: each has one."""

    most_open = 32
    """The planes of a volume that are kept open, each by several threads."""

    def __init__(self, place: str, level: int) -> None:
        self._rasterio = require("rasterio", "scenes")
        self._place, self._level, self._options = place, level, gdal_options(place)
        self._threads = threading.local()
        first = self.opened()
        self._bands = range(1, first.count + 1)
        # One band is no axis.
        self.shape: tuple[int, ...] = (first.count, *first.shape)[first.count == 1 :]
        self.dtype = np.dtype(first.dtypes[0])

    def opened(self) -> Any:
        """The dataset of this thread."""
        if not hasattr(self._threads, "dataset"):
            level = {} if self._level == 0 else {"overview_level": self._level - 1}
            quiet = self._rasterio.errors.NotGeoreferencedWarning  # the frame says it
            # Filters of warnings belong to the process: two threads would restore each other's.
            with _OPENING, warnings.catch_warnings(), self._rasterio.Env(**self._options):
                warnings.simplefilter("ignore", quiet)
                self._threads.dataset = self._rasterio.open(self._place, **level)
        return self._threads.dataset

    def __getitem__(self, index: tuple[slice, ...]) -> NDArray[Any]:
        *bands, rows, columns = index
        window = self._rasterio.windows.Window.from_slices(rows, columns)
        numbers = [*self._bands[bands[0]]] if bands else 1  # which makes no axis
        try:
            with self._rasterio.Env(**self._options):
                read: NDArray[Any] = self.opened().read(numbers, window=window)
        except self._rasterio.errors.RasterioError as error:
            *_, reason = causes_of(error)  # rasterio's own words name nothing
            away = "://" in self._place and _CUT_OFF.search(str(reason))
            raise (ConnectionError if away else OSError)(describe(reason)) from error
        return read


def open_array(asked: Asked, cache_bytes: int) -> OpenedArray:
    """Open a raster, or an overview of it. GDAL has one cache for all rasters."""
    where, raster = asked.where, _Bands(asked.path, 0)
    finest = raster.opened().transform
    if asked.level:
        check_level(asked.level, 1 + len(raster.opened().overviews(1)), where)
        raster = _Bands(asked.path, asked.level)
    dataset = raster.opened()
    if len(set(dataset.dtypes)) > 1:
        raise UsageError(f"{where}: its bands have the dtypes {', '.join(dataset.dtypes)}")
    if dataset.subdatasets:
        raise UsageError(
            f"{where}: has {plural(len(dataset.subdatasets), 'image')}, and GDAL reads one; of a "
            "TIFF file on this machine all are read"
        )
    transform, crs = dataset.transform, dataset.crs
    straight = transform.b == transform.d == 0 and not transform.is_identity
    per_dataset = require("rasterio.enums", "scenes").MaskFlags.per_dataset
    description = dataset.tags().get("TIFFTAG_IMAGEDESCRIPTION", "")
    units = ", ".join(dict.fromkeys(filter(None, dataset.units)))
    meanings = [each.name for each in dataset.colorinterp]
    lost = {
        TEXT_STAYS: re.search("<OME|^ImageJ=", description),
        MASK_STAYS: any(per_dataset in flags for flags in dataset.mask_flag_enums),
        POINTS_STAY: dataset.gcps[0] or dataset.rpcs,
        ALPHA_IS_READ: "alpha" in meanings,
        TURN_STAYS: dataset.tags().get("EXIF_Orientation", "1") != "1",
        AS_STORED.format("PALETTE"): "palette" in meanings,
        UNITS_STAY.format(units): units,
    }
    unit = unit_name(crs.linear_units) if crs is not None and crs.is_projected else None
    sizes = {  # the centres of an overview's voxels lie further in
        "y": (abs(transform.e), unit, abs(transform.e - finest.e) / 2),
        "x": (abs(transform.a), unit, abs(transform.a - finest.a) / 2),
    }
    rows, columns = dataset.block_shapes[0]
    return OpenedArray(
        array=raster,
        labels="cyx"[-len(raster.shape) :],
        chunks=(1, rows, columns)[-len(raster.shape) :],
        sizes=sizes if straight else {},
        omero=[shown_channel(text) for text in dataset.descriptions],
        notes=said_of(lost),
        packing=None if asked.raw else _packing(dataset, where),
        bands=True,
        georeferenced=(crs is not None or not transform.is_identity or dataset.nodata is not None),
        cache_bytes=GDAL_CACHE,
        codec=str(dataset.compression.value if dataset.compression else "").lower(),
    )


def _packing(dataset: Any, where: str) -> Packing | None:
    says = {
        "scale_factor": same_in_all(dataset.scales, "scale", where),
        "add_offset": same_in_all(dataset.offsets, "offset", where),
        "_FillValue": same_in_all(dataset.nodatavals, "no-data", where),
    }
    return packing_of(says, check_dtype(dataset.dtypes[0], where), where)


@dataclass(frozen=True, slots=True)
class Georeference:
    """The place of a raster in the world, and its value for no data."""

    crs: str | None
    """The coordinate reference system as WKT."""
    transform: tuple[float, ...]
    """The numbers a, b, c, d, e, f of the affine transform from column and row to x and y."""
    nodata: str | None
    """The value as a text, as JSON has no NaN."""

    @property
    def note(self) -> str:
        """A sentence on a CRS that is only a name; empty for another."""
        if (local := re.match(r'(LOCAL_CS|ENGCRS)\["([^"]*)"', self.crs or "")) is None:
            return ""
        return (
            f"the input's CRS is only a name, {local[2]!r}, and goes further as such: it says no "
            "place on Earth, or GDAL does not know its code; gdal_edit -a_srs EPSG:N sets another"
        )


def georeference_of(
    source: Source, at: Sequence[int], dtype: np.dtype[Any], where: str
) -> Georeference:
    """The georeference of an output of a raster.

    Args:
        source: The raster, one that is ``georeferenced``.
        at: The first voxel of the output in it, t c z y x.
        dtype: The dtype of the output.
        where: What messages begin with.

    Returns:
        The georeference.

    Raises:
        UsageError: The CRS, or the file, cannot be read.
    """
    rasterio = require("rasterio", "scenes")
    errors = require("rasterio.errors", "scenes")
    with as_usage_error(
        f"{where}: the input's CRS cannot be read", errors.RasterioError, ValueError, OSError
    ):
        files = getattr(source, "files", ()) or [source.address]
        with rasterio.Env(**gdal_options(source.address)):
            places = {file: _place_of(rasterio, file) for file in files}
    crs, transform, nodata, (height, width) = places[files[0]]
    for file, place in places.items():
        if place[:2] != places[files[0]][:2]:
            raise UsageError(f"{where}: {file} lies elsewhere than {files[0]}")
    text = crs.to_wkt() if crs else None
    if _is_lost(text, source.address):
        raise UsageError(
            f"{where}: the CRS of {scrub(source.address)} cannot be read; gdal_edit -a_srs EPSG:N "
            "sets it, or give an output that has none, such as OME-Zarr (*.zarr)"
        )
    rows, columns = source.domain.shape[3:]  # fewer of an overview
    across, down = width / columns, height / rows
    a, b, c, d, e, f = (float(number) for number in tuple(transform)[:6])
    a, b, d, e = a * across, b * down, d * across, e * down
    moved = (a, b, c + a * at[4] + b * at[3], d, e, f + d * at[4] + e * at[3])
    value = _nodata(nodata, dtype, stored=getattr(source, "packing", None) is None)
    return Georeference(text, moved, value)


def _place_of(rasterio: Any, file: Any) -> tuple[Any, ...]:
    """The CRS, transform, no-data value and shape of a raster."""
    with rasterio.open(file) as dataset:
        return dataset.crs, dataset.transform, dataset.nodata, dataset.shape


def _is_lost(crs: str | None, address: str) -> bool:
    """Whether a raster names a CRS that GDAL does not know."""
    if crs is not None:
        return crs.startswith(('LOCAL_CS["unnamed"', 'ENGCRS["unnamed"')) or _LOST in crs
    file = Path(address)
    return suffix_of(address) == ".vrt" and file.is_file() and b"<SRS" in file.read_bytes()


def _nodata(value: float | None, dtype: np.dtype[Any], *, stored: bool) -> str | None:
    """The value of an output for no data: NaN where values were decoded, as then no data is NaN;
    where numbers were read as ``stored`` that of the input, if the output's dtype has it."""
    if value is None or (not stored and dtype.kind != "f"):
        return None
    if not stored or math.isnan(value):
        return "nan" if dtype.kind == "f" else None
    with np.errstate(all="ignore"):
        return repr(value) if float(np.float64(value).astype(dtype)) == value else None
