"""``penstock tune loader``: the least that feeds a step, or the ceiling, from made-up launches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from penstock.cli import main
from penstock.cli.tune import fitting, threads_of
from penstock.config import LoaderConfig, TuneLoaderConfig, build
from penstock.errors import UsageError
from penstock.loader import Loader
from penstock.loader_report import LoaderCell
from penstock.loader_tune import Goal, Reading, readings, recommend_loader, write_yaml
from penstock.record import Record, case_key

GOAL = Goal(step_s=0.2, batch=16, utilisation=0.9)
"""A batch must come every 222 ms."""


def steady(workers: int, seconds: float, launches: int = 3, n: int = 20) -> Reading:
    return Reading(workers, tuple(np.full(n, seconds) for _ in range(launches)))


def uneven(workers: int, short: float, long: float, every: int) -> Reading:
    """All but each ``every``-th batch come quickly."""
    series = np.full(20, short)
    series[every - 1 :: every] = long
    return Reading(workers, (series, series))


def rung(name: str, seconds: float, launches: int = 3) -> LoaderCell:
    case = {"rung": name, "batch": 16, "threads": 4, "data": "d"}
    return LoaderCell(
        tuple(
            Record(
                schema=1,
                id=str(number),
                time="2026-01-01T00:00:00+00:00",
                scenario="ladder",
                case=case,
                key=case_key("ladder", case),
                launch=number,
                status="ok",
                samples_s={"step": (seconds, seconds * (1 + number / 100))},
            )
            for number in range(launches)
        )
    )


@pytest.mark.parametrize(
    ("reads", "workers", "queue"),
    [
        ([steady(1, 0.1)], 1, 1),
        ([steady(1, 0.3), steady(2, 0.16), steady(4, 0.09)], 2, 1),
        ([steady(1, 0.221)], 1, 1),  # 90 % is enough
        ([uneven(1, 0.1, 0.7, 5)], 1, 4),  # a queue of 2 lasts 0.4 s: 0.3 of 1.3 s are waiting
        ([uneven(1, 0.1, 1.2, 10)], 1, 8),  # and of 4, 0.8 s: 0.4 of 2.4
    ],
    ids=["one", "the fewest that do", "just", "uneven", "more uneven"],
)
def test_the_fewest_workers_and_the_shallowest_queue_win(
    reads: list[Reading], workers: int, queue: int
) -> None:
    advice = recommend_loader(reads, GOAL, (1, 2, 4, 8), batch_bytes=2**20)
    assert advice.settings == {"batch_size": 16, "workers": workers, "fetch": 0, "queue": queue}


def test_every_launch_must_be_fed() -> None:
    launches = (np.full(20, 0.1), np.full(20, 0.1), np.full(20, 0.24))
    advice = recommend_loader([Reading(1, launches), steady(2, 0.1)], GOAL, (1, 2), 2**20)
    assert advice.settings is not None and advice.settings["workers"] == 2


def test_the_reasons_have_their_numbers_and_intervals() -> None:
    advice = recommend_loader([steady(1, 0.3), steady(2, 0.16)], GOAL, (1, 2), 2**20)
    fed, fewer = advice.sentences
    assert fed == (
        "2 workers and a queue of 1 keep steps of 200 ms fed: a batch of 16 comes every 160 ms "
        "[160 ms - 160 ms, 60 batches], and 100.0 % [100.0 - 100.0 %, 3 launches] of the time is "
        "computing, of 90 % asked for. 2 batches take 2.00 MiB."
    )
    assert fewer == (
        "Fewer do not: with 1 worker a batch comes every 300 ms [300 ms - 300 ms, 60 batches], "
        "and 222 ms is needed: 1.35 times too slow."
    )


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ((0.4, 0.5, 0.6), "The ceiling is storage: files alone take 40"),
        ((0.1, 0.5, 0.6), "The ceiling is decode: files and decode alone take 50"),
        ((0.1, 0.2, 0.6), "The ceiling is scatter: files, decode and scatter alone take 60"),
        ((0.1, 0.15, 0.2), "No ceiling forbids it: files, decode and scatter take 20"),
    ],
)
def test_the_first_rung_that_is_too_slow_is_the_ceiling(
    seconds: tuple[float, ...], said: str
) -> None:
    rungs = {name: rung(name, s) for name, s in zip(("L1", "L2", "L3"), seconds, strict=True)}
    advice = recommend_loader([steady(4, 0.8)], GOAL, (1, 2), 2**20, rungs)
    assert advice.settings is None
    assert advice.sentences[0] == (
        "Nothing keeps steps of 200 ms fed: at best, with 4 workers, a batch of 16 comes every "
        "800 ms [800 ms - 800 ms, 60 batches], and 222 ms is needed: 3.60 times too slow."
    )
    assert advice.sentences[1].startswith(said)
    assert "3 launches] for a batch with 4 workers" in advice.sentences[1]


def test_without_a_ladder_the_ceiling_is_not_claimed() -> None:
    advice = recommend_loader([steady(1, 0.4)], GOAL, (1,), 2**20)
    assert "is not known" in advice.sentences[1]
    assert "1.80 times as fast" in advice.sentences[1]


def test_what_is_quick_enough_and_too_uneven_says_so() -> None:
    advice = recommend_loader([uneven(1, 0.01, 4.0, 20)], GOAL, (1, 2), 2**20)
    assert advice.settings is None
    (sentence,) = advice.sentences
    assert "too unevenly for the deepest queue that fits, 2" in sentence
    assert "times too slow" not in sentence


def test_readings_leave_out_what_was_read_beforehand() -> None:
    case = {"compute": "none", "workers": 2, "queue": 2, "batch": 4}
    seconds = (0.0, 0.0, 0.1, 1.0, 1.0, 1.0)
    record = Record(
        schema=1, id="a", time="2026-01-01T00:00:00+00:00", scenario="queue", case=case,
        key=case_key("queue", case), launch=0, status="ok", samples_s={"step": seconds},
        facts={"compute_s": 0.0, "left": [1, 0, 0, 0, 0, 0]},
    )  # fmt: skip
    other = record.model_copy(update={"case": {**case, "compute": "sleep"}})
    (reading,) = readings([record, other])
    assert reading.workers == 2
    assert reading.launches[0].tolist() == [1.0, 1.0, 1.0]


def test_the_file_is_one_that_a_loader_takes(tmp_path: Path) -> None:
    advice = recommend_loader([steady(2, 0.1)], GOAL, (1, 2), 2**20)
    write_yaml(advice, tmp_path / "deep" / "loader.yaml")
    text = (tmp_path / "deep" / "loader.yaml").read_text()
    assert text.startswith("# 2 workers and a queue of 1 keep steps of 200 ms fed")
    settings = yaml.safe_load(text)
    assert build(LoaderConfig, settings).workers == 2
    with pytest.raises(UsageError, match="--output"):
        write_yaml(advice, tmp_path)


@pytest.mark.parametrize(
    ("most", "threads"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])]
)
def test_threads_double_up_to_the_most(most: int, threads: list[int]) -> None:
    assert threads_of(config(threads_up_to=most)) == threads


def config(**knobs: Any) -> TuneLoaderConfig:
    return build(TuneLoaderConfig, {"step_time": 0.2, **knobs})


# --- with data ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("packed") / "data"
    assert main(["generate", "ufs-p1", str(folder), "--samples", "8", "--grid", "6", "12"]) == 0
    return str(folder)


def test_queues_and_at_last_the_batch_give_way_to_memory(data: str) -> None:
    with Loader(data, batch_size=8, workers=1) as loader:
        batch, scratch = loader.batch_bytes, loader.engine.scratch_bytes

    def fit(memory: int) -> tuple[int, list[int]]:
        size, _, queues = fitting(data, config(batch_size=8, max_memory=memory), 1)
        return size, queues

    assert fit(9 * batch + scratch) == (8, [1, 2, 4, 8])
    assert fit(3 * batch + scratch) == (8, [1, 2])
    assert fit(2 * batch + scratch - 1) == (4, [1, 2])
    with pytest.raises(UsageError, match="holds no two batches of one sample"):
        fit(scratch)


def test_more_samples_in_a_batch_than_there_are_is_refused(
    data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "loader", data, "--step-time", "1", "--batch-size", "9"]) == 2
    assert f"--batch-size 9 is more than the 8 samples of {data}" in capsys.readouterr().err


@pytest.mark.slow
def test_settings_from_end_to_end(
    data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "loader.yaml"
    flags = "--step-time 5 --batch-size 2 --threads-up-to 1 --batches 6 --launches 1"
    assert main(["tune", "loader", data, *flags.split(), "--output", str(out)]) == 0
    settings = yaml.safe_load(out.read_text())
    assert settings == {"batch_size": 2, "workers": 1, "fetch": 0, "queue": 1}
    assert "keep steps of 5.00 s fed" in capsys.readouterr().out
    with Loader(data, **settings) as loader:
        assert len(next(iter(loader))["inputs"]) == 2


@pytest.mark.slow
def test_the_ceiling_from_end_to_end(
    data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--step-time 1e-6 --batch-size 2 --threads-up-to 1 --batches 6 --launches 1"
    out = tmp_path / "loader.yaml"
    assert main(["tune", "loader", data, *flags.split(), "--output", str(out)]) == 1
    said = capsys.readouterr().out
    assert "Nothing keeps steps of" in said and "The ceiling is storage" in said
    assert not out.exists()
