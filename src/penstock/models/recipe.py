"""What a network wants done to its input and its output, as those who trained it say.

    nnU-Net folder, bioimage.io package, MONAI bundle, training of ours  ──▶  Recipe  ──▶  infer

What a recipe says is the default. A flag of the user wins, and is told.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recipe:
    """What belongs to a network besides its weights. Triples are z y x of the volume."""

    place: str
    """The file that says it, for messages."""
    spacing: tuple[float, float, float] | None = None
    """Voxel size that the network was trained at; None if it is not said."""
    unit: str = "micrometer"
    """The unit of ``spacing``."""
    patch: tuple[int, int, int] | None = None
    """Shape of a patch; None if it is not said."""
    overlap: tuple[int, int, int] | None = None
    """Voxels that neighbouring patches share; None if it is not said."""
    window: str | None = None
    """Weights by which patches are joined: ``gaussian``, of an eighth of the patch. None if it is
    not said."""
