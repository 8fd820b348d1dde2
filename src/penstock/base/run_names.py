"""Names of files in the folder of a training, and of a suite of trainings."""

from __future__ import annotations

STEPS = "steps"
"""The folder of a run in which each rank keeps the times of its steps."""
RESULTS, ARGS = "training_results.json", "args.json"
"""Files in a run's folder: its results, and the settings that it was started with."""
PICTURES = "pictures.npz"
"""The file in a run's folder with some samples and the best model's predictions of them."""
SUITE_LEDGER = "suite.ledger"
"""The folder in a suite's folder that holds the records of its trainings."""
