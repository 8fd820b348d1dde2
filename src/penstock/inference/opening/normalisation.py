"""Decides how values are scaled before the network sees them: as asked, as trained, or by default.

A default never depends on the block. Where the settings name no normalisation, a network gets the
scaling that its training recorded. If none is recorded, percentiles of the whole volume are
counted before the first patch.
"""

from __future__ import annotations

from ...base import RESULTS, InferConfig
from ...data import Scaling
from ...models import TrainingRecord


def normalised_as(config: InferConfig, trained: TrainingRecord | None) -> tuple[InferConfig, str]:
    """The settings with the normalisation decided, and a phrase that says which one it is."""
    said = config.asked_normalization
    ranged = config.model_fields_set & {"norm_lower", "norm_upper", "norm_level"}
    if said is None and trained is not None and trained.scaling is not None and not ranged:
        lower, scale = trained.scaling
        upper = lower + scale
        update = {"normalize": "fixed", "norm_lower": lower, "norm_upper": upper}
        phrase = f"{_range(lower, upper)}, as {trained.place / RESULTS} says"
        return config.model_copy(update=update), phrase
    by_default = ", by default" if said is None else ""
    config = config.model_copy(update={"normalize": said or "global"})
    lower, upper = config.norm_lower, config.norm_upper
    counted = "the whole volume"
    if config.mask is not None or config.box is not None:
        counted = "what lies inside " + " and ".join(
            flag
            for flag, value in (("--mask", config.mask), ("--box", config.box))
            if value is not None
        )
    phrases = {
        "none": "as they are",
        "fixed": _range(lower, upper),
        "global": f"percentiles {lower:g} and {upper:g} of {counted}{by_default}",
        "percentile": f"percentiles {lower:g} and {upper:g} of each block and its halo, so they "
        "change with --block",
    }
    return config, phrases[said or "global"]


def _range(lower: float, upper: float) -> str:
    return f"{lower:g} becomes 0 and {upper:g} becomes 1"


def fixed_scaling(config: InferConfig) -> Scaling | None:
    """The scaling of patches, or None if percentiles of the data decide it."""
    low, high = config.norm_lower, config.norm_upper
    if config.normalize == "none":
        return Scaling()
    if config.normalize == "fixed":
        return Scaling.of_range(low, high, low, high, config.eps)
    return None
