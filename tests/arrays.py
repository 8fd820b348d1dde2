"""Arrays of users on disk, written by TensorStore alone."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def zarr(path: Path, values: NDArray[Any], chunk: int = 8) -> Path:
    """A plain Zarr array, of chunks that are cubes."""
    import tensorstore as ts

    chunks = [1] * (values.ndim - 3) + [chunk] * 3
    metadata = {"shape": values.shape, "dtype": values.dtype.str, "chunks": chunks}
    kvstore = {"driver": "file", "path": str(path)}
    spec = {"driver": "zarr", "kvstore": kvstore, "metadata": metadata, "create": True}
    ts.open(spec).result().write(values).result()
    return path


def counted_up(side: int = 8) -> NDArray[np.uint16]:
    """A cube in which no two voxels are alike."""
    return np.arange(side**3, dtype=np.uint16).reshape(side, side, side)
