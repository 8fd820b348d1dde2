"""Scenes cut on the workers of a cluster: the bytes of one process, whoever dies."""

import dataclasses
import os
import shutil
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from penstock.base import UsageError
from penstock.cli import main
from penstock.data import ChipRecord, read_labels, scene_folders
from penstock.data.scenes import cutting
from penstock.data.scenes.cutting import SceneJob, cut_task

from ..preloaded import forked_workers, started
from .kit import CHIP, NAMES, OVERLAP, words_of

if not find_spec("distributed"):
    pytest.skip("distributed is not installed", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


def everything(folder: Path) -> dict[str, bytes]:
    """All files but the register, which has a line for each run."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.slow
def test_a_scene_that_fails_is_named_and_the_others_are_kept(
    data: Path, chipped: Path, tmp_path, capsys
) -> None:
    copy, out = tmp_path / "data", tmp_path / "out"
    shutil.copytree(data, copy)
    name = max(scene_folders(copy, "train"))
    raster = copy / "train" / name / "VV_dB.tif"
    good, times = raster.read_bytes(), raster.stat()
    raster.write_bytes(good[: len(good) // 2])
    words = words_of(copy, out, "--overlap", str(OVERLAP), "--cluster", "local:1")
    with forked_workers():
        assert main(words) == 2
    assert name in capsys.readouterr().err
    assert len(list(out.glob("train/*/manifest.json"))) == 1
    assert not (out / "train" / "index.json").exists()
    raster.write_bytes(good)
    os.utime(raster, ns=(times.st_atime_ns, times.st_mtime_ns))
    with forked_workers():
        assert main(words) == 0
    assert "done before: 1 scene\n" in capsys.readouterr().out
    without = {"manifest.json"}  # it has the times of the copies, which rounding may change
    assert {n: b for n, b in everything(out).items() if Path(n).name not in without} == {
        n: b for n, b in everything(chipped).items() if Path(n).name not in without
    }


@pytest.mark.slow
def test_a_client_that_is_killed_is_taken_over_by_another(data, chipped, tmp_path) -> None:
    words = words_of(data, tmp_path / "out", "--overlap", str(OVERLAP), "--cluster", "local:2")
    client = started(tmp_path, words)
    while client.is_alive() and not list(tmp_path.glob("out/train/.penstock-*/chips.zarr/c/1")):
        time.sleep(0.002)
    client.kill()
    client.join()
    with forked_workers():
        assert main(words) == 0
    assert everything(tmp_path / "out") == everything(chipped)


def test_a_worker_that_was_taken_for_dead_spoils_nothing(data: Path, tmp_path) -> None:
    """It cuts on while another has cut the scene and moved it into place."""
    name, folder = min(scene_folders(data, "train").items())
    labels = read_labels(data / "labels" / "train.csv")[name]
    record = ChipRecord.of(NAMES, CHIP, OVERLAP, "float16")
    out = tmp_path / name
    job = SceneJob(folder, labels, Path("train.csv"), out, record)
    first = cut_task(job)
    before = everything(out)
    elsewhere = dataclasses.replace(job, out=tmp_path / "late")  # it saw no manifest as it began
    late = cut_task(elsewhere)
    assert cutting.moved(elsewhere.out, out, late) == first
    assert everything(out) == before and elsewhere.out.exists()
    with pytest.raises(UsageError, match="was made with other size"):
        cutting.moved(elsewhere.out, out, {**late, "size": [1, 1]})
