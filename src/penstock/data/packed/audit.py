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
        self._planned: Counter[tuple[str, int]] = Counter()
        self._came: Counter[tuple[str, int]] = Counter()
        self._wrong = 0

    def batch(self, samples: NDArray[np.int64], batch: Mapping[str, NDArray[Any]]) -> None:
        """Count one batch.

        Args:
            samples: the samples that were planned, shape (samples,).
            batch: for each array, a row for each sample.
        """
        for name in self._checks:
            self._planned.update((name, int(sample)) for sample in samples)
            rows = batch.get(name, ())
            for place, row in enumerate(rows):
                check = checksum(row)
                came: int | None = int(samples[place]) if place < len(samples) else None
                if came is None or check != self._checks[name][came]:
                    self._wrong += 1
                    # If several samples have these bytes, any of them may have come.
                    came = self._sample_of[name].get(check)
                if came is not None:
                    self._came[name, came] += 1

    def result(self) -> Delivery:
        """The delivery of all batches so far: an epoch, or its first batches."""
        # A sample comes in several arrays. The worst of them counts.
        extra, lacking = self._came - self._planned, self._planned - self._came
        return Delivery(_worst(extra), _worst(lacking), self._wrong)


def _worst(counts: Counter[tuple[str, int]]) -> int:
    by_sample: dict[int, int] = {}
    for (_, sample), count in counts.items():
        by_sample[sample] = max(count, by_sample.get(sample, 0))
    return sum(by_sample.values())


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
