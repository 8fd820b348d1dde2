"""Which workers of a cluster take part in a job, and what the client need not load."""

from __future__ import annotations

import io
import json
import pickle
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.base.config.infer import InferConfig
from penstock.base.config.knobs import build
from penstock.base.errors import UsageError
from penstock.cli import main
from penstock.inference.run_folder.ending import EndRequest
from penstock.inference.sharing import openers, station
from penstock.inference.sharing.openers import odd_workers

from ..house import HEAVY
from .cluster_kit import (
    NET,
    QUICK,
    WORDS,
    Scheduler,
    eventually,
    hidden_from,
    infer,
    other_torch,
    place,
    scheduler,
    values,
    written_alone,
)
from .kit import config

__all__ = ["place", "scheduler"]  # fixtures

distributed = pytest.importorskip("distributed")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


class Loads(pickle.Unpickler):
    """Reads a pickle, and lists the packages that it needs."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self.packages: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.packages.add(module.partition(".")[0])
        return super().find_class(module, name)


def test_what_a_worker_tells_of_a_job_that_it_has_opened_needs_no_torch() -> None:
    knobs = {"in_spec": "in.npy", "out_spec": "out.zarr", "model_type": "identity", "workers": 2}
    opened = station.open_task((build(InferConfig, knobs), 1, ""), 0)
    loads = Loads(pickle.dumps(opened))
    assert loads.load().maker == opened.maker
    assert "penstock" in loads.packages and not loads.packages & {*HEAVY}


@pytest.mark.slow
def test_the_client_of_a_cluster_does_not_import_torch() -> None:
    words = ["infer", *WORDS, *QUICK, "--out-spec", "out.zarr", "--cluster", "local:1"]
    code = (
        "import sys; from penstock.cli import main; code = main(sys.argv[1:]); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, *words], check=True)
    assert [*Path("out.zarr.penstock").glob("done-*.log")]


def test_the_kind_of_worker_that_most_are_opens_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked:
        """Workers, one of which does not answer and one of which has another Python."""

        def __init__(self, *made: str) -> None:
            self.made = made

        def hosts(self) -> dict[str, str]:
            return dict.fromkeys([*map(str, range(len(self.made))), "silent", "strange"], "host")

        def strangers(self) -> dict[str, str]:
            return {"strange": "it has another Python"}

        def ask(self, *words: Any, of: set[str], **limits: Any) -> list[tuple[str, str]]:
            assert "strange" not in of
            return [(str(number), made) for number, made in enumerate(self.made)]

    def odd(*made: str, **knobs: Any) -> set[str]:
        return {*odd_workers(Asked(*made), config(cluster="tcp://a:1", **knobs))}  # type: ignore[arg-type]

    assert odd("one", "two", "two") == {"0"}
    assert odd("one", "two", "three", "two") == {"0", "2"}
    assert odd("one", "one") == odd() == set()
    assert odd("one", "two", "two", mixed_arithmetic=True) == set()


def test_a_run_that_goes_on_is_opened_by_a_worker_like_those_that_began_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = {"torch": "2", "threads": 8, "checksum": "of units"}
    (tmp_path / "run.json").write_text(json.dumps({"makers": [began, {**began, "torch": "3"}]}))
    made = {str(torch): {"torch": str(torch), "threads": 8} for torch in (1, 2, 4)}
    left_out: list[set[str]] = []

    def opened(workers: Any, config: InferConfig, peers: int, request: Any, odd: Any) -> Any:
        """By the first worker that is not left out."""
        left_out.append({*odd})
        first = min(made.keys() - odd.keys())
        return SimpleNamespace(maker=made[first], run_dir=tmp_path)

    def arithmetics(workers: Any, config: InferConfig) -> list[tuple[str, str]]:
        assert config.threads == 8, "each worker would take those of the run"
        return [(address, json.dumps(each)) for address, each in made.items()]

    monkeypatch.setattr(openers, "_opened_on", opened)
    monkeypatch.setattr(openers, "odd_workers", lambda *_: {})
    monkeypatch.setattr(openers, "_arithmetics", arithmetics)

    def torch_of(**knobs: Any) -> str:
        left_out.clear()
        job = config(cluster="tcp://a:1", **knobs)
        opened = openers.opened_on(None, job, 1, EndRequest())  # type: ignore[arg-type]
        return str(opened.maker["torch"])

    assert torch_of(resume=True) == "2" and left_out == [set(), {"1", "4"}]
    assert torch_of() == torch_of(resume=True, resume_anyway=True) == "1" and left_out == [set()]
    made.pop("2")
    assert torch_of(resume=True) == "1", "none is like them, and what begins the job says so"


def test_no_more_than_three_workers_are_asked_to_open_a_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fault may be the user's, and a cluster may have a thousand workers."""
    asked: list[int] = []

    class Refused:
        """Tasks that no worker can do."""

        def __init__(self, *words: Any) -> None:
            self.placement = SimpleNamespace(unfit={})

        def run(self, numbers: Any, tick: Any) -> None:
            for number in range(9):
                asked.append(number)
                self.placement.unfit[str(number)] = f"worker {number} lacks a file"
                tick(None)

    workers = SimpleNamespace(hosts=dict, strangers=dict)
    monkeypatch.setattr(openers, "Tasks", Refused)
    with pytest.raises(UsageError, match="worker 0 lacks a file"):
        openers.opened_on(workers, config(cluster="tcp://a:1"), 1, EndRequest())  # type: ignore[arg-type]
    assert len(asked) == 3


def without(words: Sequence[str], flag: str) -> list[str]:
    """A command line without a flag and its value."""
    at = words.index(flag)
    return [*words[:at], *words[at + 2 :]]


@pytest.mark.slow
def test_one_odd_worker_is_left_out_and_not_all_others(
    scheduler: Scheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is there first."""
    odd = scheduler.worker(path=other_torch())
    words = ["infer", *WORDS, "--cluster", scheduler.address]
    words += ["--out-spec", "out.zarr", "--parts", "12", "--overwrite"]
    with distributed.Client(scheduler.address, set_as_default=False) as client:
        client.wait_for_workers(1)
        scheduler.worker()
        scheduler.worker()
        client.wait_for_workers(3)
    for _ in eventually():  # until each of them was given a part
        assert main(words) == 0
        printed = capsys.readouterr().out
        if "Left out" in printed:
            break
    assert printed.count("Left out: ") == 1
    assert "it has torch '0.0.1', and the run was made with" in printed
    logs = [path.name for path in Path("out.zarr.penstock").glob("done-*.log")]
    assert logs and not any(f"-{odd.pid}." in name or f"-{odd.pid}-" in name for name in logs)


@pytest.mark.slow
def test_workers_with_other_numbers_of_threads_compute_with_equal_ones(
    scheduler: Scheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    """A squeeze-excite net gives other bits with two threads than with one."""
    by_two = written_alone("--threads", "2")
    words = ["infer", *without(WORDS, "--threads"), "--parts", "12", "--out-spec", "out.zarr"]
    with distributed.Client(scheduler.address, set_as_default=False) as client:
        scheduler.worker(threads=2)  # it opens the job
        client.wait_for_workers(1)
        scheduler.worker(threads=1)
        client.wait_for_workers(2)
    for _ in eventually():  # until each of them was given a part
        assert main([*words, "--cluster", scheduler.address, "--overwrite"]) == 0
        if len([*Path("out.zarr.penstock").glob("done-*.log")]) == 2:
            break
    assert "Left out" not in capsys.readouterr().out
    assert np.array_equal(values("out.zarr"), by_two)


@pytest.mark.slow
def test_a_run_goes_on_with_the_threads_that_it_began_with(
    scheduler: Scheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the workers nor this process would take three of their own accord."""
    by_three = written_alone("--parts", "6", "--threads", "3")
    words = ["infer", *without(WORDS, "--threads"), "--parts", "6", "--out-spec", "out.zarr"]
    words.append("--resume")
    with distributed.Client(scheduler.address, set_as_default=False) as client:
        scheduler.worker(threads=1)
        client.wait_for_workers(1)
    for cluster in ([], ["--cluster", scheduler.address]):
        assert infer("--parts", "6", "--threads", "3", "--overwrite") == 0
        first = next(path for path in Path("out.zarr").rglob("c/**/0") if path.is_file())
        first.unlink()
        assert main(["verify", "out.zarr", "--forget"]) == 3
        assert main([*words, *cluster]) == 0
        capsys.readouterr()
        assert main(["verify", "out.zarr", "--recompute", "100%"]) == 0
        assert re.search(r"seed 0\): \d+ have the same bits\n", capsys.readouterr().out)
        assert np.array_equal(values("out.zarr"), by_three)
    assert main([*words, "--threads", "1"]) == 2
    assert "was made with threads 3, here it is 1" in capsys.readouterr().err


@pytest.mark.slow
def test_a_worker_that_lacks_the_weights_is_left_out_and_another_does_the_job(
    scheduler: Scheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is on a host of its own, where the folder ``own`` is empty."""
    Path("own").mkdir()
    torch.save(torch.nn.Conv3d(1, 1, 3).state_dict(), "own/net.pt")
    hidden = hidden_from("own")
    scheduler.worker(within=hidden)
    with distributed.Client(scheduler.address, set_as_default=False) as client:
        client.wait_for_workers(1)
        scheduler.worker()
        client.wait_for_workers(2)
    words = ("--model-type", "net.py:weighed", "--weights", "own/net.pt", "--parts", "12")
    Path("net.py").write_text(NET + WEIGHED)
    alone = written_alone(*words)
    for _ in eventually():  # until both were given a part
        assert infer(*words, "--cluster", scheduler.address, "--overwrite") == 0
        printed = capsys.readouterr().out
        if "Left out" in printed:
            break
    assert re.search(
        r"Left out: tcp://\S+: --weights \S*own/net.pt: there is no such file", printed
    )
    assert np.array_equal(values("out.zarr"), alone)


WEIGHED = """
def weighed():
    return nn.Conv3d(1, 1, 3, padding=1)
"""
