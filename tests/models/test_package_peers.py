"""Networks of others against the library that each comes from, on volumes that no step fits."""

import hashlib
import json
import re
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import penstock
from penstock.base import InferConfig, UsageError
from penstock.data import open_source
from penstock.inference.opening.as_its_makers import with_defaults
from penstock.inference.opening.network_voxels import check_orientation
from penstock.inference.opening.selection import channels_of, volumes_of
from penstock.models import Recipe, Sliding, load_model

from .packages_kit import CODE, Array, bundle, infer, nnunet, noise, onnx_of, unet

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries

ZSCORE = {"normalization_schemes": ["ZScoreNormalization"] * 2}


def predicted(
    folder: Path, volume: Array, monkeypatch: Any, *, mirror: bool, size: Any = None
) -> tuple[Array, Any]:
    """The scores of nnU-Net's own preprocessor and predictor, and the box that it crops to.

    What it adds up is float32 here, and half precision as it comes.
    """
    for name in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results"):
        monkeypatch.setenv(name, str(folder))
    room = pytest.importorskip("nnunetv2.inference.predict_from_raw_data")
    plans, dataset = (json.loads((folder / f"{name}.json").read_text()) for name in
                      ("plans", "dataset"))  # fmt: skip
    plans |= {
        "plans_name": "p",
        "image_reader_writer": "SimpleITKIO",
        "transpose_backward": [0, 1, 2],
    }
    base = plans["configurations"]["base"]
    base |= {"preprocessor_name": "DefaultPreprocessor", "batch_dice": False, "batch_size": 2,
             "data_identifier": "x", "previous_stage": None}  # fmt: skip
    for what in ("data", "seg", "probabilities"):
        base.setdefault(f"resampling_fn_{what}", "resample_data_or_seg_to_shape")
        how = {
            "is_seg": what == "seg",
            "order": 1 if what == "probabilities" else 3,
            "order_z": 0,
            "force_separate_z": None,
        }
        base.setdefault(f"resampling_fn_{what}_kwargs", how)
    (folder / "plans.json").write_text(json.dumps(plans))
    (folder / "dataset.json").write_text(json.dumps(dataset | {"file_ending": ".nii.gz"}))
    for file in folder.glob("fold_*/*.pth"):
        state = torch.load(file, weights_only=False)
        torch.save(state | {"trainer_name": "nnUNetTrainer"}, file)
    predictor = room.nnUNetPredictor(
        device=torch.device("cpu"), use_mirroring=mirror, perform_everything_on_device=False,
        allow_tqdm=False,
    )  # fmt: skip
    predictor.initialize_from_trained_model_folder(str(folder), None)
    manager, gaussian = predictor.configuration_manager, room.compute_gaussian
    monkeypatch.setattr(torch, "half", torch.float32)
    monkeypatch.setattr(
        room, "compute_gaussian", lambda *args, **more: gaussian(*args, **more, dtype=torch.float32)
    )
    values, _, facts = manager.preprocessor_class(verbose=False).run_case_npy(
        volume,
        None,
        {"spacing": size or base["spacing"]},
        predictor.plans_manager,
        manager,
        dataset,
    )
    scores = predictor.predict_logits_from_preprocessed_data(torch.from_numpy(values)).numpy()
    return scores, tuple(slice(*ends) for ends in facts["bbox_used_for_cropping"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "patch", "more"),
    [
        ((1, 27, 19, 33), [16, 16, 16], {}),
        ((1, 27, 9, 33), [8, 16, 12], {"tta": "flips"}),
        ((1, 12, 9, 33), [16, 12, 14], {}),
        ((2, 31, 13, 29), [12, 14, 16], {"use_mask_for_norm": [True, False]}),
        ((2, 31, 33, 29), [12, 14, 16], {"use_mask_for_norm": [True, True]}),
    ],
)
def test_an_nnunet_is_what_its_own_predictor_makes_of_it(
    shape: tuple[int, ...], patch: list[int], more: dict[str, Any], tmp_path, monkeypatch: Any
) -> None:
    channels, tta = shape[0], more.pop("tta", None)
    folder = nnunet(
        tmp_path / "net", [unet(fold, channels) for fold in range(2)],
        configuration={"patch_size": patch, **(ZSCORE if more else {}), **more},
        channels={str(number): f"c{number}" for number in range(channels)},
    )  # fmt: skip
    volume = noise(*shape)
    if more:
        volume *= np.pad(np.ones((2, 22, *[side - 7 for side in shape[2:]]), "uint16"),
                         [(0, 0), (4, 5), (3, 4), (5, 2)])  # fmt: skip
        volume[:, 4:8, 3:7, 5:9] = volume[1, 10:14, 5:8, 8:12] = 0
    wanted, box = predicted(folder, volume, monkeypatch, mirror=tta is not None)
    made, again = (
        infer(volume, folder, np.zeros((3, *shape[1:]), "float32"), head_kind="scores", tta=tta,
              block=block)
        for block in (None, 17)
    )  # fmt: skip
    assert (made == again).all()
    assert np.abs(made[(slice(None), *box)] - wanted).max() < 1e-4


SCHEMES = ["ZScoreNormalization", "CTNormalization", "RescaleTo01Normalization"]


LINEAR = {"resampling_fn_data_kwargs": {"is_seg": False, "order": 1, "order_z": 0,
                                        "force_separate_z": None}}  # fmt: skip
BY_TORCH = {"resampling_fn_data": "resample_torch_fornnunet",
            "resampling_fn_data_kwargs": {"is_seg": False, "force_separate_z": None}}  # fmt: skip


def with_border_and_holes(shape: tuple[int, ...]) -> Array:
    """A rough volume with a border of zeros, a hole of zeros inside, and a bay that is none."""
    volume = np.zeros(shape, "uint16")
    inner = volume[:, 2:-1, 5:-4, 3:-6]
    inner[...] = noise(*inner.shape) ** 2 // 900
    inner[:, 3:6, 8:15, 9:14] = inner[1:, 0:2, 3:9, 4:8] = 0  # the second in some channels
    inner[:, 4:7, 18:24, :7] = 0
    return volume


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "axes", "masked", "how"),
    [
        ((9.0, 1.4, 0.8), 3, True, {}), ((9.0, 1.4, 0.8), 2, False, {}),
        ((2.5, 0.8, 0.7), 3, False, {}), ((2.5, 0.8, 0.7), 2, True, LINEAR),
        ((2.0, 1.4, 0.8), 3, True, BY_TORCH), ((2.0, 1.0, 1.0), 2, True, {}),
        ((9.0, 1.4, 0.8), 3, False, BY_TORCH),
    ],
)  # fmt: skip
def test_an_nnunet_crops_fills_holes_normalises_and_resamples_as_its_own_predictor(
    size: tuple[float, ...],
    masked: bool,
    axes: int,
    how: dict[str, Any],
    tmp_path,
    monkeypatch: Any,
) -> None:
    target = (2.0, 1.0, 1.0)
    plain = {
        "normalization_schemes": SCHEMES, "use_mask_for_norm": [masked, False, False],
        "spacing": [*target[-axes:]], "patch_size": [16, 24, 16][-axes:], **how,
    }  # fmt: skip
    folder = nnunet(tmp_path / "net", [unet(0, 3, axes=axes)], configuration=plain,
                    channels={"0": "T1", "1": "CT", "2": "T2"})  # fmt: skip
    volume = with_border_and_holes((3, 14, 40, 41))
    scores, box = predicted(folder, volume, monkeypatch, mirror=False, size=size)
    resampling = pytest.importorskip("nnunetv2.preprocessing.resampling.default_resampling")
    target = (size[0], *target[1:]) if axes == 2 else target
    cropped = [each.stop - each.start for each in box]
    wanted = np.zeros((3, *volume.shape[1:]))
    wanted[(slice(None), *box)] = resampling.resample_data_or_seg_to_shape(
        scores, cropped, target, size, is_seg=False, order=1, order_z=0, force_separate_z=None,
    )  # fmt: skip
    made, again = (
        infer(volume, folder, np.zeros((3, *volume.shape[1:]), "float32"), head_kind="scores",
              in_voxel_size=(*map(str, size), "mm"), block=block)
        for block in (None, 11)
    )  # fmt: skip
    assert (made == again).all()
    assert np.abs(made - wanted).max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "inferer"),
    [
        ((24, 16, 16), {"overlap": 0.5}),
        ((27, 19, 22), {"overlap": 0.6, "mode": "gaussian"}),
        ((40, 9, 22), {"mode": "gaussian", "sigma_scale": [0.2, 0.125, 0.3]}),
        ((5, 6, 22), {"overlap": [0.25, 0.5, 0.1], "mode": "gaussian", "padding_mode": "reflect"}),
        ((7, 7, 30), {"cval": 2.5}),
        ((5, 6, 22), {"overlap": 0.25, "padding_mode": "replicate"}),
    ],
)
def test_a_bundle_is_what_monais_inferer_makes_of_it(shape, inferer, tmp_path) -> None:
    inferers = pytest.importorskip("monai.inferers")
    said = {"_target_": "SlidingWindowInferer", "roi_size": [8, 8, 12], **inferer}
    folder = bundle(tmp_path / "bundle", inferer=said)
    volume = noise(1, *shape)
    values = ((volume.transpose(0, 3, 2, 1).astype("float32") + 50) / 750).clip(0, 1)
    net: Any = load_model(str(folder)).module.module
    with torch.no_grad():
        wanted = inferers.SlidingWindowInferer([8, 8, 12], **inferer)(
            torch.from_numpy(values)[None], net
        )[0].numpy()
    wanted = wanted.transpose(0, 3, 2, 1)
    made, again = (
        infer(volume, folder, np.zeros((2, *shape), "float32"), head_kind="scores", block=block)
        for block in (None, 13)
    )
    assert (made == again).all() and np.abs(made - wanted).max() < 1e-4
    labels = infer(volume, folder, np.zeros((1, *shape), "uint8"))
    assert (labels[0] == wanted.argmax(0)).mean() > 0.999


def on(key: str, name: str, **values: Any) -> dict[str, Any]:
    return {"_target_": name, "keys": key, **values}


def of_monai(folder: Path, file: Path) -> Array:
    """What MONAI's own transforms and inferer make of a file, channels z y x."""
    settings = json.loads((folder / "configs" / "inference.json").read_text())
    parser = pytest.importorskip("monai.bundle").ConfigParser(settings)
    seen = parser.get_parsed_content("preprocessing")({"image": str(file)})
    net: Any = load_model(str(folder)).module.module
    with torch.no_grad():
        scores = parser.get_parsed_content("inferer")(seen["image"].as_tensor()[None], net)[0]
    seen["pred"] = pytest.importorskip("monai.data").MetaTensor(scores)  # as MONAI's loops make it
    made: Array = parser.get_parsed_content("postprocessing")(seen)["pred"].numpy()
    return made.transpose(0, 3, 2, 1)


RANGE = on("image", "ScaleIntensityRanged", a_min=-50, a_max=700, b_min=0, b_max=1, clip=True)
COARSE, FINE = (
    on("image", "Spacingd", pixdim=sizes) for sizes in ([1.5, 1.5, 2.0], [0.6, 0.9, -1])
)
NEAREST = on("image", "Spacingd", pixdim=[1.1, 0.8, 1.7], mode="nearest")
SOFTMAX = on("pred", "Activationsd", softmax=True)
SIGMOID, CUT = on("pred", "Activationsd", sigmoid=True), on("pred", "AsDiscreted", threshold=0.5)
ARGMAX = on("pred", "AsDiscreted", argmax=True)
LINEAR, CHOSEN = (
    on("pred", "Invertd", transform="@preprocessing", orig_keys="image", nearest_interp=nearest)
    for nearest in (False, True)
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([COARSE, RANGE], [SOFTMAX, LINEAR]), ([FINE, RANGE], [SOFTMAX, LINEAR, ARGMAX]),
        ([RANGE, FINE], [LINEAR, SIGMOID]), ([COARSE, RANGE], [SIGMOID, LINEAR, CUT]),
        ([NEAREST, RANGE], [SOFTMAX, ARGMAX, CHOSEN]), ([RANGE], [SOFTMAX, LINEAR]),
        ([FINE, on("image", "NormalizeIntensityd"),
          on("image", "ScaleIntensityd", minv=-1.0, maxv=1.0)], [SIGMOID, CHOSEN]),
        ([COARSE, on("image", "NormalizeIntensityd", nonzero=True),
          on("image", "ScaleIntensityd", minv=-1.0, maxv=1.0)], [SOFTMAX, LINEAR]),
    ],
)  # fmt: skip
def test_a_bundle_gives_what_monais_transforms_give(before, after, tmp_path) -> None:
    nibabel = pytest.importorskip("nibabel")
    read = [on("image", "LoadImaged"), on("image", "EnsureChannelFirstd")]
    folder = bundle(
        tmp_path / "bundle",
        preprocessing={"_target_": "Compose", "transforms": [*read, *before]},
        postprocessing={"_target_": "Compose", "transforms": after},
        inferer={"_target_": "SlidingWindowInferer", "roi_size": [8, 8, 12], "mode": "gaussian"},
    )
    weights = torch.load(folder / "models" / "model.pt")
    for value in [*weights.values()][-2:]:  # far from each other, and from the middle
        value *= 30
    torch.save(weights, folder / "models" / "model.pt")
    volume = noise(23, 19, 17).transpose(2, 1, 0).astype("float32")
    volume[:5, :4] = 0
    file = tmp_path / "volume.nii.gz"
    nibabel.save(nibabel.Nifti1Image(volume, np.diag([0.7, 0.8, 1.9, 1.0])), file)
    wanted = of_monai(folder, file)
    reduced = ARGMAX in after or CUT in after
    made = np.zeros(wanted.shape, "uint8" if reduced else "float32")
    again = np.zeros_like(made)
    for out, knobs in ((made, {}), (again, {"block": 13, "parts": 4})):
        penstock.run_inference(
            str(file), out, model=str(folder), devices="cpu", run_dir=tmp_path / "run",
            overwrite=True, **knobs,
        )  # fmt: skip
    assert (made == again).all()
    if reduced:
        assert len(np.unique(made)) > 1 and (made == wanted).mean() > 0.999
    else:
        assert np.ptp(wanted) > 0.5 and np.abs(made - wanted).max() < 1e-4


def older(folder: Path, kind: str) -> tuple[Path, Array, Array]:
    """A zip file of format 0.4, and its test tensors."""
    folder.mkdir()
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(1, 2, 3, padding=1)
    (folder / "net.onnx").write_bytes(onnx_of(conv))
    (folder / "net.py").write_text(
        CODE.replace("self.last(torch.relu(self.conv(x)))", "self.conv(x)")
    )
    state = {f"conv.{name}": value for name, value in conv.state_dict().items()}
    last = torch.nn.Conv2d(2, 2, 1).state_dict()
    torch.save(state | {f"last.{name}": value for name, value in last.items()}, folder / "net.pt")
    x = (np.random.default_rng(0).random((1, 1, 48, 64)) * 200 + 20).astype("float32")
    with torch.no_grad():
        y = conv(torch.from_numpy((x - x.mean()) / x.std())).sigmoid().numpy()
    np.save(folder / "in.npy", x)
    np.save(folder / "out.npy", y)
    (folder / "doc.md").write_text("# A net")
    of_code = {
        "source": "net.pt", "architecture": "net.py:Net", "kwargs": {"width": 2},
        "architecture_sha256": hashlib.sha256((folder / "net.py").read_bytes()).hexdigest(),
    }  # fmt: skip
    weights = {"onnx": {"onnx": {"source": "net.onnx"}}, "state": {"pytorch_state_dict": of_code}}
    shape = {"min": [1, 1, 16, 16], "step": [0, 0, 16, 16]}
    like = {"reference_tensor": "raw", "scale": [1, 0, 1, 1], "offset": [0, 1, 0, 0]}
    scaled = {"name": "zero_mean_unit_variance", "kwargs": {"mode": "per_sample", "axes": "xy"}}
    tensor = {"axes": "bcyx", "data_type": "float32"}
    described = {
        "format_version": "0.4.10", "type": "model", "name": "a net", "description": "a test",
        "authors": [{"name": "A"}], "cite": [{"text": "x", "url": "https://example.org"}],
        "license": "MIT", "documentation": "doc.md", "timestamp": "2024-01-01T00:00:00Z",
        "inputs": [{"name": "raw", **tensor, "shape": shape, "preprocessing": [scaled]}],
        "outputs": [{"name": "prob", **tensor, "shape": like, "halo": [0, 0, 2, 2],
                     "postprocessing": [{"name": "sigmoid"}]}],
        "test_inputs": ["in.npy"], "test_outputs": ["out.npy"], "weights": weights[kind],
    }  # fmt: skip
    (folder / "rdf.yaml").write_text(yaml.safe_dump(described))
    with zipfile.ZipFile(folder / "net.zip", "w") as archive:
        for file in set(folder.iterdir()) - {folder / "net.zip"}:
            archive.write(file, file.name)
    return folder / "net.zip", x, y


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["onnx", "state"])
def test_a_package_of_format_0_4_runs(kind: str, tmp_path) -> None:
    pytest.importorskip("bioimageio.spec")
    package, x, y = older(tmp_path / "made", kind)
    made = infer(x[0][:, None], package, np.zeros((2, 1, 48, 64), "float32"), trust_model=True)
    assert np.abs(made[:, 0] - y[0])[:, 1:-1, 1:-1].max() < 1e-5
    if kind == "state":
        with pytest.raises(UsageError, match="only opened with --trust-model"):
            load_model(str(package))
        rdf = tmp_path / "made" / "rdf.yaml"
        rdf.write_text(re.sub(" *architecture_sha256.*\n", "", rdf.read_text()))
        with pytest.raises(UsageError, match="Missing required `architecture_sha256`"):
            load_model(str(tmp_path / "made"), trust=True)


def test_channels_are_found_by_name_or_listed() -> None:
    source = open_source(noise(3, 4, 4, 4), axes="czyx")
    source.omero = tuple({"label": name} for name in ("GFP", "DAPI", "488"))  # type: ignore[attr-defined]
    wants = Recipe("net/plans.json", channels=("dapi", "488"))

    def chosen(recipe: Recipe | None = None, **said: Any) -> Any:
        config = InferConfig(in_spec="a", out_spec="b", model_type="c", **said)
        return channels_of(config, source, recipe)

    assert chosen() == ((0, 1, 2), [])
    assert chosen(c="488,GFP,1") == ((2, 0, 1), [])
    assert chosen(wants) == ((1, 2), ["--c dapi,488, as net/plans.json says"])
    assert chosen(wants, c="0:2") == ((0, 1), [])
    assert chosen(Recipe("", channels=("CT",))) == ((0, 1, 2), [])
    with pytest.raises(UsageError, match=r"no channel T1, and .* takes T1, dapi; it has GFP, DAPI"):
        chosen(Recipe("", channels=("T1", "dapi")))
    with pytest.raises(UsageError, match=r"'cy5' is not all, .* nor one of GFP, DAPI, 488"):
        chosen(c="cy5")


def test_time_points_may_be_channels() -> None:
    net: Any = SimpleNamespace(in_channels=4, recipe=None, name="net")
    with pytest.raises(UsageError, match=r"takes 4 at once.*; if its time points are channels"):
        volumes_of(range(4), [0], net, 1)
    with pytest.raises(UsageError, match=r"set --in-channels$"):
        volumes_of(range(3), [0], net, 1)


@pytest.mark.parametrize(
    ("said", "overlap"),
    [({}, (8, 16, 16)), ({"patch": (40,)}, (20, 20, 20)), ({"patch": (9, 8, 4)}, (4, 4, 2)),
     ({"patch": (40,), "overlap": (6,)}, (6,)), ({"patch": (40,), "seam_mode": "trim"}, None),
     ({"patch": "auto"}, None)],
)  # fmt: skip
def test_a_patch_of_the_user_overlaps_by_the_same_share(said: dict[str, Any], overlap: Any) -> None:
    recipe = Recipe("net", patch=(16, 32, 32), overlap=(8, 16, 16), sliding=Sliding("gaussian"))
    config = InferConfig(in_spec="a", out_spec="b", model_type="c", **said)
    assert with_defaults(config, recipe)[0].overlap == overlap


def test_a_volume_that_lies_otherwise_is_refused() -> None:
    source, wants = open_source(noise(4, 4, 4)), Recipe("bundle", orientation="RAS")
    check_orientation(source, wants)
    source.affine = np.diag([-1.0, -1, 2, 1]).tolist()  # type: ignore[attr-defined]
    check_orientation(source, Recipe("bundle", orientation="LPS"))
    with pytest.raises(UsageError, match="run along LPS, and bundle turns its input to RAS"):
        check_orientation(source, wants)
