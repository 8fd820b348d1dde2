"""Fixtures of tests of training."""

import shutil
from collections.abc import Iterator

import pytest

from .comet_cloud import Cloud
from .track_kit import served


@pytest.fixture
def no_tracker_set_up(monkeypatch, tmp_path) -> None:
    """No key, server or store of the user's; the processes of trackers keep to one thread."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    for name in ("COMET_API_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def _one_cloud(tmp_path_factory) -> Iterator[Cloud]:
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
def server(tmp_path_factory) -> Iterator[str]:
    """The URL of an MLflow server on loopback, its store an SQLite database."""
    pytest.importorskip("mlflow")
    folder = tmp_path_factory.mktemp("mlflow")
    with served(f"sqlite:///{folder}/store.db", folder) as url:
        yield url
