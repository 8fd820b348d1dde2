"""The CUDA path against its CPU twin: ``pytest -m gpu`` on a machine that has a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import penstock

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def run(volume: np.ndarray, net: Any, device: str, **knobs: Any) -> np.ndarray:
    out = np.zeros_like(volume)
    penstock.run_inference(volume, out, model=net, devices=device, **knobs)
    return out


def conv() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.GELU(), nn.Conv3d(8, 1, 3, padding=1))


@pytest.mark.parametrize("seam", ["trim", "blend"])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "float32"])
def test_identity_is_exact(seam: str, dtype: str) -> None:
    volume = np.random.default_rng(0).integers(0, 200, (70, 90, 110)).astype(dtype)
    knobs: dict[str, Any] = {"patch": 32, "overlap": 8, "seam_mode": seam, "normalize": "none"}
    assert np.allclose(run(volume, "identity", "cuda:0", amp="off", **knobs), volume, atol=1e-3)


@pytest.mark.parametrize("seam", ["trim", "blend"])
def test_cuda_agrees_with_the_cpu(seam: str) -> None:
    volume = np.random.default_rng(1).normal(size=(70, 90, 110)).astype("float32")
    knobs: dict[str, Any] = {"patch": 32, "overlap": 8, "seam_mode": seam, "normalize": "global"}
    expected = run(volume, conv(), "cpu", **knobs)
    exact = run(volume, conv(), "cuda:0", amp="off", **knobs)
    half = run(volume, conv(), "cuda:0", **knobs)
    assert np.abs(exact - expected).max() < 1e-3 * np.abs(expected).max()
    assert np.abs(half - expected).max() < 2e-2 * np.abs(expected).max()


def test_the_result_does_not_depend_on_block_or_workers() -> None:
    volume = np.random.default_rng(2).integers(0, 5000, (70, 90, 110)).astype("uint16")
    knobs: dict[str, Any] = {"patch": 32, "overlap": 8, "seam_mode": "blend", "normalize": "global"}
    results = [
        run(volume, conv(), "cuda:0", block=block, prep_workers=workers, batch=8, **knobs)
        for block, workers in ((32, 1), (64, 4))
    ]
    assert (results[0] == results[1]).all()


def test_nan_and_a_failing_model_behave_as_on_the_cpu() -> None:
    volume = np.ones((20, 20, 20), "float32")
    volume[3, 4, 5] = np.nan
    out = run(volume, "identity", "cuda:0", patch=16, overlap=4, normalize="none")
    assert np.isnan(out[3, 4, 5])
    assert np.isfinite(out).sum() == volume.size - 1

    class Overflows(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 1e30 * 1e30

    with pytest.raises(penstock.StageError, match="not finite"):
        run(np.ones((20, 20, 20), "float32"), Overflows(), "cuda:0", patch=16, overlap=4)


@pytest.mark.parametrize("mode", ["inference", "train"])
def test_a_model_is_measured_by_events_and_its_memory_by_the_driver(
    tmp_path: Path, mode: str
) -> None:
    from penstock import cli, ledger

    flags = ["--tile-sizes", "64", "--batch-sizes", "2", "--effort", "quick", "--mode", mode]
    out = tmp_path / "bench.csv"
    assert cli.main(["bench", "model", *flags, "--launch-seconds", "1", "--output", str(out)]) == 0
    (record,) = ledger.read(tmp_path / "bench.ledger")
    assert record.ok and record.case["device"].startswith("cuda")
    phases = {"forward", "backward", "optimizer"} if mode == "train" else set()
    assert {"step", "device"} | phases == set(record.samples_s)
    assert record.memory.device_peak and record.memory.device_reserved
    assert record.memory.device_reserved >= record.memory.device_peak
    assert record.clocks
