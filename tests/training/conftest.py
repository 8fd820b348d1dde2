"""Fixtures of tests of training."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.base.config.knobs import build
from penstock.base.config.train import TrainConfig
from penstock.training.tracking import tell

from .comet_cloud import Cloud


@pytest.fixture
def no_tracker_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """No key and no server of the user's; the processes of trackers keep to one thread."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("COMET_API_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tell.Tracking]:
    """A run that is tracked, by nobody who is really there."""
    monkeypatch.setattr(tell, "SYSTEM_EVERY_S", 1e6)
    config = build(TrainConfig, {"output_dir": tmp_path})
    made = tell.Tracking(config, 0, tell.run_facts("spiral", config, 1, "cpu"))
    yield made
    made.finish("complete", {})


@pytest.fixture(scope="session")
def _one_cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate")
    made = Cloud(tmp_path_factory.mktemp("cloud"))
    yield made
    made.close()


@pytest.fixture
def cloud(_one_cloud: Cloud) -> Cloud:
    """A stand-in for Comet's cloud that has heard of nothing."""
    _one_cloud.begin_anew()
    return _one_cloud


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an MLflow server on loopback, its store an SQLite database."""
    pytest.importorskip("mlflow")
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--backend-store-uri", f"sqlite:///{folder}/store.db", "--workers", "1"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, stdout=log, stderr=log, start_new_session=True,
            env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true",
                 "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health"):
                break
            assert process.poll() is None, (folder / "log").read_text()
            time.sleep(0.2)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
