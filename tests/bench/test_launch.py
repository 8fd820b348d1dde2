"""The supervisor: whatever a worker does becomes the right record, and the supervisor goes on."""

import errno
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import UsageError
from penstock.bench.launch import supervisor
from penstock.bench.launch.supervisor import Ending, Launch, run_launch
from penstock.bench.launch.worker import status_of
from penstock.bench.scenarios import WrongResult, find
from penstock.instruments.record import Record, case_key, parse_record

from ..preloaded import started

ZOO = str(Path(__file__).parent / "zoo.py")
MIB = 2**20


def run(animal: str, timeout_s: float = 300.0, limit: int | None = None, **case: Any) -> Record:
    launch = Launch(f"zoo:{animal}", case, timeout_s, 2, 5, memory_limit=limit)
    record = run_launch(launch, command=[sys.executable, ZOO])
    assert parse_record(record.line()) == record
    return record


@pytest.mark.slow
def test_a_launch_that_goes_well_is_a_whole_record_whatever_the_one_before_did() -> None:
    assert run("Segfault").status == "crash"
    record = run("Animal", batch=3)
    assert record.ok and record.error is None
    assert (record.launch, record.order) == (2, 5)
    assert record.key == case_key("zoo:Animal", {"batch": 3})
    assert record.samples_s == {"step": (0.5, 0.25, 1.0)}
    assert record.work == {"samples": 1.0}
    assert record.facts == {"kind": "Animal"}
    assert record.warmup.first_s == 1.0 and record.warmup.setup_s is not None
    assert record.memory.host_baseline is not None and record.memory.host_baseline > MIB
    assert record.memory.host_peak >= record.memory.host_baseline, "however short it was"
    assert record.environment["machine"]["cores"] == os.cpu_count()


@pytest.mark.parametrize(
    ("animal", "case", "status", "stage", "message", "stderr"),
    [
        ("HostOom", {"limit": 128 * MIB}, "oom_host", "measure", "MemoryError", "pieces.append"),
        pytest.param("HostOom", {"limit": 300 * MIB, "piece": 4096}, "oom_host", "measure",
                     "MemoryError", "MemoryError", marks=pytest.mark.slow),  # to the last page
        ("BadAlloc", {}, "oom_host", "measure", "std::bad_alloc", "terminate called"),
        pytest.param("Killed", {}, "crash", "measure", "SIGKILL", "", marks=pytest.mark.slow),
        pytest.param("Exits", {"code": 0}, "crash", "measure", "exit code 0 and no result", "",
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_each_end_of_a_process_is_the_right_row(
    animal: str, case: dict[str, Any], status: str, stage: str, message: str, stderr: str
) -> None:
    check_failure(run(animal, **case), status, stage, message, stderr)


@pytest.mark.usefixtures("zoo_here")
@pytest.mark.parametrize(
    ("animal", "status", "stage", "message", "stderr"),
    [
        ("WrongShape", "wrong_result", "measure", "(1, 64, 64), not", "WrongResult"),
        ("Unsupported", "unsupported", "setup", "--dtype float16 is not supported on cpu", ""),
        ("Raises", "crash", "measure", "KeyError: 'no such layer", "in step"),
        ("NotFinite", "crash", "report", "ValueError: Out of range float", ""),
        ("Missing", "unsupported", "setup", "there is no scenario", "Missing"),
    ],
)
def test_each_exception_is_the_right_row(animal, status, stage, message, stderr) -> None:
    check_failure(run(animal), status, stage, message, stderr)


def check_failure(record: Record, status: str, stage: str, message: str, stderr: str) -> None:
    assert (record.status, record.error.stage) == (status, stage)
    assert message in record.error.message and "\n" not in record.error.message
    assert stderr in record.error.stderr
    assert record.samples_s == {} and record.stop is None


NONE = "exit code 0 and no result"


@pytest.mark.parametrize(
    ("said", "stage", "message"),
    [
        (b"", "start", NONE),
        (b'{"stage": "measure"}\n{"result": {"work": {"samp', "measure", NONE),
        (b'hello\n[1]\n{"result": 3}\n\xff\n', "start", NONE),
        (b'{"result": {"samples_s": {"step": [NaN]}}}\n', "start", NONE),
        (b'{"result": {"samples_s": {"step": ["soon"]}}}\n', "report", "samples_s.step.0"),
        (b'{"result": {"case": 3, "memory": 4}}\n', "report", "its answer is not a record: case"),
        (b'{"failed": {"status": "tired", "message": 3}}\n', "report", "its answer is not a rec"),
    ],
)
def test_what_is_no_answer_is_a_crash(said: bytes, stage: str, message: str, monkeypatch) -> None:
    monkeypatch.setattr(supervisor, "_run", lambda *_: Ending(0, said=said))
    record = run("Animal")
    assert (record.status, record.error.stage) == ("crash", stage)
    assert message in record.error.message


def test_a_command_that_is_not_there_is_a_row_too() -> None:
    record = run_launch(Launch("zoo", {}, 1.0), command=["/no/such/program"])
    assert (record.status, record.error.stage) == ("crash", "start")
    assert "could not be started" in record.error.message


def hang(**case: Any) -> tuple[Record, float]:
    """A launch that was killed when it held what it was to hold, after so many seconds: on a busy
    machine a process may take long to come so far."""
    for timeout_s in (1.0, 8.0, 32.0, 128.0):
        record = run("Hang", timeout_s=timeout_s, **case)
        stage = record.error and record.error.stage
        if stage == "measure" and (record.memory.host_peak or 0) > case["bytes"]:
            break
    return record, timeout_s


@pytest.mark.slow
def test_a_hang_is_a_timeout_and_its_memory_is_known() -> None:
    record, seconds = hang(bytes=48 * MIB)
    assert (record.status, record.error.stage) == ("timeout", "measure")
    assert record.error.message == f"it was killed after {seconds:.0f} s"
    assert record.memory.host_peak is not None and record.memory.host_peak > 48 * MIB
    assert record.memory.host_peak_kernel > 48 * MIB


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="no PSS here")
def test_pages_that_a_tree_shares_are_counted_once() -> None:
    record, _ = hang(bytes=200 * MIB, children=3)
    # Not 800 and what four Pythons hold. Looked at while it forks or is killed, each may be seen
    # with fewer that share: 200 * (1 + 1/2 + 1/3 + 1/4) or more, and the Pythons.
    assert 200 * MIB < record.memory.host_peak < 800 * MIB


def test_what_it_prints_neither_blocks_it_nor_is_believed() -> None:
    record = run("Babble")
    assert record.ok
    assert record.samples_s == {"step": (0.5, 0.25, 1.0)}


def test_only_the_end_of_stderr_is_kept() -> None:
    command = [sys.executable, "-S", "-c", "import os; os.write(2, b'x' * 99_999 + b'the end')"]
    record = run_launch(Launch("zoo", {}, 30.0), command=command)
    assert record.error.stderr == "x" * (4096 - 7) + "the end"


def test_a_result_stands_though_its_process_dies_afterwards() -> None:
    record = run("CrashesAtExit")
    assert record.ok and record.error is None
    assert record.facts == {"kind": "CrashesAtExit", "ended": "it died of SIGSEGV"}


@pytest.fixture
def fifo(tmp_path) -> Iterator[tuple[Path, int]]:
    """Reading it ends when the last process that holds it open does."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reader, True)
    yield path, reader
    os.close(reader)


def test_what_a_worker_leaves_in_its_group_is_killed(fifo: tuple[Path, int]) -> None:
    path, reader = fifo
    assert run("Leaves", fifo=str(path), escapes=False).ok
    assert os.read(reader, 100) == b"up\n"
    assert os.read(reader, 1) == b""  # it would wait while anyone lives


@pytest.mark.slow
def test_one_that_escapes_to_another_session_is_not_waited_for() -> None:
    record = run("Leaves", fifo="/dev/null", escapes=True)
    assert record.ok
    os.kill(record.facts["left"], signal.SIGKILL)  # it was alive


def supervisor_of_three(path: Path, reader: int, first: str = "") -> ForkServerProcess:
    """A supervisor, once its worker that hangs and two children of that are up. It runs the code
    ``first`` before."""
    process = started(
        path.parent,
        code=f"{first}\nimport sys\n"
        "from penstock.bench.launch.supervisor import Launch, run_launch\n"
        f"asked = Launch('zoo:Hang', {{'fifo': {str(path)!r}, 'children': 2}}, 100)\n"
        f"command = [sys.executable, {ZOO!r}]\n"
        "run_launch(asked, command=command)",
    )
    writer = os.open(path, os.O_WRONLY)  # so that reading waits for the first of them
    said = b""
    while said.count(b"up") < 3:
        said += os.read(reader, 100)
    os.close(writer)
    return process


def test_an_interrupted_supervisor_takes_the_worker_with_it(fifo: tuple[Path, int]) -> None:
    path, reader = fifo
    received = "import signal; signal.signal(signal.SIGTERM, signal.default_int_handler)"
    process = supervisor_of_three(path, reader, received)
    process.terminate()
    assert os.read(reader, 1) == b""
    process.join()
    assert "KeyboardInterrupt" in (path.parent / "said").read_text()


def test_a_killed_supervisor_takes_the_worker_and_its_forks_with_it(fifo: tuple[Path, int]) -> None:
    path, reader = fifo
    process = supervisor_of_three(path, reader)
    process.kill()
    assert within(reader, 1) == b""
    process.join()


def within(reader: int, most: int) -> bytes:
    """What comes, or the end; neither may take minutes."""
    assert select.select([reader], [], [], 300)[0], "nothing comes, and somebody is left"
    return os.read(reader, most)


def test_a_process_ends_with_its_launcher(fifo: tuple[Path, int]) -> None:
    """And where a process of another kind stands between the two."""
    path, reader = fifo
    child = (
        "import os, time; from penstock.base import orphans\n"
        "orphans.LOOK_EVERY_S = 0.02; orphans.end_with_parent()\n"
        f"os.write(os.open({str(path)!r}, os.O_WRONLY), b'up'); time.sleep(100)"
    )
    between = f"import subprocess, sys; subprocess.call([sys.executable, '-c', {child!r}])"
    program = (
        "import subprocess, sys; from penstock.base import orphans\n"
        f"subprocess.call([sys.executable, '-c', {between!r}], env=orphans.for_children())"
    )
    with subprocess.Popen([sys.executable, "-c", program]) as launcher:
        writer = os.open(path, os.O_WRONLY)
        assert within(reader, 2) == b"up"
        os.close(writer)
        launcher.kill()
        assert within(reader, 1) == b""


@pytest.fixture
def group() -> Iterator[Path]:
    for root, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        folder = root / f"penstock-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / limit).write_text(str(64 * MIB))
        except OSError:
            folder.rmdir()
            continue
        yield folder
        folder.rmdir()
        return
    pytest.skip("no control group can be made here")


def test_a_worker_that_the_kernel_kills_for_memory_is_out_of_memory(group: Path) -> None:
    record = run("CgroupOom", group=str(group), bytes=500 * MIB)
    assert (record.status, record.error.stage) == ("oom_host", "measure")
    assert "the kernel killed it for memory" in record.error.message
    assert record.memory.host_peak is not None


def test_a_kill_is_for_memory_where_nothing_counts(monkeypatch) -> None:
    monkeypatch.setattr(supervisor, "oom_kills", dict)
    monkeypatch.setattr(supervisor, "_run", lambda *_: Ending(-signal.SIGKILL))
    record = run("Killed")
    assert record.error is not None and record.status == "oom_host"
    assert "no counter" in record.error.message


def caused_by(error: BaseException) -> Exception:
    try:
        raise RuntimeError("the backend failed") from error
    except RuntimeError as outer:
        return outer


@pytest.mark.parametrize(
    ("error", "limited", "status"),
    [
        (MemoryError(), False, "oom_host"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate"), False, "oom_host"),
        (RuntimeError("std::bad_alloc"), False, "oom_host"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), False, "oom_host"),
        (ImportError("libtorch.so: Cannot allocate memory"), True, "oom_host"),
        (RuntimeError("could not create a primitive"), True, "oom_host"),
        (RuntimeError("could not create a primitive"), False, "crash"),  # it may be any fault
        (RuntimeError("can't start new thread"), True, "oom_host"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), False, "oom_device"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), False, "oom_device"),
        (ValueError("the user ran out of memory"), False, "crash"),  # the user's own words
        (UsageError("--batch-sizes 0"), False, "unsupported"),
        (NotImplementedError("slow_conv3d on Half"), False, "unsupported"),
        (WrongResult("the output is wrong"), False, "wrong_result"),
        (caused_by(MemoryError()), False, "oom_host"),
        (caused_by(ValueError()), False, "crash"),
        (ZeroDivisionError(), False, "crash"),
    ],
)
def test_an_exception_has_a_status(error: Exception, limited: bool, status: str) -> None:
    assert status_of(error, limited=limited) == status


@pytest.mark.usefixtures("zoo_here")
def test_a_check_fills_the_case_in_and_measures_nothing() -> None:
    launch = Launch("zoo:Animal", {"batch": 1}, 30.0, task="check")
    record = run_launch(launch, command=[sys.executable, ZOO])
    assert record.ok and record.samples_s == {}
    assert record.case == {"batch": 1, "checked": True}
    assert record.facts["kind"] == "Animal" and record.facts["process_bytes"] > MIB


def test_a_scenario_that_cannot_be_imported_says_what_is_absent(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "penstock.bench.scenarios.queue", None)
    with pytest.raises(ModuleNotFoundError, match=r"scenarios\.queue"):
        find("queue")


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="descriptors are counted by Linux")
def test_a_launch_that_has_no_room_for_its_request_leaves_no_pipe_open(monkeypatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match="No space left"):
        supervisor._run((), Launch("model", {}, 1.0), supervisor.LaunchPlace())
    assert len(list(Path("/proc/self/fd").iterdir())) == before
