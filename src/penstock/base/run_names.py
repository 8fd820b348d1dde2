"""Names of the files by which several wings know a folder: of a run of ``infer``, of a training,
and of a suite of trainings."""

from __future__ import annotations

RUN_FILE, SUMMARY_FILE = "run.json", "summary.json"
"""Files in the folder of a run of ``infer``: its settings, and what was done, written last."""
STEPS = "steps"
"""The folder of a run in which each rank keeps the times of its steps."""
RESULTS, ARGS = "training_results.json", "args.json"
"""Files in a run's folder: its results, and the settings that it was started with."""
BEST, CHECKPOINTS = "best_model.pth", "checkpoints"
"""The weights of a training's best epoch, and the folder of its checkpoints."""
PICTURES = "pictures.npz"
"""The file in a run's folder with some samples and the best model's predictions of them."""
SUITE_LEDGER = "suite.ledger"
"""The folder in a suite's folder that holds the records of its trainings."""
