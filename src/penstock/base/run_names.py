"""Names of files in the folder of a training."""

from __future__ import annotations

STEPS = "steps"
"""The folder of a run in which each rank keeps the times of its steps."""
RESULTS, ARGS = "training_results.json", "args.json"
"""Files in a run's folder: its results, and the settings that it was started with."""
