"""Telemetry: rates from scripted counters, rows that survive a kill, a monitor that cannot hurt."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.base.errors import UsageError
from penstock.base.files import set_aside
from penstock.instruments.machine import Nvml, Pair, ThisMachine, Usage, peak_rss
from penstock.instruments.sampler import (
    MIB,
    PSS_EVERY_S,
    Sampler,
    TelemetryReading,
    export_reference,
    rates,
    read_rows,
)

from ..anew import forked
from .kit import GIB, Driver

JOB, CHILD, LATER = (100, 1.0), (101, 2.0), (101, 9.0)  # the last two: one id, two processes


class Script:
    """A Machine that answers from lists; an exception in a list is raised."""

    def __init__(self, **answers: list[Any]) -> None:
        self._answers = {name: iter(values) for name, values in answers.items()}

    def _next(self, name: str) -> Any:
        answer = next(self._answers.get(name, iter(())), None)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def processes(self) -> Mapping[tuple[int, float], Usage]:
        return self._next("processes") or {}

    def pss(self) -> int | None:
        return self._next("pss")

    def disk(self) -> Pair | None:
        return self._next("disk")

    def network(self) -> Pair | None:
        return self._next("network")


def ticks(*times: float) -> Callable[[], float]:
    """A clock that tells these times; the first is the moment of `open`."""
    return iter(times).__next__


@pytest.fixture
def sampled(tmp_path) -> Iterator[Callable[..., list[dict[str, Any]]]]:
    def sampled(count: int, **keywords: Any) -> list[dict[str, Any]]:
        keywords.setdefault("clock", ticks(*range(100, 200)))
        keywords.setdefault("machine", Script())
        keywords.setdefault("gpus", list)
        gauges = keywords.pop("gauges", dict)
        queues = keywords.pop("queues", {"prep": 64})
        sampler = Sampler(tmp_path / "rows.jsonl", 1.0, gauges, queues, **keywords)
        sampler.open()
        rows = [sampler.sample() for _ in range(count)]
        sampler.stop()
        assert read_rows(tmp_path / "rows.jsonl")[1] == rows  # what was returned is on disk
        return rows

    yield sampled


def test_the_processes_are_those_of_the_whole_tree() -> None:
    words = ["bash", "-c", "sleep 60 & echo; wait"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as child:
        assert child.stdout is not None and child.stdout.readline()
        tree = [psutil.Process(), *psutil.Process().children(recursive=True)]
        assert {pid for pid, _ in ThisMachine().processes()} == {each.pid for each in tree}
        assert len([*ThisMachine(child.pid).processes()]) == 2
        os.killpg(child.pid, signal.SIGKILL)
    with pytest.raises(psutil.NoSuchProcess):
        ThisMachine(child.pid)


def test_rates_of_the_tree_and_the_machine(sampled: Any) -> None:
    machine = Script(
        processes=[
            {JOB: Usage(1.0, 500, 3, (1000, 10)), CHILD: Usage(0.5, 200, 1, (0, 0))},
            {JOB: Usage(3.0, 600, 4, (5000, 10)), CHILD: Usage(1.5, 300, 1, (8, 0))},
        ],
        disk=[(0, 7), (40_000, 7)],
        network=[(5, 5), (25, 1005)],
    )
    first, second = sampled(2, machine=machine, clock=ticks(10, 10, 12))

    rate_keys = [key for key in first if key.endswith("_per_s")]
    assert len(rate_keys) == 6
    assert [first[key] for key in (*rate_keys, "cpu_percent")] == [None] * 7  # null, not 0
    assert (first["t"], second["t"]) == (0, 2)
    assert (first["rss_bytes"], first["processes"], first["threads"]) == (700, 2, 4)
    assert second["cpu_percent"] == 150.0  # 3 CPU seconds in 2 seconds
    assert second["read_bytes_per_s"] == 2004.0
    assert second["write_bytes_per_s"] == 0.0
    assert second["machine_read_bytes_per_s"] == 20_000.0
    assert second["machine_write_bytes_per_s"] == 0.0
    assert second["net_sent_bytes_per_s"] == 10.0
    assert second["net_recv_bytes_per_s"] == 500.0


def reading(t: float, **processes: Usage) -> TelemetryReading:
    keys = {"job": JOB, "child": CHILD, "later": LATER}
    return TelemetryReading(t, {keys[name]: usage for name, usage in processes.items()}, None, None)


def used(cpu: float, disk: int | None) -> Usage:
    return Usage(cpu, 0, 1, None if disk is None else (disk, 0))


FIRST, THEN = reading(0, job=used(1, 10)), reading(1, job=used(2, 15))


@pytest.mark.parametrize(
    ("before", "after", "cpu", "read"),
    [
        # A child ended: nothing is subtracted for it. One began: all that it used counts.
        (reading(0, job=used(1, 10), child=used(900, 9000)), THEN, 100.0, 5.0),
        (FIRST, reading(1, job=used(1, 10), child=used(0.5, 7)), 50.0, 7.0),
        # An id that is used again is another process.
        (reading(0, child=used(900, 9000)), reading(1, later=used(0.25, 3)), 25.0, 3.0),
        # A part of the sum is unknown, so the sum is.
        (reading(0, job=used(1, 10), child=used(0, None)),
         reading(1, job=used(2, 15), child=used(0, None)), 100.0, None),
        (None, THEN, None, None),  # the first row
        (TelemetryReading(0, None, None, None), THEN, None, None),  # the row before failed
        (reading(1, job=used(1, 10)), THEN, None, None),  # no time has passed
        (reading(0), reading(1), 0.0, 0.0),  # an empty tree
    ],
)  # fmt: skip
def test_rates_of_a_tree_that_changes(before, after, cpu, read) -> None:
    row = rates(before, after)
    assert (row["cpu_percent"], row["read_bytes_per_s"]) == (cpu, read)


def test_a_counter_that_runs_backwards_is_null_then_right_again(sampled: Any) -> None:
    rows = sampled(3, machine=Script(network=[(900, 10), (100, 30), (150, 60)]))
    assert [row["net_sent_bytes_per_s"] for row in rows] == [None, None, 50.0]
    assert [row["net_recv_bytes_per_s"] for row in rows] == [None, 20.0, 30.0]


def test_pss_is_read_less_often(sampled: Any) -> None:
    late = 100 + PSS_EVERY_S
    rows = sampled(4, machine=Script(pss=[11, 22, 33]), clock=ticks(100, 100, 101, late, late + 1))
    assert [row["pss_bytes"] for row in rows] == [11, None, 22, None]


def test_rows_of_earlier_parts_of_a_run_are_kept_in_turn(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    for part in ("first", "second", "third"):
        set_aside(path)
        path.write_text(part)
    names = ("metrics-1.jsonl", "metrics-2.jsonl", "metrics.jsonl")
    assert [(tmp_path / name).read_text() for name in names] == ["first", "second", "third"]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux counts it")
def test_the_peak_of_a_process_is_not_its_parents() -> None:
    code = "from penstock.instruments.machine import peak_rss; print(peak_rss())"
    held = b"1" * 12 * 10**7
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert 10**7 < int(done.stdout) < 10**8 < len(held) < peak_rss()


def test_a_failed_reading_is_null_and_said_once(sampled: Any) -> None:
    machine = Script(
        processes=[{JOB: Usage(1, 5, 1, None)}] * 4,
        network=[(0, 0), RuntimeError("no route"), RuntimeError("still none"), (50, 0), (60, 0)],
    )
    rows = sampled(5, machine=machine)
    assert [row["net_sent_bytes_per_s"] for row in rows] == [None, None, None, None, 10.0]
    assert [row["rss_bytes"] for row in rows][:4] == [5] * 4
    assert [row.get("monitor_error") for row in rows] == [
        None,
        "network: RuntimeError: no route",
        None,
        None,
        None,
    ]


def test_a_failed_gauge_is_null(sampled: Any) -> None:
    answers = iter([{"prep": 3}, ZeroDivisionError("oops"), {"prep": float("nan")}, {"done": 2.5}])

    def gauges() -> Any:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    rows = sampled(4, gauges=gauges, queues={"prep": 64, "write-0": 8})
    assert [row["gauges"] for row in rows] == [
        {"prep": 3, "write-0": None},
        {"prep": None, "write-0": None},
        {"prep": None, "write-0": None},
        {"prep": None, "write-0": None, "done": 2.5},
    ]
    assert rows[1]["monitor_error"] == "gauges: ZeroDivisionError: oops"


def test_a_full_disk_costs_a_row_and_not_the_job(tmp_path) -> None:
    path = tmp_path / "m.jsonl"
    sampler = Sampler(path, 1, dict, {}, clock=ticks(*range(9)), machine=Script(), gpus=list)
    sampler.open()
    real = sampler._file

    class Full:
        def write(self, line: bytes) -> int:
            return real.write(line[:20]) or 0

    sampler.sample()
    sampler._file = Full()  # type: ignore[assignment]
    sampler.sample()
    sampler._file = real
    sampler.sample()
    sampler.stop()

    _, rows = read_rows(path)
    assert [row["t"] for row in rows] == [1, 3]
    assert rows[1]["monitor_error"].startswith("file: OSError: 20 of ")
    assert sampler._faults.keys() == {"file"}


@pytest.mark.parametrize("interval", [0, -1, float("nan")])
def test_an_interval_that_is_none_is_refused(tmp_path, interval: float) -> None:
    with pytest.raises(UsageError, match="interval"):
        Sampler(tmp_path / "m.jsonl", interval, dict, {})


def test_a_path_that_cannot_be_written_is_refused_before_the_job(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"metrics cannot be written to .*file/m\.jsonl"):
        Sampler(tmp_path / "file" / "m.jsonl", 1, dict, {}).start()


def test_the_thread_samples_until_stop_and_once_more(tmp_path) -> None:
    path = tmp_path / "deep" / "m.jsonl"
    enough = threading.Event()
    calls = []

    def gauges() -> dict[str, float]:
        calls.append(threading.current_thread())
        if len(calls) >= 3:
            enough.set()
        return {"prep": len(calls)}

    with Sampler(path, 0.01, gauges, {"prep": 64}, gpus=list) as sampler:
        assert enough.wait(30)
    sampler.stop()  # a second time is harmless

    header, rows = read_rows(path)
    assert header["queues"] == {"prep": 64}
    assert header["interval"] == 0.01
    assert {"schema", "pid", "cpu_count"} <= header.keys()
    assert [row["gauges"]["prep"] for row in rows] == list(range(1, len(calls) + 1))
    assert len(set(calls)) == 1 and calls[0] is not threading.current_thread()
    assert calls[0].daemon and not calls[0].is_alive()
    assert sampler._faults == {}
    assert rows[-1]["rss_bytes"] > MIB and rows[-1]["processes"] >= 1
    assert sampler.peak_rss == max(row["rss_bytes"] for row in rows)


def test_rows_survive_a_kill(tmp_path) -> None:
    path, calls = tmp_path / "m.jsonl", list[int]()

    def gauges() -> dict[str, int]:
        calls.append(0)
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"prep": len(calls)}

    def work() -> None:
        Sampler(path, 0.01, gauges, {"prep": 64}, gpus=list).start()
        threading.Event().wait(60)

    assert forked(work, tmp_path).code == -signal.SIGKILL
    header, rows = read_rows(path)
    assert header["queues"] == {"prep": 64}
    assert [row["gauges"]["prep"] for row in rows] == [1, 2, 3]


class NoDriver(Driver):
    def nvmlInit(self) -> None:
        raise self.NVMLError("no driver")


def test_nvml(monkeypatch) -> None:
    """Of the second card, which is cut in slices, NVML tells no utilisation."""
    driver: Any = Driver({"GPU-a": False, "GPU-b": True})
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    assert Nvml()() == [
        {"index": 0, "name": "NVIDIA A100", "util_percent": 87, "memory_bytes": 5 * GIB},
        {"index": 1, "name": "NVIDIA A100", "util_percent": None, "memory_bytes": 5 * GIB},
    ]


@pytest.mark.parametrize("module", [None, NoDriver({})])
def test_no_nvml_is_no_gpu(monkeypatch, module: Any) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)  # None: it cannot be imported
    assert Nvml()() == []


def write_rows(path: Path, rows: list[dict[str, Any]], tail: str = "") -> None:
    header = {"schema": 1, "queues": {"prep": 64, "write-0": 0}, "interval": 1, "cpu_count": 2}
    path.write_text("".join(json.dumps(line) + "\n" for line in (header, *rows)) + tail)


def row(t: float, **values: Any) -> dict[str, Any]:
    keys = ("cpu_percent", "rss_bytes", "pss_bytes", "read_bytes_per_s", "write_bytes_per_s")
    keys += ("machine_read_bytes_per_s", "machine_write_bytes_per_s")
    keys += ("net_sent_bytes_per_s", "net_recv_bytes_per_s")
    return {"t": t, **dict.fromkeys(keys), "gpus": [], "gauges": {}, **values}


TORN = ["", '{"t": 2.0, "cpu_perc', '{"t": 2.0, "name": "\xc3', "[" * 100_000]


@pytest.mark.parametrize("tail", TORN, ids=["whole", "key", "text", "nested"])
def test_a_torn_last_line_is_left_out(tmp_path, tail: str) -> None:
    write_rows(tmp_path / "m.jsonl", [row(0), row(1)], tail)
    _, rows = read_rows(tmp_path / "m.jsonl")
    assert [row["t"] for row in rows] == [0, 1]


@pytest.mark.parametrize("content", [b"", b"t,cpu\n0,1\n", b'{"queue_monitor": {}}\n', b"[1]\n"])
def test_a_file_without_a_header_is_refused(tmp_path, content: bytes) -> None:
    (tmp_path / "m.jsonl").write_bytes(content)
    with pytest.raises(UsageError, match=r"m\.jsonl does not begin with the header"):
        read_rows(tmp_path / "m.jsonl")


def test_the_reference_shape(tmp_path) -> None:
    full = {
        "rss_bytes": 3 * MIB,
        "cpu_percent": 150.0,
        "net_sent_bytes_per_s": 2.0 * MIB,
        "net_recv_bytes_per_s": 8.0 * MIB,
        "machine_read_bytes_per_s": 0.5 * MIB,
        "machine_write_bytes_per_s": 0.0,
    }
    write_rows(
        tmp_path / "m.jsonl",
        [
            row(0, rss_bytes=MIB, gauges={"prep": 5, "write-0": None, "done": 1}),
            row(1, **full, gauges={"prep": 6, "write-0": 2}),
            row(2, **{**full, "net_sent_bytes_per_s": None}, gauges={"prep": 7, "write-0": 3}),
            row(3, **{**full, "cpu_percent": 70.0}, gauges={"prep": None, "write-0": 4}),
        ],
    )
    export_reference(tmp_path / "m.jsonl", tmp_path / "new" / "metrics.json")

    assert json.loads((tmp_path / "new" / "metrics.json").read_text()) == {
        "queue_monitor": {
            "queues": {
                "prep": {
                    "max_size": 64,
                    "samples": [{"t_rel_s": t, "size": t + 5} for t in (0, 1, 2)],
                },
                "write-0": {
                    "max_size": 0,
                    "samples": [{"t_rel_s": t, "size": t + 1} for t in (1, 2, 3)],
                },
            }
        },
        "system_monitor": {
            "t_rel_s": [1, 3],
            "cpu_percent": [150.0, 70.0],
            "ram_rss_mb": [3.0, 3.0],
            "net_io_mbytes_sec": {"sent": [2.0, 2.0], "recv": [8.0, 8.0]},
            "disk_io_mbytes_sec": {"read": [0.5, 0.5], "write": [0.0, 0.0]},
        },
    }
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["metrics.json"]


def test_the_reference_shape_leaves_out_what_was_never_read(tmp_path) -> None:
    """Of a run without rows, all but the queues."""
    write_rows(tmp_path / "m.jsonl", [row(1, rss_bytes=2 * MIB), row(2, rss_bytes=4 * MIB)])
    export_reference(tmp_path / "m.jsonl", tmp_path / "metrics.json")
    system = json.loads((tmp_path / "metrics.json").read_text())["system_monitor"]
    assert system == {"t_rel_s": [1, 2], "ram_rss_mb": [2.0, 4.0]}
    write_rows(tmp_path / "m.jsonl", [])
    export_reference(tmp_path / "m.jsonl", tmp_path / "metrics.json")
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["system_monitor"] == {}
    assert metrics["queue_monitor"]["queues"]["prep"] == {"max_size": 64, "samples": []}
