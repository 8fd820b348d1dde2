"""``penstock tune loader``: the least that feeds a step, from made-up launches."""

import argparse
import contextlib
import shlex
from typing import Any

import numpy as np
import pytest
import yaml

from penstock.base import LoaderConfig, TrainConfig, UsageError, add_flags, build, from_flags
from penstock.base.config.bench import BenchLoaderConfig, BenchQueueConfig, TuneLoaderConfig
from penstock.bench.scenarios import WrongResult
from penstock.bench.scenarios.queue import FromLoader
from penstock.cli import main
from penstock.cli.tune import fitting, threads_of
from penstock.loading.loader import Loader
from penstock.reports.tune.settings_advice import (
    Goal,
    ReadAlone,
    flags_of,
    readings_of,
    recommend_loader,
    write_settings_yaml,
)

from ..bench.conftest import launches_here
from ..bench.records import made_record

__all__ = ["launches_here"]  # a fixture

GOAL = Goal(step_s=0.2, batch=16, utilisation=0.9)
"""A batch must come every 222 ms."""


def steady(workers: int, seconds: float, launches: int = 3, n: int = 20) -> ReadAlone:
    return ReadAlone(workers, tuple(np.full(n, seconds) for _ in range(launches)))


def uneven(workers: int, short: float, long: float, every: int) -> ReadAlone:
    """All but each ``every``-th batch come quickly."""
    series = np.full(20, short)
    series[every - 1 :: every] = long
    return ReadAlone(workers, (series, series))


@pytest.mark.parametrize(
    ("reads", "workers", "queue"),
    [
        ([steady(1, 0.1)], 1, 1),
        ([steady(1, 0.3), steady(2, 0.16), steady(4, 0.09)], 2, 1),
        ([steady(1, 0.221)], 1, 1),  # 90 % is enough
        ([uneven(1, 0.1, 0.7, 5)], 1, 4),  # a queue of 2 lasts 0.4 s: 0.3 of 1.3 s are waiting
        ([uneven(1, 0.1, 1.2, 10)], 1, 8),  # and of 4, 0.8 s: 0.4 of 2.4
        ([ReadAlone(1, (*steady(1, 0.1, 2).launches, np.full(20, 0.24))), steady(2, 0.1)], 2, 1),
    ],
    ids=["one", "the fewest that do", "just", "uneven", "more uneven", "each launch must be fed"],
)
def test_the_fewest_workers_and_the_shallowest_queue_win(reads, workers, queue) -> None:
    advice = recommend_loader(reads, GOAL, (1, 2, 4, 8), batch_bytes=2**20)
    assert advice.settings == {"batch_size": 16, "workers": workers, "fetch": 0, "queue": queue}


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


def test_what_nothing_feeds_says_by_how_much() -> None:
    advice = recommend_loader([steady(1, 0.9), steady(4, 0.8)], GOAL, (1, 2), 2**20)
    assert advice.settings is None
    (sentence,) = advice.sentences
    assert sentence == (
        "Nothing keeps steps of 200 ms fed: at best, with 4 workers, a batch of 16 comes every "
        "800 ms [800 ms - 800 ms, 60 batches], and 222 ms is needed: 3.60 times too slow."
    )


def test_what_is_quick_enough_and_too_uneven_says_so() -> None:
    advice = recommend_loader([uneven(1, 0.01, 4.0, 20)], GOAL, (1, 2), 2**20)
    assert advice.settings is None
    (sentence,) = advice.sentences
    assert "too unevenly for the deepest queue that fits, 2" in sentence
    assert "times too slow" not in sentence


def test_readings_leave_out_what_was_read_beforehand() -> None:
    case = {"compute": "none", "workers": 2, "queue": 2, "batch": 4}
    seconds = (0.0, 0.0, 0.1, 1.0, 1.0, 1.0)
    facts = {"left": [1, 0, 0, 0, 0, 0]}
    record = made_record("queue", case, samples_s={"step": seconds}, facts=facts)
    other = record.model_copy(update={"case": {**case, "compute": "sleep"}})
    (reading,) = readings_of([record, other])
    assert reading.workers == 2
    assert reading.launches[0].tolist() == [1.0, 1.0, 1.0]


def test_the_file_is_one_that_a_loader_takes(tmp_path) -> None:
    advice = recommend_loader([steady(2, 0.1)], GOAL, (1, 2), 2**20)
    file = tmp_path / "deep" / "loader.yaml"
    write_settings_yaml("--output", advice.settings, advice.sentences, file, False)
    text = file.read_text()
    assert text.startswith("# 2 workers and a queue of 1 keep steps of 200 ms fed")
    assert build(LoaderConfig, yaml.safe_load(text)).workers == 2
    with pytest.raises(UsageError, match="it is a folder"):
        write_settings_yaml("--output", advice.settings, (), tmp_path, False)


@pytest.mark.parametrize(
    ("most", "threads"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])]
)
def test_threads_double_up_to_the_most(most: int, threads: list[int]) -> None:
    assert threads_of(config(threads_up_to=most)) == threads


def config(**knobs: Any) -> TuneLoaderConfig:
    return build(TuneLoaderConfig, {"step_time": 0.2, **knobs})


@pytest.mark.parametrize("seconds", ["0", "inf", "soon"])
def test_a_step_that_takes_no_time_is_refused(seconds: str) -> None:
    with pytest.raises(UsageError, match=f"--step-time '{seconds}': input should be"):
        config(step_time=seconds)


def test_the_flags_are_ones_that_train_and_bench_take() -> None:
    reads = [steady(1, 0.04), steady(2, 0.01)]
    advice = recommend_loader(reads, Goal(0.02, 2, 0.9), (1, 2), 2**20)
    train, bench = flags_of(advice.settings, 0.02, "my data")
    taken: dict[str, Any] = {}
    for line, model in ((train, TrainConfig), (bench, BenchQueueConfig)):
        parser = argparse.ArgumentParser()
        parser.add_argument("data", nargs="?")
        add_flags(parser, model)
        args = parser.parse_args(shlex.split(line)[3:])
        taken |= from_flags(model, args).model_dump(include=set(vars(args)) - {"data"})
        assert args.data in (None, "my data")
    assert taken == {
        "batch_size": 2, "num_workers": 2, "prefetch_factor": 1,
        "workers": (2,), "queue_sizes": (1,), "compute_time": 0.02,
    }  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("packed") / "data"
    assert main(["generate", "ufs-p1", str(folder), "--samples", "8", "--grid", "6", "12"]) == 0
    return str(folder)


def needed(data: str, batch: int, queue: int) -> int:
    """Bytes of a loader: those ahead, the one in use, and what reading them takes."""
    with Loader(data, batch_size=batch, workers=1, queue=queue) as loader:
        return (queue + 1) * loader.batch_bytes + loader.scratch_bytes


def test_queues_give_way_to_memory(data: str) -> None:
    def fit(memory: int) -> list[int]:
        return list(fitting(data, config(batch_size=8, max_memory=memory), 1)[1])

    assert fit(needed(data, 8, 8)) == [1, 2, 4, 8]
    assert fit(needed(data, 8, 2)) == [1, 2]
    with pytest.raises(UsageError, match=r"holds no two batches of 8 samples, .* --batch-size"):
        fit(needed(data, 8, 1) - 1)


def test_half_of_what_a_cgroup_leaves_is_for_the_loader(data: str, tmp_path, monkeypatch) -> None:
    (tmp_path / "memory.max").write_text(f"{2 * needed(data, 8, 2) + 1000}\n")
    (tmp_path / "memory.current").write_text("1000\n")
    monkeypatch.setattr(
        "penstock.instruments.environment.cgroup_folders", lambda controller: [tmp_path]
    )
    assert list(fitting(data, config(batch_size=8), 1)[1]) == [1, 2]


def test_more_samples_in_a_batch_than_there_are_is_refused(data: str, capsys) -> None:
    assert main(["tune", "loader", data, "--step-time", "1", "--batch-size", "9"]) == 2
    assert f"--batch-size 9 is more than the 8 samples of {data}" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("launches_here")
def test_a_loader_is_tuned_from_end_to_end(data: str, tmp_path, capsys) -> None:
    """Steps of a microsecond cannot be fed, and those of 5 s cannot but be."""
    out = tmp_path / "loader.yaml"
    flags = "--batch-size 2 --threads-up-to 1 --batches 6 --launches 1"
    command = ["tune", "loader", data, *flags.split(), "--output", str(out)]
    assert main([*command, "--step-time", "1e-6"]) == 1
    said = capsys.readouterr().out
    assert "Nothing keeps steps of 0.00100 ms fed" in said
    words = shlex.split(said.partition("limits it:")[2].partition("\n\n")[0])
    assert words[:4] == ["penstock", "bench", "loader", data]
    parser = argparse.ArgumentParser()
    add_flags(parser, BenchLoaderConfig)
    assert from_flags(BenchLoaderConfig, parser.parse_args(words[4:])).threads == (1,)
    assert not out.exists()
    assert main([*command, "--step-time", "5"]) == 0
    assert yaml.safe_load(out.read_text())["batch_size"] == 2
    said = capsys.readouterr().out
    assert "keep steps of 5.00 s fed: a batch of 2 comes every" in said
    assert "penstock train emulator --batch-size 2 --num-workers 1 --prefetch-factor 1" in said


@pytest.mark.slow
@pytest.mark.usefixtures("launches_here")
def test_chunks_that_were_never_written_can_be_filled(tmp_path, capsys) -> None:
    zarr = pytest.importorskip("zarr")
    path = tmp_path / "mask.zarr"
    zarr.create_array(path, shape=(8, 4), chunks=(1, 4), dtype="f4", fill_value=0)[::2] = 1
    out = tmp_path / "loader.yaml"
    flags = "--step-time 5 --batch-size 2 --threads-up-to 1 --batches 6 --launches 1"
    command = ["tune", "loader", str(path), *flags.split(), "--output", str(out)]
    assert main(command) == 2
    assert "missing" in capsys.readouterr().err
    assert main([*command, "--missing", "fill"]) == 0
    settings = yaml.safe_load(out.read_text())
    assert settings["missing"] == "fill"
    with Loader(str(path), **settings) as loader:
        assert len(list(loader)) == 4


def test_a_queue_that_batches_do_not_fill_is_said_and_not_waited_for(data: str) -> None:
    case = {
        "data": data, "batch": 4, "shuffle": "none", "seed": 0, "workers": 1, "queue": 8,
    }  # fmt: skip
    batches = FromLoader(case)
    batches._loader.order = Loader(data, batch_size=4).order  # which ends
    batches._batches = iter(batches._loader)
    with contextlib.closing(batches):
        batches.get()
        with pytest.raises(WrongResult, match="ended before a queue of 8 was full"):
            batches.fill()
