"""Detectors over scenes on the workers of a cluster: the table of one process, whoever dies."""

from __future__ import annotations

import shutil
import threading
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from penstock.cli import main

from ..dask_threads import threads_of_this_process
from ..preloaded import forked_workers
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
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with scenes and the weights of a detector that has learnt nothing. Workers that are
    processes of their own, in slow tests, know none but the usual ones."""
    import torch

    from penstock.data import planes_of
    from penstock.models.detector import make_detector

    if not request.node.get_closest_marker("slow"):
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


def worker_at_work() -> psutil.Process | None:
    """A worker that reads a raster now."""
    for process in psutil.Process().children(recursive=True):
        try:
            if any(file.path.endswith("_dB.tif") for file in process.open_files()):
                return process
        except psutil.Error:
            continue
    return None


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_workers_write_what_one_process_writes_whoever_dies(
    killed: bool, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict("alone.csv") == 0
    alone = capsys.readouterr().out
    if killed:
        with forked_workers(), Killer() as killer:
            for _ in range(20):  # the scenes may be read before anybody has looked
                Path("out.csv").unlink(missing_ok=True)
                capsys.readouterr()
                assert predict("out.csv", "--cluster", "local:2") == 0, capsys.readouterr().err
                if killer.killed:
                    break
        assert killer.killed
    else:
        with threads_of_this_process() as workers:
            assert predict("out.csv", "--cluster", workers) == 0, capsys.readouterr().err
    assert Path("out.csv").read_bytes() == Path("alone.csv").read_bytes()
    assert len(Path("out.csv").read_text().splitlines()) > 10
    output = capsys.readouterr().out
    assert output.split(", in")[0] == alone.split(", in")[0].replace("alone", "out")
    assert ("1 worker died on the way" in output) == killed
    assert not list(place.glob("*.parts"))


class Killer(threading.Thread):
    """Kills one worker while it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.killed, self.ended = False, threading.Event()

    def run(self) -> None:
        while not self.killed and not self.ended.wait(0.005):
            if (worker := worker_at_work()) is not None:
                worker.kill()
                self.killed = True

    def __enter__(self) -> Killer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.join()


@pytest.mark.slow
def test_a_scene_that_fails_is_listed_and_the_others_are_kept(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict("alone.csv") == 0
    name, *_ = sorted(path.name for path in Path("scenes").iterdir())
    raster = Path("scenes", name, "VV_dB.tif")
    good = raster.read_bytes()
    raster.write_bytes(good[: len(good) // 2])
    words = ["--part-retries", "0", "--max-failed-parts", "1"]
    with threads_of_this_process() as workers:
        assert predict("out.csv", *words, "--cluster", workers) == 3
    error = capsys.readouterr().err
    assert f"1 scene failed ({name}: " in error and "--resume does the rest" in error
    assert len(list(Path("out.csv.parts").glob("*.csv"))) == 2
    raster.write_bytes(good)
    with threads_of_this_process() as workers:
        assert predict("out.csv", *words, "--cluster", workers, "--resume") == 0
    assert Path("out.csv").read_bytes() == Path("alone.csv").read_bytes()


def test_a_device_that_workers_lack_is_refused_in_one_sentence(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with threads_of_this_process() as workers:
        assert predict("out.csv", "--cluster", workers, "--device", "mps") == 2
    assert "--device mps: torch finds no such device here" in capsys.readouterr().err
    assert not list(place.glob("out*"))
