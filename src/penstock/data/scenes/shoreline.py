"""The shorelines of xView3 scenes: ``<scene>_shoreline.npy``, contours of (row, col) pixels.

The files are object arrays, so they are pickles, and a pickle may run any code while it is read.
numpy's own switch for that (``allow_pickle``) is all or nothing. Here the pickle may only build
plain arrays, so a shoreline from a stranger is safe to read.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import UsageError, as_usage_error

Contour = NDArray[np.float64]
"""(n, 2): row and column of each vertex, in pixels of the scene."""

_ADMITTED = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "_reconstruct"),  # as numpy 1 wrote it
    ("numpy._core.multiarray", "scalar"),
    ("numpy.core.multiarray", "scalar"),
    ("_codecs", "encode"),  # bytes, as Python 2 pickled them
}


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(f"it holds {module}.{name}, which is not an array")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def shoreline_path(root: Path, scene: str) -> Path:
    """The path of a scene's shoreline.

    Args:
        root: the folder of the shorelines.
        scene: the name of the scene.

    Returns:
        The path of its file.
    """
    return root / f"{scene}_shoreline.npy"


def read_shoreline(path: Path) -> list[Contour]:
    """The contours of a scene; none where it has no shore.

    Raises:
        UsageError: the file is absent or holds anything else; the message names it.
    """
    # A damaged pickle may raise anything.
    with as_usage_error(f"shoreline {path} cannot be read"), path.open("rb") as file:
        version = np.lib.format.read_magic(file)
        read_header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        _, _, dtype = read_header(file)
        # Contours of one length became one array.
        one = not dtype.hasobject
        loaded = np.load(path, allow_pickle=False) if one else _ArraysOnly(file).load()
        contours = [np.asarray(contour, np.float64) for contour in loaded]
    for contour in contours:
        if contour.ndim != 2 or contour.shape[1] != 2:
            raise UsageError(
                f"shoreline {path}: a contour has shape {contour.shape}; it must be (vertices, 2)"
            )
    return contours


def write_shoreline(path: Path, contours: Sequence[Contour]) -> None:
    """Write contours as the xView3 data set has them: an object array of arrays."""
    array = np.empty(len(contours), object)
    for index, contour in enumerate(contours):
        array[index] = np.asarray(contour, np.float64)
    np.save(path, array, allow_pickle=True)
