"""An array of processes that share a job: prepare, statistics, parts, finish."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.cli import main
from penstock.data.normalize import Histogram
from penstock.data.stores import marker
from penstock.inference.run_folder.journal import Journal
from penstock.inference.run_folder.reader import open_run
from penstock.inference.sharing.completeness import maker_notes

from ..preloaded import started
from .kit import Array

WORDS = ("--in-spec in.npy --model-type identity --patch 8 --overlap 2 --block 8 --chunks 8 "
         "--devices cpu --threads 1 --seam-mode blend --normalize").split()  # fmt: skip
SHAPE = (16, 24, 8)
"""Six blocks to write."""


VOLUME = np.random.default_rng(0).normal(900, 200, SHAPE).astype("float32")


@pytest.fixture(autouse=True)
def _volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("in.npy", VOLUME)


def infer(*words: str, normalize: str = "global", out: str = "out.zarr") -> int:
    return main(["infer", *WORDS, normalize, "--out-spec", out, *words])


@functools.cache
def alone(normalize: str) -> Array:
    """What one process writes."""
    assert infer(normalize=normalize, out="alone.zarr") == 0
    return values("alone.zarr")


def values(path: str) -> Array:
    source = penstock.open_source(path)
    return source.read(source.domain)


def finished(order: list[int], counts: list[int], **knobs: Any) -> Array:
    """The output of an array whose elements run, and before that count, in some order."""
    elements = max(order)
    assert infer("--prepare", "--workers", str(elements), **knobs) == 0
    for element in counts:
        assert infer("--statistics", f"{element}/{elements}", **knobs) == 0
    for element in order:
        assert infer("--part", f"{element}/{elements}", **knobs) == 0
    assert infer("--finish", **knobs) == 0
    return values("out.zarr")


@pytest.mark.parametrize(
    ("normalize", "order", "counts"),
    [
        ("global", [2, 1, 2], 2 * [2, 1, 2]),  # float32 is counted in two rounds
        pytest.param("percentile", [2, 3, 1, 3], [3], marks=pytest.mark.slow),
        ("none", [2, 1], [2]),  # there is nothing to count
        pytest.param("none", [2, 3, 1, 3], [3], marks=pytest.mark.slow),
    ],
)
def test_elements_in_any_order_and_twice_write_what_one_process_writes(
    normalize: str, order: list[int], counts: list[int]
) -> None:
    shared = finished(order, counts, normalize=normalize)
    assert np.array_equal(shared, alone(normalize))
    summary = json.loads(Path("out.zarr.penstock/summary.json").read_text())
    assert summary["voxels"] == np.prod(SHAPE)
    assert len(summary["workers"]) == max(order)


def test_each_step_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    np.save("in.npy", VOLUME.astype("uint16"))  # it is counted in one round
    assert infer("--part", "1/2") == 2
    assert "run --prepare --workers N first" in capsys.readouterr().err
    assert infer("--prepare") == 2
    assert "--prepare needs --workers N" in capsys.readouterr().err
    assert infer("--prepare", "--workers", "2") == 0
    assert "next --statistics i/2 for each i, then --part i/2" in capsys.readouterr().out
    assert infer("--part", "1/2") == 2
    assert "2 of 2 shares of round 1 are missing; run --statistics 1/2" in capsys.readouterr().err
    for element in (1, 2):
        assert infer("--statistics", f"{element}/2") == 0
    assert infer("--part", "2/2") == 0
    assert infer("--finish") == 3
    said = capsys.readouterr().err
    assert "run again with --part 1/2 (in SLURM penstock slurm submit --array 1-1 -- infer" in said
    for words, said in {
        ("--part", "1/3"): "prepared for 2 elements",
        ("--part", "5/4"): "'5/4' is not an element",
        ("--part", "1/2", "--overlap", "4"): "had overlap",
        ("--part", "1/2", "--finish"): "two steps of an array",
    }.items():
        assert infer(*words) == 2
        assert said in capsys.readouterr().err


def test_finish_says_how_all_that_is_missing_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    np.save("in.npy", np.zeros((16, 24, 16), "float32"))  # of 12 blocks
    assert infer("--prepare", "--workers", "12", "--parts", "12", normalize="none") == 0
    for element in (2, 7):
        assert infer("--part", f"{element}/12", normalize="none") == 0
    capsys.readouterr()
    assert infer("--finish", normalize="none") == 3
    said = capsys.readouterr().err
    assert "run again with --part i/12 for each i of 1,3-6,8-12, each in a process" in said
    assert "penstock slurm submit --array 1,3-6,8-12 -- infer ... --part %a/12" in said
    assert "in 10 parts of 12 (0,2-5,7-11); run" in said


def test_another_run_of_the_output_is_refused_while_elements_write_and_seen_by_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marker, "LEASE_S", 0.6)
    assert infer("--prepare", "--workers", "2", normalize="none") == 0
    assert infer("--part", "1/2", normalize="none") == 0
    element = json.loads(Path("out.zarr.penstock-lock").read_text())["claims"][""]
    assert element["owner"]["host"] == "an array"
    with pytest.warns(RuntimeWarning, match="it has 1 s to show that it still does"):
        assert infer("--overwrite", "--run-dir", "other", normalize="none") == 0
    assert infer("--part", "2/2", normalize="none") == 1
    assert "this run has lost" in capsys.readouterr().err
    assert infer("--finish", normalize="none") == 3


def test_a_share_of_statistics_ends_at_a_signal_and_is_counted_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second one: what there is to count is one piece."""
    assert infer("--prepare", "--workers", "2") == 0
    with monkeypatch.context() as patch:

        def told(self: Histogram, values: Array) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)

        patch.setattr(Histogram, "add", told)
        assert infer("--statistics", "2/2") == 3
    assert "SIGTERM ended the job; run again" in capsys.readouterr().err
    assert infer("--statistics", "2/2") == 0
    assert "round 1; missing: 1 share" in capsys.readouterr().out


def test_an_element_that_was_killed_goes_on_by_itself() -> None:
    assert infer("--prepare", "--workers", "2", normalize="none") == 0
    words = [*WORDS, "none", "--out-spec", "out.zarr", "--part", "1/2"]
    killed = started(Path.cwd(), words, KILLED)
    killed.join()
    assert killed.exitcode == -9
    log = Path("out.zarr.penstock/done-part-1-of-2.log")
    assert len(log.read_text().splitlines()) == 3  # the maker, two units of three
    assert infer("--part", "1/2", normalize="none") == 0
    assert infer("--part", "2/2", normalize="none") == 0
    assert infer("--finish", normalize="none") == 0
    assert np.array_equal(values("out.zarr"), alone("none"))


def test_whose_blocks_are_whose_stands_in_the_log_of_each_element(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Threads are a fact of the maker; the run.json of --prepare knows those of its own alone."""
    assert infer("--prepare", "--workers", "2", normalize="none") == 0
    assert infer("--part", "1/2", normalize="none") == 0
    more = ("--threads", "2")  # the later flag wins
    assert infer("--part", "2/2", *more, normalize="none") == 2
    said = capsys.readouterr().err
    assert "--part 2/2: it has threads 2, and the run was made with 1, which" in said
    assert "--resume:" not in said and "--overwrite" not in said
    assert infer("--finish", *more, normalize="none") == 2
    assert "--finish: it has threads 2, and the run" in capsys.readouterr().err
    assert infer("--part", "2/2", *more, "--resume-anyway", normalize="none") == 0
    assert infer("--finish", normalize="none") == 0
    run = open_run(["out.zarr"], None)
    assert [maker["threads"] for maker in run.makers] == [1, 2]
    journal = Journal(Path("out.zarr.penstock"), {})
    journal.run, journal.makers = run.content["run"], run.content["makers"]
    (sentence,) = maker_notes(journal)
    ours, others = (sum(n.maker == k for n in run.notes.values()) for k in (0, 1))
    assert sentence == (
        f"Mixed arithmetic: {ours} blocks with threads 1; {others} blocks with threads 2: "
        "last bits may differ from block to block"
    )
    shares = [line.rpartition(" ")[0].split() for line in log_of(2) if line[0] != "#"]
    theirs = {tuple(map(int, words)) for words in shares}
    assert {key for key, note in run.notes.items() if note.maker == 1} == theirs
    capsys.readouterr()
    assert main(["verify", "out.zarr", "--recompute", "100%"]) == 0
    said = capsys.readouterr().out
    assert "6 of 6 blocks are proven" in said and "6 have the same bits" in said


def log_of(element: int) -> list[str]:
    return Path(f"out.zarr.penstock/done-part-{element}-of-2.log").read_text().splitlines()


KILLED = """
import os, signal, sys
from penstock.cli import main
from penstock.inference.run_folder.journal import Journal
note = Journal.note
def killed(self, *args):
    note(self, *args)
    if self.written == 2:
        os.kill(os.getpid(), signal.SIGKILL)
Journal.note = killed
main(["infer", *sys.argv[1:], "--writer-workers", "1"])
"""
