"""What tests of trackers share: small runs that are tracked, and what they were told."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.base import TRAIN_DEFAULTS, Incomplete, TrainConfig, build
from penstock.scaling import TrainingRun, read_runs
from penstock.training import tracking
from penstock.training.log_lines import last_lines
from penstock.training.results import run_facts

from ..ports import held_port
from .kit import SMALL, rows

if TYPE_CHECKING:
    import torch


WORDS = "--num-samples 203 --batch-size 8 --epochs 2 --hidden-dims 8 4 --device cpu".split()
"""The flags of a small run: two spirals, 18 steps to an epoch."""
KEY = "planted-4f1c9e77a0b24d6c"
NO_NETWORK = {"HTTPS_PROXY": "http://127.0.0.1:9"}
"""The variables of a machine whose proxy is not there."""

TRACKED_RUNS = [
    pytest.mark.skipif(
        find_spec("lightning_fabric") is None, reason="lightning_fabric is not installed"
    ),
    pytest.mark.usefixtures("one_thread", "no_tracker_set_up"),
]
"""The marks of tests that train, and whose runs are tracked."""
needs = {
    name: pytest.mark.skipif(
        not all(map(find_spec, packages)), reason=f"not all of {packages} are installed"
    )
    for name, packages in tracking.PACKAGES.items()
}


def tracked(out: Path, *names: str, **changes: Any) -> dict[str, Any]:
    from penstock.training.loop import train_workload

    settings = {"output_dir": out, "track": names, **changes}
    return train_workload(
        "spiral", build(TrainConfig, TRAIN_DEFAULTS["spiral"], SMALL, {"epochs": 2}, settings)
    )


def facts_of(config: TrainConfig) -> dict[str, Any]:
    """The facts of a run of two spirals, as its trackers are told them."""
    labels = {"name": config.name or "mine", "tags": dict(config.tag)}
    return run_facts("spiral", config, 1, "cpu", labels, {"device": "cpu"})


Series = dict[str, list[tuple[int, Any]]]


def expected(out: Path) -> Series:
    """Of each metric its steps and values, as the files of the run itself have them."""
    series: Series = {}
    for row in rows(out):
        if (step := int(row["step"])) == 1 or step % 10 == 0:
            series.setdefault("train_loss_step", []).append((step, float(row["loss"])))
            for name in ("step_s", "data_wait_s", "forward_s", "optimizer_s"):
                value = pytest.approx(float(row[name]), abs=1e-9, rel=1e-6)
                series.setdefault(name, []).append((step, value))
    results = json.loads((out / "training_results.json").read_text())
    for row in results["history"]:
        for name in ("val_loss", "val_acc", "train_loss", "train_s", "val_s", "samples"):
            series.setdefault(name, []).append((row["step"], pytest.approx(row[name])))
    return series


def assert_logged(series: Series, out: Path) -> None:
    """Whether a tracker has the metrics of a run, those of the machine among them."""
    wanted = expected(out)
    assert {name: sorted(set(series[name])) for name in wanted} == wanted
    assert all(value > 0 for _, value in series["system/rss_bytes"])
    assert series["training_s"] and series["best_val_acc"]
    lines = last_lines(json.loads((out / "training_results.json").read_text()), out)
    (printed,) = (line.split()[3] for line in lines if line.startswith("Time per epoch"))
    assert max(series["time_per_epoch_s"])[1] == pytest.approx(float(printed), abs=0.006)


def assert_one_run(out: Path, kept: Path) -> TrainingRun:
    """The run in a folder, which is the one that a tracker kept."""
    (folder,), (other,) = read_runs([out]), read_runs([kept])
    assert folder.complete and folder.ranks[0].local
    for name in ("devices", "seconds", "epochs", "samples", "batch", "val_loss", "val_acc"):
        assert getattr(other, name) == pytest.approx(getattr(folder, name)), (name, kept)
    assert len(read_runs([out, kept])) == 1
    return folder


def stop_after_21(out: Path, *names: str, **changes: Any) -> None:
    from penstock.training.loop import train_workload

    def stop(now: Any) -> None:
        if now.step == 21:
            os.kill(os.getpid(), signal.SIGTERM)

    settings = {"output_dir": out, "track": names, **changes}
    config = build(TrainConfig, TRAIN_DEFAULTS["spiral"], SMALL, {"epochs": 2}, settings)
    with pytest.raises(Incomplete):
        train_workload("spiral", config, progress=stop)


@contextlib.contextmanager
def served(store: str, folder: Path) -> Iterator[str]:
    """The URL of an MLflow server on loopback that shows a store; ``folder`` takes its log."""
    held = held_port()
    port = held.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--backend-store-uri", store, "--workers", "1"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, stdout=log, stderr=log, start_new_session=True,
            env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true",
                 "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(1500):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health"):
                break
            assert process.poll() is None, (folder / "log").read_text()
            time.sleep(0.2)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        held.close()


def until(true: Any) -> None:
    for _ in range(3000):
        if true():
            return
        time.sleep(0.1)
    raise AssertionError("it never was")


def no_file_holds(key: str, out: Path) -> bool:
    """Not even inside an archive; of a file in a database, its bytes."""
    for path in out.rglob("*"):
        if not path.is_file():
            continue
        assert key.encode() not in path.read_bytes(), path
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                for name in archive.namelist():
                    assert key.encode() not in archive.read(name), (path, name)
    return True


def best_weights(out: Path) -> dict[str, torch.Tensor]:
    import torch

    return torch.load(out / "best_model.pth", weights_only=True)
