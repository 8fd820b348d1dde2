"""Which workers of a cluster take part in a job, and what the client need not load."""

from __future__ import annotations

import io
import json
import pickle
import re
import subprocess
import sys
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
    began = {"torch": "2", "threads": 2, "checksum": "of units"}
    (tmp_path / "run.json").write_text(json.dumps({"makers": [began, {**began, "torch": "3"}]}))
    made = {str(threads): {"torch": "2", "threads": threads} for threads in (1, 2, 4)}
    left_out: list[set[str]] = []

    def opened(workers: Any, config: InferConfig, peers: int, request: Any, odd: Any) -> Any:
        """By the first worker that is not left out."""
        left_out.append({*odd})
        first = min(made.keys() - odd.keys())
        return SimpleNamespace(maker=made[first], run_dir=tmp_path)

    monkeypatch.setattr(openers, "_opened_on", opened)
    monkeypatch.setattr(openers, "odd_workers", lambda *_: {})
    texts = [(address, json.dumps(each)) for address, each in made.items()]
    monkeypatch.setattr(openers, "_arithmetics", lambda *_: texts)

    def threads(**knobs: Any) -> int:
        left_out.clear()
        job = config(cluster="tcp://a:1", **knobs)
        opened = openers.opened_on(None, job, 1, EndRequest())  # type: ignore[arg-type]
        return int(opened.maker["threads"])

    assert threads(resume=True) == 2 and left_out == [set(), {"1", "4"}]
    assert threads() == threads(resume=True, resume_anyway=True) == 1 and left_out == [set()]
    made.pop("2")
    texts.pop(1)
    assert threads(resume=True) == 1, "none is like them, and what begins the job says so"


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


@pytest.mark.slow
@pytest.mark.parametrize("differs", ["threads", "torch"])
def test_one_odd_worker_is_left_out_and_not_all_others(
    differs: str, scheduler: Scheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is there first. A squeeze-excite net gives other bits with two threads than with one."""
    if differs == "threads":
        odd, said = scheduler.worker(threads=2), "it has threads 2, and the run was made with 1"
    else:
        Path("theirs").mkdir()
        code = "import torch; torch.__version__ = torch.torch_version.TorchVersion('0.0.1')"
        Path("theirs/sitecustomize.py").write_text(code)
        odd = scheduler.worker(path=str(Path("theirs").absolute()))
        said = "it has torch '0.0.1', and the run was made with"
    at = WORDS.index("--threads")
    words = ["infer", *WORDS[:at], *WORDS[at + 2 :], "--cluster", scheduler.address]
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
    assert printed.count("Left out: ") == 1 and said in printed
    logs = [path.name for path in Path("out.zarr.penstock").glob("done-*.log")]
    assert logs and not any(f"-{odd.pid}." in name or f"-{odd.pid}-" in name for name in logs)


@pytest.mark.slow
def test_a_run_that_one_kind_of_worker_began_is_not_opened_by_the_other(
    scheduler: Scheduler,
) -> None:
    """Of two workers neither is in the majority, and the other one is there first."""
    assert infer(*QUICK, "--threads", "2") == 0
    first = next(path for path in Path("out.zarr").rglob("c/**/0") if path.is_file())
    first.unlink()
    assert main(["verify", "out.zarr", "--forget"]) == 3
    with distributed.Client(scheduler.address, set_as_default=False) as client:
        scheduler.worker()
        client.wait_for_workers(1)
        scheduler.worker(threads=2)
        client.wait_for_workers(2)
    at = WORDS.index("--threads")
    words = ["infer", *WORDS[:at], *WORDS[at + 2 :], *QUICK, "--out-spec", "out.zarr"]
    assert main([*words, "--cluster", scheduler.address, "--resume"]) == 0
    assert main(["verify", "out.zarr"]) == 0


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
