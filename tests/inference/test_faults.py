"""What a job refuses, and what it says of a fault in any stage."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import penstock
from penstock.base.errors import StageError, UsageError
from penstock.data.stores.memory import MemorySink, MemorySource
from penstock.inference import run as infer
from penstock.inference.run_folder import journal
from penstock.inference.stages import reading
from penstock.inference.tiling import stitch

from .kit import SMALL, arange, conv, job


class Broken(RuntimeError):
    """What the tests inject."""


def failing_after(calls: int, real: Callable[..., Any]) -> Callable[..., Any]:
    count = iter(range(10**9))

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(count) >= calls:
            raise Broken("a cosmic ray")
        return real(*args, **kwargs)

    return call


@pytest.mark.parametrize(
    ("stage", "owner", "attribute"),
    [
        ("read", MemorySource, "read"),
        ("normalise", reading, "block_scaling"),
        ("forward", nn.Identity, "forward"),
        ("stitch", stitch.Assembly, "_unit"),
        ("write", MemorySink, "write"),
    ],
)
@pytest.mark.parametrize("calls", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_a_fault_in_any_stage_surfaces_with_stage_and_block(
    stage: str, owner: Any, attribute: str, calls: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    started = job(tmp_path, normalize="percentile")
    monkeypatch.setattr(owner, attribute, failing_after(calls, getattr(owner, attribute)))
    before = threading.active_count()
    with pytest.raises(StageError, match=f"^{stage} failed at .*Box.*cosmic ray") as caught:
        infer.run_job(started)
    assert isinstance(caught.value.__cause__, Broken)
    assert threading.active_count() <= before


def test_values_that_are_not_finite_are_an_error_and_not_a_zero(tmp_path: Path) -> None:
    class Overflows(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / (x - x)

    with pytest.raises(StageError, match="NaN or infinite values"):
        infer.run_job(job(tmp_path, model_type=Overflows()))


def test_a_block_that_was_never_written_is_never_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = job(tmp_path)
    note = journal.Journal.note

    def lost(self: journal.Journal, key: tuple[int, ...], *more: Any) -> None:
        if key != (0, 1, 1, 1):
            note(self, key, *more)

    monkeypatch.setattr(journal.Journal, "note", lost)
    with pytest.raises(penstock.Incomplete, match="26 of 27 blocks"):
        infer.run_job(started)


# --- refused before it begins ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"overlap": 8}, "--overlap 8 must be less than --patch 8"),
        ({"trim_voxels": 2}, "--trim-voxels 2 needs an --overlap of at least 4, not 2"),
        ({"block": 4}, "--block 4 is smaller than --patch 8"),
        ({"t": 1}, "--t 1 is out of range: the input has 0 to 0"),
        ({"c": "0:3"}, "--c 1 is out of range"),
        ({"c": "x"}, "--c 'x' is not all"),
        ({"out_spec": np.zeros((24, 24, 23), "uint16")}, "has 23 along x but this job writes 24"),
        ({"devices": "cuda:7"}, "--devices cuda:7: this machine has"),
        ({"devices": "abacus"}, "--devices 'abacus'"),
        ({"model_type": "nonesuch"}, "--model-type 'nonesuch' is unknown"),
        ({"model_type": "os:nonesuch"}, "could not be made"),
        ({"weights": "nowhere.pt"}, "--weights nowhere.pt"),
        ({"patch": (8, 8), "model_type": conv()}, "has 2 axes but the model is made of 3-D"),
        ({"model_type": conv(3)}, "the model takes 3 at once"),
        ({"model_type": nn.MaxPool3d(2)}, "turns a patch of"),
        ({"out_spec": (np.zeros(1), np.zeros(1))}, "head"),
        ({"batch": 0}, "--batch 0: input should be greater than or equal to 1"),
        ({"normalize": "maybe"}, "--normalize 'maybe'"),
        ({"nonesuch": 1}, "there is no setting 'nonesuch'"),
        ({"norm_lower": 99, "norm_upper": 1}, "--norm-lower 99.0 must be less than"),
        ({"norm_lower": float("nan")}, "--norm-lower nan must be less than"),
        ({"normalize": "percentile", "norm_upper": 200}, "must be percentiles from 0 to 100"),
        ({"normalize": "global", "norm_lower": 0, "norm_upper": 1}, "one below 50 and one above"),
        ({"eps": 0}, "--eps 0: input should be greater than 0"),
        ({"compile_dynamic": "maybe"}, "--compile-dynamic 'maybe'"),
        ({"clip_norm": (1, 0)}, "--clip-norm 1.0 must be less than 0.0"),
        ({"clip_norm": (1,)}, "--clip-norm"),
        ({"out_spec": ()}, "--out-spec"),
        ({"model_type": "denoise-net"}, "denoise-net has no weights of its own"),
        ({"model_type": lambda x: x}, "is neither a name, a reference or a file, nor a module"),
        ({"max_memory": 0}, "--max-memory 0: input should be greater than or equal to 1"),
        ({"trace": Path(__file__).parent}, "--trace"),
        ({"metrics_json": Path(__file__) / "x.json"}, "--metrics-json"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(
    knobs: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        job(tmp_path, **knobs)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_too_little_memory_is_refused_with_both_numbers_and_a_cure(tmp_path: Path) -> None:
    started = job(tmp_path, max_memory="1MiB")
    with pytest.raises(penstock.Refused, match=r"needs .* [MG]iB of host .* 1.00 MiB; give .*--"):
        infer.run_job(started)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("returned", "said"),
    [("None", "NoneType"), ("[x, 2]", "int as out1"), ("x[:, :, 1:]", "turns a patch of")],
)
def test_a_model_that_returns_no_image_is_refused(returned: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(f"def net():\n    return lambda x: {returned}\n")
    with pytest.raises(UsageError, match=said):
        job(tmp_path, model_type=f"{tmp_path / 'odd.py'}:net")


# --- a run folder that cannot be written ---------------------------------------------------------


def full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("stage", "method", "file"),
    [("write", "note", "done.log"), ("statistics", "save_statistics", "statistics.json")],
)
def test_a_disk_that_fills_under_the_run_folder_is_told_with_stage_and_path(
    stage: str, method: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = job(tmp_path, normalize="global")
    monkeypatch.setattr(journal.Journal, method, full)
    with pytest.raises(StageError, match=f"^{stage} failed at .*{file}: .*No space left"):
        infer.run_job(started)


def test_a_line_that_could_not_be_noted_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of it in a buffer must not hide the stage as the log is closed."""
    disk = Path("/dev/full")
    if not disk.exists():
        pytest.skip("there is no /dev/full")
    started, begin = job(tmp_path), journal.Journal.begin

    def begun(self: journal.Journal, settings: Any, **more: Any) -> None:
        begin(self, settings, **more)
        assert self._log is not None
        self._log.close()
        self._log._file = disk.open("w")

    monkeypatch.setattr(journal.Journal, "begin", begun)
    with pytest.raises(StageError, match=r"^write failed at block .*done\.log: .*No space left"):
        infer.run_job(started)


def test_a_summary_that_cannot_be_written_costs_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, save = job(tmp_path), journal.Journal.save

    def saved(self: journal.Journal, name: str, content: Any) -> None:
        (full if name == "summary.json" else save)(self, name, content)

    monkeypatch.setattr(journal.Journal, "save", saved)
    with pytest.warns(RuntimeWarning, match=r"--run-dir .*run: summary\.json: No space left"):
        assert infer.run_job(started).units_written == 27


@pytest.mark.parametrize("name", ["done.log", "run.json"])
def test_a_run_folder_that_cannot_be_used_is_refused(name: str, tmp_path: Path) -> None:
    source, out, folder = arange((9, 9, 9)), tmp_path / "out.zarr", tmp_path / "run"
    penstock.run_inference(source, out, run_dir=folder, **SMALL)
    (folder / name).unlink()
    (folder / name).mkdir()
    with pytest.raises(UsageError, match=r"^run_dir=.*run: Is a directory$"):
        penstock.run_inference(source, out, run_dir=folder, resume=True, **SMALL)


def test_a_run_folder_that_may_not_be_looked_into_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, exists = job(tmp_path), Path.exists

    def denied(self: Path) -> bool:
        if self == tmp_path / "run":
            raise PermissionError(13, "Permission denied", str(self))
        return exists(self)

    monkeypatch.setattr(Path, "exists", denied)
    with pytest.raises(UsageError, match=r"^--run-dir .*run: Permission denied$"):
        infer.run_job(started)
