"""Fixtures that several test files share."""

from __future__ import annotations

import gc
import os
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from penstock.base.caller import environment_kept
from penstock.data import specimen
from penstock.reports.figures.canvas import STYLE

# Also where the shell forbids bytecode: without it each of a hundred processes compiles torch anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A machine that is busy makes no example wrong; fewer of them than usual keep tests quick.
settings.register_profile("penstock", deadline=None, max_examples=20)
settings.load_profile("penstock")


def pytest_collection() -> None:
    """Thousands of tests and the libraries under them are all there to stay: searching them for
    garbage took a third of the collection."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()  # nor is any test to search them again
    gc.set_threshold(50_000)  # nor, as often as Python would, what it imports itself
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _frozen_uncounted() -> Iterator[None]:
    """Each run, training and measurement asks Python whether anything is frozen. Python counts, and
    for all that is frozen here it takes 30 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "get_freeze_count", lambda: 1)
        yield


@pytest.fixture(scope="session", autouse=True)
def _few_dots() -> Iterator[None]:
    """Figures are quickly written; what is in them is looked for on their axes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(STYLE, "dpi", 20)
        yield


@pytest.fixture(scope="session", autouse=True)
def _little_grows() -> Iterator[None]:
    """Specimens repeat sooner than they do elsewhere, so there is less to grow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(specimen, "PERIOD", (240, 240, 240))
        yield


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of each figure a blank one is written: for tests of files, not of what they show."""
    from matplotlib.figure import Figure

    savefig = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda _, *args, **knobs: savefig(Figure((1, 1)), *args, **knobs)
    )


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """What a test, or a library that it uses, leaves in the environment ends with it. A nanny of
    Dask leaves ``MKL_NUM_THREADS=1``, with which workers of two threads would count as equal."""
    with environment_kept():
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch on one thread: nets this small gain nothing from a second, and wait for it."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def _moto() -> Iterator[str]:
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3_endpoint(_moto: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The URL of a real S3 server on loopback that holds one empty bucket, ``test-bucket``."""
    empty = tmp_path / "aws"
    empty.touch()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_CONFIG_FILE": str(empty),
        "AWS_SHARED_CREDENTIALS_FILE": str(empty),
    }.items():
        monkeypatch.setenv(name, value)
    for method, path in (("POST", "moto-api/reset"), ("PUT", "test-bucket")):
        request = urllib.request.Request(f"{_moto}/{path}", method=method)
        urllib.request.urlopen(request).close()
    return _moto
