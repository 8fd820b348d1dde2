"""Fixtures that several files of this folder share."""

import contextlib
import gc
import io
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

import penstock.bench
from penstock.bench.launch import supervisor, worker
from penstock.bench.launch.supervisor import Ending, Launch, LaunchPlace

from . import zoo
from .kit_loader import weather
from .kit_model import NETS


@pytest.fixture(autouse=True)
def _frozen() -> None:
    """Whoever measures collects garbage first: not all that libraries have made in each test."""
    gc.freeze()


@pytest.fixture(scope="session")
def nets(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("nets") / "nets.py"
    path.write_text(NETS)
    return str(path)


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """A packed data set of weather, which nobody writes to."""
    return weather(tmp_path_factory.mktemp("packed") / "data")


@pytest.fixture
def launches_here(monkeypatch, tmp_path_factory) -> None:
    """Launches do all that they do, but in this process and not in one of their own."""
    folder = tmp_path_factory.mktemp("launches")

    def run(command: Sequence[str], launch: Launch, place: LaunchPlace) -> Ending:
        assert launch.memory_limit is None, "it would stay with this process"
        assert place.wanted is None or place.wanted()
        path, answers = folder / "request.json", folder / "answers"
        path.write_text(json.dumps(asdict(launch)))
        descriptor = os.open(answers, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            code = worker.main(str(path), str(descriptor))
        os.close(descriptor)
        said, end = answers.read_bytes(), stderr.getvalue().encode()[-supervisor.STDERR_BYTES :]
        return Ending(code, said=said, stderr=end, peak=2**20, peak_kernel=2**20)

    monkeypatch.setattr(supervisor, "_run", run)
    monkeypatch.setattr(worker, "end_with_parent", lambda: None)
    monkeypatch.setattr(worker.faulthandler, "enable", lambda **_: None)


@pytest.fixture
def zoo_here(launches_here, monkeypatch) -> None:
    """The same for those of the zoo, where an exception or a result is all that is asked for."""
    monkeypatch.syspath_prepend(str(Path(zoo.__file__).parent))
    monkeypatch.setattr(penstock.bench, "measure", zoo.measuring_loop(), raising=False)
