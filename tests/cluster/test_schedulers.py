"""Addresses at which no scheduler of Dask answers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import penstock
from penstock.base import HEAP_VARIABLES
from penstock.base.errors import UsageError
from penstock.cluster import workers
from penstock.cluster.absence import Absence

from ..anew import Ended, forked, imported_anew

distributed = pytest.importorskip("distributed")
HTTP = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n" * 20


@pytest.fixture(params=["closed", "silent", "of another protocol"])
def port(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A port where no scheduler is, of which none is expected for long."""
    monkeypatch.setattr(workers, "CONNECT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = int(listening.getsockname()[1])
        if request.param == "closed":
            listening.close()
            yield port
            return
        met = []

        def meet() -> None:
            met.append(listening.accept()[0])
            if request.param != "silent":
                met[0].sendall(HTTP)

        aside = threading.Thread(target=meet)
        aside.start()
        yield port
        aside.join()
        met[0].close()


def sentence_of(address: str) -> str:
    with pytest.raises(UsageError) as caught, workers.connected(address):
        pass
    return str(caught.value)


def test_what_is_no_scheduler_is_one_sentence(port: int) -> None:
    """Here the caller has an event loop of its own, as a notebook has."""
    address = f"tcp://127.0.0.1:{port}"

    async def called() -> str:
        return sentence_of(address)

    assert asyncio.run(called()).startswith(f"--cluster {address}: no scheduler answers ")


@pytest.mark.parametrize(
    ("address", "why"),
    [("tls://127.0.0.1:9", "ssl_context"), ("tcp://127.0.0.1", "missing port number")],
)
def test_an_address_that_cannot_be_asked_says_why(address: str, why: str) -> None:
    sentence = sentence_of(address)
    assert sentence.startswith(f"--cluster {address}: no scheduler answers there (")
    assert why in sentence


@pytest.mark.slow
def test_a_worker_that_dies_while_it_starts_is_started_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its nanny ends then. Dask starts no other."""
    monkeypatch.setattr(workers, "LOST_S", 5)
    with workers.connected("local:1", absence=Absence(300)) as here:
        (nanny,) = here.client.cluster.workers.values()
        while nanny.status.name not in ("closed", "failed"):
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.Error):  # it has just ended
                    if "spawn_main" in " ".join(child.cmdline()):
                        child.kill()
            time.sleep(0.01)
        here.wait()
        assert here.client.submit(os.getpid, pure=False).result(300) != os.getpid()


@pytest.mark.slow
def test_a_worker_that_fails_while_it_is_asked_is_not_one_without_penstock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be about to die."""
    mine = os.getpid()

    def version() -> str:
        if os.getpid() != mine:
            raise RuntimeError
        return "1"

    monkeypatch.setattr(workers, "version_question", lambda: version)
    with workers.connected("local:1", absence=Absence(300)) as here:
        here.wait()
        assert here.strangers() == {}


def in_a_fork(asked: Path, path: list[str]) -> Ended:
    """What a fork answers, of which Penstock is forgotten: libraries are those of here."""

    def work() -> None:
        sys.path[:0] = path
        with imported_anew():
            print(pickle.loads(asked.read_bytes())())

    return forked(work, asked.parent)


def in_a_fresh_one(asked: Path, path: list[str]) -> Ended:
    code = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb'))())"
    done = subprocess.run(
        [sys.executable, "-c", code, str(asked)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("ask", [in_a_fork, pytest.param(in_a_fresh_one, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["shadowed", "older"])
def test_a_python_with_another_penstock_can_say_so(
    kind: str, ask: Callable[[Path, list[str]], Ended], tmp_path: Path
) -> None:
    """What it is asked needs nothing of ours there."""
    asked = tmp_path / "asked.pickle"
    asked.write_bytes(distributed.protocol.pickle.dumps(workers.version_question()))
    theirs = tmp_path / "theirs"
    (theirs / "penstock_dl-0.0.1.dist-info").mkdir(parents=True)
    about = "Metadata-Version: 2.1\nName: penstock-dl\nVersion: 0.0.1\n"
    (theirs / "penstock_dl-0.0.1.dist-info/METADATA").write_text(about)
    if kind == "shadowed":
        (theirs / "penstock").mkdir()
        (theirs / "penstock/__init__.py").write_text("")
    done = ask(asked, [str(theirs), str(Path(penstock.__file__).parents[1])])
    assert done.out.strip() == ("0.0.1" if kind == "older" else "not at all"), done.err


@pytest.mark.slow
def test_workers_load_what_a_job_needs_before_it_is_given_to_them() -> None:
    """Their processes begin with one heap: set later, it would not hold for Dask's threads. And
    Dask does not look 100 times a second where these are."""
    pytest.importorskip("torch")
    before = dict(os.environ)
    with workers.connected("local:1", preload="penstock.inference.sharing.ahead") as here:
        here.wait()
        until = time.monotonic() + 300
        while "torch" not in here.client.submit(lambda: [*sys.modules], pure=False).result(300):
            assert time.monotonic() < until
            time.sleep(0.1)
        born = here.client.submit(Path("/proc/self/environ").read_text).result(300).split("\0")
        assert {f"{name}={text}" for name, text in HEAP_VARIABLES.items()} <= {*born}
        callbacks = here.client.run(lambda dask_worker: [*dask_worker.periodic_callbacks])
        assert all("heartbeat" in each and "profile" not in each for each in callbacks.values())
    assert dict(os.environ) == before
