"""Fixtures that several test files share."""

import argparse
import functools
import gc
import itertools
import logging
import os
import signal
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture.providers import HypothesisProvider

from penstock import cli
from penstock.base import environment_kept, extensions
from penstock.data import volumes
from penstock.instruments import ThisMachine, environment
from penstock.reports.charts import paper

# Also where the shell forbids bytecode: without it each of a hundred processes compiles torch anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell that starts tests in the background has them ignore Ctrl-C, and all that they start too.
signal.signal(signal.SIGINT, signal.default_int_handler)


def _holds_tests(folder: str) -> bool:
    """Whether what tests write has room there, scripts that are started among it."""
    try:
        room = os.statvfs(folder)
    except (OSError, AttributeError):  # there is none on other systems
        return False
    free = room.f_bavail * room.f_frsize
    return free > 2 << 30 and not room.f_flag & os.ST_NOEXEC and os.access(folder, os.W_OK)


# What tests write is kept in memory where that can be, so that none waits for a disk.
if _holds_tests("/dev/shm"):
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")

# Each law is held with a few examples whenever tests are run, with many once in `make check`, and
# with most in `make proofs`. A machine that is busy makes no example wrong.
for name, max_examples in (("few", 2), ("many", 30), ("most", 200)):
    settings.register_profile(name, deadline=None, max_examples=max_examples)
settings.load_profile("few")


def pytest_configure(config: pytest.Config) -> None:
    """What Dask warns of where a machine is busy is no error."""
    slow = "ignore:Creating scratch directories is taking a surprisingly long time:UserWarning"
    config.addinivalue_line("filterwarnings", slow)
    if "not slow" not in config.option.markexpr:
        os.environ["TRAININGS_FORKED"] = "1"  # what all of them load is loaded before they fork
    if not config.getoption("--hypothesis-profile"):
        # Of a few examples none need be a constant of ours, for which all rooms would be parsed.
        HypothesisProvider._maybe_draw_constant = lambda *_, **__: None  # type: ignore[method-assign]
    if config.option.verbose < 1 and not config.option.durations:
        for plugin in config.pluginmanager.get_plugins():
            if send := getattr(plugin, "sendevent", None):  # of a worker of xdist
                vars(plugin)["sendevent"] = functools.partial(_send_what_counts, send)


def _send_what_counts(send: Callable[..., None], name: str, **event: Any) -> None:
    """Four of six messages about a test that passes are that it begins, is set up, is torn down
    and ends, which is shown nowhere. To pack and unpack them takes 2 s of a CPU for all tests."""
    report = event.get("data", {})
    set_up = name == "testreport" and report["when"] != "call" and report["outcome"] == "passed"
    if not set_up and name not in ("logstart", "logfinish"):
        send(name, **event)


def pytest_collection() -> None:
    """Thousands of tests and the libraries under them are all there to stay: searching them for
    garbage took a third of the collection."""
    gc.disable()


_ORDER = "data inference cli instruments reports".split()
_ORDER += "bench models training cluster base scaling tests loading".split()
"""Folders in the order of their tests. Each of two workers begins with a half. Folders that need
the same large libraries stand in one half, so that one worker imports them: rasterio and xarray, or
Lightning with torchvision. Who is done early takes tests from the end of the other half, so what
needs no such library stands there."""
_FORKING = ("started", "forked_workers", "Scheduler")
"""Names in a file whose tests fork a process. They come first, so that one worker starts the
process that is forked: it loads torch, and others take over from the end of a half. The tests that
fork themselves come before those beside them. Next come those that ask S3, as one worker is to
import moto."""


def _turn(item: pytest.Item) -> int:
    assert isinstance(item, pytest.Function)
    if "_dynamo" in item.function.__code__.co_names:
        return _ORDER.index("training")  # which loads torch's compiler, too
    if any(hasattr(item.module, name) for name in _FORKING):
        return -3 if {*_FORKING} & {*item.function.__code__.co_names} else -2
    if "s3_endpoint" in item.fixturenames:
        return -1
    folder = item.path.parent.name
    return _ORDER.index(folder) if folder in _ORDER else len(_ORDER)


@pytest.hookimpl(trylast=True)  # after those that are not asked for have gone
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each worker of xdist begins with the same number of tests, and the longest begin first."""
    docs = [item for item in items if item.get_closest_marker("docs")]
    others = iter(sorted((item for item in items if item not in docs), key=_turn))
    workers, left = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")), len(items)
    items.clear()
    for worker in range(workers):
        share, first = left // (workers - worker), docs[worker::workers]
        items += [*first, *itertools.islice(others, max(0, share - len(first)))]
        left -= share
    items += others


def pytest_collection_finish() -> None:
    gc.freeze()  # nor is any test to search them again
    gc.set_threshold(50_000)  # nor, as often as Python would, what it imports itself
    gc.enable()


def pytest_unconfigure() -> None:
    """pytest collects five times at its end, to hear of files that nobody closed. Once is enough:
    for the other times nothing is left to search."""
    gc.collect()
    gc.freeze()


def _listed_once(patch: pytest.MonkeyPatch) -> None:
    """What is installed stays so while tests run. To list its entry points takes 10 ms, at each
    training and for each name of a model. A test that puts a folder in front has that one listed
    anew, and one that changes the path otherwise all."""
    real, here = metadata.entry_points, list(sys.path)

    @functools.cache
    def kept(**which: str) -> metadata.EntryPoints:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "path", here)
            return real(**which)

    def entry_points(**which: str) -> metadata.EntryPoints:
        if sys.path == here:
            return kept(**which)
        if sys.path[1:] != here or not which:
            return real(**which)
        in_front = metadata.distributions(path=sys.path[:1])
        added = (each for of in in_front for each in of.entry_points)
        return metadata.EntryPoints((*added, *kept(group=which["group"]))).select(**which)

    for room in (metadata, extensions):
        patch.setattr(room, "entry_points", entry_points)


def _parsers_made_once(patch: pytest.MonkeyPatch) -> None:
    """To make the parser of a verb takes longer than most commands that are refused. A test that
    puts a folder in front, whose packages may add words, has one made anew."""
    real, here = cli.parser_of, list(sys.path)
    kept = functools.cache(lambda verb, run: real([verb]))

    def parser_of(words: Sequence[str]) -> argparse.ArgumentParser:
        if not words or words[0] not in cli.VERBS or sys.path != here:
            return real(words)
        return kept(words[0], import_module(f"penstock.cli.{words[0]}").run)

    patch.setattr(cli, "parser_of", parser_of)


def _pages_walked_once(patch: pytest.MonkeyPatch) -> None:
    """Each run of the inference begins with a reading of PSS, for which the kernel walks all pages
    of torch: 10 ms. Here one reading of this process serves all; others are read as they are."""
    real = ThisMachine.pss
    kept = functools.cache(lambda: real(ThisMachine()))

    def pss(self: ThisMachine) -> int | None:
        return kept() if self._root.pid == os.getpid() else real(self)

    patch.setattr(ThisMachine, "pss", pss)


def _repository_asked_once(patch: pytest.MonkeyPatch) -> None:
    """Each run, training and launch asks git for the commit, and git looks at every file of this
    repository: 10 ms. Here the first answer stands. In any other folder git is asked."""
    real, here = environment.ask_git, Path.cwd()
    kept = functools.cache(lambda words: real(words))

    def ask_git(words: Sequence[str], folder: Path | None = None) -> str | None:
        ours = (folder or Path.cwd()) == here
        return kept(tuple(words)) if ours else real(words, folder)

    patch.setattr(environment, "ask_git", ask_git)


def _own_store(patch: pytest.MonkeyPatch, factory: pytest.TempPathFactory) -> None:
    """Trainings that tell MLflow, and what is found of networks, keep out of the folders of whoever
    runs the tests. Only Matplotlib's list of fonts stays there: to make it takes 0.4 s of each
    process that draws."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    patch.setenv("MPLCONFIGDIR", str(cache / "matplotlib"))
    patch.setenv("XDG_DATA_HOME", str(factory.mktemp("data")))
    patch.setenv("XDG_CACHE_HOME", str(factory.mktemp("cache")))


def _less_is_done(patch: pytest.MonkeyPatch) -> None:
    """What takes its time and changes nothing that tests look at."""
    # Each record says how busy the machine was: two looks at all processes, a quarter of a
    # second apart.
    patch.setattr(environment, "WATCH_S", 0.0)
    patch.setattr(environment, "_cpu_seconds_of_others", dict)
    # Each job asks whether anything is frozen. Python counts, for 30 ms of all that is here.
    patch.setattr(gc, "get_freeze_count", lambda: 1)
    patch.setattr(paper, "_DPI", 20)  # what is in a figure is looked for on its axes
    patch.setattr(volumes, "PERIOD", (60, 60, 60))  # there is less to grow


_ONCE = (
    _listed_once, _parsers_made_once, _pages_walked_once, _repository_asked_once, _less_is_done,
)  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def _for_all_tests(tmp_path_factory) -> Iterator[None]:
    """One fixture for all of these: pytest sets each up for each of thousands of tests."""
    with pytest.MonkeyPatch.context() as patch:
        for begin in _ONCE:
            begin(patch)
        _own_store(patch, tmp_path_factory)
        yield


@pytest.fixture
def here(tmp_path, monkeypatch) -> None:
    """`tmp_path` is the working folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def on_disk() -> Iterator[Path]:
    """A folder for files that must not lie in memory, as those of `tmp_path` may."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Any]:
    """A real one, with one page."""
    from .reports.browser import CHROMIUM, Browser

    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def undrawn(monkeypatch) -> None:
    """In place of each figure a blank one is written: for tests of files, not of what they show."""
    from matplotlib.figure import Figure

    monkeypatch.setattr(paper, "draw", lambda figure: Figure((1, 1)))


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


# A server that logs between two tests, when pytest takes no logs, would keep the captured stderr of
# one for all others, and complain in theirs that it is closed.
logging.getLogger("werkzeug").addHandler(logging.NullHandler())


@pytest.fixture(scope="session")
def _moto() -> Iterator[str]:
    """A server of moto's, which otherwise lists its folders at each request and all errors of S3 at
    each error: a third of its time."""
    room, errors = pytest.importorskip("moto.server"), pytest.importorskip("moto.core.errors")
    host_of, errors_of = room.DomainDispatcherApplication, errors.ErrorLookupFactory
    with pytest.MonkeyPatch.context() as patch:
        kept = functools.cache(host_of.get_backend_for_host)
        patch.setattr(host_of, "get_backend_for_host", kept)
        listed = staticmethod(functools.cache(errors_of._create_error_lut))
        patch.setattr(errors_of, "_create_error_lut", listed)
        server = room.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
        server.stop()


@pytest.fixture
def s3_endpoint(_moto: str, monkeypatch, tmp_path) -> str:
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
