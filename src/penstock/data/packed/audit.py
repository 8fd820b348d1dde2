"""Checks that a loader delivered each sample once, with its true values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .format import Packed, checksum


@dataclass(frozen=True, slots=True)
class Delivery:
    """A comparison of the planned samples with the delivered ones. All three must be 0."""

    duplicates: int
    """Samples that came more often than was planned."""
    missing: int
    """Samples that were planned and did not come."""
    wrong: int
    """Arrays of a sample that are not, byte for byte, those of the sample planned at that place."""

    @property
    def right(self) -> bool:
        """Whether every planned sample came once, with its values."""
        return self == Delivery(0, 0, 0)


class Audit:
    """Counts duplicates, missing and wrong samples, by nothing but the delivered bytes."""

    def __init__(self, packed: Packed) -> None:
        self._checks = packed.checks
        self._sample_of = {
            name: {int(check): sample for sample, check in enumerate(values)}
            for name, values in packed.checks.items()
        }
        self._planned = {name: Counter[int]() for name in packed.checks}
        self._came = {name: Counter[int]() for name in packed.checks}
        self._wrong = 0

    def batch(self, samples: NDArray[np.int64], batch: Mapping[str, NDArray[Any]]) -> None:
        """Count one batch.

        Args:
            samples: the samples that were planned, shape (samples,).
            batch: for each array, a row for each sample.
        """
        for name, checks in self._checks.items():
            self._planned[name].update(samples.tolist())
            for place, row in enumerate(batch.get(name, ())):
                check = checksum(row)
                came: int | None = int(samples[place]) if place < len(samples) else None
                if came is None or check != checks[came]:
                    self._wrong += 1
                    # If several samples have these bytes, any of them may have come.
                    came = self._sample_of[name].get(check)
                if came is not None:
                    self._came[name][came] += 1

    def result(self) -> Delivery:
        """The delivery of all batches so far: an epoch, or its first batches."""
        # A sample comes in several arrays. The worst of them counts.
        pairs = [(self._came[name], self._planned[name]) for name in self._checks]
        extra = max(((came - planned).total() for came, planned in pairs), default=0)
        lacking = max(((planned - came).total() for came, planned in pairs), default=0)
        return Delivery(extra, lacking, self._wrong)


def num_shared_samples(one: Packed, other: Packed) -> int:
    """The number of samples of ``other`` that are in ``one``, by the checksums of their arrays.

    Args:
        one: a data set.
        other: another data set.

    Returns:
        The number of samples of ``other`` whose checksums are those of a sample of ``one``.
    """
    names = sorted(one.checks.keys() & other.checks.keys())
    ours, theirs = (
        [tuple(checks) for checks in zip(*(p.checks[n].tolist() for n in names), strict=True)]
        for p in (one, other)
    )
    seen = set(ours)
    return sum(sample in seen for sample in theirs)
