"""A user's own Lightning Trainer emits the records that `penstock train` does."""

from __future__ import annotations

import csv
import json
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

if not find_spec("pytorch_lightning"):
    pytest.skip("pytorch_lightning is not installed", allow_module_level=True)
if find_spec("torchvision"):  # which torchmetrics imports, and which may not load by itself
    import penstock.models.torchvision_ops  # noqa: F401
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import pytorch_lightning as lightning

    from penstock.training.lightning import Records


class Line(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        points, values = batch
        loss: torch.Tensor = ((self.net(points) - values) ** 2).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_tells_its_steps(tmp_path: Path) -> None:
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
    told = json.loads((tmp_path / "training_results.json").read_text())
    assert (told["steps"], told["samples"], told["status"]) == (6, 20, "complete")
    assert told["ranks"][0]["phases"]["forward"]["total_s"] > 0


class Slow(Line):
    """A step takes a second and the validation of a batch a hundred, by a clock of its own."""

    now = 0.0

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        self.now += 1
        return super().training_step(batch, number)

    def validation_step(self, batch: Any, number: int) -> None:
        self.now += 100


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("every", "validations"), [(1, 6), (1.0, 2)], ids=["steps", "epochs"])
def test_validation_is_no_part_of_training_nor_of_a_step(
    every: float, validations: int, tmp_path: Path
) -> None:
    """After each step, or at an epoch's end; before training Lightning validates two batches."""
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
    told = json.loads((tmp_path / "training_results.json").read_text())
    assert (told["training_s"], told["validation_s"]) == (6, 300 * validations)
    assert told["samples_per_s"] == 20 / 6
    phases = told["ranks"][0]["phases"]
    assert (phases["step"]["total_s"], phases["forward"]["total_s"]) == (6, 6)
    assert phases["data_wait"]["total_s"] == 0
