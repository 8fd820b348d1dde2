"""An endless synthetic volume: any box of it follows from a random seed and the box's place.

A `Specimen` takes memory in proportion to the box, so that a volume of any size can be written
piece by piece. Intensities are ADU, lengths are voxels, axes are z, y, x.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .box import Box
from .grid import Grid, indices
from .neurites import Beads, FloatArray, Soma, add_beads, add_soma, furthest, grown
from .volumes import CAMERA_OFFSET, COARSE, FINE, FINE_SHARE, brightness, noisy

PERIOD = (240, 480, 480)
"""Voxels along z, y, x after which the structures of a `Specimen` repeat; its noise never."""
NOISE_TILE = (8, 64, 64)
"""Shape of the boxes in which a `Specimen` draws its noise, each from a seed of its own."""
_AT_ONCE = (128, 128, 128)
"""Shape of the largest part of a `Specimen` that is made at once: whole tiles."""
_TAPS = range(-2, 4)
"""Offsets of the knots of a periodic field that count at a voxel. Others weigh less than 1e-4."""


class Specimen:
    """A synthetic microscopy volume without end in any direction. The voxels of a box follow from
    the seed and the coordinates; the size of the box and earlier calls play no part.

    It repeats a `clean_volume` of the size of `PERIOD` that has no faces: a structure that leaves
    through one face comes in through the opposite one. The beads of that period are held, some 50
    MB; all other memory is in proportion to the box.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        rng = np.random.default_rng(seed)
        self._knots = [
            rng.standard_normal([length // apart for length in PERIOD], np.float32)
            for apart in (COARSE, FINE)
        ]
        somas, beads = grown(PERIOD, rng)
        self._beads, self._margin = _around(beads), furthest(beads)
        self._somas = [image for soma in somas for image in _images(soma)]

    def clean(self, box: Box) -> FloatArray:
        """The noiseless volume in a box (z, y, x): ADU, of the shape of ``box``."""
        volume = np.empty(box.shape, np.float32)
        for part in Grid(box, PERIOD):
            home = tuple(a % length for a, length in zip(part.start, PERIOD, strict=True))
            volume[part.within(box)] = self._in_period(Box.of(home, part.shape))
        return volume

    def without_noise(self, box: Box) -> NDArray[np.uint16]:
        """`clean`, rounded to uint16."""
        return np.clip(np.rint(self.clean(box)), 0, 65535).astype(np.uint16)

    def image(self, box: Box) -> NDArray[np.uint16]:
        """The box as the camera of `noisy` sees it: ADU, of the shape of ``box`` (z, y, x)."""
        image = np.empty(box.shape, np.uint16)
        for part in Grid(box, _AT_ONCE):
            image[part.within(box)] = self._seen(part)
        return image

    def _seen(self, box: Box) -> NDArray[np.uint16]:
        # A Poisson variate uses up more or fewer numbers by its mean, so tiles are made whole.
        tiles = Grid(box, NOISE_TILE)
        ends = (np.multiply(end, NOISE_TILE) for end in (tiles.cells.start, tiles.cells.stop))
        whole = Box(*(tuple(end.tolist()) for end in ends))
        clean = self.clean(whole)
        image = np.empty(box.shape, np.uint16)
        for index in indices(tiles.cells):
            tile = Box.of(np.multiply(index, NOISE_TILE).tolist(), NOISE_TILE)
            part = tiles.cell(index)
            seen = noisy(clean[tile.within(whole)], [self._seed, *index])
            image[part.within(box)] = seen[part.within(tile)]
        return image

    def _in_period(self, box: Box) -> FloatArray:
        """`clean` of a box that lies within the period at the origin."""
        asked = box
        # One voxel more at the low faces, where `add_beads` leaves out a last trace of some beads.
        box = box.grow((1,) * 3, (0,) * 3)
        field = _periodic(self._knots[0], COARSE, box)
        field += np.float32(FINE_SHARE) * _periodic(self._knots[1], FINE, box)
        volume = CAMERA_OFFSET + brightness(field)
        for soma in self._somas:
            add_soma(volume, soma, box.start)
        # Beads are sorted by z, so that those of a slab are found quickly.
        beads, margin = self._beads, self._margin
        first, last = np.searchsorted(
            beads.points[:, 0], (box.start[0] - margin, box.stop[0] + margin)
        )
        near = slice(first, last)
        beads = Beads(beads.points[near], beads.radii[near], beads.peaks[near])
        add_beads(volume, beads, box.start)
        return volume[asked.within(box)]


def _periodic(knots: FloatArray, apart: int, box: Box) -> FloatArray:
    """Gaussian noise like `_smooth_noise`'s in a box, with as many knots as a period has.

    Each voxel is a sum of the same terms in the same order whatever the box is. A product of
    matrices would not promise that.
    """
    field = knots
    for axis, (start, stop) in enumerate(zip(box.start, box.stop, strict=True)):
        places = np.arange(start, stop)
        nearest = places // apart
        weights = [np.exp(-0.5 * np.square((places / apart - nearest - t) / 0.7)) for t in _TAPS]
        norm = np.sqrt(sum(np.square(weight) for weight in weights))
        along = [-1 if a == axis else 1 for a in range(3)]
        summed: Any = 0
        for tap, weight in zip(_TAPS, weights, strict=True):
            share = (weight / norm).astype(np.float32).reshape(along)
            summed = summed + share * field.take((nearest + tap) % knots.shape[axis], axis)
        field = summed
    return field


def _around(beads: Beads) -> Beads:
    """The beads of a period and those of its neighbours that reach into it, sorted by z."""
    points = beads.points % PERIOD
    margin = furthest(beads)
    which = np.arange(len(points))
    for axis, length in enumerate(PERIOD):
        low, high = points[:, axis] < margin, points[:, axis] > length - margin
        step = np.eye(3)[axis] * length
        points = np.concatenate([points, points[low] + step, points[high] - step])
        which = np.concatenate([which, which[low], which[high]])
    by_z = np.argsort(points[:, 0], kind="stable")
    points, which = points[by_z], which[by_z]
    return Beads(points, beads.radii[which], beads.peaks[which])


def _images(soma: Soma) -> Iterator[Soma]:
    """The copies of a cell body, a period apart, that reach into the period."""
    reach = 2 * soma.radii + 2
    for by in itertools.product((-1, 0, 1), repeat=3):
        center = soma.center + np.multiply(by, PERIOD)
        if ((center > -reach) & (center < PERIOD + reach)).all():
            yield replace(soma, center=center)
