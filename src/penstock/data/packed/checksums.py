"""Checksums of planes, which can be combined into the checksum of a whole array."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..box import Box


def checksum(array: NDArray[Any]) -> int:
    """CRC-32 of the C-contiguous bytes of an array."""
    return zlib.crc32(np.ascontiguousarray(array).data)


_POLYNOMIAL = np.uint32(0xEDB88320)
"""The polynomial of CRC-32. In this module the highest bit is x to the power of 0."""
_ONES = 0xFFFFFFFF


class PlaneChecks:
    """The CRC-32 of each plane (z) of a volume, from pieces of any shape in any order.

    CRC-32 is linear but for its first and its last step, which invert all bits: the CRC of a plane
    is the sum (xor) of those of its rows, each among zeros. Zeros after a row multiply its CRC by a
    power of x modulo the polynomial.
    """

    def __init__(self, shape: Sequence[int], itemsize: int) -> None:
        planes, rows, columns = shape
        row_bytes = columns * itemsize
        self._itemsize, self._columns = itemsize, columns
        self._below = _power_of_x(8 * row_bytes * np.arange(rows - 1, -1, -1, dtype=np.int64))
        """The factor by which the rows below a row multiply it, shape (rows,)."""
        whole = _power_of_x(np.array([8 * row_bytes * rows]))
        of_zeros = _product(np.full(1, _ONES, np.uint32), whole) ^ np.uint32(_ONES)
        self._checks = np.repeat(of_zeros, planes)

    def of_piece(self, piece: Box, values: NDArray[Any]) -> NDArray[np.uint32]:
        """The share of a piece in the CRC of each of its planes, for `add`.

        Any number of threads may call it.

        Args:
            piece: The box of the piece (z, y, x).
            values: Its voxels, of the same shape.

        Returns:
            Shape (planes of the piece,).
        """
        flat = np.ascontiguousarray(values).reshape(-1, values.shape[-1])
        # Ones as the start cancel the first inversion, and the xor undoes the last.
        linear = [zlib.crc32(row.data, _ONES) ^ _ONES for row in flat]
        rows = np.array(linear, np.uint32).reshape(values.shape[:2])
        planes = np.bitwise_xor.reduce(
            _product(rows, self._below[piece.start[1] : piece.stop[1]]), axis=1
        )
        right = 8 * self._itemsize * (self._columns - piece.stop[2])
        return _product(planes, _power_of_x(np.array([right])))

    def add(self, piece: Box, contributed: NDArray[np.uint32]) -> None:
        """Add a piece; one thread at a time.

        Args:
            piece: The box of the piece (z, y, x).
            contributed: The result of `of_piece`.
        """
        self._checks[piece.start[0] : piece.stop[0]] ^= contributed

    def result(self) -> NDArray[np.uint32]:
        """The checksums, shape (planes,), once every voxel has been in one piece."""
        return self._checks


def _product(a: NDArray[np.uint32], b: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Polynomials multiplied modulo that of CRC-32, element by element."""
    product = np.zeros(np.broadcast_shapes(a.shape, b.shape), np.uint32)
    one = np.uint32(1)
    for bit in range(31, -1, -1):
        product ^= (a >> np.uint32(bit) & one) * b
        b = (b >> one) ^ (b & one) * _POLYNOMIAL  # times x
    return product


def _power_of_x(exponents: NDArray[np.int64]) -> NDArray[np.uint32]:
    """x to these powers, modulo the polynomial of CRC-32."""
    power = np.full(exponents.shape, 1 << 31, np.uint32)
    square = np.full(1, 1 << 30, np.uint32)
    left = exponents.copy()
    while left.any():
        power = np.where(left & 1, _product(power, square), power)
        square, left = _product(square, square), left >> 1
    return power
