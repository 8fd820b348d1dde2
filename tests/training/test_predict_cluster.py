"""Detectors over scenes on the workers of a cluster: the table of one process."""

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from penstock.cli import main

from ..dask_threads import threads_of_this_process
from .kit import lighten

if not all(map(find_spec, ("torchvision", "rasterio", "numcodecs", "distributed"))):
    pytest.skip("torchvision, rasterio or distributed is missing", allow_module_level=True)

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]
SETTINGS = ["--channels", "vh,vv,bathymetry", "--backbone", "mobilenet", "--chip-size", "48",
            "--overlap", "16", "--dtype", "float16", "--score-threshold", "0.05", "--device", "cpu",
            "--threads", "1", "--batch-size", "3"]  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A folder with scenes and the weights of a detector that has learnt nothing."""
    import torch

    from penstock.data import planes_of
    from penstock.models.detector import make_detector

    lighten(monkeypatch)
    monkeypatch.chdir(tmp_path)
    words = ["--scenes", "3", "--size", "48", "48", "--objects", "9", "--seed", "5"]
    assert main(["generate", "xview3", "data", *words]) == 0
    Path("scenes").mkdir()
    for split in ("train", "validation"):
        for scene in Path("data", split).iterdir():
            if scene.is_dir():
                shutil.move(scene, Path("scenes", scene.name))
    torch.manual_seed(0)
    net = make_detector(planes_of(("vh", "vv", "bathymetry")), "mobilenet")
    torch.save(net.state_dict(), "weights.pth")
    return tmp_path


def predict(out: str, *more: str) -> int:
    words = ["weights.pth", "--data-root", "scenes", "--output", out]
    return main(["predict", *words, *SETTINGS, *more])


@pytest.mark.slow
def test_workers_write_what_one_process_writes(place: Path, capsys) -> None:
    assert predict("alone.csv") == 0
    alone = capsys.readouterr().out
    with threads_of_this_process() as workers:
        assert predict("out.csv", "--cluster", workers) == 0, capsys.readouterr().err
    assert Path("out.csv").read_bytes() == Path("alone.csv").read_bytes()
    assert len(Path("out.csv").read_text().splitlines()) > 10
    output = capsys.readouterr().out
    assert output.split(", in")[0] == alone.split(", in")[0].replace("alone", "out")
    assert "died" not in output
    assert not list(place.glob("*.parts"))


@pytest.mark.slow
def test_a_scene_that_fails_is_named_and_the_others_are_kept(place: Path, capsys) -> None:
    assert predict("alone.csv") == 0
    *_, name = sorted(path.name for path in Path("scenes").iterdir())
    raster = Path("scenes", name, "VV_dB.tif")
    good = raster.read_bytes()
    raster.write_bytes(good[: len(good) // 2])
    with threads_of_this_process() as workers:
        assert predict("out.csv", "--cluster", workers) == 2
    assert name in capsys.readouterr().err
    assert list(Path("out.csv.parts").glob("*.csv"))
    raster.write_bytes(good)
    with threads_of_this_process() as workers:
        assert predict("out.csv", "--cluster", workers, "--resume") == 0
    assert Path("out.csv").read_bytes() == Path("alone.csv").read_bytes()


@pytest.mark.slow
def test_a_device_that_workers_lack_is_refused_in_one_sentence(place: Path, capsys) -> None:
    with threads_of_this_process() as workers:
        assert predict("out.csv", "--cluster", workers, "--device", "mps") == 2
    assert "--device mps: torch finds no such device here" in capsys.readouterr().err
    assert not list(place.glob("out*"))
