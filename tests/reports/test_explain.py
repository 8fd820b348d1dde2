"""What bound a run, what to change, by how much, and whether that held."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from penstock.instruments import Interval, Loopback
from penstock.reports import mfu
from penstock.reports.change import Change, Held, place_beside, ranked
from penstock.reports.explanation import Explanation, explain
from penstock.reports.places import places_of
from penstock.reports.training.ranks import covered

from .pages import HOSTILE, run_folder
from .test_training_report import COMPUTING, WAITING, training

READ = {"read": (9.0, 0.1, 1), "forward": (2.0, 8.0, 1), "write": (1.0, 9.0, 2)}


def explained(path: Path, *others: Path) -> Explanation:
    (place,) = places_of(path)
    return explain(place, others)


def infer(
    folder: Path, stages: Any = READ, settings: dict[str, Any] | None = None, **changes: Any
) -> Path:
    usual = {"model_type": "identity", "out_spec": [f"{folder.name}.zarr"], "prep_workers": 1}
    run = {"settings": usual | (settings or {}), **changes.pop("run", {})}
    return run_folder(folder, stages, run=run, **{"cpu_seconds": 12.0, **changes})


# --- a run of infer -------------------------------------------------------------------------------


def test_a_run_bound_by_reading_is_given_threads_and_the_command_to_test_them(
    tmp_path: Path,
) -> None:
    advice = explained(infer(tmp_path / "a"))
    first = advice.changes[0]
    assert advice.bound[0].startswith("Bound by read: its thread was busy 90% of the time")
    assert first.sentence() == (
        "2 threads for read in place of 1: 1.82x as fast [1.00-2.22: least if the store gives no "
        "more, most if nothing else takes longer; one run]. Read was busy for 90% of the time on "
        "1 thread."
    )
    words = shlex.split(first.command)
    assert words[:2] == ["penstock", "infer"] and words[-2:] == ["--prep-workers", "2"]
    assert "a-prep-workers-2.zarr" in words


def test_the_gain_turns_with_the_record(tmp_path: Path) -> None:
    busier = READ | {"forward": (8.0, 2.0, 1)}
    (first, *_) = explained(infer(tmp_path / "a", busier)).changes
    assert first.gain.high == pytest.approx(1 / 0.8), "then forward binds"
    assert explained(infer(tmp_path / "b", cpu_seconds=37.0)).changes == [], "the cores are full"
    writing = {"read": (1.0, 9.0, 1), "write": (9.0, 0.1, 1)}
    (first,) = explained(infer(tmp_path / "c", writing)).changes
    assert first.settings == {"writer_workers": 2}


def test_a_run_bound_by_computing_may_compute_less(tmp_path: Path) -> None:
    computing = {"forward": (9.5, 0.1, 1), "read": (0.5, 9.0, 1)}
    domain = [[0, 0, 0, 0, 0], [1, 1, 96, 240, 240]]
    geometry = {"domain": domain, "patch": [64] * 3, "overlap": [32] * 3, "devices": ["cpu"]}
    run = {"makers": [{"threads": 2}], "fingerprint": geometry}
    folder = infer(tmp_path / "a", computing, run=run)
    by = {name: change for change in explained(folder).changes for name in change.settings}
    overlap, threads = by["overlap"], by["threads"]
    assert overlap.settings == {"overlap": [16, 16, 16]}
    assert overlap.gain.high == pytest.approx(192 / 50), "3 x 8 x 8 patches, and 2 x 5 x 5"
    assert "192 patches; 50 would do" in overlap.sentence()
    assert threads.settings == {"threads": 4} and threads.gain.high == 2.0
    assert "on 2 threads" in threads.sentence()
    (starved, _) = explained(infer(tmp_path / "b", computing, run=run, cpu_seconds=4.75)).changes
    assert starved.gain.high == pytest.approx(2 * 192 / 50)
    assert "others used the cores for up to 50% of the time" in starved.sentence()


def test_threads_that_check_and_write_are_one_knob(tmp_path: Path) -> None:
    stages = {"checksum": (6.0, 0.1, 1), "write": (3.0, 0.1, 1)}
    (change,) = explained(infer(tmp_path / "a", stages)).changes
    assert change.settings == {"writer_workers": 2} and "checksum was busy" in change.why
    assert change.gain.high == pytest.approx(1 / 0.3), "the cores bind: 12 of 40 s"


def test_a_gpu_in_float32_is_given_mixed_precision(tmp_path: Path) -> None:
    stages = {"forward": (8.0, 0.1, 1), "read": (5.0, 0.1, 1)}
    for number, (arithmetic, word) in enumerate(((["None", False], "float32"),
                                                 (["None", True], "TF32"),
                                                 (["torch.float16", False], ""))):  # fmt: skip
        run = {"fingerprint": {"devices": ["cuda:0"], "arithmetic": arithmetic}}
        changes = explained(infer(tmp_path / str(number), stages, run=run)).changes
        assert [change.settings for change in changes] == [{"amp": "bf16"}] * bool(word)
        assert all(c.gain.high == pytest.approx(1 / 0.7) and word in c.why for c in changes)


def test_percentiles_of_a_smaller_level_are_foretold(tmp_path: Path) -> None:
    stages = {"statistics": (4.0, 0.1, 4), "read": (2.0, 1.0, 4)}
    (change,) = explained(infer(tmp_path / "a", stages, {"norm_level": 1})).changes
    assert change.settings == {"norm_level": 2} and "--norm-level 2" in change.command
    ends = (change.gain.low, change.gain.value, change.gain.high)
    assert ends == pytest.approx((1 / 0.8, 1 / 0.7, 1 / 0.6)), "40% of the time on one thread"
    assert "is not in the record" in change.sentence()


@pytest.mark.parametrize(
    ("stage", "why"), [("stitch", "one thread"), ("upload", "pinned"), ("note", "--run-dir")]
)
def test_a_stage_that_no_setting_shortens_is_said_to_be_one(
    tmp_path: Path, stage: str, why: str
) -> None:
    advice = explained(infer(tmp_path / "a", {stage: (9.0, 1.0, 1), "forward": (1.0, 9.0, 1)}))
    assert advice.changes == [] and why in advice.bound[-1]
    start = f"No setting is advised for {stage}, which was busy for 90% of the time: "
    assert advice.bound[-1].startswith(start)
    idle = explained(infer(tmp_path / "b", {stage: (2.0, 1.0, 1)}))
    assert "No setting" not in " ".join(idle.bound)


def test_what_a_run_computed_is_set_beside_the_roof(tmp_path: Path) -> None:
    plan = {"num_patches": 10, "patch_flops": 4e9, "cores": 4}
    folder = infer(tmp_path / "a", run={"plan": plan})
    metrics = folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("{", '{"machine_key": "nowhere", ', 1))
    lines = explained(folder).bound
    assert lines[2].startswith("While it worked the network computed 20.0 Gflop/s"), lines


def test_a_test_beside_others_says_nothing_where_it_did_not_hold(tmp_path: Path) -> None:
    computing = {"forward": (9.5, 0.1, 1), "read": (0.5, 9.0, 1)}
    run = {"makers": [{"threads": 2}]}
    base = infer(tmp_path / "a", computing, run=run)
    infer(tmp_path / "b", computing, settings={"threads": 4}, seconds=30.0, cpu_seconds=4.75)
    held = next(each for each in explained(base).held if each.where == "b")
    assert held.verdict == "cannot be told"
    assert "it had a processor for at most 50% of that time." in held.sentence()


def test_a_run_that_is_not_done_says_that_it_cannot_know(tmp_path: Path) -> None:
    advice = explained(run_folder(tmp_path / "a"))
    assert "What limited it is not known" in advice.bound[1]
    assert advice.lines()[-1] == "No measurement supports a change."


@pytest.mark.parametrize(
    ("seconds", "verdict"), [(6.0, "held"), (10.5, "did not hold"), (2.0, "gave more")]
)
def test_a_test_beside_the_run_is_found_by_its_settings(
    tmp_path: Path, seconds: float, verdict: str
) -> None:
    base = infer(tmp_path / "a")
    infer(tmp_path / "b", seconds=seconds, settings={"prep_workers": 2})
    infer(tmp_path / "c", seconds=1.0, settings={"prep_workers": 2, "batch": 7})
    run_folder(tmp_path / "d")  # under way
    (held,) = explained(base).held
    assert held.verdict == verdict and held.where == "b"
    assert f"{verdict}: b was {10 / seconds:.2f}x as fast [1 launch each]" in held.sentence()
    elsewhere = infer(tmp_path / "x" / "y", seconds=5.0, settings={"prep_workers": 2})
    assert [each.where for each in explained(base, elsewhere).held] == ["b", "y"]


@pytest.mark.slow
def test_a_slow_store_is_named_and_threads_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer is late by a second, so that the machine's own noise is small."""
    monkeypatch.chdir(tmp_path)
    assert main("generate volume v.ome.zarr --shape 64 256 256".split()) == 0
    with Loopback(tmp_path, 1.0) as store:
        words = ["infer", "--in-spec", f"{store.url}/v.ome.zarr", "--model-type", "identity"]
        words += "--patch 64 64 64 --overlap 0 --normalize none --block 64 128 128".split()
        for out, threads in (("r.ome.zarr", "1"), ("r-prep-workers-2.ome.zarr", "2")):
            assert main([*words, "--out-spec", out, "--prep-workers", threads]) == 0
    advice = explained(Path("r.ome.zarr"))
    assert advice.bound[0].startswith("Bound by read")
    assert advice.changes[0].settings == {"prep_workers": 2}
    (held,) = advice.held
    # How much more speed it is, and so the verdict, depends on what else the machine does.
    assert held.where == "r-prep-workers-2.ome.zarr" and held.measured.value > 1


# --- a training -----------------------------------------------------------------------------------


def trained(folder: Path, phases: Any, args: dict[str, Any] | None = None, **changes: Any) -> Path:
    training(folder, phases, **changes)
    usual = {"workload": "spiral", "num_workers": 0, "batch_size": 32, "output_dir": folder.name}
    (folder / "args.json").write_text(json.dumps(usual | (args or {})))
    return folder


def test_a_starved_training_is_given_workers(tmp_path: Path) -> None:
    advice = explained(trained(tmp_path / "a", WAITING))
    first = advice.changes[0]
    assert advice.bound[0].startswith("Bound by waiting for data: 65% of the time of steps")
    assert first.settings == {"num_workers": 2} and first.gain.low == 1.0
    assert 2.6 < first.gain.value < 3.1, "0.65 of a step is hidden behind the other 0.35"
    assert "least if they share cores with the step" in first.sentence()
    assert (
        first.command == ("penstock train spiral --num-workers 2 --output-dir a-num-workers-2")
        or "--num-workers 2" in first.command
    )


def test_workers_that_are_waited_for_bring_a_batch_a_step(tmp_path: Path) -> None:
    folder = trained(tmp_path / "a", WAITING, {"num_workers": 2}, device="A GPU")
    first = next(c for c in explained(folder).changes if "num_workers" in c.settings)
    assert first.settings == {"num_workers": 4} and first.gain.value == pytest.approx(2.0, abs=0.1)
    assert first.gain.low is not None and 1.2 < first.gain.low < 1.6, "half of the wait is left"
    assert "mixed precision" not in " ".join(c.what for c in explained(folder).changes)


def test_what_is_done_once_a_step_is_done_less_often_with_larger_batches(tmp_path: Path) -> None:
    phases = {"forward": (0.5, 0.5), "optimizer": (0.3, 0.3), "communication": (0.2, 0.2)}
    folder = trained(tmp_path / "a", phases, world=2, device="A GPU")
    changes = explained(folder).changes
    batch = next(c for c in changes if "batch_size" in c.settings)
    assert batch.gain.value == pytest.approx(1 / 0.75) and batch.gain.high == 2.0
    assert "50% of a step is communication and optimizer" in batch.sentence()
    start = "penstock launch torchrun --nproc-per-node 2 -- train spiral "
    assert batch.command.startswith(start)
    amp = next(c for c in changes if "amp" in c.settings)
    assert amp.gain.high == pytest.approx(1 / 0.75)
    assert [c.gain.value for c in changes] == sorted((c.gain.value for c in changes), reverse=True)


def test_copies_that_take_long_may_be_larger(tmp_path: Path) -> None:
    phases = {"forward": (0.4, 0.4), "transfer": (0.6, 0.6)}
    advice = explained(trained(tmp_path / "a", phases, device="A GPU"))
    (change,) = advice.changes
    assert advice.bound[0].startswith("Bound by transfer: 60%") and "pinned" not in advice.bound[0]
    assert change.settings == {"batch_size": 64} and "--batch-size 64" in change.command
    ends = (change.gain.low, change.gain.value, change.gain.high)
    assert ends == pytest.approx((1.0, (1 + 1 / 0.7) / 2, 1 / 0.7))
    assert "copies to the device take 60% of a step, 600 ms each" in change.sentence().lower()
    once = phases | {"optimizer": (0.3, 0.3)}
    several = explained(trained(tmp_path / "b", once, device="A GPU")).changes
    assert [c.settings for c in several] == [{"batch_size": 64}], "one change, and not two"


def test_a_training_that_computes_on_a_cpu_may_have_threads_or_bfloat16(tmp_path: Path) -> None:
    phases = {"forward": (0.5, 0.5), "backward": (0.5, 0.5)}
    threads, precision = explained(trained(tmp_path / "a", phases, {"threads": 2})).changes
    assert threads.settings == {"threads": 4} and threads.gain.high == pytest.approx(2.0)
    assert "--threads 4" in threads.command and "there are no more cores" in threads.basis
    assert precision.settings == {"amp": True}
    assert "the gain is not known, because a processor that does not" in precision.sentence()
    advice = explained(trained(tmp_path / "b", phases, {"amp": True}))
    assert advice.changes == []
    assert advice.bound[-1].startswith("No setting is advised for forward and backward, 100%")


def test_a_training_is_set_beside_the_roof_of_its_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roofs = {("m", "cpu", "float32"): 64e9, ("m", "cuda:0", "float16"): 1e12}
    monkeypatch.setattr(mfu, "known_roof", lambda *asked: roofs.get(asked))
    usual: dict[str, Any] = {"flops_per_sample": 10e6, "flops_note": "", "machine_key": "m"}
    advice = explained(trained(tmp_path / "a", WAITING, **usual))
    does = (
        "it computed 6.40 Gflop/s (products, convolutions and attention, forward and backward, "
        "over all the time of its epochs)"
    )
    assert advice.bound[1] == (
        f"MFU (model FLOPs utilisation) 10.0% [10.0%-10.0%, 2 epochs of one run]: {does}, of the "
        "64.0 Gflop/s that matrix products of float32 reach here."
    )
    usual |= {"device": "A GPU", "flops_per_sample": 1e9}
    two = explained(trained(tmp_path / "b", WAITING, {"amp": True}, world=2, **usual))
    assert two.bound[1].startswith("MFU (model FLOPs utilisation) 32.0%"), "of two devices"
    assert "2.00 Tflop/s that matrix products of float16" in two.bound[1]
    for number, settings in enumerate(({"tf32": True}, {"dtype": "bfloat16"}, {})):
        line = explained(trained(tmp_path / str(number), WAITING, settings, **usual)).bound[1]
        dtype = settings.get("dtype", "tf32" if settings else "float32")
        start = f"Its MFU (model FLOPs utilisation) is not known, for want of a peak of {dtype}: it"
        assert line.startswith(start) and "it computed 640 Gflop/s" in line
        assert line.endswith("run penstock doctor once on each machine.")
    roofs["m", "cuda:0", "tf32"] = 64e12
    line = explained(trained(tmp_path / "c", WAITING, {"tf32": True}, **usual)).bound[1]
    assert "1.0% [1.0%-1.0%" in line and "products of tf32" in line


def test_why_the_arithmetic_of_a_training_is_not_known_is_said(tmp_path: Path) -> None:
    start = "Its MFU (model FLOPs utilisation) is not known: "
    old = explained(trained(tmp_path / "a", WAITING))
    assert old.bound[1] == f"{start}its operations were not counted."
    lost = explained(trained(tmp_path / "b", WAITING, flops_per_sample=None, flops_note="why"))
    assert lost.bound[1] == f"{start}why."
    begun = explained(trained(tmp_path / "c", WAITING, samples_per_s=None))
    assert "MFU" not in " ".join(begun.bound)


def test_a_load_that_is_shorter_than_handing_it_over_says_nothing(tmp_path: Path) -> None:
    short = {name: tuple(s / 1000 for s in each) for name, each in WAITING.items()}
    base = trained(tmp_path / "a", short)
    change = next(c for c in explained(base).changes if "num_workers" in c.settings)
    assert "the gain is not known, because handing a batch" in change.sentence()
    trained(tmp_path / "b", COMPUTING, {"num_workers": 2})
    (held,) = explained(base).held
    assert held.verdict == "was tested" and "no gain was predicted" in held.sentence()


def test_ranks_are_merged(tmp_path: Path) -> None:
    phases = {"forward": (0.5, 0.5), "communication": (0.2, 0.2)}
    folder = trained(tmp_path / "a", phases, world=2, slow=1.2)
    # The first rank waits for the last, which has a fifth more to do and waits less.
    path = folder / "steps" / "rank0.csv"
    path.write_text(path.read_text().replace("0.200000", "0.300000").replace(",0.7,", ",0.8,"))
    lines = explained(folder).bound[1:]
    assert "25% is the sum over ranks that no computing hides, 200 ms" in lines[1]
    assert "6% waiting for the last of 2 ranks, 50.0 ms" in lines[1]
    assert lines[2] == "Rank 1 is the last in 100% of 10 steps; 50% would be chance."
    assert "is not known: no trace of a profiler shows it" in lines[3]
    (folder / "profile").mkdir()
    events = [
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 0, "dur": 4e6},
        {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce", "ts": 3e6, "dur": 4e6},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9e6},
        {"ph": "i", "name": 3},
    ]
    for rank in (0, 1):
        text = json.dumps({"traceEvents": events})
        (folder / "profile" / f"rank{rank}.json").write_text(text)
    line = explained(folder).bound[-1]
    assert line.startswith("25% of the 8.00 s in which ranks summed was hidden behind computing")
    assert "[25%-25%, 2 traces of the profiler]" in line


def test_covered_seconds() -> None:
    assert covered([]) == 0 and covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)]) == 4.0


# --- words ----------------------------------------------------------------------------------------


def test_changes_rank_by_what_they_give_and_the_unknown_comes_last() -> None:
    one, two, unknown = (
        Change(name, "", Interval(value, 1.0, high, 1), "", {})
        for name, value, high in (("one", 1.2, 2.0), ("two", 1.5, 2.0), ("three", 9.0, None))
    )
    assert [c.what for c in ranked([one, unknown, two])] == ["two", "one", "three"]
    near = Held(one, "x", Interval(2.2, 1.9, 2.5, 1))
    assert near.verdict == "may have held" and "1.90-2.50, 1 launch each" in near.sentence()
    assert place_beside("a/b.c.zarr", {"overlap": [8, 8]}) == "a/b-overlap-8-8.c.zarr"


def test_names_are_text_and_a_command_is_quoted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    infer(tmp_path / "a", settings={"in_spec": HOSTILE})
    code = main(["explain", str(tmp_path / "a"), "--json", str(tmp_path / "e.json")])
    assert code == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x00" not in out
    (run,) = json.loads((tmp_path / "e.json").read_text())["runs"]
    assert HOSTILE in shlex.split(run["changes"][0]["command"])
    assert main(["explain", str(tmp_path / "nothing")]) == 2
