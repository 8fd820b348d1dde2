"""Objects at sea, found or labelled: points in a scene of 10 m pixels, and their classes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...base import UsageError

UNKNOWN, NO, YES = -1, 0, 1
_OF_LABELS = ("points", "is_vessel", "is_fishing", "length_m", "confidence", "shore_km", "more")


@dataclass(frozen=True, slots=True, eq=False)
class Objects:
    """Objects at sea, predicted or labelled: columns of one length. `of` makes one."""

    scene: NDArray[np.str_]
    points: NDArray[np.float64]
    """(n, 2): row and column in the scene, in pixels."""
    is_vessel: NDArray[np.int8]
    """1 yes, 0 no, -1 unknown."""
    is_fishing: NDArray[np.int8]
    length_m: NDArray[np.float64]
    """NaN where it is unknown."""
    confidence: NDArray[np.int8]
    """0 LOW, 1 MEDIUM, 2 HIGH for a label; -1 where none was given, and for a prediction."""
    shore_km: NDArray[np.float64]
    """Distance of a label from the shore; 9999.99 where there is none, NaN where it is unknown."""
    score: NDArray[np.float64]
    """The score of a prediction from 0 to 1; NaN where none was given."""
    lines: NDArray[np.int32]
    """The line of a label in its file, from 1 with the header; 0 where it is not from a file."""
    more: NDArray[np.object_]
    """The other cells of a label's line by the name of their column; empty ones are left out."""

    @classmethod
    def of(
        cls,
        scene: ArrayLike,
        points: ArrayLike,
        *,
        is_vessel: ArrayLike = UNKNOWN,
        is_fishing: ArrayLike = UNKNOWN,
        length_m: ArrayLike = math.nan,
        confidence: ArrayLike = -1,
        shore_km: ArrayLike = math.nan,
        score: ArrayLike = math.nan,
        lines: ArrayLike = 0,
        more: Sequence[Mapping[str, str]] = (),
    ) -> Objects:
        """Objects from columns of one length; a single value stands for all of them.

        Args:
            scene: the name of the scene.
            points: row and column in the scene, in pixels, shape (n, 2).
            is_vessel: 1 yes, 0 no, -1 unknown.
            is_fishing: likewise.
            length_m: metres; None or NaN where unknown.
            confidence: of labels, 0 LOW, 1 MEDIUM, 2 HIGH; -1 where none was given.
            shore_km: of labels, kilometres from the shore; None or NaN where unknown.
            score: of predictions, from 0 to 1; NaN where there is none.
            lines: of labels, the line of their file.
            more: of labels, further cells by the name of their column; none if it is empty.

        Returns:
            The objects.
        """
        points = np.asarray(points, np.float64).reshape(-1, 2)

        def column(values: ArrayLike, dtype: Any) -> NDArray[Any]:
            return np.broadcast_to(np.asarray(values, dtype), len(points)).copy()

        return cls(
            column(scene, np.str_),
            points,
            column(is_vessel, np.int8),
            column(is_fishing, np.int8),
            column(length_m, np.float64),
            column(confidence, np.int8),
            column(shore_km, np.float64),
            column(score, np.float64),
            column(lines, np.int32),
            np.array([*map(dict, more or [{}] * len(points)), None], object)[:-1],
        )

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, rows: NDArray[Any] | slice) -> Objects:
        """The objects of some rows, by number or by mask."""
        return Objects(*(getattr(self, field.name)[rows] for field in fields(self)))

    @classmethod
    def join(cls, parts: Iterable[Objects]) -> Objects:
        """All objects of several parts, in their order; none of no parts."""
        parts = [*parts] or [cls.of([], [])]
        columns = ([getattr(part, field.name) for part in parts] for field in fields(cls))
        return cls(*(np.concatenate(column) for column in columns))

    def as_lists(self) -> dict[str, list[Any]]:
        """Columns of labels for `of`, without the scene, as JSON takes them: None for NaN.

        Line numbers are left out: they are facts of the file, not of the scene.
        """
        columns = {name: getattr(self, name).tolist() for name in _OF_LABELS}
        for name in ("length_m", "shore_km"):
            columns[name] = [None if math.isnan(value) else value for value in columns[name]]
        return columns

    def check_inside(self, size: tuple[int, int], path: Path) -> None:
        """Refuse a point that is not in the scene.

        Args:
            size: rows and columns of the scene.
            path: the file that the points are from.

        Raises:
            UsageError: a point lies outside; the message names its line.
        """
        outside = np.any((self.points < 0) | (self.points >= np.array(size)), axis=1)
        if outside.any():
            first = int(np.flatnonzero(outside)[0])
            row, column = self.points[first]
            raise UsageError(
                f"{path} line {self.lines[first]}: row {row:g}, column {column:g} is outside scene "
                f"{self.scene[first]}, which has {size[0]} x {size[1]} pixels"
            )
