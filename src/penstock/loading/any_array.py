"""Any array, or a packed data set, opened as samples that a loader can be measured on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..base import UsageError, check_equal, parsed_json, well_formed
from ..data import (
    DOCUMENT,
    LONGEST,
    UNFINISHED,
    Packed,
    PackedArray,
    checksum,
    first_level_of,
    open_dataset,
    open_packed_array,
    stored_bytes,
)
from .engines.engine import Location, Selection
from .engines.tensorstore_engine import open_plainly
from .fields import Field, PatchGrid


@dataclass(frozen=True, slots=True)
class PatchedArray(PackedArray):
    """An array whose patches count as samples."""

    cut: Field
    """The field that cuts them."""

    @property
    def sample_bytes(self) -> int:
        """Bytes of one decoded patch, without padding."""
        return self.cut.item_nbytes

    def box(self, item: int) -> tuple[slice, ...]:
        """The indices of a patch in the array, by the patch's number."""
        field = self.cut
        sample, patch = divmod(item, field.patches_per_sample)
        box = [slice(sample, sample + 1), *(slice(0, n) for n in field.shape[1:])]
        for axis, start in field.patch_start(patch).items():
            box[axis] = slice(start, start + field.patch_sizes[axis])
        return tuple(box[len(field.shape) - len(self.shape) :])


def cut_of(array: PackedArray) -> Field | None:
    """The field that cuts an array's patches, if these count as samples; else None."""
    return array.cut if isinstance(array, PatchedArray) else None


def open_dataset_or_array(place: str | Path, patch: Sequence[int] | None = None) -> Packed:
    """Open a packed data set, or one array as a data set. Messages name it DATA.

    The array may be Zarr, N5, or the first level of an OME-Zarr image. Its axis 0 counts the
    samples. It has no checksums until `with_checks` reads some.

    Args:
        place: The folder.
        patch: The shape of patches that count as samples, as `Loader` cuts them. None for samples.

    Returns:
        The data set.

    Raises:
        UsageError: The folder holds no array, or the patches do not fit.
    """
    packed = _open_any(place)
    if patch is None:
        return packed
    selection = Selection(patch=dict.fromkeys(packed.arrays, PatchGrid(tuple(patch))))
    arrays, counts = {}, {}
    for key, array in packed.arrays.items():
        field = selection.field(
            key, Location(str(array.path), array.axes), array.shape, array.chunks, array.dtype
        )
        whole: dict[str, Any] = {each.name: getattr(array, each.name) for each in fields(array)}
        arrays[key] = PatchedArray(**whole, cut=field)
        counts[key] = field.shape[0] * field.patches_per_sample
    check_equal("DATA: the numbers of patches of --patch", counts)
    items = np.arange(counts.popitem()[1])
    return Packed(packed.root, arrays, items, {}, {**packed.document, "patch": list(patch)})


def _open_any(place: str | Path) -> Packed:
    path = Path(place)
    if any((path / file).is_file() for file in (DOCUMENT, UNFINISHED)) or not path.is_dir():
        return open_dataset(path)
    path = Path(first_level_of(str(path)))
    where = f"DATA {path}"
    if not any((path / m).is_file() for m in (".zarray", "zarr.json", "attributes.json")):
        return open_dataset(path)  # raises, since it is no data set
    with well_formed(f"{where}: holds no array", OSError):
        array = _open_array_alone(path, where)
        if max(array.shape) > LONGEST:
            raise UsageError(
                f"{where}: its metadata claims the shape {array.shape}, and an axis has at most "
                f"{LONGEST}"
            )
    stored, decoded = stored_bytes(path), math.prod(array.shape) * array.dtype.itemsize
    document = {
        "path": str(path), "shape": array.shape, "chunks": array.chunks, "shards": array.shards,
        "dtype": str(array.dtype), "stored_bytes": stored,
        "compression_ratio": decoded / stored if stored else None,
    }  # fmt: skip
    return Packed(path.parent, {array.name: array}, np.arange(array.shape[0]), {}, document)


def _open_array_alone(path: Path, where: str) -> PackedArray:
    if (path / "attributes.json").is_file():
        n5 = parsed_json((path / "attributes.json").read_text())
        shape, chunks = tuple(n5["dimensions"]), tuple(n5["blockSize"])
        dtype = np.dtype(n5["dataType"]).newbyteorder(">")
        axes = ("sample", *map(str, range(1, len(shape))))
        return PackedArray("data", path, axes, shape, chunks, None, dtype, "", "/", ())
    metadata = next(path / n for n in (".zarray", "zarr.json") if (path / n).is_file())
    ndim = len(parsed_json(metadata.read_text())["shape"])
    entry = {"path": path.name, "axes": ["sample", *map(str, range(1, ndim))]}
    return open_packed_array(path.parent, "data", entry, where)


def with_checks(packed: Packed, samples: Iterable[int]) -> Packed:
    """The data set with the checksums of some samples.

    A data set without checksums gets them here: TensorStore reads each sample alone, as no loader
    does.

    Args:
        packed: The data set.
        samples: The samples whose checksums are needed.

    Returns:
        A data set with checksums of at least these samples.
    """
    if packed.checks:
        return packed
    checks = {}
    for name, array in packed.arrays.items():
        stored = open_plainly(str(array.path))
        checks[name] = np.zeros(packed.num_samples, np.uint32)
        for sample in sorted(set(samples)):
            checks[name][sample] = checksum(stored[array.box(sample)].read().result())
    return replace(packed, checks=checks)
