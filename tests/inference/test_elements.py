"""An array of processes that share a job: its steps, its summary, the log of what is written."""

import errno
import functools
import json
import os
import signal
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.cli import main
from penstock.data import Box, Histogram, indices
from penstock.inference.planning.plan import make_plan, missing_parts, voxels_of
from penstock.inference.run_folder.block_log import (
    BlockSet,
    Key,
    digest_of,
    line_of,
    lost_line,
    read_lines,
)
from penstock.inference.run_folder.folder import LocalFolder, Notes
from penstock.inference.run_folder.journal import Journal
from penstock.inference.stages.summary import Summary, merged
from penstock.instruments import StageTotals

from ..parameters import paired
from ..preloaded import started
from ..traced import traced
from .kit import KILLED, SEED, SMALL, Array, arange, config, facts, opened, values

WORDS = ("--in-spec in.npy --model-type identity --patch 8 --overlap 2 --block 8 --chunks 8 "
         "--devices cpu --threads 1 --seam-mode blend --normalize").split()  # fmt: skip
SHAPE = (16, 24, 8)
"""Six blocks to write."""


VOLUME = np.random.default_rng(0).normal(900, 200, SHAPE).astype("float32")


@pytest.fixture(autouse=True)
def _volume(here) -> None:
    np.save("in.npy", VOLUME)


def infer(*words: str, normalize: str = "global", out: str = "out.zarr") -> int:
    return main(["infer", *WORDS, normalize, "--out-spec", out, *words])


@functools.cache
def alone(normalize: str) -> Array:
    assert infer(normalize=normalize, out="alone.zarr") == 0
    return values("alone.zarr")


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("normalize", "order", "counts"),
    [
        # float32 is counted in two rounds, and for percentiles there is nothing to count
        ("global", [2, 1, 2], 2 * [2, 1, 2]),
        ("percentile", [2, 3, 1, 3], [3]),
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


def test_each_step_says_what_is_missing(capsys) -> None:
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
        ("--part", "5/4"): "'5/4' is not an element",
        ("--part", "1/2", "--overlap", "4"): "had overlap",
        ("--part", "1/2", "--finish"): "two steps of an array",
    }.items():
        assert infer(*words) == 2
        assert said in capsys.readouterr().err


@pytest.mark.slow
def test_another_run_is_refused_until_it_takes_over_and_seen_by_elements(capsys) -> None:
    assert infer("--prepare", "--workers", "2", normalize="none") == 0
    assert infer("--part", "1/2", normalize="none") == 0
    other = ("--overwrite", "--run-dir", "other")
    assert infer(*other, normalize="none") == 2
    said = capsys.readouterr().err
    assert "(no single process on " in said and "--take-over takes the output" in said
    assert infer(*other, "--take-over", normalize="none") == 0
    assert infer("--part", "2/2", normalize="none") == 1
    assert "this run has lost" in capsys.readouterr().err
    assert infer("--finish", normalize="none") == 2
    assert "was made anew by another run" in capsys.readouterr().err


def test_a_share_of_statistics_ends_at_a_signal_and_is_counted_again(monkeypatch, capsys) -> None:
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
    assert "round 1; 1 of 2 shares are missing" in capsys.readouterr().out


@pytest.mark.slow
def test_an_element_that_was_killed_goes_on_by_itself() -> None:
    assert infer("--prepare", "--workers", "2", normalize="none") == 0
    words = [*WORDS, "none", "--out-spec", "out.zarr", "--part", "1/2", "2"]
    killed = started(Path.cwd(), words, KILLED)
    killed.join()
    assert killed.exitcode == -9
    assert len(log_of(1)) == 2  # of three
    assert infer("--part", "1/2", normalize="none") == 0
    assert infer("--part", "2/2", normalize="none") == 0
    assert infer("--finish", normalize="none") == 0
    assert np.array_equal(values("out.zarr"), alone("none"))


def log_of(element: int) -> list[str]:
    (log,) = Path("out.zarr.penstock").glob(f"done-part-{element}-of-2-*.log")
    return log.read_text().splitlines()


def share(voxels: int, seconds: float, **more: Any) -> Summary:
    """What one process did."""
    return Summary(
        seconds=seconds, voxels=voxels, input_bytes=voxels, blocks_written=1, blocks_skipped=0,
        blocks_planned=9, bound_by="", cpu_seconds=seconds, peak_rss=None, planned_peak=0,
        **{"stages": {}, **more},
    )  # fmt: skip


def test_the_summary_says_how_evenly_processes_worked() -> None:
    speeds = {"a": share(10_000_000, 10.0), "b": share(8_000_000, 10.0), "c": share(0, 10.0)}
    assert (
        "Workers: 3, 0.80 to 1.00 Mvox/s each while at work" in merged(speeds, 10.0, 9, 64).lines()
    )
    forward = {"forward": StageTotals(5.0, 5.0, 3, 1)}
    each = {name: share(1000, 10.0, stages=forward) for name in "abc"}
    assert "1.0 of 64 cores of each worker were in use" in merged(each, 10.0, 9, 64).bound_by
    assert "1.0 of 64 cores were in use" in merged({"a": each["a"]}, 10.0, 9, 64).bound_by


def test_a_summary_that_cannot_be_saved_hides_no_error(monkeypatch, capsys) -> None:
    assert infer("--prepare", "--workers", "1", normalize="none") == 0

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Journal, "note", full)
    monkeypatch.setattr(Journal, "save", full)
    with pytest.warns(RuntimeWarning, match="the summary of this process: No space left"):
        assert infer("--part", "1/1", "--trace", "trace.json", normalize="none") == 3
    (trace,) = Path().glob("trace*.json")
    assert "part-1-of-1" in trace.name and json.loads(trace.read_text()), "elements share none"
    assert "make room there, then run again with --resume" in capsys.readouterr().err


@pytest.mark.slow
def test_elements_that_were_killed_after_their_last_block_are_finished(capsys) -> None:
    assert infer("--prepare", "--workers", "1", normalize="none") == 0
    assert infer("--part", "1/1", normalize="none") == 0
    (summary,) = Path("out.zarr.penstock").glob("summary-*")
    summary.unlink()
    capsys.readouterr()
    assert infer("--finish", normalize="none") == 0
    assert "No element has left its times" in capsys.readouterr().out
    assert np.array_equal(values("out.zarr"), alone("none"))


def test_a_run_of_which_no_process_left_its_times_has_a_summary() -> None:
    """All were killed between their last block and their summary."""
    said = "\n".join(merged({}, 0.0, 9, 2).lines())
    assert "Blocks written: 0 of 9 planned, 9 by an earlier run" in said
    assert "Total time" not in said and "nan" not in said


def test_the_voxels_of_blocks_are_those_of_their_boxes(tmp_path) -> None:
    made = opened(tmp_path / "out.zarr", (21, 30, 37), block=8, chunks=8).plan
    keys = {(0, *index) for index in indices(made.geometry.blocks.cells)}
    assert voxels_of(made, BlockSet(keys)) == made.voxels == 21 * 30 * 37
    some = {key for key in keys if sum(key) % 3 == 0}
    boxes = [made.geometry.blocks.cell(key[1:]) for key in some]
    assert voxels_of(made, BlockSet(some)) == sum(box.size for box in boxes)


BLOCK, CHECKS = (0, 1, -16, 128), ("cafe0123cafe0123", "0000000000000000")


@pytest.mark.parametrize("dtype", ["uint8", "bool", "int16", "uint64", "float16", "float64"])
def test_a_check_is_of_values_in_c_order_and_little_endian(dtype: str) -> None:
    values = (arange((3, 4, 5)) % 7).astype(dtype)
    little = values.astype(np.dtype(dtype).newbyteorder("<")).tobytes()
    wanted = xxhash.xxh3_64_hexdigest(little)
    big = values.astype(np.dtype(dtype).newbyteorder(">"))
    for same in (values, np.asfortranarray(values), big, values[::-1][::-1]):
        assert digest_of([same]) == wanted
    assert digest_of([values[::-1]]) != wanted


@given(
    st.tuples(*[st.integers(0, 10**6)] * 4),
    st.lists(st.builds("{:016x}".format, st.integers(0, 2**64 - 1)), max_size=3),
)
def test_a_line_says_what_was_noted_if_whole(key: tuple[int, ...], checks: list[str]) -> None:
    line = line_of(key, checks).encode()
    assert read_lines([line]) == {key: tuple(checks)}
    for end in range(len(line)):
        assert read_lines([line[:end]]) == {}
        assert read_lines([line[:end] + b"?\n"]) == {}  # as a resume ends it


def test_a_log_names_what_was_written_and_lost() -> None:
    lines = [
        line_of((0, 0, 0, 0)), line_of(BLOCK, CHECKS),
        line_of((0, 0, 0, 1)), lost_line(BLOCK), lost_line((0, 0, 0, 0)),
        line_of((0, 0, 0, 0), CHECKS[:1]),
    ]  # fmt: skip
    assert read_lines(line.encode() for line in lines) == {
        (0, 0, 0, 0): CHECKS[:1], (0, 0, 0, 1): ()
    }  # fmt: skip


@pytest.mark.parametrize(("suffix", "seam"), paired(["zarr", "n5"], ["trim", "blend"]))
def test_the_checks_of_a_run_are_those_of_what_it_stored(suffix: str, seam: str, tmp_path) -> None:
    data, out = arange((20, 20, 20)), tmp_path / f"out.{suffix}"
    data[:10] = 0
    knobs: dict[str, Any] = {**SMALL, "block": 10, "chunks": (5, 10, 10), "normalize": "none"}
    summary = penstock.run_inference(data, out, seam_mode=seam, **knobs)
    folder = tmp_path / f"out.{suffix}.penstock"
    notes = read_lines((folder / "done.log").read_bytes().splitlines(keepends=True))
    volume = values(out)[0, 0]
    assert len(notes) == 8
    for index in np.ndindex(2, 2, 2):
        z, y, x = (10 * i for i in index)
        block = np.ascontiguousarray(volume[z : z + 10, y : y + 10, x : x + 10])
        assert notes[(0, *index)] == (xxhash.xxh3_64_hexdigest(block.data),)
    assert json.loads((folder / "run.json").read_text())["maker"]["checksum"] == "xxh3_64"
    assert summary.stages["checksum"].count == summary.stages["note"].count == 8


def test_logs_are_read_on_from_where_the_last_look_ended(tmp_path) -> None:
    log, other = tmp_path / "done.log", tmp_path / "done-b.log"
    one, two, three = ((0, 0, 0, number) for number in (1, 2, 3))
    log.write_text(line_of(one) + "0 0 0")
    notes = Notes(LocalFolder(tmp_path), {})
    assert notes.fresh().keys() == {one}
    read = "?" * (len(line_of(one)) - 1) + "\n"  # which is not read again
    log.write_text(read + line_of(two))
    other.write_text(line_of(three))
    assert notes.fresh().keys() == {two, three}
    assert notes.fresh() == {}


def test_a_line_that_is_written_during_a_look_is_whole_for_the_next_one(tmp_path) -> None:
    log, folder, seen = tmp_path / "done.log", LocalFolder(tmp_path), dict[str, int]()
    one, two = line_of((0, 0, 0, 1)), line_of((0, 0, 0, 2))
    log.write_text(one + two[:3])
    notes = Notes(folder, {})
    assert len(notes.blocks()) == 1 and notes.damaged == [two[:3].encode()]
    for line in next(iter(folder.new_lines("", seen))):
        if line == two[:3].encode():
            log.write_text(one + two)
    assert [*next(iter(folder.new_lines("", seen)))] == [two.encode()]
    assert len(notes.blocks()) == 2 and notes.damaged == []


BEGUN = '{"settings": {}, "fingerprint": {}, "maker": {"checksum": "xxh3_64"}}'


def test_a_run_begun_anew_reads_its_logs_from_their_begin(tmp_path) -> None:
    (tmp_path / "run.json").write_text(BEGUN)
    (tmp_path / "done-b.log").write_text(lost_line(BLOCK) * 100)
    journal = Journal.open(tmp_path, {}, resume=True)
    journal.begin({"settings": {}, "blocks": 0})
    (tmp_path / "done-b.log").write_text(line_of(BLOCK))  # a worker of the same name
    journal.refresh()
    assert {*journal.done} == {BLOCK}
    journal.close()


PLACES = st.sampled_from([-1025, -513, -512, -1, 0, 1, 511, 512, 1024])
KEYS = st.lists(st.tuples(st.integers(0, 1), st.integers(-1, 1), st.just(0), PLACES), max_size=12)


@given(KEYS, KEYS, KEYS)
def test_it_is_a_set(first: list[Key], second: list[Key], third: list[Key]) -> None:
    blocks, plain = BlockSet(first), {*first}
    blocks.update(BlockSet(second))
    plain |= {*second}
    blocks -= {*third}
    plain -= {*third}
    blocks.discard((0, 5, 5, 5))
    assert {*blocks} == plain and len([*blocks]) == len(blocks) == len(plain)
    assert [key for key in (*first, *third) if key in blocks] == [
        key for key in (*first, *third) if key in plain
    ]
    for volume, low, high in product((0, 1), (-1025, -1, 0, 511), (1, 512, 1025)):
        box = Box((-1, 0, min(low, high)), (1, 1, high))
        inside = [key for key in plain if key[0] == volume and key[1] < 1 and low <= key[3] < high]
        assert blocks.count(volume, box) == len(inside)


def test_a_block_that_one_log_lost_and_another_has_is_written(tmp_path) -> None:
    a, b, c = ((0, 0, 0, number) for number in range(3))
    logs = {
        "done.log": [line_of(a), line_of(b), line_of(c), lost_line(b), lost_line(c)],
        "done-b.log": [line_of(b)],
    }
    for name, lines in logs.items():
        (tmp_path / name).write_text("".join(lines))
    assert {*Notes(LocalFolder(tmp_path), {}).blocks()} == {a, b}


@pytest.mark.slow
def test_who_shares_a_large_job_holds_less_than_a_byte_for_each_block(tmp_path) -> None:
    """A petabyte has rows as long, and a hundred million blocks. What one reading of a log leaves
    behind, whatever its size, is there before memory is counted."""
    plan = make_plan(config(parts=40), facts((1_500, 1_500, 54_000)), SEED)
    checks, blocks = ["0123456789abcdef"], plan.geometry.blocks.cells
    (tmp_path / "run.json").write_text(BEGUN)
    with (tmp_path / "done-a.log").open("w") as log:
        log.writelines(line_of((0, *index), checks) for index in indices(blocks))
    lost = (0, *blocks.start)
    with (tmp_path / "done-a.log").open("a") as log:
        log.write(lost_line(lost))
    assert len(Journal.open(tmp_path, {}, resume=True).done) == plan.num_blocks - 1
    with traced() as most:
        journal = Journal.open(tmp_path, {}, resume=True)
        lacking = missing_parts(plan, journal.done)
        voxels = voxels_of(plan, journal.done)
        peak = most()
    assert lacking == {0: 1} and lost not in journal.done
    assert voxels == plan.voxels - plan.geometry.blocks.cell(lost[1:]).size
    assert len(journal.done) == plan.num_blocks - 1 > 7_500
    # Besides: what a log of any size takes, and garbage of a few hundred boxes.
    assert peak < plan.num_blocks + 2**17
