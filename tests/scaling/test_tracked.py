"""What trackers tell of a run that is not so, or not whole."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from penstock.scaling.runs import TrainingRun
from penstock.scaling.sources.tracked import TrackedRun, training_runs
from penstock.scaling.sources.tracker_files import comet_runs
from penstock.scaling.tables import run_mark


def read(runs: Iterable[TrackedRun]) -> list[TrainingRun]:
    return list(training_runs(runs, Path("tracker"), lambda sentence: None))


def scored(epochs: int, *, first: float | None = None, planned: int = 3) -> list[TrainingRun]:
    """Of epochs of 10 s, each with a score at its end; ``first``: when something came before."""
    rows = [
        {"metricName": "val_loss", "metricValue": 0.5, "timestamp": 1e12 + 1e4 * end, "step": end}
        for end in range(1, epochs + 1)
    ]
    if first is not None:
        at = 1e12 + 1e3 * first
        rows.append({"metricName": "train_loss", "metricValue": 1, "timestamp": at, "step": 1})
    experiment = {"parameters": {"num_gpus": 2, "epochs": planned}, "metrics": rows}
    return read(comet_runs([experiment], Path("c.json")))


def test_the_epoch_before_the_first_metric_is_not_in_the_time() -> None:
    (run,) = scored(3, first=0)
    assert (run.seconds, run.epochs, run.complete) == (pytest.approx(30), 3, True)
    # The mean loss of an epoch may come a moment before its score.
    for first in (None, 9.8):
        (run,) = scored(3, first=first)
        assert run.seconds == pytest.approx(20, abs=0.3)
        assert run.per_epoch == pytest.approx(10, abs=0.2)
        assert not run.complete
        assert run_mark(run).endswith("its time is of 2 of 3 epochs; not compared.")
    (run,) = scored(1, first=10.0, planned=1)
    assert (run.seconds, run.complete) == (None, False)


@pytest.mark.parametrize(
    "value, runs",
    [
        (None, 0),
        (5, 0),
        ({"x": {"metrics": [], "params": 5}}, 0),
        ({"x": {"metrics": [3, None], "params": {"num_gpus": 2}}}, 1),
        ({"epoch": {"experimentKey": {}, "metricName": ":", "metricValue": 1, "num_gpus": 2}}, 1),
    ],
)
def test_what_is_no_export_of_comet_is_no_defect_of_ours(value: object, runs: int) -> None:
    of_comet = read(comet_runs(value, Path("c.json")))
    assert [run.complete for run in of_comet] == [False] * runs
