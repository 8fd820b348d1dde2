"""The CUDA path against its CPU twin: ``pytest -m gpu`` on a machine that has a device.

What a training does is asked of both, so that the same calls are tested where there is none.
"""

import gc
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.base import TRAIN_DEFAULTS, Incomplete, TrainConfig, build
from penstock.cli import main

from .rows import rows_of

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
ON_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif("not __import__('torch').cuda.is_available()", reason="no CUDA device"),
)


def on_gpu(test: Any) -> Any:
    for mark in ON_GPU:
        test = mark(test)
    return test


def run(volume: np.ndarray, net: Any, device: str, **knobs: Any) -> np.ndarray:
    out = np.zeros_like(volume)
    penstock.run_inference(volume, out, model=net, devices=device, **knobs)
    return out


def conv() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.GELU(), nn.Conv3d(8, 1, 3, padding=1))


@on_gpu
@pytest.mark.parametrize("seam", ["trim", "blend"])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "float32"])
def test_identity_is_exact(seam: str, dtype: str) -> None:
    volume = np.random.default_rng(0).integers(0, 200, (70, 90, 110)).astype(dtype)
    knobs: dict[str, Any] = {"patch": 32, "overlap": 8, "seam_mode": seam, "normalize": "none"}
    assert np.allclose(run(volume, "identity", "cuda:0", amp="off", **knobs), volume, atol=1e-3)


@on_gpu
@pytest.mark.parametrize("seam", ["trim", "blend"])
def test_cuda_agrees_with_the_cpu(seam: str) -> None:
    volume = np.random.default_rng(1).normal(size=(70, 90, 110)).astype("float32")
    knobs: dict[str, Any] = {"patch": 32, "overlap": 8, "seam_mode": seam, "normalize": "global"}
    expected = run(volume, conv(), "cpu", **knobs)
    exact = run(volume, conv(), "cuda:0", amp="off", **knobs)
    half = run(volume, conv(), "cuda:0", **knobs)
    assert np.abs(exact - expected).max() < 1e-3 * np.abs(expected).max()
    assert np.abs(half - expected).max() < 2e-2 * np.abs(expected).max()


@on_gpu
def test_a_batch_that_does_not_fit_is_named() -> None:
    import torch
    from torch import nn

    share = torch.cuda.mem_get_info(0)[1] // 20

    class Hungry(nn.Module):
        """Takes a twentieth of the GPU's memory for each patch, which the plan cannot foresee."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.is_cuda:
                torch.empty(len(x) * share, dtype=torch.uint8, device=x.device)
            return x

    volume = np.random.default_rng(0).integers(0, 200, (70, 90, 110)).astype("uint16")
    knobs: dict[str, Any] = {"patch": 32, "overlap": 8, "normalize": "none", "amp": "off",
                             "batch": 32, "head_kind": "intensity"}  # fmt: skip
    with pytest.raises(penstock.StageError, match="run again with --resume --batch 16") as caught:
        run(volume, Hungry(), "cuda:0", **knobs)
    assert caught.value.exit_code == 3


@on_gpu
def test_the_result_does_not_depend_on_block_or_workers() -> None:
    volume = np.random.default_rng(2).integers(0, 5000, (70, 90, 110)).astype("uint16")
    knobs: dict[str, Any] = {"patch": 32, "overlap": 8, "seam_mode": "blend", "normalize": "global"}
    results = [
        run(volume, conv(), "cuda:0", block=block, prep_workers=workers, batch=8, **knobs)
        for block, workers in ((32, 1), (64, 4))
    ]
    assert (results[0] == results[1]).all()


@on_gpu
def test_nan_and_a_failing_model_behave_as_on_the_cpu() -> None:
    volume = np.ones((20, 20, 20), "float32")
    volume[3, 4, 5] = np.nan
    out = run(volume, "identity", "cuda:0", patch=16, overlap=4, normalize="none")
    assert np.isnan(out[3, 4, 5])
    assert np.isfinite(out).sum() == volume.size - 1

    import torch

    class Overflows(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 1e30 * 1e30

    with pytest.raises(penstock.StageError, match="NaN or infinite values"):
        run(np.ones((20, 20, 20), "float32"), Overflows(), "cuda:0", patch=16, overlap=4)


@on_gpu
@pytest.mark.parametrize("seam", ["trim", "blend"])
def test_patches_come_back_with_the_same_bits_alone_and_many_at_once(seam: str) -> None:
    volume = np.random.default_rng(3).integers(0, 5000, (70, 90, 110)).astype("uint16")
    knobs: dict[str, Any] = {"patch": 32, "overlap": 8, "seam_mode": seam, "normalize": "global"}
    alone, at_once = (run(volume, "identity", "cuda:0", batch=batch, **knobs) for batch in (1, 16))
    assert (alone == at_once).all()


@on_gpu
def test_bricks_are_read_into_pinned_memory(monkeypatch) -> None:
    import torch

    from penstock.inference.lanes.bricks import Loaded
    from penstock.inference.lanes.transfers import Transfers

    upload, pinned = Transfers.upload, []

    def noted(self: Transfers, loaded: Loaded) -> None:
        if loaded.array is not None:
            pinned.append(torch.from_numpy(loaded.array).is_pinned())
        upload(self, loaded)

    monkeypatch.setattr(Transfers, "upload", noted)
    volume = np.random.default_rng(5).integers(0, 5000, (70, 90, 110)).astype("uint16")
    knobs: dict[str, Any] = {"patch": 32, "overlap": 8, "seam_mode": "trim", "normalize": "none"}
    assert (run(volume, "identity", "cuda:0", amp="off", **knobs) == volume).all()
    assert pinned and all(pinned)


@on_gpu
def test_nothing_of_a_job_stays_on_the_device() -> None:
    import torch

    volume = np.zeros((70, 90, 110), "uint16")
    held = torch.cuda.memory_allocated()
    for overlap in (8, 10):
        run(volume, "identity", "cuda:0", patch=32, overlap=overlap, seam_mode="blend")
        gc.collect()
        assert torch.cuda.memory_allocated() == held


@on_gpu
@pytest.mark.parametrize("knobs", [{"amp": "off", "tf32": False}, {"tf32": True}, {"amp": "fp16"}])
def test_the_plan_holds_what_the_device_and_cudnn_take(knobs: dict[str, Any]) -> None:
    import torch

    volume = np.random.default_rng(4).normal(size=(140, 150, 160)).astype("float32")
    settings: dict[str, Any] = {"patch": 64, "overlap": 16, "normalize": "none", "batch": 4,
                                "devices": "cuda:0"}  # fmt: skip
    out = np.zeros_like(volume)
    plan = penstock.plan_inference(volume, out, model="denoise-net", **settings, **knobs)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    penstock.run_inference(volume, out, model="denoise-net", **settings, **knobs)
    assert torch.cuda.max_memory_allocated() - before <= plan.device_peak


@on_gpu
@pytest.mark.parametrize("mode", ["inference", "train"])
def test_a_model_is_measured_by_events_and_its_memory_by_the_driver(tmp_path, mode: str) -> None:
    from penstock.instruments import ledger

    flags = ["--tile-sizes", "64", "--batch-sizes", "2", "--effort", "quick", "--mode", mode]
    out = tmp_path / "bench.csv"
    assert main(["bench", "model", *flags, "--launch-seconds", "1", "--output", str(out)]) == 0
    (record,) = ledger.read_ledger(tmp_path / "bench.ledger")
    assert record.ok and record.case["device"].startswith("cuda")
    phases = {"forward", "backward", "optimizer"} if mode == "train" else set()
    assert {"step", "device"} | phases == set(record.samples_s)
    assert record.memory.device_peak and record.memory.device_reserved
    assert record.memory.device_reserved >= record.memory.device_peak
    driver = record.memory.device_driver  # with the context, which comes on top
    assert driver is None or driver > record.memory.device_reserved
    assert record.clocks


@pytest.fixture
def rows(tmp_path) -> tuple[Path, np.ndarray]:
    zarr = pytest.importorskip("zarr")
    pytest.importorskip("tensorstore")
    values = np.arange(64 * 2**16, dtype="float32").reshape(64, 2**16)
    zarr.create_array(tmp_path / "rows.zarr", data=values, chunks=(4, 2**16))
    return tmp_path / "rows.zarr", values


@on_gpu
@pytest.mark.parametrize("as_tensors", [False, True])
def test_a_pinned_batch_is_not_overwritten_while_it_is_copied(rows, as_tensors) -> None:
    """Parts of it, on a stream that is late, after the last view of it is gone."""
    import torch

    path, values = rows
    side, copies = torch.cuda.Stream(), []
    with penstock.Loader(path, batch_size=4, queue=1, pin=True) as loader:
        for batch in loader.as_torch() if as_tensors else loader:
            (array,) = batch.values()
            tensor = array if as_tensors else torch.from_numpy(array)
            assert tensor.is_pinned()
            with torch.cuda.stream(side):
                torch.cuda._sleep(2 * 10**7)
                copies.append(tensor[1:].to("cuda", non_blocking=True))
            del batch, array, tensor
    torch.cuda.synchronize()
    for place, copy in enumerate(copies):
        assert (copy.cpu().numpy() == values[4 * place + 1 : 4 * place + 4]).all()
    assert len(copies) == 16


@on_gpu
def test_graphs_are_captured_while_pinned_batches_are_read(rows: tuple[Path, np.ndarray]) -> None:
    """The threads of a loader are others than the one that captures."""
    import torch

    path, values = rows
    total, static = torch.zeros((), device="cuda"), torch.zeros((4, 2**16), device="cuda")
    with penstock.Loader(path, batch_size=4, queue=1, pin=True) as loader:
        for batch in loader.as_torch():
            (tensor,) = batch.values()
            static.copy_(tensor, non_blocking=True)
            del batch, tensor
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                total += static.max()
            graph.replay()
    assert total.item() == pytest.approx(values.reshape(16, -1).max(1).sum(), rel=1e-5)


PHASES = ("data_wait", "transfer", "forward", "backward", "optimizer")


@pytest.fixture(
    params=[pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=ON_GPU)]
)
def device(request) -> str:
    pytest.importorskip("lightning_fabric")
    return request.param


def train(workload: str, *settings: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    from penstock.training.loop import train_workload as train

    progress = more.pop("progress", lambda now: None)
    config = build(TrainConfig, TRAIN_DEFAULTS[workload], *settings, more)
    return train(workload, config, progress=progress)


POINTS, STEPS = {"cpu": 83, "cuda": 203}, {"cpu": 24, "cuda": 54}
"""On a CPU, which drains each step as it ends, fewer show the same."""


def spiral(out: Path, device: str, **more: Any) -> dict[str, Any]:
    small: dict[str, Any] = {"num_samples": POINTS[device], "batch_size": 8, "epochs": 3}
    small |= {"hidden_dims": (8, 4), "dropout": 0.0, "output_dir": out, "device": device}
    return train("spiral", small, **more)


def read(out: Path, name: str) -> dict[str, Any]:
    import torch

    return torch.load(out / name, weights_only=True, map_location="cpu")


def assert_close(one: Mapping[str, Any], other: Mapping[str, Any], tolerance: float) -> None:
    import torch

    assert one.keys() == other.keys()
    for name in one:
        assert torch.allclose(one[name], other[name], rtol=tolerance, atol=tolerance), name


def assert_logged(out: Path, results: Mapping[str, Any], device: str) -> None:
    """Each step has its phases, and the peaks are of the device that trained."""
    rows = rows_of(out / "steps" / "rank0.csv")
    assert len(rows) == results["steps"]
    for row in rows:
        phases = [float(row[f"{name}_s"]) for name in PHASES]
        assert min(phases) >= 0
        # An event of a GPU knows the time to half a microsecond, a float32 of milliseconds.
        within = 1e-6 if device == "cpu" else 1e-4
        assert sum(phases) == pytest.approx(float(row["step_s"]), abs=within)
    (rank,) = results["ranks"]
    for name in PHASES[2:]:
        assert rank["phases"][name]["total_s"] > 0
    peaks = [rank["memory"][name] for name in ("device_peak", "device_reserved")]
    assert all(peaks) if device == "cuda" else peaks == [None, None]
    assert (results["device"] == "cpu") == (device == "cpu")


def test_the_spiral_is_trained_as_on_the_cpu(device: str, tmp_path) -> None:
    results = spiral(tmp_path / "there", device)
    assert_logged(tmp_path / "there", results, device)
    here = spiral(tmp_path / "here", "cpu", num_samples=POINTS[device])
    assert results["samples"] == here["samples"]
    assert results["final"]["val_loss"] == pytest.approx(here["final"]["val_loss"], rel=1e-2)
    one, other = (read(tmp_path / name, "best_model.pth") for name in ("there", "here"))
    assert one.keys() == other.keys()


def test_a_training_that_is_stopped_goes_on(device: str, tmp_path) -> None:
    """With dropout, whose random numbers are the device's own."""

    def strike(now: Any) -> None:
        if not now.validated and 9 < now.step < STEPS[device]:
            os.kill(os.getpid(), signal.SIGTERM)

    spiral(tmp_path / "whole", device, dropout=0.2)
    with pytest.raises(Incomplete, match="stopped by SIGTERM"):
        spiral(tmp_path / "parts", device, dropout=0.2, progress=strike)
    # Where steps are queued, the signal comes when they are drained.
    results = spiral(tmp_path / "parts", device, dropout=0.2, resume=True)
    assert results["steps"] == STEPS[device] and len(results["resumed_at_steps"]) == 1
    whole, parts = (read(tmp_path / n, "checkpoints/last.pt")["model"] for n in ("whole", "parts"))
    assert_close(whole, parts, 0 if device == "cpu" else 1e-4)


def tiny(in_channels: int = 1) -> Any:
    from torch import nn

    return nn.Sequential(
        nn.Conv3d(in_channels, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 1, 3, padding=1)
    )


@pytest.fixture
def pairs(device: str, tmp_path) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    sides = (8, 16, 40) if device == "cpu" else (16, 24, 40)
    clean = rng.integers(0, 4000, sides).astype(np.uint16)
    noisy = clean + rng.integers(0, 500, clean.shape).astype(np.uint16)
    knobs: dict[str, Any] = {"model": f"{__name__}:tiny", "tile_size": "8", "num_workers": 2}
    for flag, array in {"in_spec": noisy, "target_spec": clean}.items():
        np.save(tmp_path / f"{flag}.npy", array)
        knobs[flag] = str(tmp_path / f"{flag}.npy")
    return knobs


def test_mixed_precision_learns_if_clipped(device: str, pairs: dict[str, Any], tmp_path) -> None:
    """By the command; and it goes on with the scaler, which only CUDA's half precision has."""
    out = tmp_path / "out"
    words = [part for name, value in pairs.items() for part in (f"--{name}", str(value))]
    words += ["--amp", "--clip-norm", "1", "--learning-rate", "0.01", "--batch-size", "4"]
    words += ["--device", device, "--output-dir", str(out)]
    assert main(["train", "pairs", *words, "--epochs", "4", "--schedule", "constant"]) == 0
    results = json.loads((out / "training_results.json").read_text())
    assert_logged(out, results, device)
    history = results["history"]
    assert history[-1]["train_loss"] < history[0]["train_loss"]
    assert np.isfinite(results["final"]["val_psnr"])
    scaler = read(out, "checkpoints/last.pt")["scaler"]
    assert scaler["scale"] > 0 if device == "cuda" else not scaler
    more = [*words, "--epochs", "5", "--schedule", "constant", "--resume"]
    assert main(["train", "pairs", *more]) == 0
    resumed = json.loads((out / "training_results.json").read_text())
    assert (resumed["epochs"], resumed["resumed_at_steps"]) == (5, [results["steps"]])


def test_accumulated_batches_equal_the_big_one_and_all_are_timed(device, pairs, tmp_path) -> None:
    big = train("pairs", pairs, batch_size=6, epochs=2, device=device, output_dir=tmp_path / "big")
    out = tmp_path / "small"
    small = train(
        "pairs", pairs, batch_size=2, grad_accum_steps=3, epochs=2, device=device, output_dir=out
    )
    assert (small["steps"], small["global_batch_size"]) == (big["steps"], 6)
    assert small["samples"] == big["samples"]
    assert_logged(out, small, device)
    one, other = (read(tmp_path / name, "best_model.pth") for name in ("big", "small"))
    assert_close(one, other, 1e-4 if device == "cpu" else 1e-2)
    for name in one if device == "cpu" else ():
        np.testing.assert_allclose(other[name], one[name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.long
def test_the_benchmark_of_inference_has_a_twin_on_the_cpu(tmp_path) -> None:
    small = {"WORK": str(tmp_path / "work"), "SMOKE": "1", "PYTHON": sys.executable}
    command = ["bash", str(BENCHMARKS / "gpu.sh"), str(tmp_path / "kept"), "infer"]
    environment = {**os.environ, **small, "DEVICE": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    kept = tmp_path / "kept" / "infer"
    records = [json.loads(line) for line in (kept / "infer.jsonl").read_text().splitlines()]
    limits = {r["name"] for r in records if r["kind"] == "limit"}
    assert limits == {"read", "write", "copy"}, "there is no bus on a CPU"
    for kind in ("alone", "infer"):
        cases = [(r["net"], r["how"]) for r in records if r["kind"] == kind]
        assert cases == [
            ("identity", "eager"), ("three_conv", "eager"), ("three_conv", "compiled"),
        ]  # fmt: skip
        assert all(r["voxels_per_second"] > 0 for r in records if r["kind"] == kind)
    assert len([*kept.glob("trace-*.json")]) == 3
    assert (kept / "infer.txt").read_text() == done.stdout


def test_how_much_of_the_copies_lies_beside_forwards(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    overlap_of = runpy.run_path(str(BENCHMARKS / "gpu_infer.py"))["overlap_of"]
    assert overlap_of([], [(0.0, 9.0)]) is None
    assert overlap_of([(0.0, 2.0), (4.0, 6.0)], [(1.0, 3.0), (3.0, 5.0)]) == 0.5


@pytest.mark.parametrize("script", ["benchmarks/gpu_infer.py", "training/denoise_tiny.py"])
def test_a_script_without_its_gpu_says_so(script: str, monkeypatch, capsys) -> None:
    place = BENCHMARKS.parent / script
    monkeypatch.setattr("sys.argv", [str(place), "--device", "cuda"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(place), run_name="__main__")
    said = capsys.readouterr().err
    assert end.value.code == 2 and "--device cuda: torch sees no CUDA device here" in said


@pytest.mark.long
def test_the_benchmark_keeps_ledger_report_and_figures(tmp_path) -> None:
    """gpu.sh, with a preset, scenes and chips that a CPU has time for. It goes on where it was."""
    needed = ("lightning_fabric", "torchvision", "rasterio", "matplotlib")
    if not all(map(find_spec, needed)):
        pytest.skip(f"one of {', '.join(needed)} is not installed")
    settings = json.loads((BENCHMARKS / "gpu_suite.json").read_text())
    settings |= {"batch_sizes": [1], "num_workers_list": [0], "epochs": 1}
    settings["train"] |= {"device": "cpu", "backbone": "mobilenet", "max_steps": 2}
    (tmp_path / "preset.json").write_text(json.dumps(settings))
    small = {
        "PRESET": str(tmp_path / "preset.json"), "WORK": str(tmp_path / "work"),
        "SCENES": "--scenes 2 --size 256 256 --objects 8", "CUT": "--chip-size 128 --overlap 32",
        "PYTHON": sys.executable, "DEVICE": "cpu",
    }  # fmt: skip
    command = ["bash", str(BENCHMARKS / "gpu.sh"), str(tmp_path / "kept"), "suite"]
    for said in ("ok", "skipped, the ledger has it"):
        done = subprocess.run(
            command, env={**os.environ, **small}, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        assert said in done.stdout + done.stderr
    kept = tmp_path / "kept" / "suite"
    assert {path.name for path in kept.iterdir()} == {
        "suite.ledger", "system_info.json", "benchmark_report.json", "benchmark_report.md",
        "benchmark_report.png",
    }  # fmt: skip
    (record,) = (kept / "suite.ledger" / "records.jsonl").read_text().splitlines()
    assert json.loads(record)["case"]["amp"] is True
    assert str(tmp_path) not in record
    words = [*command[:-1], "suit"]
    done = subprocess.run(words, env={**os.environ, **small}, capture_output=True, text=True)
    assert done.returncode == 2 and "there is no part suit; there are check" in done.stderr
