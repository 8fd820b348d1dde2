"""The marks of a figure of models, and the units of its axes.

A batch has a colour, a tile has a shape, and a failure is a cross.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...base import require
from ..model.cell import ModelCell
from .canvas import STYLE, Axes, colour_at

MARKERS = "osD^vPX*"
"""The shapes of tiles, in their order."""

PAD = 8.0
"""Points between a panel and its title."""
NOTE: dict[str, Any] = {"fontsize": STYLE["small"] - 1, "color": STYLE["ink"]}
CHIP: dict[str, Any] = {
    **NOTE,
    "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1.5},
}
BAND: dict[str, Any] = {
    "facecolor": "#f4f4f4",
    "edgecolor": "#dddddd",
    "hatch": "////",
    "zorder": 0,
}


@dataclass(frozen=True)
class Marks:
    """The tiles and batches of one figure, in their order."""

    tiles: tuple[str, ...]
    batches: tuple[int, ...]

    @classmethod
    def of(cls, cells: Sequence[ModelCell]) -> Marks:
        tiles = dict.fromkeys(cell.tile for cell in cells)
        return cls(tuple(tiles), tuple(sorted({cell.batch for cell in cells})))

    def colour(self, cell: ModelCell) -> str:
        return colour_at(self.batches.index(cell.batch))

    def marker(self, cell: ModelCell) -> str:
        return MARKERS[self.tiles.index(cell.tile) % len(MARKERS)]

    def legend(self) -> list[Any]:
        """The handles of batches, of tiles and of the frontier."""
        grey = STYLE["faint"]
        return [
            *(handle(f"batch {b}", colour_at(i)) for i, b in enumerate(self.batches)),
            *(
                handle(f"tile {tile}", grey, MARKERS[i % len(MARKERS)], "")
                for i, tile in enumerate(self.tiles)
            ),
            handle("frontier", grey, "", "--"),
        ]


def handle(label: str, colour: str, marker: str = "o", line: str = "-") -> Any:
    """A line of a legend."""
    return require("matplotlib.lines", "plot").Line2D(
        [], [], color=colour, marker=marker, linestyle=line, markersize=6, label=label
    )


def cross(axis: Axes, x: float, y: float, text: str, colour: str) -> None:
    """Draw a failure."""
    axis.plot(x, y, marker="x", color=colour, markersize=7, markeredgewidth=2.2, linestyle="")
    axis.annotate(text, (x, y), (8, 0), textcoords="offset points", va="center", **CHIP)


def silent(axis: Axes, text: str, x: float = 0.5) -> None:
    """Say in an empty panel why it is empty."""
    place: dict[str, Any] = {"transform": axis.transAxes, "ha": "center", "va": "center"}
    axis.text(x, 0.5, text, fontsize=STYLE["text"], color=STYLE["faint"], **place)
    axis.set_yticks([])


def top_of(values: Iterable[float]) -> float | None:
    """A number a little above the largest value; None without a finite value."""
    finite = [value for value in values if np.isfinite(value)]
    return 1.08 * max(finite) or 1.0 if finite else None


def byte_unit(values: Iterable[float]) -> tuple[str, float]:
    """The unit of an axis of bytes, and the bytes of one."""
    return ("GiB", 2.0**30) if (top_of(values) or 0) >= 2**30 else ("MiB", 2.0**20)


def rate_unit(cells: Sequence[ModelCell]) -> tuple[str, float]:
    """The label of an axis of pixels a second, and the pixels of its unit."""
    kind = "useful pixels" if cells[0].haloed else "pixels"
    top = top_of(cell.pixels_per_s for cell in cells) or 0
    for word, scale in (("Thousand million", 1e9), ("Million", 1e6), ("Thousand", 1e3)):
        if top >= scale:
            return f"{word} {kind} per second", scale
    return f"{kind.capitalize()} per second", 1.0
