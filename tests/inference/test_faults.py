"""What a job refuses, and what it says of a fault in any stage, of no memory and of a full disk."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import penstock
from penstock.base.errors import StageError, UsageError
from penstock.cli import main
from penstock.data import normalize
from penstock.data.stores.in_memory import MemorySink
from penstock.data.stores.sliced import SlicedSource
from penstock.inference import run as infer
from penstock.inference.run_folder import journal
from penstock.inference.tiling import stitch

from ..parameters import mainly
from .faulty_s3 import distinct, write_model
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
        ("read", SlicedSource, "read"),
        ("normalise", normalize.Normalisation, "of_array"),
        ("forward", nn.Identity, "forward"),
        ("stitch", stitch.Assembly, "_block"),
        ("write", MemorySink, "write"),
    ],
)
def test_a_fault_in_any_stage_surfaces_with_stage_and_block(
    stage: str, owner: Any, attribute: str, tmp_path,
    monkeypatch,
) -> None:  # fmt: skip
    started = job(tmp_path, normalize="percentile")
    monkeypatch.setattr(owner, attribute, failing_after(3, getattr(owner, attribute)))
    before = threading.active_count()
    with pytest.raises(StageError, match=f"^{stage} failed at .*Box.*cosmic ray") as caught:
        infer.run_job(started)
    assert isinstance(caught.value.__cause__, Broken)
    assert threading.active_count() <= before


def test_a_block_that_was_never_written_is_never_success(tmp_path, monkeypatch) -> None:
    started = job(tmp_path)
    note = journal.Journal.note

    def lost(self: journal.Journal, key: tuple[int, ...], *more: Any) -> None:
        if key != (0, 1, 1, 1):
            note(self, key, *more)

    monkeypatch.setattr(journal.Journal, "note", lost)
    with pytest.raises(penstock.Incomplete, match="26 of 27 blocks"):
        infer.run_job(started)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"overlap": 8}, "--overlap 8 must be less than --patch 8"),
        ({"trim_voxels": 2}, "--trim-voxels 2 needs an --overlap of at least 4, not 2"),
        ({"t": 1}, "--t 1 is out of range: the input has 0 to 0"),
        ({"c": "0:3"}, "--c 1 is out of range"),
        ({"c": "DAPI"}, "a range like 0:5; the input has no names for its 1 channel"),
        ({"out_spec": np.zeros((24, 24, 23), "uint16")}, "has 23 along x but this job writes 24"),
        ({"out_spec": ["a.zarr", "b.zarr"]}, "1 head, out (1 channel), but --out-spec names 2"),
        ({"devices": "cuda:7"}, "--devices cuda:7: this machine has"),
        ({"model_type": "nonesuch"}, "--model-type 'nonesuch' is unknown"),
        ({"model_type": "os:nonesuch"}, "could not be made"),
        ({"weights": "nowhere.pt"}, "--weights nowhere.pt"),
        ({"patch": (8, 8), "model_type": conv()}, "has 2 axes but the model is made of 3-D"),
        ({"model_type": conv(3)}, "takes 3 at once"),
        ({"model_type": nn.MaxPool3d(2, stride=1)}, "turns a patch of"),
        ({"batch": 0}, "--batch 0: input should be greater than or equal to 1"),
        ({"normalize": "maybe"}, "--normalize 'maybe'"),
        ({"nonesuch": 1}, "there is no setting 'nonesuch'"),
        ({"norm_lower": 99, "norm_upper": 1}, "--norm-lower 99.0 must be less than"),
        ({"normalize": "percentile", "norm_upper": 200}, "must be percentiles from 0 to 100"),
        ({"normalize": "global", "norm_lower": 0, "norm_upper": 1}, "one below 50 and one above"),
        ({"clip_norm": (1, 0)}, "--clip-norm 1.0 must be less than 0.0"),
        ({"out_spec": ()}, "--out-spec"),
        ({"model_type": "denoise-net"}, "denoise-net has no weights of its own"),
        ({"model_type": 3}, "is neither a name, a reference or a file, nor a module"),
        ({"trace": Path(__file__).parent}, "--trace"),
        ({"metrics_json": Path(__file__) / "x.json"}, "--metrics-json"),
    ],
)
def test_what_cannot_be_is_refused(knobs: dict[str, Any], message: str, tmp_path) -> None:
    with pytest.raises(UsageError) as caught:
        job(tmp_path, **knobs)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_too_little_memory_is_refused_with_both_numbers_and_a_cure(tmp_path) -> None:
    started = job(tmp_path, max_memory="1MiB")
    with pytest.raises(penstock.Refused, match=r"needs .* [MG]iB of host .* 1.00 MiB; give .*--"):
        infer.run_job(started)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("returned", "said"),
    [("None", "NoneType"), ("[x, 2]", "int as out1"), ("x[:, :, 1:]", "turns a patch of")],
)
def test_a_model_that_returns_no_image_is_refused(returned: str, said: str, tmp_path) -> None:
    (tmp_path / "odd.py").write_text(f"def net():\n    return lambda x: {returned}\n")
    with pytest.raises(UsageError, match=said):
        job(tmp_path, model_type=f"{tmp_path / 'odd.py'}:net")


def full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("stage", "method", "file"),
    [("write", "note", "done.log"), ("statistics", "save_statistics", "statistics.json")],
)
def test_a_disk_that_fills_under_the_run_folder_is_told_with_stage_and_path(
    stage: str, method: str, file: str, tmp_path, monkeypatch
) -> None:
    started = job(tmp_path, normalize="global")
    monkeypatch.setattr(journal.Journal, method, full)
    with pytest.raises(StageError, match=f"^{stage} failed at .*{file}: .*No space left"):
        infer.run_job(started)


def test_a_line_that_could_not_be_noted_is_told_once(tmp_path, monkeypatch) -> None:
    """What is left of it in a buffer must not hide the stage as the log is closed."""
    disk = Path("/dev/full")
    if not disk.exists():
        pytest.skip("there is no /dev/full")
    started, begin = job(tmp_path), journal.Journal.begin

    def begun(self: journal.Journal, settings: Any, **more: Any) -> None:
        begin(self, settings, **more)
        self._log.close()
        self._log._file = disk.open("wb")

    monkeypatch.setattr(journal.Journal, "begin", begun)
    with pytest.raises(StageError, match=r"^write failed at block .*done\.log: .*No space left"):
        infer.run_job(started)


def test_a_summary_that_cannot_be_written_costs_no_job(tmp_path, monkeypatch) -> None:
    started, save = job(tmp_path), journal.Journal.save

    def saved(self: journal.Journal, name: str, content: Any) -> None:
        (full if name == "summary.json" else save)(self, name, content)

    monkeypatch.setattr(journal.Journal, "save", saved)
    with pytest.warns(RuntimeWarning, match=r"--run-dir .*run: summary\.json: No space left"):
        assert infer.run_job(started).blocks_written == 27


@pytest.mark.parametrize("name", ["done.log", "run.json"])
def test_a_run_folder_that_cannot_be_used_is_refused(name: str, tmp_path) -> None:
    source, out, folder = arange((9, 9, 9)), tmp_path / "out.zarr", tmp_path / "run"
    penstock.run_inference(source, out, run_dir=folder, **SMALL)
    (folder / name).unlink()
    (folder / name).mkdir()
    with pytest.raises(UsageError, match=r"^`run_dir` .*run: Is a directory$"):
        penstock.run_inference(source, out, run_dir=folder, resume=True, **SMALL)


FULL = (
    "if x.device.type != 'meta' and len(x) > {0} and (x == {1}).any():\n"
    "    raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 GiB.')\n"
    "return x"
)
REALLY = (
    "if x.device.type != 'meta' and len(x) > 1 and (x == 5).any():\n"
    "    torch.empty(2**60, dtype=torch.uint8)\n"
    "return x"
)


def words(folder: Path, model: str) -> list[str]:
    """A job of 8 blocks; patches of one block are in no other."""
    np.save(folder / "in.npy", distinct(16))
    given = ["--in-spec", folder / "in.npy", "--out-spec", folder / "out.zarr", "--model-type",
             model, "--patch", 8, "--overlap", 0, "--block", 8, "--chunks", 8, "--devices", "cpu",
             "--normalize", "none", "--head-kind", "intensity"]  # fmt: skip
    return ["infer", *map(str, given)]


@pytest.mark.parametrize("body", [FULL.format(1, 5), REALLY], ids=["a device", "the host"])
def test_the_job_ends_with_a_sentence(body: str, tmp_path, capsys) -> None:
    assert main(words(tmp_path, write_model(tmp_path, "full", body))) == 3
    error = capsys.readouterr().err
    assert error.startswith("penstock infer: forward failed at brick ")
    assert "no memory left for 2 patches at a time; run again with --resume when" in error
    assert len(error.strip().splitlines()) == 1


VOLUME = np.random.default_rng(0).integers(0, 60_000, (32, 32, 48)).astype("uint16")
"""96 KiB that no codec makes smaller, in 12 blocks."""


@pytest.fixture
def disk(tmp_path) -> Iterator[tuple[Path, Callable[[str], None]]]:
    """A disk of 64 KiB, and a function that mounts it anew with other options."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(options: str) -> None:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        subprocess.run(command, check=True, capture_output=True)

    if sys.platform != "linux":
        pytest.skip("it takes Linux to mount a disk in memory")
    try:
        mount("size=64k")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("it takes the rights of root to mount a disk")
    yield place, lambda options: mount(f"remount,{options}")
    subprocess.run(["umount", "-l", str(place)], check=True)


def disk_words(folder: Path, out: Path, *more: object) -> list[str]:
    np.save(folder / "in.npy", VOLUME)
    given = ["--in-spec", folder / "in.npy", "--out-spec", out, "--model-type", "identity",
             "--patch", 16, "--overlap", 0, "--block", 16, "--chunks", 16, "--devices", "cpu",
             "--normalize", "none", "--prep-workers", 1, "--writer-workers", 2, *more]  # fmt: skip
    return ["infer", *map(str, given)]


def check_notes(out: Path, folder: Path) -> int:
    """Each block that is noted is whole; how many there are."""
    written, stored = penstock.open_source(out), 0
    logs = [(folder / "done.log"), *folder.glob("done-*.log")]
    for line in "".join(log.read_text() for log in logs).splitlines():
        if line[:1].isdigit() and line.count(" ") >= 4:
            _, *block = map(int, line.split()[:4])
            start = tuple(16 * n for n in block)
            box = penstock.Box.of((0, 0, *start), (1, 1, 16, 16, 16))
            assert (written.read(box)[0, 0] == VOLUME[box.slices[2:]]).all()
            stored += 1
    return stored


@pytest.mark.parametrize("beside", mainly([True, False], 0), ids=["and its run folder", "alone"])
def test_an_output_on_a_disk_that_fills_is_told_and_resumed(beside, disk, tmp_path, capsys) -> None:
    place, remount = disk
    out = place / "out.zarr"
    folder = place / "out.zarr.penstock" if beside else tmp_path / "run"
    command = disk_words(tmp_path, out, *(() if beside else ("--run-dir", folder)))
    assert main(command) == 3
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("penstock infer: write failed at block ")
    assert "No space left on device" in error and "Traceback" not in error
    assert error.endswith("; make room there, then run again with --resume")
    assert 0 < check_notes(out, folder) < 12
    assert not (folder / "retries.jsonl").exists()
    remount("size=4m")
    assert main([*command, "--resume"]) == 0
    assert check_notes(out, folder) == 12
    capsys.readouterr()
    assert main(["verify", str(out), "--run-dir", str(folder)]) == 0
    assert [path for path in place.rglob("*") if path.suffix in (".__lock", ".part")] == []
