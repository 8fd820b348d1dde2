"""A user's own Lightning Trainer emits the records that `penstock train` does."""

from __future__ import annotations

import csv
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

if not find_spec("pytorch_lightning"):
    pytest.skip("pytorch_lightning is not installed", allow_module_level=True)


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_tells_its_steps(tmp_path: Path) -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from .lines import Line, Records, lightning

    points = torch.arange(20.0).reshape(10, 2) / 20
    data = DataLoader(TensorDataset(points, points.sum(1, keepdim=True)), batch_size=4)
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Records(tmp_path)],
    )  # fmt: skip
    line = Line()
    first = float(line.training_step((points[:4], points[:4].sum(1, keepdim=True)), 0))
    trainer.fit(line, data)
    with (tmp_path / "steps" / "rank0.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2", "3", "4", "5", "6"]
    assert [row["samples"] for row in rows] == ["4", "4", "2"] * 2
    assert float(rows[0]["loss"]) == pytest.approx(first)
    parts = ("data_wait", "forward", "backward", "optimizer")
    for row in rows:
        assert row["communication_s"] == ""
        total = sum(float(row[f"{name}_s"]) for name in parts)
        assert total == pytest.approx(float(row["step_s"]), abs=1e-6)
    document = json.loads((tmp_path / "training_results.json").read_text())
    assert (document["steps"], document["samples"], document["status"]) == (6, 20, "complete")
    assert document["ranks"][0]["phases"]["forward"]["total_s"] > 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("every", "validations"), [(1, 6), (1.0, 2)], ids=["steps", "epochs"])
def test_validation_is_no_part_of_training_nor_of_a_step(
    every: float, validations: int, tmp_path: Path
) -> None:
    """After each step, or at an epoch's end; before training Lightning validates two batches."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from .lines import Records, Slow, lightning

    points = torch.arange(20.0).reshape(10, 2) / 20
    data = DataLoader(TensorDataset(points, points.sum(1, keepdim=True)), batch_size=4)
    line = Slow()
    records = Records(tmp_path, clock=lambda: line.now)
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[records],
        val_check_interval=every,
    )  # fmt: skip
    trainer.fit(line, data, data)
    trainer.validate(line, data, verbose=False)
    assert line.now == 6 + 100 * (2 + 3 * validations + 3)
    document = json.loads((tmp_path / "training_results.json").read_text())
    assert (document["training_s"], document["validation_s"]) == (6, 300 * validations)
    assert document["samples_per_s"] == 20 / 6
    phases = document["ranks"][0]["phases"]
    assert (phases["step"]["total_s"], phases["forward"]["total_s"]) == (6, 6)
    assert phases["data_wait"]["total_s"] == 0
