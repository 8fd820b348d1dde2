"""Steps that packages do to input and output: one normalisation for each channel, or refused."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.base.errors import UsageError
from penstock.data import Normalisation
from penstock.models.packages import bioimageio, monai_bundle, monai_steps
from penstock.models.packages import nnunet as nnunet_room
from penstock.models.packages.chain import Chain
from penstock.models.packages.package import Parcel, in_our_order
from penstock.models.recipe import AS_IT_IS, HeadRecipe, Recipe

SPACE = {"scale": 1.0, "unit": None, "halo": 0, "type": "space"}


def axes(letters: str = "bczyx", **more: Any) -> list[Any]:
    """The axes of a tensor as bioimageio.spec has them; ``more`` has members of some."""
    names = {"b": "batch", "c": "channel"}
    made = []
    for letter in letters:
        kind = {"type": names[letter]} if letter in names else SPACE
        made.append(
            SimpleNamespace(id=names.get(letter, letter), **kind | {**more.get(letter, {})})
        )
    return made


def step(name: str, **values: Any) -> Any:
    missing = {"reference_tensor": None, "min_percentile": None, "max_percentile": None,
               "min": None, "max": None, "eps": 0.0, "offset": 0.0}  # fmt: skip
    return SimpleNamespace(id=name, kwargs=SimpleNamespace(**missing | values))


def before(*steps: Any, channels: int = 1, letters: str = "bczyx") -> Any:
    given = SimpleNamespace(id="raw", axes=axes(letters), preprocessing=steps)
    parcel: Any = Parcel("net", "net", trusted=False)  # type: ignore[arg-type]
    return bioimageio._normalisation(parcel, given, channels)


FLOATS = step("ensure_dtype", dtype="float32")
PERCENTILES = {"min_percentile": 1, "max_percentile": 99}
DOUBLED = step("scale_linear", gain=2.0)


def test_steps_of_an_input_become_one_normalisation() -> None:
    each = before(
        FLOATS,
        step("scale_linear", gain=[2.0, 0.5], offset=3.0, axis="channel"),
        step("clip", min=10.0, max=90.0),
        step("clip", max=80.0),
        step("fixed_zero_mean_unit_variance", mean=40.0, std=8.0),
        channels=2,
    )
    values = np.arange(0, 100, 7.0)
    for how, gain in zip(each, (2.0, 0.5), strict=True):
        wanted = ((values * gain + 3).clip(10, 80) - 40) / 8
        np.testing.assert_allclose(how.of_array(values).applied(values), wanted)
    over = step("scale_range", axes=["z", "y", "x"], reference_tensor="raw", **PERCENTILES)
    assert before(over, channels=2) == (Normalisation("percentiles", 1, 99),) * 2
    assert len(before(step("zero_mean_unit_variance", axes=None), channels=2)) == 1


@pytest.mark.parametrize(
    "steps",
    [
        [step("scale_range", axes=["y", "x"], **PERCENTILES)],
        [step("zero_mean_unit_variance", axes=["channel"])],
        [step("scale_range", axes=None, reference_tensor="other", **PERCENTILES)],
        [DOUBLED, step("zero_mean_unit_variance", axes=None)],
        [step("fixed_zero_mean_unit_variance", mean=[1.0], std=[2.0], axis="z")],
        [step("scale_linear", gain=0.0, offset=1.0)],
        [step("clip", min_percentile=5)],
        [DOUBLED, step("ensure_dtype", dtype="uint8")],
        [step("blur")],
    ],
)
def test_a_step_of_an_input_that_would_be_another_is_refused(steps: Any) -> None:
    with pytest.raises(UsageError, match=rf"{steps[-1].id} of its input is not done"):
        before(*steps)


def test_numbers_that_are_counted_after_others(tmp_path) -> None:
    def chain() -> Chain:
        return Chain(Parcel(tmp_path, tmp_path, trusted=False).refuse, 2)

    scores, values = Normalisation("moments"), np.random.default_rng(0).random((2, 50)) * 70
    scaled = chain()
    scaled.affine("first", [3.0, 4.0], 5.0)
    scaled.count("next", Normalisation("percentiles", 0, 100), by_channel=True)
    scaled.count("last", scores, by_channel=True)
    assert scaled.each == [scores] * 2, "a z-score takes back what was affine"
    for how, of in zip(scaled.each, values, strict=True):
        np.testing.assert_allclose(
            how.of_array(of).applied(of), how.of_array(of / 5).applied(of / 5)
        )

    def together(made: Chain) -> None:
        made.affine("first", [3.0, 4.0], 5.0)

    for begun in (
        together,
        lambda made: made.clip(0, 1),
        lambda made: made.affine("first", 0.0, -1.0),
        lambda made: made.count("first", Normalisation("moments", nonzero=True), by_channel=False),
    ):
        made = chain()
        begun(made)
        with pytest.raises(UsageError, match="last counts numbers of its input after another"):
            made.count("last", scores, by_channel=False)
    with pytest.raises(UsageError, match="first of its input has 3 numbers"):
        chain().affine("first", [1.0, 2.0, 3.0], 1.0)


def after(*steps: Any, dtype: str = "float32") -> Any:
    parcel: Any = Parcel("net", "net", trusted=False)  # type: ignore[arg-type]
    return bioimageio._heads(parcel, [SimpleNamespace(dtype=dtype, postprocessing=steps)])


def test_steps_of_an_output_are_done_in_their_order_or_refused() -> None:
    soft, sigmoid = step("softmax", axis="channel"), step("sigmoid")
    cut, doubled = step("binarize", threshold=0.25), step("scale_linear", gain=2.0, offset=1.0)
    assert after(soft, FLOATS) == ({"out": HeadRecipe("scores", "softmax")}, None)
    assert after(sigmoid, cut) == ({"out": HeadRecipe("scores", "sigmoid")}, "threshold:0.25")
    assert after(doubled)[0] == {"out": HeadRecipe("intensity", None, (1.0, 2.0), "float32")}
    plain = {"out": HeadRecipe("intensity", None, AS_IT_IS, "float32")}
    assert after(FLOATS)[0] == plain, "it does not go back to the scale of the input"
    whole = step("ensure_dtype", dtype="uint8")
    labels = {"out": HeadRecipe("labels", dtype="uint8")}
    assert after(whole) == after(FLOATS, whole, dtype="uint8") == (labels, None)
    for steps in ([sigmoid, doubled], [doubled, sigmoid], [doubled, doubled], [cut, sigmoid],
                  [step("softmax", axis="y")], [sigmoid, whole], [whole, doubled],
                  [step("clip", min=0.0)]):  # fmt: skip
        with pytest.raises(UsageError, match=f"{steps[-1].id} of its output is not done"):
            after(*steps)


def test_halo_sides_and_voxel_size_are_those_of_the_input() -> None:
    along = {"scale": 0.5, "unit": "nanometer", "size": SimpleNamespace(min=10, step=100)}
    like = SimpleNamespace(axis_id="y", get_size=lambda axis, of, ref_size: ref_size + 8)
    given = {axis.id: axis for axis in axes("yx", y=along, x=along | {"size": like})}
    assert bioimageio._side(given, "y", 2) == 310 and bioimageio._side(given, "x", 2) == 318
    half, double = (SimpleNamespace(halo=4, scale=scale) for scale in (1.0, 0.25))
    assert bioimageio._halo(half, given["y"]) == 8, "4 voxels that are as large as 8"
    assert bioimageio._halo(double, given["y"]) == 2
    assert bioimageio._spacing(given, "yx")[0][1:] == (0.5, 0.5)
    assert bioimageio._spacing(given, "yx")[1] == "nanometer"
    given["x"].unit = None
    assert bioimageio._spacing(given, "yx") == (None, "")


def test_tensors_of_a_package_get_our_order_of_axes() -> None:
    values = torch.arange(24).reshape(1, 2, 3, 4)
    assert torch.equal(in_our_order(values, "bxyz"), values.permute(0, 3, 2, 1)[:, None])
    assert torch.equal(in_our_order(values, "byxc"), values.permute(0, 3, 1, 2))


RANGE = {"a_min": -50, "a_max": 700, "b_min": 0, "b_max": 1}


def transformed(*steps: tuple[str, dict[str, Any]], channels: int = 1) -> tuple[Recipe, Any]:
    parcel: Any = Parcel("net", "net", trusted=False)  # type: ignore[arg-type]
    recipe, chain = Recipe("net"), Chain(parcel.refuse, channels)
    for name, values in steps:
        recipe = monai_steps.before(parcel, recipe, chain, name, values)
    return recipe, chain.each


def test_transforms_of_a_bundle_become_one_normalisation() -> None:
    both = ("ScaleIntensityRange", RANGE | {"b_min": -1, "clip": True})
    values = np.array([-100.0, -50, 325, 700, 900])
    scaling = transformed(both)[1][0].of_array(values)
    assert scaling.applied(values).tolist() == [-1, -1, 0, 1, 1]
    lists = {"subtrahend": [1.0, 2.0], "divisor": [4.0, 5.0], "channel_wise": True}
    each = transformed(("NormalizeIntensity", lists), channels=2)[1]
    assert [(how.lower, how.upper) for how in each] == [(1, 5), (2, 7)]
    plain = ("NormalizeIntensity", {})
    assert transformed(("ScaleIntensity", {}), plain)[1] == [Normalisation("moments")]
    for first in ([], [plain]):
        how = transformed(*first, ("ScaleIntensity", {"minv": -1.0, "maxv": 3.0}))[1][0]
        np.testing.assert_allclose(how.of_array(values).applied(values), values / 250 - 0.6)
        assert how.line().endswith("of which 0.25 becomes 0 and 0.5 becomes 1")
    kept = ("NormalizeIntensity", {"nonzero": True})
    how = transformed(kept, ("ScaleIntensity", {"minv": -1.0}))[1][0]
    assert how.line().startswith("least and largest of the whole volume, only where it is not 0")
    values = np.array([0.0, 2, 4, 12])  # 0 becomes what the mean, 6, does
    np.testing.assert_allclose(how.of_array(values).applied(values), [-0.2, -1, -0.6, 1])
    spacing = ("Spacing", {"pixdim": [1.0, 2.0, 3.0], "mode": ["bilinear", "nearest"]})
    recipe, _ = transformed(both, spacing)
    assert (recipe.spacing, recipe.order, recipe.scaled_first) == ((3, 2, 1), 1, True)
    assert recipe.centred
    for sizes, zyx in ((1.5, (1.5,) * 3), ([-1, 2, 3], (3, 2, np.nan)), ([1, 2], (np.nan, 2, 1))):
        np.testing.assert_equal(transformed(("Spacing", {"pixdim": sizes}))[0].spacing, zyx)
    recipe, _ = transformed(spacing, both)
    assert not recipe.scaled_first


@pytest.mark.parametrize(
    ("steps", "because"),
    [
        ([("NormalizeIntensity", {"subtrahend": 1, "nonzero": True}),
          ("ScaleIntensityRange", RANGE)], "scaled again after what is not 0 was"),
        ([("Spacing", {"pixdim": []})], "pixdim of its Spacing is .*, and not numbers"),
        ([("Spacing", {"pixdim": 1.0, "scale_extent": True})], "scale_extent of its Spacing is"),
        ([("Spacing", {"pixdim": 1.0, "padding_mode": "zeros"})], "padding_mode of its Spacing"),
        ([("CropForeground", {})], "CropForeground of its input is not done"),
        ([("Resize", {})], "Resize of its input is not done"),
        ([("CastToType", {"dtype": "$torch.int16"})], "CastToType of its input is not done"),
        ([("Spacing", {"pixdim": [1.0] * 3, "mode": "bicubic"})], "mode of its Spacing is 'bicub"),
        ([("Spacing", {"pixdim": "$[1] * 3"})], "--trust-model"),
        ([("ScaleIntensityRange", RANGE | {"a_max": -50})], "which is no range"),
        ([("ScaleIntensityRange", RANGE | {"b_max": None})], "b_max of its Scale.* is None"),
        ([("ScaleIntensity", {}), ("Spacing", {"pixdim": [1.0] * 3}), ("ScaleIntensity", {})],
         "comes after Spacing, and another scaling"),
        ([("NormalizeIntensity", {"nonzero": True}),
          ("ScaleIntensityRangePercentiles", {"lower": 1, "upper": 99})], "after another step"),
        ([("NormalizeIntensity", {"subtrahend": [1.0], "divisor": 2.0})], "and not a number"),
    ],
)  # fmt: skip
def test_a_transform_of_a_bundle_that_would_be_another_is_refused(steps: Any, because: str) -> None:
    with pytest.raises(UsageError, match=because):
        transformed(*steps)


@pytest.mark.parametrize("step", [{"_target_": "Activationsd", "other": "$torch.exp"},
                                  {"_target_": "AsDiscreted", "to_onehot": 2},
                                  {"_target_": "AsDiscreted", "argmax": True, "to_onehot": 2},
                                  {"_target_": "AsDiscreted", "threshold": 0.5,
                                   "rounding": "torchrounding"}])  # fmt: skip
def test_a_transform_of_an_output_that_would_be_another_is_refused(step: Any) -> None:
    parcel: Any = Parcel("net", "net", trusted=False)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="of its output is not done as it is said, only softmax"):
        monai_steps.after(parcel, Recipe("net"), [(step.pop("_target_")[:-1], step)])


SOFTMAX, SIGMOID = ("Activations", {"softmax": True}), ("Activations", {"sigmoid": True})
ARGMAX, CUT = ("AsDiscrete", {"argmax": True}), ("AsDiscrete", {"threshold": 0.5})
LINEAR, NEAREST = ("Invert", {"nearest_interp": False}), ("Invert", {})


@pytest.mark.parametrize(
    ("steps", "head", "reduce", "back_order"),
    [
        ([SOFTMAX, LINEAR, ARGMAX], HeadRecipe("scores", "softmax"), "argmax", 1),
        ([SOFTMAX, ARGMAX, LINEAR], HeadRecipe("scores", "softmax"), "argmax", 0),
        ([LINEAR, SIGMOID, CUT], HeadRecipe("scores", "sigmoid", after_back=True), "threshold:0.5",
         1),
        ([SIGMOID, NEAREST], HeadRecipe("scores", "sigmoid"), None, 0),
        ([("SaveImage", {})], HeadRecipe("scores"), None, 1),
    ],
)  # fmt: skip
def test_transforms_of_an_output_are_done_in_their_order(steps, head, reduce, back_order) -> None:
    parcel: Any = Parcel("net", "net", trusted=False)  # type: ignore[arg-type]
    recipe = monai_steps.after(parcel, Recipe("net"), steps)
    assert (recipe.heads["out"], recipe.reduce, recipe.back_order) == (head, reduce, back_order)
    with pytest.raises(UsageError, match="Activations of its output is not done"):
        monai_steps.after(parcel, Recipe("net"), [ARGMAX, SOFTMAX])


def test_an_inferer_that_would_be_another_is_refused() -> None:
    parcel: Any = Parcel("net", "net", trusted=False)  # type: ignore[arg-type]

    def tiled(name: str, sides: int = 2, **values: Any) -> Recipe:
        said = {"_target_": f"monai.inferers.{name}", "roi_size": [8] * sides, **values}
        return monai_bundle._tiled(parcel, Recipe("net"), said, sides)

    assert tiled("SliceInferer", spatial_dim=2).patch == (1, 8, 8)
    assert tiled("SlidingWindowInfererAdapt", 3).patch == (8, 8, 8)
    assert tiled("SimpleInferer").patch is None
    for name, values in (("SliceInferer", {}), ("SliceInferer", {"spatial_dim": 0}),
                         ("LDMSampler", {})):  # fmt: skip
        with pytest.raises(UsageError, match=f"its inferer {name} is not run"):
            tiled(name, **values)


def test_resampling_of_an_nnunet() -> None:
    parcel: Any = Parcel("net", "net", trusted=False)  # type: ignore[arg-type]

    def resampled(**said: Any) -> dict[str, Any]:
        plans = {f"resampling_fn_{name}": value for name, value in said.items()}
        return nnunet_room._resampled(parcel, plans, (3.0, 1.0, 1.0))

    assert resampled() == {"spacing": (3.0, 1.0, 1.0), "order": 3, "most_anisotropy": 3.0}
    assert resampled(data_kwargs={"order": 1, "force_separate_z": True})["most_anisotropy"] == 1
    torch_too = resampled(data="resample_torch_fornnunet", data_kwargs={"force_separate_z": False})
    assert (torch_too["order"], torch_too["most_anisotropy"]) == (1, None)
    assert resampled(data="resample_torch_simple")["most_anisotropy"] is None
    assert resampled(data="no_resampling_data_or_seg_hack") == {}
    for said in ({"data": "mine"}, {"data_kwargs": {"order": 2}}, {"data_kwargs": {"order_z": 1}}):
        with pytest.raises(UsageError, match="is not done, only resample_data_or_seg_to_shape"):
            resampled(**said)
