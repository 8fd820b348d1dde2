"""Tune: what is recommended follows the records, fits the memory, and is accepted by a job."""

from pathlib import Path
from typing import Any

import pytest

from penstock.base import TRAIN_DEFAULTS, InferConfig, TrainConfig, UsageError, build, read_yaml
from penstock.instruments.record import Record, Warmup
from penstock.reports.tune.model_advice import Choice, Recommendation, recommend, write_model_yaml

from .kit import GIB, HOST, MIB, TIMES, launch, sized, sweep


def chosen(recommendation: Recommendation) -> dict[str, tuple[str, int]]:
    return {c.goal: (c.cell.tile, c.cell.batch) for c in recommendation.choices}


def by_goal(recommendation: Recommendation, goal: str) -> Choice:
    (choice,) = (choice for choice in recommendation.choices if choice.goal == goal)
    return choice


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, ("384", 2)),  # within 5 % of batch 4
        ({(384, 4): 130.0}, ("384", 4)),  # no plateau any more
        ({(384, 1): 37.5}, ("384", 1)),  # within 5 %, and smaller still
        ({(256, 2): 32.5}, ("256", 2)),  # less than 384, batch 1
    ],
)
def test_throughput_is_the_smallest_on_the_plateau(changed, expected) -> None:
    assert chosen(recommend(sized(TIMES | changed)))["throughput"] == expected


def test_what_cannot_be_told_from_the_best_is_on_the_plateau() -> None:
    times = {(384, 1): 46.0, (384, 2): 84.0}  # 9 % apart
    assert chosen(recommend(sized(times)))["throughput"] == ("384", 2)
    assert chosen(recommend(sized(times, spread=0.2)))["throughput"] == ("384", 1)
    # One launch bounds nothing, so the numbers stand.
    assert chosen(recommend(sized(times, launches=1)))["throughput"] == ("384", 2)


def test_useful_pixels_rank() -> None:
    times = {(128, 1): 10.0, (256, 1): 44.0}
    assert chosen(recommend(sized(times)))["throughput"] == ("128", 1)
    assert chosen(recommend(sized(times, case={"halo": 32})))["throughput"] == ("256", 1)


def test_latency_is_the_shortest_step_and_says_who_is_alike() -> None:
    alone = by_goal(recommend(sized(TIMES)), "latency")
    assert (alone.cell.tile, alone.cell.batch) == ("256", 1)
    assert alone.sentence.startswith(
        "For latency: prithvi-refiner-tiny, tile 256, batch 1: 30.0 ms a step [29.7 ms - 30.3 ms, "
        "5 launches], 2.18 M pixels per second: the shortest step of 5 cases; its peak, "
    )
    alike = by_goal(recommend(sized(TIMES | {(256, 2): 30.1})), "latency")
    assert "of 5 cases, not distinguishable from 1 other; " in alike.sentence


def test_the_sentence_of_the_plateau_names_the_best() -> None:
    sentence = by_goal(recommend(sized(TIMES)), "throughput").sentence
    assert "smallest of 2 cases on the plateau, whose best is 384, batch 4 with 4.01" in sentence
    alone = by_goal(recommend(sized(TIMES | {(384, 4): 130.0})), "throughput")
    assert "the most of 5 cases" in alone.sentence


def test_training_takes_the_most_and_accumulates_the_rest() -> None:
    records = sized(TIMES, case={"mode": "train"})
    fitting = recommend(records)
    assert chosen(fitting) == {"training": ("384", 4)}
    assert fitting.choices[0].settings["grad_accum_steps"] == 1

    tight = recommend(records, budget_bytes=400 * MIB)
    assert chosen(tight) == {"training": ("384", 2)}
    assert tight.choices[0].settings["grad_accum_steps"] == 2
    assert "and 2 accumulated steps make a batch of 4" in tight.choices[0].sentence


def test_the_margin_stays_free() -> None:
    """384, batch 2 peaks at 0.294912 GiB: 90 % of 0.32768 GiB."""
    peak = 384 * 384 * 2 * GIB // 10**6
    above = recommend(sized(TIMES), budget_bytes=int(peak / 0.9) - 2)
    assert chosen(above)["throughput"] == ("384", 1)
    within = recommend(sized(TIMES), budget_bytes=int(peak / 0.9) + 2)
    assert chosen(within)["throughput"] == ("384", 2)
    assert "its peak, 302 MiB, is within 90 % of 336 MiB." in within.lines[0]
    assert within.notes == ("Left out, the peak is above 90 % of 336 MiB: 384, batch 4.",)
    assert chosen(recommend(sized(TIMES), int(peak / 0.9) + 2, 0.2))["throughput"] == ("384", 1)


ON_GPU = {
    "case": {"device": "cuda:0"},
    "memory": {"device_peak": GIB, "device_reserved": 2 * GIB, "device_driver": 3 * GIB},
}
CARDS = {"gpus": [{"memory_bytes": 80 * GIB}, {"memory_bytes": 40 * GIB}]}


@pytest.mark.parametrize(
    ("fields", "peak", "limit"),
    [
        ({}, "512 MiB", "8.00 GiB"),
        ({"environment": {"limits": {"cgroup_memory_bytes": 2 * GIB}}}, "512 MiB", "2.00 GiB"),
        ({"case": {"budget": GIB}}, "512 MiB", "1.00 GiB"),
        # A slice of a card has less than the driver tells of the whole.
        (ON_GPU | {"environment": CARDS, "facts": {"device_memory": 10 * GIB}}, "3.00 GiB",
         "10.0 GiB"),
    ],
)  # fmt: skip
def test_which_memory_there_is(fields: dict[str, Any], peak: str, limit: str) -> None:
    environment = HOST | fields.get("environment", {})
    usual: dict[str, Any] = {"memory": {"host_peak": 512 * MIB}}
    records = sweep(TIMES, **usual | fields | {"environment": environment})
    assert f"its peak, {peak}, is within 90 % of {limit}." in recommend(records).lines[0]


def test_what_is_not_known_is_not_claimed() -> None:
    unmeasured = recommend(sweep(TIMES, environment=HOST), budget_bytes=1)
    assert chosen(unmeasured)["latency"] == ("256", 1)
    assert unmeasured.lines[0].endswith("so nothing is said of the margin.")
    unbounded = recommend(sized(TIMES, environment={"machine_key": "here", "gpus": None}))
    assert unbounded.lines[0].endswith("302 MiB, of a memory whose size is not known.")


def test_nothing_fits_and_nothing_ran() -> None:
    tiny = recommend(sized(TIMES), budget_bytes=MIB)
    assert tiny.choices == ()
    assert tiny.notes[-1] == (
        "No case is left to recommend. The least peak is 67.1 MiB (256, batch 1)."
    )
    failed = recommend([launch(status="oom_host")])
    assert failed.choices == ()
    assert failed.lines == [
        "Left out, a launch failed: 256, batch 1.",
        "No case is left to recommend.",
    ]
    assert recommend([]) == Recommendation(())


def test_failures_and_the_cliff_are_left_out() -> None:
    records = [*sized(TIMES), launch(384, 2, 5, status="oom_host")]
    records += sweep({(512, 1): 20.0}, memory={"alloc_retries": 1}, environment=HOST)
    advice = recommend(records)
    assert chosen(advice) == {"latency": ("256", 1), "throughput": ("384", 4)}
    assert advice.notes == (
        "Left out, a launch failed: 384, batch 2.",
        "Left out, short of memory by allocator retries: 512, batch 1.",
    )


def test_infer_accepts_the_yaml(tmp_path) -> None:
    case = {"device": "cuda:0", "amp": True, "compile": True, "halo": 16, "channels": 4}
    advice = recommend(sized({(256, 2): 20.0, (384, 1): 60.0}, case=case))
    (path,) = write_model_yaml(advice, tmp_path / "new" / "bench.yaml")
    assert path == tmp_path / "new" / "bench.yaml"
    config = build(InferConfig, read_yaml(path), {"in_spec": "in.zarr", "out_spec": "out.zarr"})
    assert (config.patch, config.overlap, config.batch) == ((256, 256), (32,), 2)
    assert (config.amp, config.compile, config.in_channels) == ("fp16", True, 4)
    assert (config.model_type, config.devices) == ("prithvi-refiner-tiny", ("cuda:0",))


def test_all_reasons_stand_in_the_file(tmp_path) -> None:
    records = sized(TIMES) + sized({(512, 1): 90.0}, case={"model": "my.package:net"})
    advice = recommend([*records, launch(64, case={"model": "bad"}, status="crash")])
    (path,) = write_model_yaml(advice, tmp_path / "bench.yaml")
    assert read_yaml(path) == advice.choices[0].settings, "those for throughput of the first model"
    comments = " ".join(line.removeprefix("# ") for line in path.read_text().splitlines())
    assert all(line in comments for line in advice.lines)
    assert "bad, inference, cpu: Left out, a launch failed: 64, batch 1." in advice.notes


@pytest.mark.parametrize(
    ("case", "amp"),
    [({"amp": False}, "off"), ({"amp": True}, "bf16"), ({"amp": True, "device": "cuda:1"}, "fp16")],
)
def test_amp_in_the_words_of_infer(case: dict[str, Any], amp: str) -> None:
    records = sweep({(256, 1): 30.0}, launches=1, case=case)
    assert recommend(records).choices[0].settings["amp"] == amp


@pytest.mark.parametrize("mode", ["inference", "train"])
@pytest.mark.parametrize("tf32", [False, True])
def test_tf32_as_it_was_measured(mode: str, tf32: bool, tmp_path) -> None:
    case = {"mode": mode, "device": "cuda:0", "tf32": tf32}
    records = sweep({(256, 1): 30.0}, launches=1, case=case)
    (path,) = write_model_yaml(recommend(records), tmp_path / "bench.yaml")
    settings = read_yaml(path)
    assert settings["tf32"] is tf32
    if mode == "train":
        assert build(TrainConfig, TRAIN_DEFAULTS["pairs"], settings).tf32 is tf32
    else:
        more = {"in_spec": "in.zarr", "out_spec": "out.zarr"}
        assert build(InferConfig, settings, more).tf32 is tf32


def test_infer_has_no_other_dtype() -> None:
    records = sized(TIMES) + sized({(384, 2): 10.0}, case={"dtype": "bfloat16"})
    advice = recommend(records)
    assert {choice.cell.case["dtype"] for choice in advice.choices} == {"float32"}
    assert advice.notes == ("Left out, penstock infer keeps weights in float32: 384, batch 2.",)
    training = [r.model_copy(update={"case": r.case | {"mode": "train"}}) for r in records]
    assert recommend(training).choices[0].settings["dtype"] == "bfloat16"


def test_settings_for_training(tmp_path) -> None:
    case = {"mode": "train", "checkpointing": True, "compile": True}
    (path,) = write_model_yaml(recommend(sized(TIMES, case=case)), tmp_path / "bench.yaml")
    assert read_yaml(path) == {
        "model": "prithvi-refiner-tiny", "tile_size": 384, "batch_size": 4, "grad_accum_steps": 1,
        "device": "cpu", "dtype": "float32", "amp": False, "compile": True,
        "channels_last": False, "checkpointing": True,
    }  # fmt: skip


def test_a_place_that_cannot_be_written(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"--recommend .*bench\.yaml cannot be written"):
        write_model_yaml(recommend(sized(TIMES)), tmp_path / "file" / "bench.yaml")
    assert write_model_yaml(Recommendation(()), tmp_path / "none.yaml") == []


def test_a_winner_of_one_launch_or_an_unsteady_one_is_doubted_in_its_file(tmp_path) -> None:
    written = doubted([launch(256, 1, seconds=(0.1,) * 9)], tmp_path)
    assert "But it was measured in one launch, and another may differ: measure again" in written
    several = [launch(256, 1, i, (0.1 + i / 1e4,) * 9) for i in range(3)]
    assert "But" not in doubted(several, tmp_path)
    unsteady = several[0].model_copy(update={"warmup": Warmup(settled=False)})
    written = doubted([unsteady, *several[1:]], tmp_path)
    assert "But it was still unsteady after warm-up in 1 of 3 launches: measure again" in written


def doubted(records: list[Record], folder: Path) -> str:
    (path,) = write_model_yaml(recommend(records), folder / "winner.yaml")
    return " ".join(line.removeprefix("# ") for line in path.read_text().splitlines())
