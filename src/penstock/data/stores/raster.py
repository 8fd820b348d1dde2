"""Rasters by rasterio: VRT mosaics, JPEG 2000, JPEG and PNG, and TIFF files behind a URL.

A file on this machine is read by `ometiff`, which decodes with all threads and knows all kinds of
TIFF. GDAL reads of a remote file only the tiles that a window needs.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import UsageError, require
from .cf_packing import Packing, packing_of, same_in_all
from .frames import shown_channel, unit_name
from .georeference import ALPHA_IS_READ, GDAL_CACHE, GDAL_OPTIONS, POINTS_STAY
from .protocols import check_dtype
from .sliced import Asked, OpenedArray

_OPENING = threading.Lock()


class _Bands:
    """The bands of a raster, as c y x. A dataset of GDAL belongs to one thread: each has one."""

    def __init__(self, place: str, level: int) -> None:
        self._rasterio = require("rasterio", "scenes")
        self._place, self._level = place, level
        self._threads = threading.local()
        first = self.opened()
        self.shape: tuple[int, ...] = (first.count, first.height, first.width)
        self.dtype = np.dtype(first.dtypes[0])

    def opened(self) -> Any:
        """The dataset of this thread."""
        if not hasattr(self._threads, "dataset"):
            level = {} if self._level == 0 else {"overview_level": self._level - 1}
            quiet = self._rasterio.errors.NotGeoreferencedWarning  # the frame says it
            # Filters of warnings belong to the process: two threads would restore each other's.
            with _OPENING, warnings.catch_warnings(), self._rasterio.Env(**GDAL_OPTIONS):
                warnings.simplefilter("ignore", quiet)
                self._threads.dataset = self._rasterio.open(self._place, **level)
        return self._threads.dataset

    def __getitem__(self, index: tuple[slice, ...]) -> NDArray[Any]:
        bands, rows, columns = index
        window = self._rasterio.windows.Window.from_slices(rows, columns)
        with self._rasterio.Env(**GDAL_OPTIONS):
            numbers = [band + 1 for band in range(self.shape[0])[bands]]
            read: NDArray[Any] = self.opened().read(numbers, window=window)
        return read


def open_array(asked: Asked, cache_bytes: int) -> OpenedArray:
    """Open a raster, or an overview of it. GDAL has one cache for all rasters."""
    where, raster = asked.where, _Bands(asked.path, asked.level)
    dataset = raster.opened()
    if len(set(dataset.dtypes)) > 1:
        raise UsageError(f"{where}: its bands have the dtypes {', '.join(dataset.dtypes)}")
    notes = []
    transform, crs = dataset.transform, dataset.crs
    straight = transform.b == transform.d == 0 and not transform.is_identity
    per_dataset = require("rasterio.enums", "scenes").MaskFlags.per_dataset
    if any(per_dataset in flags for flags in dataset.mask_flag_enums):
        notes.append("the input has a mask, which is not read: what it masks counts as values")
    if dataset.gcps[0] or dataset.rpcs:
        notes.append(POINTS_STAY)
    if any(each.name == "alpha" for each in dataset.colorinterp):
        notes.append(ALPHA_IS_READ)
    unit = unit_name(crs.linear_units) if crs is not None and crs.is_projected else None
    sizes = {"y": (abs(transform.e), unit, 0.0), "x": (transform.a, unit, 0.0)}
    rows, columns = dataset.block_shapes[0]
    return OpenedArray(
        array=raster,
        labels=["band", "y", "x"],
        chunks=(1, rows, columns),
        sizes=sizes if straight else {},
        omero=[shown_channel(text) for text in dataset.descriptions],
        notes=notes,
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
