"""What tests of trackers share: small runs that are tracked, and what they were told."""

from __future__ import annotations

import contextlib
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

from penstock.base.config.knobs import build
from penstock.base.config.train import TRAIN_DEFAULTS, TrainConfig
from penstock.base.errors import Incomplete
from penstock.training.tracking import events, tell, trackers

from ..ports import held_port
from .kit import SMALL

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
PACKAGES = {name: tracker.package for name, tracker in trackers.TRACKERS.items()}
needs = {
    name: pytest.mark.skipif(not find_spec(package), reason=f"{package} is not installed")
    for name, package in PACKAGES.items()
}


def tracked(out: Path, *names: str, **changes: Any) -> dict[str, Any]:
    from penstock.training.loop import train_workload

    settings = {"output_dir": out, "track": names, **changes}
    return train_workload(
        "spiral", build(TrainConfig, TRAIN_DEFAULTS["spiral"], SMALL, {"epochs": 2}, settings)
    )


def facts_of(config: TrainConfig, ranks: int = 1, device: str = "cpu") -> dict[str, Any]:
    """The facts of a run of two spirals, as its trackers are told them."""
    labels = {"name": config.name or "mine", "tags": dict(config.tag)}
    return tell.run_facts("spiral", config, ranks, device, labels)


def told(out: Path, kind: str) -> list[dict[str, Any]]:
    return [
        event for _, event in events.read_events(out / "events.jsonl") if event["event"] == kind
    ]


def series(out: Path) -> dict[str, list[tuple[int, float]]]:
    """Of each metric its steps and values, as the file of events has them; sorted."""
    return {name: sorted(points) for name, points in in_order(out).items()}


def in_order(out: Path) -> dict[str, list[tuple[int, float]]]:
    """Of each metric its steps and values, in the order of the file of events."""
    by_name: dict[str, list[tuple[int, float]]] = {}
    for _, event in events.read_events(out / "events.jsonl"):
        for name, value in event.get("metrics", {}).items():
            by_name.setdefault(name, []).append((event["step"], value))
    return by_name


def stop_after_21(out: Path, *names: str) -> None:
    from penstock.training.loop import train_workload

    def stop(now: Any) -> None:
        if now.step == 21:
            os.kill(os.getpid(), signal.SIGTERM)

    settings = {"output_dir": out, "track": names}
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


def begun(out: Path) -> Path:
    """The file of events of a run that has just begun."""
    log = events.EventLog(out / "events.jsonl")
    facts = facts_of(build(TrainConfig, {"output_dir": out}))
    log.begin(event="begin", step=0, run="a" * 32, trackers=[], environment={}, **facts)
    log.tell("step", 1, metrics={"train_loss_step": 0.5})
    log.close()
    return log.path


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

    state_dict: dict[str, torch.Tensor] = torch.load(out / "best_model.pth", weights_only=True)
    return state_dict
