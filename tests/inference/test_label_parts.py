"""Labels by parts, on workers, and after kills: the bytes of one process, and what status says."""

import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import numpy as np
import pytest
from scipy import ndimage

from penstock.base import LabelConfig
from penstock.cli import main
from penstock.data import open_source
from penstock.inference import Labelling

from ..preloaded import forked_workers, started

KILLED = """
import signal, sys
from penstock.cli import main
from penstock.inference.objects import labelling  # loaded before the clock runs
signal.setitimer(signal.ITIMER_REAL, float(sys.argv[1]))
sys.exit(main(sys.argv[2:]))
"""
"""A command that SIGALRM kills after some seconds, without a word; 0 for never."""


def words_of(folder: Path, name: str, *more: str) -> list[str]:
    place, out = str(folder / "in.npy"), str(folder / name / "out.zarr")
    fixed = (
        f"--chunks 4 4 4 --block 4 4 4 --workers 1 --fill-holes --table {folder / name / 't.csv'}"
    )
    return ["label", place, out, *fixed.split(), *more]


def made(folder: Path, side: int) -> np.ndarray:
    mask = np.random.default_rng(side).random((side,) * 3) < 0.5
    np.save(folder / "in.npy", mask)
    for name in ("one", "many"):
        (folder / name).mkdir()
    return mask


def content(folder: Path) -> dict[str, bytes]:
    files = [folder / "t.csv", *(folder / "out.zarr").rglob("*")]
    return {str(f.relative_to(folder)): f.read_bytes() for f in files if f.is_file()}


def check_same(folder: Path, capsys) -> None:
    """All is as one process wrote it, and `status` and `verify` say that it is whole."""
    out = str(folder / "many" / "out.zarr")
    assert content(folder / "many") == content(folder / "one")
    capsys.readouterr()
    assert (main(["status", out]), main(["verify", out])) == (0, 0)
    said = capsys.readouterr().out
    assert said.startswith("done: ") and "blocks are proven" in said
    assert not {path.name for path in Path(f"{out}.penstock").iterdir() if path.is_dir()}


def test_parts_write_what_one_process_writes(tmp_path, capsys) -> None:
    mask = made(tmp_path, 8)
    assert main(words_of(tmp_path, "one")) == 0
    labels = open_source(str(tmp_path / "one" / "out.zarr"))
    filled = ndimage.binary_fill_holes(mask, np.ones((3, 3, 3)))
    np.testing.assert_array_equal(labels.read(labels.domain)[0, 0], ndimage.label(filled)[0])

    def step(*more: str) -> tuple[int, str]:
        code = main(words_of(tmp_path, "many", *more))
        read = capsys.readouterr()
        return code, read.out + read.err

    run = str(tmp_path / "many" / "out.zarr.penstock")
    assert "no run is prepared in" in step("--part", "1/2")[1]
    assert "next 3 times: --part i/1" in step("--prepare")[1]
    assert main(["status", run]) == 3
    assert "next is label --part i/n" in capsys.readouterr().out
    code, said = step("--finish")
    assert code == 3 and "no block is searched for holes yet; run --part" in said
    for said in ("All blocks are searched for holes", "All blocks are counted", "Complete: all"):
        for part in ("3/3", "1/3", "2/3", "2/3"):
            assert step("--part", part)[0] == 0
        assert said in step("--finish")[1]
        code, again = step("--finish")  # it ends no round twice
        assert (code, "yet; run --part i/1 for each" in again) == (
            (0, False) if "C" in said else (3, True)
        )
    summary = Path(run, "summary.json").read_text()
    assert '"at_planes"' in summary and step("--finish")[0] == 0
    assert step("--resume")[0] == 0
    assert Path(run, "summary.json").read_text() == summary
    check_same(tmp_path, capsys)
    (tmp_path / "many" / "out.zarr" / "0" / "c" / "0" / "1" / "1").unlink()
    assert main(["verify", run.removesuffix(".penstock"), "--forget"]) == 3
    assert "penstock label, as before and with --resume" in capsys.readouterr().out
    assert step("--resume")[0] == 0
    check_same(tmp_path, capsys)


def test_a_part_that_may_number_blocks_in_another_way_is_refused(tmp_path, capsys) -> None:
    made(tmp_path, 8)
    assert main(words_of(tmp_path, "one", "--prepare")) == 0
    run = tmp_path / "one" / "out.zarr.penstock" / "run.json"
    text = run.read_text()
    run.write_text(text.replace('"connected-components-3d": "', '"connected-components-3d": "0.'))
    assert main(words_of(tmp_path, "one", "--part", "1/2")) == 2
    assert "connected-components-3d" in capsys.readouterr().err
    run.write_text(text)
    assert main(words_of(tmp_path, "one", "--part", "1/2")) == 0


@pytest.mark.slow
def test_twenty_kills_and_two_at_once(tmp_path, capsys) -> None:
    made(tmp_path, 20)
    assert main(words_of(tmp_path, "one")) == 0
    rng, kills, longest = np.random.default_rng(1), 0, 0.25

    def start(seconds: float, *more: str) -> ForkServerProcess:
        return started(tmp_path, [str(seconds), *words_of(tmp_path, "many", *more)], KILLED)

    def code_of(process: ForkServerProcess) -> int | None:
        process.join(60)
        return process.exitcode

    def steps() -> Iterator[list[str]]:
        yield ["--prepare"]
        for _ in range(3):
            yield from (["--part", f"{element}/3"] for element in (2, 1, 3))
            yield ["--finish"]

    for step in steps():
        more = [*step, "--resume"] if step == ["--prepare"] else step
        for _ in range(3):
            killed = code_of(start(rng.uniform(0.002, longest), *more)) == -signal.SIGALRM
            kills += killed
            longest *= 1.15 if killed else 0.6  # so that most are killed, on any machine
        twice = [start(0, *more) for _ in range(2 if step[0] == "--part" else 1)]
        # A --finish that was killed may have ended its round: then the next has no block yet.
        ended = {0, 3} if step == ["--finish"] else {0}
        assert {*map(code_of, twice)} <= ended
    check_same(tmp_path, capsys)
    assert kills >= 20


@pytest.mark.slow
def test_workers_of_dask_write_what_one_process_writes(tmp_path, capsys) -> None:
    pytest.importorskip("distributed")
    made(tmp_path, 20)
    assert main(words_of(tmp_path, "one")) == 0
    with forked_workers():
        assert main(words_of(tmp_path, "many", "--cluster", "local:2")) == 0
    check_same(tmp_path, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("infers", [False, True])
def test_a_client_of_dask_that_is_killed_is_resumed(tmp_path, capsys, infers: bool) -> None:
    pytest.importorskip("distributed")
    made(tmp_path, 20)
    np.save(tmp_path / "in.npy", np.load(tmp_path / "in.npy").astype(np.float32))

    def words(name: str, *more: str) -> list[str]:
        place, out = str(tmp_path / "in.npy"), str(tmp_path / name / "out.zarr")
        verb = ["label"]
        if infers:
            net = "--model identity --head-kind scores --normalize none --overlap 0 --patch 4"
            verb = ["infer", *f"{net} --devices cpu --instances components".split()]
        fixed = f"--threshold 0.5 --chunks 4 --block 4 --table {tmp_path / name / 't.csv'}"
        return [*verb[:1], place, out, *verb[1:], *fixed.split(), *more]

    def seen() -> bool:
        """Whether objects of a block are found, or all scores and objects are written."""
        return any(folder.glob("objects/*.npz")) or (folder / "summary.json").is_file()

    assert main(words("one")) == 0
    folder = tmp_path / "many" / "out.zarr.penstock"
    for stage in ("scores", "objects") if infers else ("objects",):
        log = tmp_path / "many" / "out.zarr.scores.penstock"
        start = [sys.executable, "-m", "penstock", *words("many", "--cluster", "local:2")]
        client = subprocess.Popen(
            [*start, "--resume"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until = time.monotonic() + 100
        while client.poll() is None and time.monotonic() < until:
            begun = any(file.stat().st_size > 500 for file in log.glob("done-*.log"))
            if seen() or (stage == "scores" and begun):
                break
            time.sleep(0.002)
        client.kill()
        assert client.wait(60) == -signal.SIGKILL and not (folder / "summary.json").exists()
    with forked_workers():
        assert main(words("many", "--cluster", "local:2", "--resume")) == 0
    check_same(tmp_path, capsys)


def test_work_is_handed_on_without_what_is_open(tmp_path) -> None:
    np.save(tmp_path / "mask.npy", np.ones((4, 5, 6), bool))
    config = LabelConfig(
        in_spec=str(tmp_path / "mask.npy"), out_spec=str(tmp_path / "out.zarr"),
        intensity=np.ones((4, 5, 6)), table=tmp_path / "table.csv",
    )  # fmt: skip
    work = Labelling(config).work
    assert work.image is not None and "image" in vars(work)
    handed = pickle.loads(pickle.dumps(work))
    assert vars(handed).keys() == {each.name for each in fields(work)}
    assert handed.grid == work.grid and handed.image.read(handed.grid[0]).sum() == 120
