"""How far a network sees, and whether tiles of it can equal the whole: what ``inspect`` finds.

A network of period P sees the same when its input moves by P voxels. So patches start on a grid of
P, and what a core needs around it is counted from the lines of that grid.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reach:
    """How far a network sees. Tuples have an entry for each axis that the network takes, in the
    order z y x; they are empty where no overlap makes tiling exact."""

    blame: str = ""
    """The reason that no overlap makes tiling exact, such as a layer that sees the whole patch;
    else empty."""
    period: tuple[int, ...] = ()
    """Least shift of the input that only shifts the output."""
    before: tuple[int, ...] = ()
    """Voxels of context that a core which starts on the grid needs before it."""
    after: tuple[int, ...] = ()
    """Voxels that a core which ends on the grid needs after it."""
    seen_before: tuple[int, ...] = ()
    """Voxels that the farthest seeing voxel of the output sees before itself."""
    seen_after: tuple[int, ...] = ()
    """Voxels that it sees after itself."""
    step: tuple[int, ...] = ()
    """Sides of patches are multiples of it: the network takes them, and they end on its grid."""
    partly: bool = False
    """True if the search cost more than it may, and ended before it was known."""
    places: int = 0
    """Number of places at which tiles were compared with a larger input, and were equal."""

    @property
    def exact(self) -> bool:
        """True if there is an overlap at which no voxel of a core sees a cut."""
        return not self.blame

    def line(self) -> str:
        """The same in words."""
        if self.blame:
            return f"no overlap is {'known to be ' * self.partly}exact: {self.blame}"
        sides = (
            f"{low}" if low == high else f"{low} before, {high} after"
            for low, high in zip(self.before, self.after, strict=True)
        )
        return f"reach {' / '.join(sides)}, checked at {self.places} places"
