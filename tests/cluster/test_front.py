"""Items shared among workers: each is done once or named, whoever leaves, dies or does not fit."""

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.base import (
    HEAP_VARIABLES,
    Incomplete,
    OnWorkers,
    OutOfMemory,
    PenstockError,
    StageError,
    StoreFull,
)
from penstock.base.errors import UsageError
from penstock.cluster import (
    FailedItem,
    UnfitWorker,
    WorkerLeaves,
    Workers,
    before_leaving,
    close_after_item,
    connect,
    connection,
    front,
    share,
    share_pieces,
    wait_for_worker,
)
from penstock.cluster import workers as waiting

from ..later import imported_later
from ..preloaded import forked_workers

distributed = imported_later("distributed")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
COUNT = 8
CALLS: Counter[int] = Counter()
"""How often each item was begun, by workers of this process."""
AT_WORK: Counter[str] = Counter()
"""Items at work on each of these workers."""
MOST: Counter[str] = Counter()


class Cluster:
    """A scheduler and workers in this process, which come and go by name."""

    def __init__(self, *names: str) -> None:
        loopback = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
        self.one = {"cls": distributed.Worker, "options": {**loopback, "nthreads": 2}}
        options = {**loopback, "port": 0, "dashboard": False}
        self.dask = distributed.SpecCluster(
            dict.fromkeys(names, self.one),
            scheduler={"cls": distributed.Scheduler, "options": options},
            silence_logs=logging.CRITICAL,
        )

    def change(self, gone: str = "", come: str = "") -> None:
        self.dask.worker_spec.pop(gone, None)
        if come:
            self.dask.worker_spec[come] = self.one
        self.dask.sync(self.dask._correct_state)


@contextlib.contextmanager
def workers_of(*names: str, **knobs: Any) -> Iterator[tuple[Cluster, Workers]]:
    cluster = Cluster(*names)
    with cluster.dask:
        asked = OnWorkers(cluster=cluster.dask.scheduler_address, **knobs)
        with connect(asked) as workers:
            yield cluster, workers


@pytest.fixture(autouse=True)
def _often(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(front, "LOOK_S", 0.05)
    monkeypatch.setattr(front, "TICK_S", 0.05)
    monkeypatch.chdir(tmp_path)  # workers of this machine begin here
    for counts in (CALLS, AT_WORK, MOST):
        counts.clear()


def name_here() -> str:
    return str(distributed.get_worker().name)


def work(number: int) -> int:
    """An item that takes a moment, and that no worker of an odd name may do."""
    here = name_here()
    if "odd" in here:
        raise UnfitWorker("another kind")
    CALLS[number] += 1
    AT_WORK[here] += 1
    MOST[here] = max(MOST[here], AT_WORK[here])
    time.sleep(0.02)
    AT_WORK[here] -= 1
    return number


def test_each_item_is_done_once_and_a_worker_does_one_at_a_time() -> None:
    """Workers of two threads. Of items without an end no more are taken than needed."""
    taken = itertools.count()
    with workers_of("one", "two") as (_, workers):
        shared = share(workers, work, taken, work_of=lambda number: number + 100)
        done = dict(itertools.islice(shared, COUNT))
        shared.close()
    assert all(value == number + 100 for number, value in done.items())
    assert len(done) == COUNT and max(CALLS.values()) == 1
    assert MOST.keys() == {"one", "two"} and max(MOST.values()) == 1
    assert next(taken) <= COUNT + 2


def fails(number: int) -> int:
    CALLS[number] += 1
    if number == 1:
        raise UsageError("no such channel")
    if number == 2:
        raise RuntimeError("a fault\nof two lines")
    if number == 3 and CALLS[3] < 3:
        raise OSError("passes")
    if number == 4:
        raise StageError("write", "block 1", StoreFull("no room")) from StoreFull("no room")
    if number == 5:
        raise StageError("forward", "block 1", OutOfMemory("none")) from OutOfMemory("none")
    return number


def test_only_faults_are_tried_again_and_what_fails_says_why_with_its_exit_code() -> None:
    with workers_of("one") as (_, workers):
        done = dict(share(workers, fails, range(6)))
        notes = workers.notes("part")
    assert (done[0], done[3]) == (0, 3)
    failed = {number: done[number] for number in (1, 2, 4, 5)}
    assert all(isinstance(each, FailedItem) for each in failed.values())
    assert (failed[1].sentence, failed[1].exit_code) == ("no such channel", 2)
    assert isinstance(failed[1].error(), UsageError)
    assert (failed[2].sentence, failed[2].exit_code) == ("RuntimeError: a fault", 1)
    assert type(failed[2].error()) is PenstockError
    assert failed[4].exit_code == failed[5].exit_code == 3
    assert CALLS == {0: 1, 1: 1, 2: 3, 3: 3, 4: 1, 5: 1}
    assert notes == ["Parts: 4 failed and tried again"]


class LoadedLate:
    """Cannot be loaded where it is sent to, at first."""

    def __reduce__(self) -> tuple[Callable[[], int], tuple[()]]:
        return loaded_late, ()


def loaded_late() -> int:
    CALLS[7] += 1
    if CALLS[7] < 3:
        raise OSError("the folder of the code does not answer")
    return 8


def test_an_item_that_could_not_be_loaded_is_tried_again() -> None:
    with workers_of("one") as (_, workers):
        shared = share(workers, fails, [7], work_of=lambda number: LoadedLate())
        assert dict(shared) == {7: 8} and workers.retried == 2


def test_the_first_piece_that_fails_for_good_is_named() -> None:
    names = {"a": 0, "b": 1, "c": 2}
    with workers_of("one") as (_, workers):
        for given, error, said in (
            ("ac", Incomplete, r"^scene c failed \(RuntimeError: a fault\); run again$"),
            ("ab", UsageError, r"^no such channel$"),
        ):
            done = []
            pieces = share_pieces(
                workers, fails, given, "scene", "run again", work_of=names.__getitem__
            )
            with pytest.raises(error, match=said):
                for name, _ in pieces:
                    done.append(name)
            assert done == ["a"]


def results_of(
    cluster: Cluster, workers: Workers, then: Callable[[set[int]], None], **how: Any
) -> set[int]:
    """The values of all items; ``then`` is called with them again and again."""
    results = set[int]()
    for _, value in share(workers, work, range(COUNT), progress=lambda: then(results), **how):
        results.add(value)
    return results


@pytest.mark.slow
def test_items_go_on_elsewhere_when_the_only_worker_that_fits_is_gone() -> None:
    """They wait for one that fits: the odd one that comes first is left out, and named."""
    with workers_of("fit") as (cluster, workers):
        looks = itertools.count()

        def then(results: set[int]) -> None:
            if "fit" in cluster.dask.worker_spec and len(results) >= 3:
                cluster.change(gone="fit", come="odd")
            if workers.left_out and not workers.fit and next(looks) == 5:
                cluster.change(come="late")

        assert results_of(cluster, workers, then) == {*range(COUNT)}
        assert next(looks) > 5 and [*workers.left_out.values()] == ["another kind"]
        (note,) = (note for note in workers.notes("part") if "Left out" in note)
        assert note.endswith(": another kind") and workers.deaths == 0
    assert max(CALLS.values()) == 1


@pytest.mark.parametrize(("names", "most"), [("odd odder", 9), ("odd odder oddest oddity", 3)])
def test_a_job_that_no_worker_can_do_ends_at_once(names: str, most: int) -> None:
    """Or when so many could not: the fault may be the user's, and a cluster may have thousands."""
    with workers_of(*names.split()) as (_, workers):
        with pytest.raises(UsageError, match=r"^another kind$"):
            list(share(workers, work, [0], most_unfit=most))
        assert len(workers.left_out) == min(most, len(names.split()))


def test_a_worker_with_another_version_is_named_and_does_nothing() -> None:
    with workers_of("one", "two") as (_, workers):
        workers.versions = {**workers.versions, "numpy": "0.1"}
        said = r"^--cluster: no worker can take part\. tcp:\S+: it has numpy \S+, here it is 0\.1"
        with pytest.raises(UsageError, match=said):
            wait_for_worker(workers)
        workers.left_out.clear()
        workers.versions = {"Python": "2.7.9"}
        with pytest.raises(UsageError, match=r"it has Python 3\.\S+, here it is 2\.7\.9; workers"):
            wait_for_worker(workers)
        workers.left_out.clear()
        here = sys.version_info
        workers.versions = {"Python": f"{here.major}.{here.minor}.99"}
        wait_for_worker(workers)
        assert len(workers.fit) == 2


def leaves(number: int) -> int:
    CALLS[number] += 1
    if CALLS[number] == 1 and name_here() == "one":
        raise WorkerLeaves("SIGTERM")
    return number


def test_an_item_whose_worker_leaves_is_done_by_another_and_has_not_failed() -> None:
    with workers_of("one", "two") as (_, workers):
        assert dict(share(workers, leaves, range(4))) == {n: n for n in range(4)}
        assert workers.notes("part") == []


def test_a_job_that_is_to_end_waits_for_what_runs_and_begins_nothing() -> None:
    with workers_of("one", "two") as (_, workers):
        ending = threading.Event()
        done = []
        for number, _ in share(workers, work, itertools.count(), ending=ending.is_set):
            done.append(number)
            if len(done) == 3:
                ending.set()
        assert sorted(done) == sorted(CALLS) and 3 <= len(done) <= 5


def test_what_progress_raises_ends_the_job_and_withdraws_its_items() -> None:
    def raises() -> None:
        if CALLS:
            raise Incomplete("the lock is lost")

    with workers_of("one") as (cluster, workers):
        with pytest.raises(Incomplete, match="the lock is lost"):
            list(share(workers, work, itertools.count(), progress=raises))
        until = time.monotonic() + 60
        while cluster.dask.scheduler.tasks and time.monotonic() < until:
            time.sleep(0.01)
        assert not cluster.dask.scheduler.tasks


def test_a_scheduler_that_is_gone_is_said(monkeypatch) -> None:
    monkeypatch.setattr(connection, "CONNECT_S", 1.0)  # so long it is sought again
    cluster = Cluster("one")
    with connect(OnWorkers(cluster=cluster.dask.scheduler_address)) as workers:
        wait_for_worker(workers)
        cluster.dask.close()
        with pytest.raises(PenstockError, match=r"the scheduler of tcp://\S+ is gone"):
            list(share(workers, work, itertools.count()))


@pytest.fixture
def now(monkeypatch) -> list[float]:
    """The time on the clock of those who wait."""
    seconds = [0.0]
    monkeypatch.setattr(waiting.time, "monotonic", lambda: seconds[0])
    return seconds


def test_a_worker_that_never_comes_is_waited_for_so_long_and_no_longer(now: list[float]) -> None:
    said = list[str]()
    wait = Workers(None, "local", 300, said.append)
    wait.wait(0)
    now[0] = 250
    wait.wait(0)
    wait.wait(1)
    now[0] = 500
    wait.wait(0)
    assert said[0] == "waiting for a worker of local, 4 min 10 s so far"
    now[0] = 551
    with pytest.raises(Incomplete, match="no worker of local was there for 5 min 1 s"):
        wait.wait(0)


def test_workers_that_die_and_come_again_end_no_wait_without_progress(now: list[float]) -> None:
    wait = Workers(None, "local", 300)
    for now[0] in range(0, 1000, 100):  # each death is followed by progress
        wait.gone = [None]
        wait.wait(1)
    wait.gone = [None, 2**30]
    for now[0] in (1000, 1100, 1199):
        wait.wait(1)
    now[0] = 1200
    said = r"^2 workers of local \(memory limit 1.00 GiB\) left or died, and there was no progress "
    with pytest.raises(Incomplete, match=said):
        wait.wait(1)


def test_a_worker_that_leaves_once_is_replaced_by_the_next(now: list[float]) -> None:
    wait = Workers(None, "local", 300, gone=[None])
    for now[0] in (200, 400):
        wait.wait(1)
    wait.gone.append(None)
    now[0] = 700
    with pytest.raises(Incomplete, match="left or died, and there was no progress for 5 min 0 s"):
        wait.wait(1)


def dies(number: int) -> int:
    """Item 1 kills its worker for ever; item 2 three times, and saves something before each."""
    saved = Path(f"saved-{number}")
    with saved.open("a") as file:
        file.write("x")
    if number == 1 or (number == 2 and saved.stat().st_size < 4):
        os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.mark.slow
def test_an_item_on_which_workers_die_is_given_up_unless_some_of_it_is_saved(monkeypatch) -> None:
    monkeypatch.setattr(connection, "DEATHS", 2)

    def saved(number: int) -> int:
        file = Path(f"saved-{number}")
        return file.stat().st_size if number == 2 and file.exists() else 0

    with forked_workers(), connect(OnWorkers(cluster="local:1")) as workers:
        done = dict(share(workers, dies, range(4), saved=saved))
        notes = workers.notes("part")
    assert {n: done[n] for n in (0, 2, 3)} == {0: 0, 2: 2, 3: 3}
    assert done[1].exit_code == 3
    assert done[1].sentence.startswith("2 workers died on it, one after the other; the last was")
    assert Path("saved-1").stat().st_size == 2 and Path("saved-2").stat().st_size == 4
    assert notes == ["Workers: 5 workers died on the way"]


def leave_on(number: int) -> int:
    """The first item has its worker asked to leave, and the second closes its worker."""
    mark = Path(f"seen-{number}")
    if mark.exists() or number > 1:
        return number
    mark.touch()
    if number == 1:
        close_after_item("a stage hangs")
        raise RuntimeError("hangs")
    ended = threading.Event()

    def end() -> None:
        Path("end").touch()
        ended.set()
        time.sleep(0.2)

    before_leaving["here"] = end
    os.kill(os.getpid(), signal.SIGTERM)
    assert ended.wait(60)
    raise WorkerLeaves("SIGTERM")


@pytest.mark.slow
def test_a_worker_that_is_asked_to_leave_or_closes_itself_is_replaced_without_blame() -> None:
    with forked_workers(), connect(OnWorkers(cluster="local:1")) as workers:
        assert dict(share(workers, leave_on, range(3))) == {0: 0, 1: 1, 2: 2}
        assert workers.deaths == 0 and Path("end").exists()
        assert workers.notes("part") == ["Parts: 1 failed and tried again"]


def needs_memory(number: int) -> int:
    return len(bytearray(b"x") * (1 << 30))


@pytest.mark.slow
def test_a_worker_whose_memory_limit_is_too_low_ends_the_job_and_is_named() -> None:
    with (  # its worker is no fork, whose libraries alone would fill it
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=1, memory_limit="700MiB", host="127.0.0.1",
            dashboard_address=None, silence_logs=logging.CRITICAL,
        ) as cluster,
        connect(OnWorkers(cluster=cluster.scheduler_address, worker_timeout=3000)) as workers,
    ):  # fmt: skip
        ((_, value),) = share(workers, needs_memory, [0])
    assert isinstance(value, FailedItem) and value.exit_code == 3
    assert "memory limit (dask worker --memory-limit) is 700 MiB" in value.sentence


HTTP = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n" * 20


@pytest.fixture(params=["closed", "silent", "of another protocol"])
def port(request, monkeypatch) -> Iterator[int]:
    """A port where no scheduler is, of which none is expected for long."""
    monkeypatch.setattr(connection, "CONNECT_S", 0.3)
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
    with pytest.raises(UsageError) as caught, connect(OnWorkers(cluster=address)):
        pass
    return str(caught.value)


def test_what_is_no_scheduler_is_one_sentence(port: int) -> None:
    """Here the caller has an event loop of its own, as a notebook has."""
    address = f"tcp://127.0.0.1:{port}"

    async def called() -> str:
        return sentence_of(address)

    assert asyncio.run(called()).startswith(f"--cluster {address}: no scheduler answers ")


@pytest.mark.slow
def test_workers_load_what_a_job_needs_before_it_is_given_to_them() -> None:
    """Their processes begin with one heap: set later, it would not hold for Dask's threads. And
    Dask does not look 100 times a second where these are. No Ctrl-C of a terminal reaches them
    while they import: it ended them with tracebacks, and the job for a wrong reason."""
    pytest.importorskip("torch")
    before = dict(os.environ)
    with connect(OnWorkers(cluster="local:1"), preload="penstock.inference.opening.job") as here:
        wait_for_worker(here)
        until = time.monotonic() + 300
        while "torch" not in here.client.submit(lambda: [*sys.modules], pure=False).result(300):
            assert time.monotonic() < until
            time.sleep(0.1)
        born = here.client.submit(Path("/proc/self/environ").read_text).result(300).split("\0")
        assert {f"{name}={text}" for name, text in HEAP_VARIABLES.items()} <= {*born}
        blocked = here.client.submit(signal.pthread_sigmask, signal.SIG_BLOCK, []).result(300)
        assert signal.SIGINT in blocked
        callbacks = here.client.run(lambda dask_worker: [*dask_worker.periodic_callbacks])
        assert all("heartbeat" in each and "profile" not in each for each in callbacks.values())
    assert dict(os.environ) == before
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
