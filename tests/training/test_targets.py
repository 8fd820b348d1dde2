"""The kinds of targets of ``train pairs``: found from values, trained on and scored as that."""

import json
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

if find_spec("lightning_fabric") is None:
    pytest.skip("lightning_fabric is not installed", allow_module_level=True)

from penstock.base import TRAIN_DEFAULTS, TrainConfig, UsageError, build
from penstock.data.stores.open import open_source
from penstock.models import HeadRecipe, read_training_record

from .kit import train_workload

SHAPE = (6, 16, 48)
RNG = np.random.default_rng(0)
X = np.linspace(0, 6, np.prod(SHAPE)).reshape(SHAPE)
IMAGE = 2000 + 1500 * np.sin(40 * X) + RNG.normal(0, 50, SHAPE)
CLASSES = np.digitize(IMAGE, (1200, 2000, 2800))
GAP = np.where(X < 2, np.nan, 1.0)
ONE, FOUR, SURE, SOFT = (f"tests.training.kit:{n}" for n in ("tiny", "four", "sure", "soft"))
TARGETS: dict[str, tuple[Any, str, str]] = {
    # the target, its kind, and the loss that its kind has
    "image": (IMAGE.astype(np.uint16), "intensity", "mse"),
    "image with gaps": (IMAGE * GAP, "intensity", "mse"),
    "mask": ((CLASSES > 1).astype(np.uint8), "mask", "bce"),
    "mask of 255": ((CLASSES > 1).astype(np.uint8) * 255, "mask", "bce"),
    "mask of bool": (CLASSES > 1, "mask", "bce"),
    "mask of floats, with gaps": ((CLASSES > 1) * GAP, "mask", "bce"),
    "probabilities": (np.clip(IMAGE / 4000, 0, 1).astype(np.float32), "probabilities", "bce"),
    "labels": (CLASSES.astype(np.uint8), "labels", "ce"),
    "labels of floats, with gaps": (CLASSES * GAP, "labels", "ce"),
}
CHANNELS = {"labels": FOUR}


@pytest.fixture
def pairs_of(tmp_path) -> Any:
    def make(target: NDArray[Any], source: NDArray[Any] = IMAGE, **changes: Any) -> TrainConfig:
        for name, array in (("in", source), ("target", target)):
            np.save(tmp_path / f"{name}.npy", array)
        settings = {
            "in_spec": str(tmp_path / "in.npy"), "target_spec": str(tmp_path / "target.npy"),
            "tile_size": "6x8x8", "batch_size": 4, "epochs": 1, "device": "cpu", "num_workers": 0,
            "output_dir": tmp_path / "out", "model": ONE,
        }  # fmt: skip
        return build(TrainConfig, TRAIN_DEFAULTS["pairs"], settings, changes)

    return make


@pytest.mark.parametrize("name", TARGETS)
def test_the_kind_of_a_target_is_found_and_said(name: str, pairs_of: Any) -> None:
    from penstock.training.workloads.pairs import Pairs

    target, kind, loss = TARGETS[name]
    workload = Pairs(pairs_of(target, model=CHANNELS.get(kind, ONE)))
    (head,) = workload.facts["heads"].values()
    assert (workload.objective.kind, head["target"], head["loss"]) == (kind, kind, loss)
    assert f"is {kind}, as its values say (--target-kind sets another)" in workload.notes[0]
    missing = int(np.isnan(np.asarray(target, np.float64)).sum())
    assert workload.facts["not_finite"] == {"in_spec": 0, "target_spec": missing}
    left_out = f"{missing:,} of {target.size:,} values of --target-spec are not finite and are left"
    assert any(left_out in note for note in workload.notes) == bool(missing)
    # A target is what its file says, whatever the percentiles of the input are.
    seen = np.concatenate([workload.train[i][1].numpy() for i in range(len(workload.train))], -1)
    finite = seen[np.isfinite(seen)]
    if kind == "mask":
        assert set(np.unique(finite)) == {0, 1}
    elif kind == "labels":
        assert set(np.unique(finite)) == {0, 1, 2, 3}
    elif kind == "probabilities":
        assert np.isin(finite, target).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "model", "head"),
    [
        ("mask of 255", ONE, ("scores", "mask", "bce", "logits")),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("mask of 255", SURE, ("scores", "mask", "bce", "probabilities")),
                ("labels of floats, with gaps", SOFT, ("scores", "labels", "ce", "probabilities")),
            )
        ),
    ],
)
def test_a_training_says_what_its_head_is(name, model, head, pairs_of, tmp_path) -> None:
    config = pairs_of(TARGETS[name][0], model=model, epochs=3, learning_rate=0.03)
    results = train_workload("pairs", config)
    record = read_training_record(tmp_path / "out" / "best_model.pth")
    said = record.facts["heads"]["out"]
    assert tuple(said[word] for word in ("kind", "target", "loss", "returns")) == head
    activation = "sigmoid" if head[3] == "logits" else None
    assert record.heads == {"out": HeadRecipe("scores", activation)}
    assert record == read_training_record(tmp_path / "out")
    assert record == read_training_record(tmp_path / "out" / "checkpoints" / "last.pt")
    assert record.workload == "pairs"
    wanted = {"normalize": "global", "norm_lower": 0.5, "norm_upper": 99.9}
    assert {name: record.args[name] for name in wanted} == wanted
    low, high = np.percentile(IMAGE[..., :40].astype(np.float32), (0.5, 99.9))
    assert record.scaling == pytest.approx((low, high - low))
    first, last = (results["history"][i]["train_loss"] for i in (0, -1))
    assert last < first
    assert all(np.isfinite(value) for value in results["final"].values())


TEMPERATURE = (280 + 1e-3 * IMAGE).astype(np.float32)
HALF = (IMAGE * 0.5 + 70).astype(np.uint16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "kind", "scores"),
    [(TEMPERATURE, "scores", {"val_psnr"}), (HALF, "intensity", {"val_psnr", "val_psnr_input"})],
)
def test_an_image_has_a_scale_of_its_own(target, kind, scores, pairs_of, tmp_path) -> None:
    """A temperature from an image, which on the image's scale would be one number; and an image."""
    results = train_workload("pairs", pairs_of(target, learning_rate=0.02, epochs=2))
    record = read_training_record(tmp_path / "out")
    (head,) = record.heads.values()
    assert record.facts["heads"]["out"]["target"] == "intensity"
    low, high = np.percentile(target[..., :40], (0.5, 99.9))
    assert (head.kind, head.activation, head.dtype) == (kind, None, target.dtype.name)
    assert head.scaling == pytest.approx((low, high - low), rel=1e-5)
    assert set(results["final"]) == scores
    assert results["final"]["val_psnr"] < 20


def test_an_input_is_compared_on_the_scale_of_the_target(pairs_of: Any) -> None:
    """The PSNR of the input is that of the numbers as they are stored."""
    results = train_workload("pairs", pairs_of(HALF, epochs=1))
    low, high = np.percentile(HALF[..., :40], (0.5, 99.9))
    held = np.s_[..., 40:]
    error = np.mean((IMAGE[held].astype(float) - HALF[held]) ** 2)
    psnr = 10 * np.log10((high - low) ** 2 / error)
    assert results["final"]["val_psnr_input"] == pytest.approx(psnr, abs=0.01)


def test_a_record_that_is_none_or_damaged(tmp_path) -> None:
    weights = tmp_path / "best_model.pth"
    assert read_training_record(weights).heads == {}
    (tmp_path / "args.json").write_text('{"workload": "spiral"}')
    assert read_training_record(weights).args == {"workload": "spiral"}
    for heads in ({"out": {"kind": "colours"}}, ["out"], {"out": 3}):
        results = {"facts": {"heads": heads}}
        (tmp_path / "training_results.json").write_text(json.dumps(results))
        with pytest.raises(UsageError, match="its heads are damaged"):
            _ = read_training_record(weights).heads
    (tmp_path / "args.json").write_text("[]")
    with pytest.raises(UsageError, match=r"args\.json is not of a training"):
        read_training_record(weights)


STRIPES = np.arange(np.prod(SHAPE)).reshape(SHAPE) // 8


@pytest.mark.parametrize(
    ("target", "how", "sentence"),
    [
        (CLASSES.astype(np.uint8), {}, "has labels .*0, 1, 2, 3.* makes 1 channel; if it is an im"),
        (STRIPES.astype(np.int32), {"model": FOUR}, "has labels .*from 0 to 575.* makes 4 ch"),
        (CLASSES * 10, {"model": FOUR}, "has labels .*0, 10, 20, 30"),
        (CLASSES + 1, {"model": FOUR}, "has labels .*1, 2, 3, 4.* each class from 0 on"),
        (CLASSES - 1, {"model": FOUR}, "has labels .*-1, 0, 1, 2.* NaN where there is no class"),
        (np.where(X > 5, 255, CLASSES), {"model": FOUR}, "has labels .*0, 1, 2, 3, 255"),
        (IMAGE, {"target_kind": "mask"}, "--target-kind mask takes 0 and one other value; --tar"),
        (IMAGE, {"target_kind": "probabilities"}, "probabilities takes values from 0 to 1; --targ"),
        (IMAGE, {"target_kind": "labels"}, "labels takes whole numbers from 0; --target-spec has"),
        (IMAGE, {"loss": "bce"}, "--loss bce does not fit a target of intensity .*do: mse, l1$"),
        (CLASSES > 1, {"loss": "ce"}, "--loss ce does not fit .*these do: bce, dice, mse, l1$"),
        (CLASSES.astype(np.uint8), {"model": FOUR, "loss": "mse"}, "labels in 4 .*do: ce, dice$"),
        (IMAGE, {"model": FOUR}, r"makes \(4, 6, 8, 8\) of a tile and --target-spec has \(1, 6,"),
        (IMAGE * np.nan, {}, r"--target-spec \S+: no value is finite in the .* voxels from"),
        (np.where(X > 4, np.nan, IMAGE), {}, "no value is finite"),
    ],
)  # fmt: skip
def test_a_target_that_does_not_fit_is_refused(target, how, sentence, pairs_of) -> None:
    from penstock.training.workloads.pairs import Pairs

    if sentence == "no value is finite":  # the part for validation has none
        target[..., 40:] = np.nan
    with pytest.raises(UsageError, match=sentence):
        Pairs(pairs_of(target, **how))


@pytest.mark.parametrize(
    ("target", "source", "kind"),
    [
        (IMAGE / IMAGE.max(), IMAGE / 5000, "intensity"),  # both from 0 to 1
        (np.full(SHAPE, 7, np.uint8), IMAGE, "intensity"),
        (np.zeros(SHAPE, np.uint8), IMAGE, "mask"),
        (RNG.poisson(0.5, SHAPE).astype(np.uint8), IMAGE, "intensity"),  # a dim image
        ((IMAGE / 16).astype(np.uint8), IMAGE, "intensity"),
    ],
)
def test_kinds_that_are_near_another(target: NDArray[Any], source: NDArray[Any], kind: str) -> None:
    from penstock.data.box import Box
    from penstock.training.workloads.targets import count_values, kind_of

    whole = [Box.of((0,) * 5, (1, 1, *SHAPE))]
    counts = [count_values(open_source(array), whole, "--x") for array in (target, source)]
    assert kind_of(*counts, 1, 1, None) == kind


@given(
    seed=st.integers(0, 10**6),
    shape=st.tuples(*[st.integers(1, 9)] * 5),
    chunks=st.tuples(*[st.integers(1, 4)] * 5),
    dtype=st.sampled_from(("bool", "uint8", "int16", "float16", "float32", "float64")),
)
def test_values_are_counted_once_whatever_the_chunks(seed, shape, chunks, dtype) -> None:
    from penstock.data.box import Box
    from penstock.training.workloads.targets import count_values

    rng = np.random.default_rng(seed)
    array = rng.normal(0, rng.choice((1, 30)), shape).astype(dtype)
    if array.dtype.kind == "f":
        array[rng.random(shape) < 0.3] = rng.choice((np.nan, np.inf))
        array[..., 0] = rng.choice((0.5, 2))
    source = open_source(array)
    source.chunks = chunks
    cut = shape[3] // 2
    parts = [Box.of((0,) * 5, (*shape[:3], cut, shape[4]))] if cut else []
    parts.append(Box.of((0, 0, 0, cut, 0), (*shape[:3], shape[3] - cut, shape[4])))
    values = count_values(source, parts, "--x")
    array = array.astype(np.float32) if dtype == "float64" else array
    finite = array[np.isfinite(array)]
    assert (values.count, values.not_finite) == (array.size, array.size - finite.size)
    assert (values.low, values.high) == (finite.min(), finite.max())
    assert values.whole == (finite == np.round(finite)).all()
    distinct = set(finite.astype(np.float32).tolist())
    assert values.distinct == (distinct if len(distinct) <= 64 else None)


@given(
    data=st.data(),
    loss=st.sampled_from(("mse", "l1", "bce", "dice", "ce")),
    returns=st.sampled_from(("logits", "probabilities")),
)
def test_losses_and_scores_are_of_the_finite(data: st.DataObject, loss: Any, returns: Any) -> None:
    """Each against the formula in numpy, on the values that are known alone."""
    import torch

    from penstock.training.workloads.objectives import Objective

    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    kind: Any = "labels" if loss == "ce" else "mask"
    channels = 3 if kind == "labels" else data.draw(st.integers(1, 2))
    shape = (2, channels, 4, 5)
    logits = rng.normal(0, 3, shape)
    sigmoid = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    sigmoid = sigmoid if kind == "labels" else 1 / (1 + np.exp(-logits))
    classes, planes = (channels, 1) if kind == "labels" else (2, channels)
    true = rng.integers(0, classes, (2, planes, 4, 5))
    finite = rng.random(true.shape) < data.draw(st.sampled_from((0.0, 0.3, 0.8, 1.0)))
    target = torch.from_numpy(np.where(finite, true, rng.choice((np.nan, np.inf), true.shape)))
    direct = loss in ("mse", "l1")
    objective = Objective(kind, loss, "values" if direct else returns, channels)
    made = torch.from_numpy(logits if returns == "logits" and not direct else sigmoid)
    made.requires_grad_()
    value = objective.of_batch(made, target)
    value.backward()
    assert made.grad is not None and made.grad.isfinite().all()
    p, t = sigmoid, true.astype(float)
    if kind == "labels":
        each = -np.log(np.take_along_axis(p, true, 1))
    else:
        each = {"mse": (p - t) ** 2, "l1": abs(p - t)}.get(
            loss, -(t * np.log(p) + (1 - t) * np.log(1 - p))
        )
    wanted = each[finite].mean() if finite.any() else 0.0
    if loss == "dice":
        sums = [(a * finite).sum((0, 2, 3)) for a in (p * t, p + t)]
        wanted = np.mean(1 - (2 * sums[0] + 1) / (sums[1] + 1))
    assert value.item() == pytest.approx(wanted, rel=1e-4, abs=1e-9)
    scores = objective.scores(objective.of_samples(made.detach(), target, None))
    _assert_scores(scores, kind, p, true, finite)


def _assert_scores(scores: dict[str, float], kind: str, p: Any, true: Any, finite: Any) -> None:
    f1, iou, auc = [], [], []
    best = p.argmax(1)[:, None]
    for c in range(p.shape[1]):
        if kind == "labels":
            said, is_true = (best == c)[finite], (true == c)[finite]
        else:
            said, is_true = (p[:, c] >= 0.5)[finite[:, c]], (true[:, c] == 1)[finite[:, c]]
            ranks = np.log(p / (1 - p))[:, c][finite[:, c]]
            ranks = np.floor(ranks.clip(-15.99, 15.99) * 16)  # nearer ones count as equal
            yes, no = ranks[is_true][:, None], ranks[~is_true]
            if yes.size and no.size:
                auc.append(((yes > no) + (yes == no) / 2).mean())
        if (said | is_true).any():
            f1.append(2 * (said & is_true).sum() / (said.sum() + is_true.sum()))
            iou.append((said & is_true).sum() / (said | is_true).sum())
    wanted = {"val_f1": f1, "val_iou": iou} | ({"val_auc": auc} if kind != "labels" else {})
    for name, values in wanted.items():
        mean = np.mean(values) if values else np.nan
        assert scores[name] == pytest.approx(mean, abs=1e-6, nan_ok=True), name
    if kind == "labels":
        right = (best == true)[finite].mean() if finite.any() else np.nan
        assert scores["val_accuracy"] == pytest.approx(right, nan_ok=True)


@pytest.mark.parametrize("kind", ["intensity", "mask", "labels", "probabilities"])
def test_a_network_that_returns_nan_has_no_score(kind: Any) -> None:
    import torch

    from penstock.training.workloads.objectives import LOSSES, Objective

    objective = Objective(kind, LOSSES[kind][0], "logits", 2)
    made, planes = torch.full((1, 2, 3, 3), torch.nan), 1 if kind == "labels" else 2
    scores = objective.scores(objective.of_samples(made, torch.ones(1, planes, 3, 3), None))
    assert np.isnan([*scores.values()]).all()
