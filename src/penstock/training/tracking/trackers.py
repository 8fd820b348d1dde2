"""The trackers Comet, MLflow, TensorBoard and Weights & Biases, and where each stores a run.

    comet         the experiment at comet.com, with a key and a network; else OUT/track/comet/*.zip
    mlflow        the server of MLFLOW_TRACKING_URI; else ~/.local/share/penstock/mlflow.db
    tensorboard   OUT/track/tensorboard
    wandb         OUT/track/wandb, offline

Each runs in its own process (see `tell`), so what it imports, patches or waits for does not
affect the training. Trackers read keys from their own environment variables. Every sentence about a
tracker goes through `base.scrub` before it is printed.

Trackers get the steps of rank 0, the scores of all ranks, and the metrics of rank 0's process tree
and of its node with its GPUs. The other ranks are in OUT/steps/ and in the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from ...base import MissingDependency, missing
from .comet import Comet
from .mlflow import MLflow
from .protocol import Tracker
from .tensorboard import TensorBoard
from .wandb import WeightsAndBiases


def check_trackers(trackers: Sequence[str]) -> None:
    """Refuse trackers that are not installed, without importing those that are."""
    for name in trackers:
        package = TRACKERS[name].package
        if find_spec(package) is None:
            raise MissingDependency(f"--track {name}: {missing(package, 'track')}")


TRACKERS: dict[str, type[Tracker]] = {
    "comet": Comet,
    "mlflow": MLflow,
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}
