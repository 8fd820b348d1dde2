"""Names of files in a training's run folder, and the phases of its steps."""

from __future__ import annotations

STEPS = "steps"
"""The folder of a run in which each rank keeps them."""


RESULTS, ARGS = "training_results.json", "args.json"
"""What a run leaves in its folder: what became of it, and what was asked."""
