"""The chunks that a batch reads, and the places of their parts in the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .fields import ChunkRead, Field, Index, patch_template


def chunk_reads(
    field: Field, samples: NDArray[np.integer[Any]], patches: NDArray[np.integer[Any]] | None = None
) -> list[ChunkRead]:
    """The chunks that a batch reads, each once and sorted, with their copies into the batch.

    Neighbouring rows from neighbouring places of one chunk are one copy.

    Args:
        field: The array and the part of it that an item takes.
        samples: The sample of each row, along axis 0 of the array: (rows,).
        patches: The patch of each row: (rows,). None where samples are not cut.
    """
    depth = field.chunks[0]
    numbers = samples.tolist()
    places = [0] * len(numbers) if patches is None else patches.tolist()
    rows: dict[tuple[int, int, int], list[tuple[int, int]]] = {}  # (chunk, patch, time)
    for time, offset in enumerate(field.offsets):
        for row, (sample, patch) in enumerate(zip(numbers, places, strict=True)):
            chunk, inside = divmod(sample + offset, depth)
            rows.setdefault((chunk, patch, time), []).append((row, inside))
    with_time = len(field.offsets) > 1
    reads: dict[tuple[int, ...], list[tuple[Index, Index]]] = {}
    for chunk, patch, time in sorted(rows):
        for first, inside, count in _stretches(rows[chunk, patch, time]):
            to = slice(first, first + count)
            head: Index = (to, time) if with_time else (to,)
            of: Index = (slice(inside, inside + count),)
            for tail, copies in patch_template(field, patch):
                here = reads.setdefault((chunk, *tail), [])
                here += [(head + copy_to, of + copy_of) for copy_to, copy_of in copies]
    order = reads if patches is None else sorted(reads)
    return [ChunkRead(index, reads[index]) for index in order]


def chunk_indices(
    field: Field, samples: NDArray[np.integer[Any]], patches: NDArray[np.integer[Any]] | None = None
) -> list[tuple[int, ...]]:
    """The indices of the chunks of `chunk_reads`, in the same order.

    Args:
        field: The array and the part of it that an item takes.
        samples: The sample of each row, along axis 0 of the array: (rows,).
        patches: The patch of each row: (rows,). None where samples are not cut.

    Returns:
        The indices.
    """
    depth, numbers = field.chunks[0], samples.tolist()
    places = [0] * len(numbers) if patches is None else patches.tolist()
    wanted = {
        ((sample + offset) // depth, patch)
        for sample, patch in zip(numbers, places, strict=True)
        for offset in field.offsets
    }
    return sorted({(chunk, *tail) for chunk, at in wanted for tail, _ in patch_template(field, at)})


def _stretches(pairs: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Pairs (row, place) as stretches (row, place, length) in which both rise by 1."""
    stretches: list[tuple[int, int, int]] = []
    for row, inside in pairs:
        if stretches:
            first, start, count = stretches[-1]
            if row == first + count and inside == start + count:
                stretches[-1] = (first, start, count + 1)
                continue
        stretches.append((row, inside, 1))
    return stretches
