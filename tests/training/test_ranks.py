"""Several ranks: the same steps as one, one decision, and one end."""

import contextlib
import json
import sys
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from penstock.base import TRAIN_DEFAULTS, Incomplete, PenstockError, TrainConfig, UsageError, build

from .kit import assert_same, config_of, forked_ranks, rows, torchrun, train_workload, weights

if find_spec("lightning_fabric") is None:
    pytest.skip("lightning_fabric is not installed", allow_module_level=True)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> Path:
    """A run on two ranks of gloo: 80 training samples, whole batches; 17 validation samples."""
    folder = tmp_path_factory.mktemp("ranks") / "out"
    done = forked_ranks(
        folder, "spiral", "--num-samples", "115", "--batch-size", "4", "--epochs", "2",
        "--dropout", "0",
    )  # fmt: skip
    assert done.codes == [0, 0], done.said
    return folder


@pytest.mark.skipif(not find_spec("torchmetrics"), reason="torchmetrics is not installed")
def test_fabric_hears_the_version_of_torchmetrics_alone(monkeypatch) -> None:
    """All of it, where it has been imported already."""
    from penstock.training.ranks import torchmetrics_by_version

    for name in ("torchmetrics", "lightning_fabric"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with torchmetrics_by_version():
        stand_in = import_module("torchmetrics")
        assert stand_in.__version__ == metadata.version("torchmetrics")
        assert not hasattr(stand_in, "Metric")
    assert "torchmetrics" not in sys.modules
    whole = ModuleType("torchmetrics")
    monkeypatch.setitem(sys.modules, "torchmetrics", whole)
    with torchmetrics_by_version():
        assert import_module("torchmetrics") is whole
    assert sys.modules["torchmetrics"] is whole


@pytest.mark.slow
def test_two_ranks_equal_one_process_with_the_big_batch(two_ranks: Path, tmp_path) -> None:
    import torch

    alone = build(
        TrainConfig,
        TRAIN_DEFAULTS["spiral"],
        {"num_samples": 115, "batch_size": 8, "epochs": 2, "dropout": 0.0, "device": "cpu"},
        {"output_dir": tmp_path},
    )
    results = train_workload("spiral", alone)
    one, two = weights(tmp_path), weights(two_ranks)
    for name in one:
        assert torch.allclose(one[name], two[name], rtol=1e-5, atol=1e-6), name
    both = json.loads((two_ranks / "training_results.json").read_text())
    assert (both["world_size"], both["global_batch_size"], both["steps"]) == (2, 8, 20)
    assert both["samples"] == results["samples"] == 160
    for ours, theirs in zip(results["history"], both["history"], strict=True):
        for name in ("train_loss", "val_loss", "val_acc"):  # 17 samples, none counted twice
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4), name


@pytest.mark.slow
def test_ranks_tell_what_summing_costs_them(two_ranks: Path) -> None:
    both = json.loads((two_ranks / "training_results.json").read_text())
    assert [rank["rank"] for rank in both["ranks"]] == [0, 1]
    for rank in both["ranks"]:
        assert all(rank["phases"][name]["total_s"] > 0 for name in rank["phases"])
        assert rank["memory"]["host_peak"] > 0
    for rank in (0, 1):
        for row in rows(two_ranks, rank):
            parts = [float(row[f"{name}_s"]) for name in both["ranks"][0]["phases"]]
            assert sum(parts[1:]) == pytest.approx(parts[0], abs=1e-6)


@pytest.mark.slow
def test_ranks_agree_to_stop_and_go_on(tmp_path, monkeypatch) -> None:
    """With dropout, so that each rank must go on with random numbers of its own; with 71 samples
    for two ranks with batches of 4, so that the last one is filled up. What goes on does so under
    torchrun, and with another seed of Python's hashes."""
    words = ["tests.training.spirals:Struck", "--num-samples", "102", "--batch-size", "4"]
    words += ["--seed", "1", "--epochs", "2", "--optimizer", "adam", "--schedule", "constant"]
    monkeypatch.setenv("STRUCK", "1")
    stopped = forked_ranks(tmp_path / "parts", *words)
    monkeypatch.delenv("STRUCK")
    assert stopped.codes == [3, 3], stopped.said
    assert "stopped by SIGTERM after step 8 of 18" in stopped.said  # rank 1, which was struck
    assert "stopped by a signal to another rank after step 8 of 18" in stopped.said
    resumed = torchrun(tmp_path / "parts", *words, "--resume", seed="2")
    assert resumed.returncode == 0, resumed.stderr
    whole = forked_ranks(tmp_path / "whole", *words)
    assert whole.codes == [0, 0], whole.said
    assert_same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    for rank in (0, 1):
        losses = [[row["loss"] for row in rows(tmp_path / o, rank)] for o in ("whole", "parts")]
        assert losses[0] == losses[1]
        assert len(losses[0]) == 18


@pytest.mark.parametrize(
    ("raised", "caught", "done"),
    [
        (None, None, ["destroy"]),
        (Incomplete("stopped"), Incomplete, ["barrier", "destroy"]),
        (PenstockError("the loss is nan"), PenstockError, ["kill"]),
        (RuntimeError("gloo: Connection closed by peer"), PenstockError, ["kill"]),
        (KeyboardInterrupt(), KeyboardInterrupt, ["kill"]),
    ],
    ids=repr,
)
def test_a_rank_that_fails_takes_no_leave_of_the_others(
    raised: BaseException | None,
    caught: type[BaseException] | None,
    done: list[str],
    tmp_path,
    monkeypatch,
) -> None:
    """NCCL's group ends for all ranks at once, and the others are in the middle of a sum. Those
    that this process started end with it."""

    import torch

    from penstock.training import ranks

    calls: list[str] = []
    launcher = SimpleNamespace(procs=[SimpleNamespace(kill=lambda: calls.append("kill"))])

    def barrier() -> None:
        # From here on they leave with an exit code for which Fabric's watch would kill us.
        assert not launcher.procs
        calls.append("barrier")

    strategy = SimpleNamespace(launcher=launcher)
    fabric = SimpleNamespace(world_size=2, strategy=strategy, barrier=barrier)
    there = iter([False, True])
    monkeypatch.setattr(ranks, "_fabric", lambda config: fabric)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: next(there))
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: calls.append("destroy"))
    expected = pytest.raises(caught) if caught else contextlib.nullcontext()
    with expected, ranks.ranks_of(config_of(tmp_path)):
        if raised is not None:
            raise raised
    assert calls == done


@pytest.mark.slow
def test_one_rank_that_fails_ends_them_all(tmp_path) -> None:
    """Without a launcher that would end them, too."""
    words = ["tests.training.spirals:DamagedForOne", "--num-samples", "115", "--batch-size", "4"]
    done = forked_ranks(tmp_path / "out", *words)
    assert done.codes == [1, 1], done.said
    assert "penstock train: sample 17 is damaged" in done.said


def test_ranks_without_distributed_are_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UsageError, match="4 ranks were started, and without --distributed"):
        train_workload("spiral", config_of(tmp_path))
