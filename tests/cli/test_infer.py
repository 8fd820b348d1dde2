"""The command line as a user meets it: the seed's own command, bad input, resume after a kill."""

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
import yaml

from penstock.base import InferConfig, add_flags, build, from_flags
from penstock.cli import main
from penstock.cli.infer import shown_progress
from penstock.inference.stages.summary import Progress

from ..arrays import zarr
from ..places import SHARED
from ..preloaded import started
from ..seed_spec import seed_out_spec

MOUSE = SHARED / "mouse-brain-two-photon.ome.tif"


def read(spec: Any) -> np.ndarray:
    if isinstance(spec, Path):
        spec = {"driver": "auto", "kvstore": {"driver": "file", "path": str(spec)}}
    return np.asarray(ts.open(spec).result().read().result())


@pytest.fixture(scope="module")
def volume() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 4000, (1, 1, 40, 48, 56)).astype("uint16")


def infer(*words: Any) -> int:
    return main(["infer", *map(str, words), "--devices", "cpu"])


OUT_SPEC = seed_out_spec(
    {"driver": "s3", "bucket": "test-bucket", "aws_region": "us-west-2", "path": "out.zarr"},
    shape=[1, 1, 40, 48, 56],
    chunks=[1, 1, 32, 32, 32],
)
"""The seed's own output spec but for its shape and chunks."""


@pytest.mark.parametrize(
    "words, knob, value",
    [
        ("--normalize false", "normalize", "none"),
        ("--eps 1e-6", "eps", 1e-6),
        ("--compile-dynamic auto", "compile_dynamic", "auto"),
        ("--no-compile-dynamic", "compile_dynamic", "false"),
        ("--no-output-denormalize", "denormalize", False),
        ("--no-amp", "amp", "off"),
        ("--clip-norm", "clip_norm", ()),
        ("--t 0 --c 0", "c", ("0",)),
    ],
)
def test_the_flags_of_aind_torch_utils_are_taken(words: str, knob: str, value: object) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, InferConfig)
    required = "--in-spec a --out-spec b --model-type identity".split()
    config = from_flags(InferConfig, parser.parse_args([*required, *words.split()]))
    assert getattr(config, knob) == value


def test_yaml_spells_them_as_it_does() -> None:
    settings = {"normalize": False, "compile_dynamic": True}
    config = build(InferConfig, {"in_spec": "a", "out_spec": "b", "model_type": "c"}, settings)
    assert (config.normalize, config.compile_dynamic) == ("none", "true")


def test_bounds_that_could_be_intensities_are_named_as_percentiles_by_the_plan(
    volume: np.ndarray, tmp_path, capsys
) -> None:
    np.save(tmp_path / "in.npy", volume[0, 0, :8, :8, :8])
    words = f"""
      plan --in-spec {tmp_path}/in.npy --out-spec {tmp_path}/out.zarr --patch 8 --overlap 0
      --model-type identity --devices cpu --normalize global""".split()
    assert main(words) == 0
    assert "percentiles of the whole volume" not in capsys.readouterr().out
    assert main([*words, "--norm-lower", "5", "--norm-upper", "95"]) == 0
    assert "--norm-lower 5 and --norm-upper 95 are percentiles" in capsys.readouterr().out


@pytest.mark.slow
def test_the_seeds_own_command_runs_over_a_real_s3_server(
    volume: np.ndarray, s3_endpoint: str, tmp_path, capsys,
    here,
) -> None:  # fmt: skip
    import safetensors.torch

    from penstock.models.unet3d import denoise_net

    volume = volume[:, :, :20, :20, :20]
    kvstore = {"driver": "s3", "bucket": "test-bucket", "endpoint": s3_endpoint,
               "aws_region": "us-west-2"}  # fmt: skip
    source = {"driver": "zarr", "kvstore": kvstore | {"path": "tile.zarr/0/"}}
    ts.open(source, create=True, dtype="uint16", shape=volume.shape).result().write(volume).result()
    in_spec = source | {"context": {"cache_pool": {"total_bytes_limit": 4000000000},
                                    "data_copy_concurrency": {"limit": 16},
                                    "s3_request_concurrency": {"limit": 32}}}  # fmt: skip
    (tmp_path / "in_spec.json").write_text(json.dumps(in_spec, indent=4))
    out_spec = OUT_SPEC | {"kvstore": OUT_SPEC["kvstore"] | kvstore | {"path": "out.zarr"}}
    out_spec["metadata"] = OUT_SPEC["metadata"] | {"shape": volume.shape}
    (tmp_path / "out_spec.json").write_text(json.dumps(out_spec, indent=4))
    weights = tmp_path / "BM4DNet.pth"
    import torch

    torch.manual_seed(0)
    torch.save(denoise_net().state_dict(), weights)
    words = f"""
      --in-spec {tmp_path}/in_spec.json --out-spec {tmp_path}/out_spec.json
      --model-type denoise-net --weights {weights}
      --t 0 --c 0 --patch 16 16 16 --overlap 10 --block 32 32 32 --batch 64
      --devices cpu --seam-mode trim --trim-voxels 5 --halo 5 --max-inflight-batches 64
      --norm-lower 0.5 --norm-upper 99.9 --clip-norm 0.0 5.0 --min-blend-weight 0.05
      --prep-workers 16 --writer-workers 8
      --metrics-json {tmp_path}/results/metrics.json --metrics-interval 1""".split()
    assert main(["infer", *words]) == 0
    out = capsys.readouterr().out
    assert "Total time: " in out
    assert "Throughput: " in out
    assert "MB/s" in out
    assert "Blocks written: 1 of 1 planned" in out
    result = read({"driver": "zarr", "kvstore": kvstore | {"path": "out.zarr/0/"}})
    assert result.shape == volume.shape
    assert result.std() > 0
    metrics = json.loads((tmp_path / "results/metrics.json").read_text())
    assert {"queue_monitor", "system_monitor"} <= set(metrics)
    assert safetensors.torch  # the other format that --weights takes


def test_underscores_dashes_yaml_and_flags_agree(volume: np.ndarray, tmp_path, capsys) -> None:
    volume = volume[..., :16, :24, :24]
    source = zarr(tmp_path / "in.zarr", volume)
    settings = {"in_spec": str(source), "out-spec": str(tmp_path / "a.zarr"),
                "model_type": "identity", "patch": [16, 16, 16], "overlap": 4,
                "batch": 3, "devices": "cpu"}  # fmt: skip
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(settings))
    assert main(["infer", "--config", str(tmp_path / "job.yaml")]) == 0
    assert main(["infer", f"--config={tmp_path / 'job.yaml'}", "--out_spec",
                 str(tmp_path / "b.zarr"), "--seam_mode=blend", "--no-amp"]) == 0  # fmt: skip
    for name in "ab":
        assert (read(tmp_path / f"{name}.zarr/0")[:] == volume).all()
    assert "trim" in capsys.readouterr().out


def test_plan_and_dry_run_touch_nothing(volume: np.ndarray, tmp_path, capsys) -> None:
    source = zarr(tmp_path / "in.zarr", volume)
    words = ["--in-spec", source, "--out-spec", tmp_path / "out.zarr", "--model-type", "identity",
             "--patch", "16", "--overlap", "4"]  # fmt: skip
    assert infer(*words, "--dry-run") == 0
    dry = capsys.readouterr().out
    assert main(["plan", *map(str, words), "--devices", "cpu"]) == 0
    for line in (dry, capsys.readouterr().out):
        assert "patches in batches of 2" in line
        assert "amplification" in line
        assert "host memory" in line
    assert [path.name for path in tmp_path.iterdir()] == ["in.zarr"]


@pytest.fixture(scope="module")
def inputs(volume: np.ndarray, tmp_path_factory) -> Path:
    """A folder of inputs, good and bad, that no job changes."""
    import safetensors.torch
    import torch

    folder = tmp_path_factory.mktemp("inputs")
    zarr(folder / "in.zarr", volume)
    zarr(folder / "taken.zarr", volume)
    (folder / "wrong.json").write_text('{"driver": zarr}')
    local = {"driver": "file", "path": str(folder / "new.zarr")}
    aligned = OUT_SPEC["metadata"] | {"chunks": [1, 1, 16, 16, 16]}
    (folder / "misaligned.json").write_text(
        json.dumps(OUT_SPEC | {"kvstore": local, "metadata": aligned})
    )
    sharding = {"name": "sharding_indexed", "configuration": {"chunk_shape": [1, 1, 16, 16, 16]}}
    sharded = {"shape": volume.shape, "data_type": "uint16", "codecs": [sharding],
               "chunk_grid": {"name": "regular",
                              "configuration": {"chunk_shape": [1, 1, 32, 32, 32]}}}  # fmt: skip
    (folder / "sharded.json").write_text(
        json.dumps({"driver": "zarr3", "kvstore": local, "metadata": sharded, "create": True})
    )
    safetensors.torch.save_file({"a": torch.zeros(1)}, folder / "other.safetensors")
    return folder


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--in-spec", "nowhere.zarr"], ["nowhere.zarr"]),
        (["--in-spec", '{"driver": "zarr",'], ["--in-spec", "line 1"]),
        (["--in-spec", "wrong.json"], ["wrong.json", "line"]),
        (["--out-spec", "in.zarr"], ["in.zarr"]),
        (["--out-spec", "taken.zarr"], ["taken.zarr", "--overwrite"]),
        (["--out-spec", "misaligned.json", "--block", "20"], ["--block 20", "16", "--block 32"]),
        (["--out-spec", "sharded.json", "--block", "48"], ["--block 48", "32", "--block 64"]),
        (["--model-type", "denoise-net", "--weights", "other.safetensors"],
         ["other.safetensors", "another model"]),
        (["--trim-voxels", "9"], ["--trim-voxels 9", "18"]),
        (["--t", "3"], ["--t 3", "0 to 0"]),
        (["--devices", "cuda:0"], ["--devices cuda:0", "cpu"]),
        (["--max-memory", "10MiB"], ["10.0 MiB", "--max-memory"]),
        (["--config", "nowhere.yaml"], ["nowhere.yaml"]),
        (["--run-dir", "in.zarr/.zarray/x"], ["--run-dir"]),
        (["--shards", "192"], ["--shards 192", "128", "--shards 256"]),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence_exit_2_and_nothing_lost(
    words: list[str], said: list[str], inputs: Path,
    capsys, monkeypatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(inputs)
    before = sorted((p, p.stat().st_mtime_ns) for p in inputs.rglob("*"))
    given = {"--in-spec": "in.zarr", "--out-spec": "out.zarr", "--model-type": "identity",
             "--patch": "16", "--overlap": "4", "--devices": "cpu"}  # fmt: skip
    given |= dict(zip(words[::2], words[1::2], strict=True))
    code = main(["infer", *(word for pair in given.items() for word in pair)])
    error = capsys.readouterr().err
    assert code == 2, error
    assert len(error.strip().splitlines()) == 1
    assert "Traceback" not in error
    for part in said:
        assert part in error
    assert sorted((p, p.stat().st_mtime_ns) for p in inputs.rglob("*")) == before


@pytest.mark.skipif(not MOUSE.exists(), reason=f"{MOUSE} is absent")
@pytest.mark.parametrize("channels", ["1", pytest.param("all", marks=pytest.mark.slow)])
def test_a_real_two_photon_volume_goes_to_ome_zarr(channels: str, tmp_path) -> None:
    """All of it, or a channel of a corner of it."""
    import tifffile

    source = MOUSE
    if channels == "all":
        images = tifffile.imread(MOUSE)
    else:
        source = tmp_path / "corner.ome.tif"
        planes = tifffile.imread(MOUSE, key=[0, 1, 2, 30, 31, 32])[:, :180, :200]
        tifffile.imwrite(source, planes.reshape(2, 3, 180, 200), metadata={"axes": "CZYX"})
        images = planes[None, 3:]
    out = tmp_path / "mouse.ome.zarr"
    code = infer("--in-spec", source, "--out-spec", out, "--model-type", "identity", "--patch", 64,
                 "--overlap", 10, "--normalize", "global", "--c", channels)  # fmt: skip
    assert code == 0
    assert (read(out / "0").reshape(images.shape) == images).all()
    statistics = json.loads((tmp_path / "mouse.ome.zarr.penstock/statistics.json").read_text())
    for scaling, image in zip(statistics.values(), images, strict=True):
        lower, upper = np.percentile(image, [0.5, 99.9])
        assert scaling["lower"] == pytest.approx(lower)
        assert scaling["scale"] == pytest.approx(upper - lower)


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_bytes(tmp_path, capsys) -> None:
    """SIGKILL at whatever point a third of the blocks has been reached, then --resume."""
    volume = np.random.default_rng(1).integers(0, 4000, (64, 64, 64)).astype("uint16")
    source = zarr(tmp_path / "in.zarr", volume)
    slow, log = tmp_path / "slow.py", tmp_path / "cut.zarr.penstock/done.log"
    slow.write_text(
        "import time, torch\n"
        "from pathlib import Path\n"
        "class Slow(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        f"        hold, log = Path({str(tmp_path / 'hold')!r}), Path({str(log)!r})\n"
        "        while hold.exists() and log.exists() and len(log.read_text().splitlines()) > 2:\n"
        "            time.sleep(0.005)\n"
        "        return x * 0.5 + x.mean(dim=(2, 3, 4), keepdim=True)\n"
    )

    def words(out: str, *more: str) -> list[str]:
        return ["infer", "--in-spec", str(source), "--out-spec", str(tmp_path / out),
                "--model-type", f"{slow}:Slow", "--patch", "16", "--overlap", "4", "--block", "32",
                "--chunks", "16", "--batch", "32", "--devices", "cpu", "--normalize", "percentile",
                *more]  # fmt: skip

    assert main(words("whole.zarr")) == 0  # each block has patches of its own, and is done alone
    (tmp_path / "hold").touch()  # it cannot end before it is killed, however busy the machine
    victim = started(tmp_path, words("cut.zarr"))
    while not (log.exists() and len(log.read_text().splitlines()) >= 3):
        assert victim.is_alive(), "the run ended before it could be killed"
        time.sleep(0.005)
    victim.kill()
    victim.join()
    (tmp_path / "hold").unlink()
    done = len(log.read_text().splitlines())
    assert done < 8
    with log.open("a") as torn:
        torn.write("0 2 2")  # a line that the kill tore: its block is not believed

    capsys.readouterr()
    with pytest.warns(RuntimeWarning, match=r"done\.log is cut or damaged in 1 line"):
        assert main(words("cut.zarr", "--resume")) == 0
    again = capsys.readouterr().out
    assert f"Blocks written: {8 - done} of 8 planned, {done} by an earlier run" in again
    assert (read(tmp_path / "cut.zarr/0") == read(tmp_path / "whole.zarr/0")).all()

    assert main(words("cut.zarr", "--resume", "--seam-mode", "blend")) == 2
    assert "had seam" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("unbuffered", "model", "code"),
    [("", "nonesuch", 2), pytest.param("1", "identity", 0, marks=pytest.mark.slow)],
)
def test_a_reader_that_leaves_ends_no_job_and_its_exit_code_stands(
    unbuffered: str, model: str, code: int, volume: np.ndarray, tmp_path
) -> None:
    source = zarr(tmp_path / "in.zarr", volume)
    often = (
        "import penstock.cli.infer as infer, penstock.cli as cli\n"
        "infer.PLAIN_EVERY_SECONDS = 0\n"
        "cli.entry()\n"
    )
    words = [sys.executable, "-c", often, "infer", "--in-spec", source, "--out-spec",
             tmp_path / "out.zarr", "--model-type", model, "--patch", "16", "--overlap", "4",
             "--devices", "cpu"]  # fmt: skip
    read_end, write_end = os.pipe()
    os.close(read_end)
    job = subprocess.run(
        words, stdout=write_end, stderr=write_end, cwd=tmp_path,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
    )  # fmt: skip
    os.close(write_end)
    assert job.returncode == code
    if code == 0:
        assert (read(tmp_path / "out.zarr/0") == volume).all()


def test_progress_that_is_not_told_ends_no_job(volume: np.ndarray, tmp_path, monkeypatch) -> None:
    class FullDisk(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    volume = volume[..., :16, :24, :24]
    source = zarr(tmp_path / "in.zarr", volume)
    monkeypatch.setattr("penstock.cli.infer.PLAIN_EVERY_SECONDS", 0)
    monkeypatch.setattr(sys, "stderr", FullDisk())
    code = infer("--in-spec", source, "--out-spec", tmp_path / "out.zarr", "--model-type",
                 "identity", "--patch", "16", "--overlap", "4")  # fmt: skip
    assert code == 0
    assert (read(tmp_path / "out.zarr/0") == volume).all()


@pytest.mark.parametrize(
    ("done", "line"),
    [
        (0, "0 of 32 patches, 1 of 6 blocks written, no patch is computed yet\n"),
        (8, "8 of 32 patches, 1 of 6 blocks written, 2.0 MB/s, 3.00 s left\n"),
        (32, "32 of 32 patches, 1 of 6 blocks written, 2.0 MB/s\n"),
    ],
)
def test_the_time_left_is_told_while_it_is_known(done: int, line: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr("penstock.cli.infer.PLAIN_EVERY_SECONDS", 0)
    with shown_progress() as progress:
        progress(Progress(done, 32, 1, 6, 1.0, 2.0))
    assert capsys.readouterr().err == line


def test_a_pipe_that_breaks_elsewhere_is_no_success(monkeypatch, capsys) -> None:
    def broken(*_: Any) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("penstock.cli.plan.run", broken)
    assert main(["plan", "--in-spec", "a", "--out-spec", "b", "--model-type", "identity"]) == 1
    assert "BrokenPipeError" in capsys.readouterr().err


def test_a_signal_while_the_end_is_told_changes_nothing(monkeypatch) -> None:
    """A batch system sends its own more than once."""
    both = (signal.SIGTERM, signal.SIGUSR1)

    class Signalled(io.StringIO):
        def write(self, text: str) -> int:
            for number in both:
                os.kill(os.getpid(), number)
            return super().write(text)

    before = [signal.getsignal(number) for number in both]
    said = Signalled()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", said)
        code = main(["compare", "nowhere", "nowhere"])
    assert code == 2
    assert said.getvalue().startswith("penstock compare: ")
    assert [signal.getsignal(number) for number in both] == before
