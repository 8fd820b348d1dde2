"""The checksums of what is written: one for each block in each output. `block_log` keeps them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from ...data import Sink


def check_of(values: NDArray[Any], fill: object = None) -> str:
    """The check of the values of a block in one output.

    ``fill`` is the fill value of the store, None if it has none.
    """
    return f"{'f' if _is_full_of(values, fill) else 'v'}{digest_of([values])}"


def digest_of(pieces: Iterable[NDArray[Any]]) -> str:
    """The checksum of values that come in pieces, one after the other in C order."""
    digest = xxhash.xxh3_64()
    for values in pieces:
        ordered = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
        digest.update(ordered.reshape(-1).view(np.uint8).data)  # other threads may run meanwhile
    return digest.hexdigest()


def _is_full_of(values: NDArray[Any], fill: object) -> bool:
    """Whether every value has the bits of ``fill``. A chunk of -0.0 is stored where 0.0 is not."""
    if fill is None:
        return False
    bits = np.dtype(f"u{values.dtype.itemsize}")
    wanted = np.asarray(fill, values.dtype).view(bits)
    # Row by row: the first row settles most blocks, and no mask is as large as a block.
    return all((row == wanted).all() for row in values.view(bits).reshape(-1, values.shape[-1]))


def fill_of(sink: Sink) -> object:
    """The value that a store gives for chunks it does not hold, None if it does not say."""
    return getattr(sink, "fill", None)
