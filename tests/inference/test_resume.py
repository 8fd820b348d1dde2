"""What a run that was killed leaves, and what a resume believes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.base.errors import UsageError
from penstock.data.stores import kvstore
from penstock.data.stores.tensorstore import TensorStoreSink
from penstock.inference.run_folder import journal

from .kit import SMALL, arange


def test_a_finished_run_resumes_to_nothing(tmp_path: Path) -> None:
    source, out = arange((10, 10, 10)), tmp_path / "out.zarr"
    penstock.run_inference(source, out, **SMALL)
    summary = penstock.run_inference(source, out, resume=True, **SMALL)
    assert summary.units_written == 0
    assert summary.units_skipped == summary.units_planned
    assert "nothing left" in summary.bound_by


def test_a_second_process_on_the_same_output_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    source, out = arange((10, 10, 10)), tmp_path / "out.zarr"
    penstock.run_inference(source, out, **SMALL)
    first = journal.Journal.open(Path(f"{out}.penstock"), {}, resume=False)
    first.begin({})
    with pytest.raises(UsageError, match="another process is writing this output"):
        penstock.run_inference(source + 1, out, overwrite=True, **SMALL)
    first.close()
    written = penstock.open_source(out)
    assert (written.read(written.domain)[0, 0] == source).all()
    penstock.run_inference(source + 1, out, overwrite=True, **SMALL)
    assert (penstock.open_source(out).read(written.domain)[0, 0] == source + 1).all()


def test_a_killed_run_leaves_no_list_of_units_for_a_new_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--overwrite, killed while the output is made anew: what was done before counts no more."""
    source, out = arange((10, 10, 10)), tmp_path / "out.zarr"
    penstock.run_inference(source, out, **SMALL)
    create = TensorStoreSink.create

    def killed(self: TensorStoreSink) -> None:
        create(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(TensorStoreSink, "create", killed)
    with pytest.raises(KeyboardInterrupt):
        penstock.run_inference(source, out, overwrite=True, **SMALL)
    monkeypatch.setattr(TensorStoreSink, "create", create)
    summary = penstock.run_inference(source, out, resume=True, **SMALL)
    assert summary.units_skipped == 0
    written = penstock.open_source(out)
    assert (written.read(written.domain)[0, 0] == source).all()


def test_a_run_killed_while_the_old_output_is_deleted_goes_on(tmp_path: Path) -> None:
    """The old one had other chunks and another dtype, and some of it is there still."""

    source, out = arange((10, 10, 10)), tmp_path / "out.zarr"
    for way in ("resume", "overwrite"):
        penstock.run_inference(
            source, out, overwrite=True, out_dtype="float32", chunks=10, block=20, **SMALL
        )
        (out / kvstore.DELETING).write_text('{"arrays": ["0"]}')
        (out / "zarr.json").unlink()
        (out / "0/c/0/0/0").unlink()
        summary = penstock.run_inference(source, out, **{way: True}, **SMALL)
        assert summary.units_skipped == 0
        written = penstock.open_source(out)
        assert written.dtype == source.dtype
        assert (written.read(written.domain)[0, 0] == source).all()
        assert sorted(path.name for path in out.iterdir()) == ["0", "zarr.json"]


def test_what_may_not_be_replaced_is_refused_before_its_list_of_units_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = arange((10, 10, 10)), tmp_path / "out.zarr"
    penstock.run_inference(source, out, **SMALL)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def denied(self: TensorStoreSink) -> None:
        raise UsageError(f"{self.where}: Permission denied")

    monkeypatch.setattr(TensorStoreSink, "check", denied)
    with pytest.raises(UsageError, match="Permission denied"):
        penstock.run_inference(source, out, overwrite=True, **SMALL)
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before


def test_resume_refuses_another_model_of_the_same_name(tmp_path: Path) -> None:
    source, out, code = arange((10, 10, 10)), tmp_path / "out.zarr", tmp_path / "mine.py"
    knobs: dict[str, Any] = {"model": f"{code}:net", "patch": 8, "overlap": 2, "devices": "cpu"}
    code.write_text("def net(x=None):\n    return lambda x: x * 1\n")
    penstock.run_inference(source, out, **knobs)
    code.write_text("def net(x=None):\n    return lambda x: x * 2\n")
    with pytest.raises(UsageError, match=r"the run in .* had model"):
        penstock.run_inference(source, out, resume=True, **knobs)
