"""A benchmark of models as heat maps: a row for each tile, a column for each batch size.

A cell shows its number. A failed cell is hatched and names its failure. A cell that was not
measured stays empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...base import format_bytes, format_count, require
from ...bench import pixels_of
from ..model.cell import ModelCell
from .canvas import STYLE, Figure, blank, heading, tidy
from .marks import BAND

_NAMED = 240
"""Most cells of a map that shows numbers; more have no room for them."""
# The map keeps its colours on a dark page, so its texts must keep theirs.
_DARK, _LIGHT = "#0a0a0a", "#fdfdfd"


def draw_rates(cells: Sequence[ModelCell], label: str) -> Figure:
    """Draw the (useful) pixels a second of cells that differ only in tile and batch."""
    kind = "Useful pixels" if cells[0].haloed else "Pixels"
    return _draw(cells, f"{kind} a second", label, lambda c: c.pixels_per_s, format_count)


def draw_peaks(cells: Sequence[ModelCell], label: str) -> Figure:
    """Draw the peak memory of cells that differ only in tile and batch."""
    on_host = cells[0].row.get("device", "cpu") == "cpu"
    title = f"Peak memory of the {'host' if on_host else 'device'}"
    return _draw(cells, title, label, lambda c: c.peak_bytes(on_host), format_bytes)


def _draw(
    cells: Sequence[ModelCell],
    title: str,
    label: str,
    value: Callable[[ModelCell], float],
    words: Callable[[float], str],
) -> Figure:
    tiles = sorted({cell.tile for cell in cells}, key=lambda tile: (pixels_of(tile), tile))
    batches = sorted({cell.batch for cell in cells})
    values = np.array([value(cell) for cell in cells])
    seen = values[np.isfinite(values)]
    low, high = (float(seen.min()), float(seen.max())) if len(seen) else (0.0, 1.0)
    width = float(np.clip(1.6 + 0.95 * len(batches), 5.0, 13.0))
    figure = blank(width, float(np.clip(1.5 + 0.42 * len(tiles), 2.8, 12.0)))
    heading(figure, title, label)
    axis = figure.subplots()
    tidy(axis, x="Batch", y="Tile (pixels)")
    axis.grid(visible=False)
    palette = require("matplotlib", "plot").colormaps["cividis"]  # made for the colour-blind
    patches = require("matplotlib.patches", "plot")
    for cell, number in zip(cells, values, strict=True):
        at = (batches.index(cell.batch), tiles.index(cell.tile))
        corner = (at[0] - 0.5, at[1] - 0.5)
        if np.isfinite(number):
            share = (number - low) / (high - low) if high > low else 1.0
            style: dict[str, Any] = {"facecolor": palette(share)}
            text, colour = words(float(number)), _DARK if share > 0.55 else _LIGHT
        else:
            style = BAND
            text, colour = cell.failed_word or "-", STYLE["ink"]
        # Neither changes where the axes lie, and asking each for that takes long.
        axis.add_artist(patches.Rectangle(corner, 1, 1, **({"linewidth": 0} | style)))
        if len(cells) <= _NAMED:
            axis.text(*at, text, ha="center", va="center", color=colour, fontsize=STYLE["small"],
                      in_layout=False)  # fmt: skip
    axis.set_xlim(-0.5, len(batches) - 0.5)
    axis.set_ylim(len(tiles) - 0.5, -0.5)
    axis.set_xticks(range(len(batches)), list(map(str, batches)))
    axis.set_yticks(range(len(tiles)), tiles)
    axis.tick_params(length=0)
    axis.spines[["left", "bottom"]].set_visible(False)
    return figure
