"""Stores that fail for a while: the job waits and goes on, or ends so that it can be resumed."""

import errno
import itertools
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.base import Flow, StageError, StoreAway, UsageError
from penstock.data.stores import transient
from penstock.data.stores.in_memory import MemorySink
from penstock.data.stores.lock import OutputLock, _LockFile
from penstock.data.stores.sliced import SlicedSource
from penstock.inference import run as infer
from penstock.inference.run_folder.journal import Journal
from penstock.inference.stages import retries

from ..parameters import mainly, paired
from ..preloaded import started
from .faulty_s3 import BODY, Door, distinct, door_to, get, new, put
from .kit import SMALL, arange, config, job, values

KNOBS: dict[str, Any] = {"model": "identity", "patch": 8, "overlap": 2, "devices": "cpu",
                         "block": 10, "head_kind": "intensity"}  # fmt: skip


@pytest.fixture
def impatient(monkeypatch) -> None:
    """Waits of milliseconds between tries: how many there are does not depend on them."""
    monkeypatch.setattr(retries, "FIRST_S", 0.001)
    monkeypatch.setattr(retries, "LONGEST_S", 0.05)


def failing(real: Any, error: Exception, calls: range) -> Any:
    """A method of which some calls fail."""
    count = iter(range(10**9))
    lock = threading.Lock()

    def call(*args: Any, **kwargs: Any) -> Any:
        with lock:
            number = next(count)
        if number in calls:
            raise error
        return real(*args, **kwargs)

    return call


ANSWERS = {
    True: [(503, "SlowDown"), (503, ""), (500, "InternalError"), (502, ""), (504, ""), (429, ""),
           (408, ""), (400, "RequestTimeout")],
    False: [(403, "AccessDenied"), (403, "ExpiredToken"), (400, "ExpiredToken"), (401, ""),
            (404, "NoSuchBucket"), (507, ""), (301, "")],
}  # fmt: skip
"""Statuses and codes of those that pass, and of those that do not."""


@pytest.mark.slow
@pytest.mark.parametrize("passes", [True, False])
def test_answers_of_a_real_server_are_told_apart(passes: bool, s3_endpoint: str) -> None:
    with door_to(s3_endpoint) as door:
        once = {"s3_request_retries": {"max_retries": 0}}
        kept = {**put(door, "in", distinct(4), 4), "context": once}
        sink = penstock.open_sink(kept, domain=penstock.Box.of((0,) * 5, (1, 1, 4, 4, 4)),
                                  dtype=np.dtype("uint16"), resume=True)  # fmt: skip
        sink.create()
        for status, code in ANSWERS[passes]:
            door.answers = {"PUT": (status, BODY.format(code, "a word") if code else "")}
            with pytest.raises(ValueError) as caught:
                sink.write(sink.domain, np.ones((1, 1, 4, 4, 4), "uint16"))
            assert transient.is_transient(caught.value) is passes, (status, code)
            assert transient.is_full(caught.value) is (status == 507)
            assert "retry attempts" not in str(caught.value)
            assert (code or f"HTTP {status}") in str(caught.value)


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (OSError(errno.ESTALE, "Stale file handle"), True),
        (OSError(errno.EIO, "Input/output error"), True),
        (ConnectionResetError(errno.ECONNRESET, "reset"), True),
        (TimeoutError("timed out"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), False),
        (PermissionError(errno.EACCES, "Permission denied"), False),
        (FileNotFoundError("chunk 3 is not there (--missing error)"), False),
        (ValueError("UNAVAILABLE: CURL error Could not connect [curl_code='7']"), True),
        (ValueError("FAILED_PRECONDITION: Error reading: Invalid blosc-compressed data"), False),
        (ValueError("RESOURCE_EXHAUSTED: Failed to write [os_error_code='28']"), False),
        (ValueError("UNKNOWN: Failed to read [os_error_code='116']"), True),
        (RuntimeError("a defect"), False),
    ],
)
def test_errors_of_the_system_are_told_apart(error: Exception, passes: bool) -> None:
    wrapped = RuntimeError("in other words")
    wrapped.__cause__ = error
    full = any(word in str(error) for word in ("space left", "quota", "'28'"))
    for each in (error, wrapped):
        assert transient.is_transient(each) is passes
        assert transient.is_full(each) is full


@pytest.mark.parametrize(
    ("error", "normalize"),
    mainly(
        paired(
            [OSError(errno.ESTALE, "Stale file handle"), ConnectionResetError("reset")],
            ["none", "global"],
        ),
        1,
    ),
)
@pytest.mark.usefixtures("impatient")
def test_faults_that_pass_are_counted_and_change_no_voxel(
    error: Exception, normalize: str, tmp_path, monkeypatch
) -> None:
    started = job(tmp_path, normalize=normalize)
    monkeypatch.setattr(SlicedSource, "read", failing(SlicedSource.read, error, range(3)))
    monkeypatch.setattr(MemorySink, "write", failing(MemorySink.write, error, range(1, 3)))
    summary = infer.run_job(started)
    assert (started.config.out_spec[0] == started.config.in_spec).all()  # it is the identity
    assert summary.retries == 5 and summary.retry_seconds > 0
    assert any(line.startswith("Retries: ") and "5 times" in line for line in summary.lines())
    rows = [json.loads(row) for row in (tmp_path / "run/retries.jsonl").read_text().splitlines()]
    assert len(rows) == 5
    first = "read" if normalize == "none" else "statistics"
    assert {row["at"].split()[0] for row in rows} == {first, "write"}
    metrics = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert json.loads(metrics[-1])["gauges"]["retries"] == 5
    assert json.loads((tmp_path / "run/summary.json").read_text())["retries"] == 5


@pytest.mark.usefixtures("impatient")
def test_the_lock_is_tried_again_and_its_check_is_counted(tmp_path, monkeypatch) -> None:
    error = ConnectionResetError("reset")
    monkeypatch.setattr(_LockFile, "take", failing(_LockFile.take, error, range(2)))
    monkeypatch.setattr(OutputLock, "name", failing(OutputLock.name, error, range(1)))
    monkeypatch.setattr(OutputLock, "check", failing(OutputLock.check, error, range(1)))
    out, run = tmp_path / "out.zarr", tmp_path / "run"
    assert penstock.run_inference(arange((8, 8, 8)), out, run_dir=run, **SMALL).retries == 1


@pytest.mark.parametrize(
    ("owner", "fault"),
    paired([SlicedSource, MemorySink], [(errno.ENOSPC, 3), (errno.EDQUOT, 3), (errno.EACCES, 1)]),
)
def test_lasting_faults_are_told(owner: Any, fault: tuple[int, int], tmp_path, monkeypatch) -> None:
    number, code = fault
    stage = "read" if owner is SlicedSource else "write"
    started = job(tmp_path, normalize="percentile")
    error = OSError(number, "as it is")
    monkeypatch.setattr(owner, stage, failing(getattr(owner, stage), error, range(3, 10**9)))
    item = "brick" if stage == "read" else "block"
    with pytest.raises(StageError, match=rf"^{stage} failed at {item} .*as it is") as caught:
        infer.run_job(started)
    assert caught.value.exit_code == code
    assert ("make room there, then run again" in str(caught.value)) == (code == 3)
    assert not (tmp_path / "run/retries.jsonl").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_a_fault_that_outlasts_the_patience_ends_with_3_and_resumes(tmp_path, monkeypatch) -> None:
    source, out = arange((20, 20, 20)), tmp_path / "out.zarr"
    read, note, noted = SlicedSource.read, Journal.note, threading.Event()
    count = itertools.count()

    def vanish(*words: Any) -> Any:
        if next(count) < 4:
            return read(*words)
        assert noted.wait(60), "four blocks are enough for a block"
        raise OSError(errno.ESTALE, "Stale file handle")

    def noting(*words: Any) -> None:
        note(*words)
        noted.set()

    with monkeypatch.context() as patch:
        patch.setattr(SlicedSource, "read", vanish)
        patch.setattr(Journal, "note", noting)
        said = (
            r"^read failed at brick .*Stale file handle; this went on for 300 ms and \d+ "
            r"attempts? \(`retry_for`\); run again with `resume=True`"
        )
        with pytest.raises(StageError, match=said) as caught:
            penstock.run_inference(source, out, retry_for=0.3, normalize="percentile", **KNOBS)
    assert caught.value.exit_code == 3
    assert caught.value.stage == "read"
    summary = penstock.run_inference(source, out, resume=True, normalize="percentile", **KNOBS)
    assert summary.blocks_skipped > 0
    assert (values(out) == source).all()


@pytest.mark.parametrize("text", ["soon", "-1", "1 week", ""])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--retry-for: .* is not a time such as 30s"):
        config(retry_for=text)


VOLUME = distinct(20)[:10]
"""4 chunks of an output."""
BRIEF = {"max_retries": 1, "initial_delay": "10ms"}


def words(
    door: Door, out: str, folder: Path, requests: dict[str, Any], remote_input: bool = False
) -> list[str]:
    """A job on `VOLUME` whose specs say how often TensorStore sends a request by itself."""
    context: dict[str, Any] = {"context": {"s3_request_retries": requests}}
    source: Any = folder.with_name("in.npy")
    np.save(source, VOLUME)
    if remote_input:
        source = json.dumps(put(door, "in", VOLUME, 20) | context)
    given = {"--in-spec": source,
             "--out-spec": json.dumps(new(door, out, VOLUME, 10) | context),
             "--run-dir": folder, "--model-type": "identity", "--patch": 10, "--overlap": 0,
             "--block": 10, "--devices": "cpu", "--normalize": "none"}  # fmt: skip
    return ["infer", *(str(word) for pair in given.items() for word in pair)]


@pytest.mark.slow
def test_a_server_that_falls_silent_is_asked_again(s3_endpoint: str, tmp_path, monkeypatch) -> None:
    """In a process of its own: TensorStore reads its timeouts once."""
    with door_to(s3_endpoint) as door:
        command = words(door, "out", tmp_path / "run", BRIEF)
        door.silent, door.answers = threading.Event(), {"PUT": (503, "")}
        monkeypatch.setenv("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", "1")
        rows, log = tmp_path / "run/retries.jsonl", tmp_path / "said"
        process = started(tmp_path, command)
        while not rows.exists():
            assert process.is_alive(), log.read_text()
            threading.Event().wait(0.05)
        silent, door.silent, door.answers = door.silent, None, {}
        silent.set()
        process.join(300)
        assert process.exitcode == 0, log.read_text()
        assert (get(door, "out") == VOLUME).all()
    assert "Operation too slow" in rows.read_text()


@pytest.mark.slow
def test_a_users_own_patience_wins(s3_endpoint: str) -> None:
    with door_to(s3_endpoint) as door:
        once = {"s3_request_retries": {"max_retries": 1, "initial_delay": "1ms"}}
        source = penstock.open_source({**put(door, "in", distinct(4), 4), "context": once})
        door.answers = {"GET": (503, "")}
        with pytest.raises(ValueError, match="HTTP 503"):
            source.read(source.domain)
        assert door.refused == 2


def test_the_time_of_a_store_begins_anew_with_each_success_and_is_its_own(monkeypatch) -> None:
    """Three reads of one store and a write of another, on a clock that each try moves by a second:
    the time that is given is 10 s."""
    monkeypatch.setattr(retries, "FIRST_S", 0.0)
    now, stale = [0.0], OSError(errno.ESTALE, "Stale file handle")
    patient = retries.Retries(10, None, lambda: now[0], lambda: None)

    def tries_of(answers: str, during: Any = lambda: None) -> int:
        """How many tries a read takes whose answers these are, + a success."""
        left = iter(answers)

        def work() -> None:
            now[0] += 1
            during()
            if next(left) == "-":
                raise stale

        patient.run(Flow(), "in", "read", work)
        return len(answers) - len([*left])

    assert tries_of("--------+") == 9
    assert tries_of("---------+") == 10  # the first one's time is not added to this one's
    assert tries_of("-" * 40 + "+", during=lambda: tries_of("+")) == 41
    elsewhere = lambda: patient.run(Flow(), "out", "write", lambda: None)  # noqa: E731
    with pytest.raises(StoreAway, match=r"this went on for 10\.0 s and 10 attempts"):
        tries_of("-" * 40, during=elsewhere)
    assert patient.failing_s == 0
