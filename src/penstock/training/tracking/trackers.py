"""Comet, MLflow and TensorBoard: what each makes of the events of a run, offline first.

    comet         the experiment at comet.com, with a key and a network; else OUT/track/comet/*.zip
    mlflow        the server of MLFLOW_TRACKING_URI; else OUT/mlflow.db
    tensorboard   OUT/track/tensorboard

All of them run in a process that does nothing else (`tracking`), so what they import, patch or wait
for is no part of a training. They read keys from their own environment variables. Whatever is told
of a tracker, where it is or why it failed, goes through `keys.scrub` first.

They hear of rank 0: its steps, the scores of all ranks, and as metrics of the system those of its
process tree and of its node, GPUs included. Of the others, OUT/steps/ and the results tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from ...base import MissingDependency, missing
from .comet import Comet
from .mlflow import MLflow
from .protocol import Tracker
from .tensorboard import TensorBoard


def check_trackers(trackers: Sequence[str]) -> None:
    """Refuse what is not installed, without importing what is."""
    for name in trackers:
        package = TRACKERS[name].package
        if find_spec(package) is None:
            raise MissingDependency(f"--track {name}: {missing(package, 'track')}")


TRACKERS: dict[str, type[Tracker]] = {
    "comet": Comet,
    "mlflow": MLflow,
    "tensorboard": TensorBoard,
}
