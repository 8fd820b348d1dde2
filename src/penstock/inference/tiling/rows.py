"""The patches along one axis of a volume: where each begins, and which voxels each owns.

    context    a stride each, and the first begins half an overlap before the volume
    inset      a stride each, and the first begins where the volume does
    narrowed   as few as the longest stride allows, at strides that are nearly equal
    moved      a stride each, but the last is moved back

Those that are narrowed or moved end where the volume ends, as nnU-Net's and MONAI's do. A volume
that is shorter than a patch lies in the middle of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...models import Steps

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PatchRow:
    """The patches along an axis, in source coordinates."""

    patch: int
    begins: Ints
    """The first voxel that each reads, which may lie before the volume."""
    edges: Ints
    """The first voxel that each owns, and last the end of the volume."""

    def touching(self, start: Any, stop: Any, *, blended: bool) -> tuple[Any, Any]:
        """First and stop of the patches that contribute to intervals, which are not empty. Those
        that are ``blended`` contribute to all that they read, others to what they own."""
        ends = self.begins + self.patch if blended else self.edges[1:]
        starts = self.begins if blended else self.edges[:-1]
        return np.searchsorted(ends, start, side="right"), np.searchsorted(starts, stop)

    def neighbours(self, index: int) -> tuple[int, ...]:
        """How far behind a patch those begin that share voxels with it, itself among them."""
        near = self.begins - self.begins[index]
        return tuple(near[np.abs(near) < self.patch].tolist())


@lru_cache(maxsize=64)
def patches_in_row(
    steps: Steps, domain: tuple[int, int], inner: tuple[int, int], patch: int, overlap: int
) -> PatchRow:
    """The patches along an axis.

    Args:
        steps: How they follow each other.
        domain: Start and stop of the volume.
        inner: Start and stop of what steps that end with the volume take for it. Beyond it, patches
            follow that share no voxel with others.
        patch: Length of a patch.
        overlap: Voxels that neighbours share, at least.

    Returns:
        The patches.
    """
    low, high = domain
    if steps in ("context", "inset"):
        first, count = low, -(-max(1, high - low - overlap) // (patch - overlap))
        if steps == "context":
            first, count = low - overlap // 2, -(-(high - low) // (patch - overlap))
        begins = first + (patch - overlap) * np.arange(count)
    else:
        begins = inner[0] + _within(steps, inner[1] - inner[0], patch, overlap)
        before = max(0, -(-(int(begins[0]) - low) // patch))
        after = max(0, -(-(high - int(begins[-1])) // patch) - 1)
        begins = np.concatenate([
            begins[0] - patch * np.arange(before, 0, -1), begins,
            begins[-1] + patch * np.arange(1, after + 1),
        ])  # fmt: skip
    middles = begins[1:] + (begins[:-1] + patch - begins[1:]) // 2
    return PatchRow(patch, begins, np.concatenate([[low], middles, [high]]))


def _within(steps: Steps, length: int, patch: int, overlap: int) -> Ints:
    """Where patches begin that end with the volume."""
    stride, rest = patch - overlap, length - patch
    if rest <= 0:
        return np.array([-(-rest // 2)])
    if steps == "moved":
        return np.minimum(stride * np.arange(-(-rest // stride) + 1), rest)
    # Half of a patch of odd length is no whole number of voxels, and nnU-Net does not round it.
    twice = patch if overlap == patch // 2 else 2 * stride
    count = -(-2 * rest // twice)
    return np.round(rest / count * np.arange(count + 1)).astype(np.int64)
