"""Networks in folders and zip files of others: what they say is done, or refused by name."""

import json
import math
import zipfile
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import penstock
from penstock.base.errors import UsageError
from penstock.cli import main
from penstock.data import Box, FilledMask, Normalisation, open_source
from penstock.inference.opening import sample as opening_sample
from penstock.models.load import load_model
from penstock.models.packages.package import Parcel

from .packages_kit import Array, bioimage, bundle, infer, nnunet, noise, unet


def slid(net: nn.Module, values: Array, patch: tuple[int, int, int]) -> Array:
    """Scores of a volume, patch by patch, in steps of half a patch, joined by Gaussians."""
    weights = np.ones(())
    for side in patch:
        away = (np.arange(side) - side // 2) / (side / 8)
        weights = np.multiply.outer(weights, np.exp(-(away**2) / 2))
    total, covered = 0.0, np.zeros(values.shape[1:])
    sides = zip(values.shape[1:], patch, strict=True)
    for start in np.ndindex(*(2 * (side // p) - 1 for side, p in sides)):
        at = tuple(slice(i * p // 2, i * p // 2 + p) for i, p in zip(start, patch, strict=True))
        with torch.no_grad():
            made = net(torch.from_numpy(values[(slice(None), *at)][None]).float())[0].numpy()
        if isinstance(total, float):
            total = np.zeros((len(made), *values.shape[1:]))
        total[(slice(None), *at)] += made * weights
        covered[at] += weights
    return np.asarray(total / covered)


def test_an_nnunet_is_run_as_its_plans_say(tmp_path) -> None:
    folder = nnunet(tmp_path / "net", nets := [unet(0), unet(1)])
    volume = noise(1, 32, 16, 32)
    values = (volume.clip(50, 700).astype("float32") - 300) / 120
    wanted = sum(slid(net, values, (16, 16, 16)) for _, net in nets) / 2
    made = infer(volume, folder, np.zeros((3, 32, 16, 32), "float32"), head_kind="scores")
    assert np.abs(made - wanted).max() < 1e-4
    with pytest.raises(UsageError, match="says no voxel size, which the network's"):
        infer(volume, folder, np.zeros((1, 32, 16, 32), "uint8"), in_voxel_size=None)
    size = ("3", "1", "1", "mm")
    labels = infer(volume, folder, np.zeros((1, 32, 16, 32), "uint8"), in_voxel_size=size)
    best = np.sort(wanted, axis=0)
    near = best[-1] - best[-2] < 1e-4
    assert (labels[0] == wanted.argmax(0))[~near].all()


def test_an_nnunet_of_earlier_plans_has_its_network(tmp_path) -> None:
    said, net = unet(0)
    given = said["arch_kwargs"]
    earlier = {
        "architecture": None, "UNet_class_name": "PlainConvUNet", "UNet_base_num_features": 4,
        "unet_max_num_features": 6, "conv_kernel_sizes": given["kernel_sizes"],
        "pool_op_kernel_sizes": given["strides"], "n_conv_per_stage_encoder": [1, 1],
        "n_conv_per_stage_decoder": [1],
    }  # fmt: skip
    channels = {"1": "PET", "0": "CT"}
    both = {"normalization_schemes": ["CTNormalization"] * 2, "use_mask_for_norm": [False] * 2}
    folder = nnunet(tmp_path / "net", [unet(0)], configuration=earlier)
    batch = torch.from_numpy(noise(1, 1, 16, 16, 16).astype("float32"))
    with torch.no_grad():
        assert torch.equal(load_model(str(folder)).module(batch), net(batch))
    nnunet(folder, [unet(0, 2)], channels=channels, configuration=earlier | both)
    recipe = load_model(str(folder)).recipe
    assert recipe is not None and recipe.channels == ("CT", "PET"), "by number"
    nnunet(folder, [unet(0)], configuration=earlier | {"UNet_class_name": "Mine"})
    with pytest.raises(UsageError, match="its plans name the network Mine"):
        load_model(str(folder))


def test_an_nnunet_of_regions_that_turned_its_volume(tmp_path) -> None:
    said, net = unet(2, channels=2, outputs=2)
    folder = nnunet(
        tmp_path / "net", [(said, net)], plans={"transpose_forward": [1, 2, 0]},
        channels={"0": "T1", "1": "T2"}, labels={"background": 0, "whole": [1, 2], "core": 2},
        regions_class_order=[1, 2],
        configuration={"patch_size": [8, 16, 24], "use_mask_for_norm": [False] * 2,
                       "normalization_schemes": ["ZScoreNormalization", "NoNormalization"]},
    )  # fmt: skip
    volume = noise(2, 24, 8, 16)
    values = volume.astype("float64")
    values[0] = (values[0] - values[0].mean()) / values[0].std()
    scores = slid(net, values.transpose(0, 2, 3, 1), (8, 16, 24)).transpose(0, 3, 1, 2)
    wanted = np.where(scores[1] > 0, 2, np.where(scores[0] > 0, 1, 0))
    made = infer(volume, folder, np.zeros((1, 24, 8, 16), "uint8"))
    assert (made[0] == wanted)[np.abs(scores).min(0) > 1e-4].all() and set(np.unique(made)) > {0}
    recipe = load_model(str(folder)).recipe
    assert recipe is not None and recipe.patch == (24, 8, 16) and recipe.spacing == (1, 3, 1)
    assert recipe.mirrors == (0, 1), "axes 0 and 2 of y x z are y and z"


@pytest.mark.slow
def test_an_nnunet_crops_to_what_is_not_0(tmp_path, monkeypatch) -> None:
    folder = nnunet(
        tmp_path / "net", [unet(0)],
        configuration={"normalization_schemes": ["ZScoreNormalization"]},
    )  # fmt: skip
    volume = np.zeros((1, 24, 24, 24), "uint16")
    inner = volume[:, 4:20, 3:19, 5:21]
    inner[...] = noise(1, 16, 16, 16)
    out = np.full((1, 24, 24, 24), 9, "uint8")
    knobs: dict[str, Any] = {"model": str(folder), "devices": "cpu", "run_dir": tmp_path / "run",
                             "voxel_size": "none"}  # fmt: skip
    penstock.run_inference(volume[0], out[0], **knobs)
    counted = json.loads((tmp_path / "run" / "statistics.json").read_text())["0"]
    assert counted["lower"] == pytest.approx(inner.mean())
    assert counted["scale"] == pytest.approx(inner.std())
    outside = np.ones(out.shape, bool)
    outside[:, 4:20, 3:19, 5:21] = False
    assert not out[outside].any() and (out[~outside] != 9).all()
    monkeypatch.setattr(opening_sample, "nonzero_box", None)  # the run's record has the box
    assert penstock.run_inference(volume[0], out[0], **knobs, resume=True).blocks_written == 0


def test_an_nnunet_resamples_a_volume_that_nothing_is_cropped_of(tmp_path) -> None:
    folder = nnunet(tmp_path / "net", [unet(0)])
    filled = noise(1, 9, 14, 16)
    bordered = np.pad(filled, ((0, 0), (1, 2), (3, 1), (2, 2)))

    def scores(volume: Array) -> Array:
        out = np.zeros((3, *volume.shape[1:]), "float32")
        return infer(volume, folder, out, head_kind="scores", in_voxel_size=("2", "1.3", "1", "mm"))

    made = scores(filled)
    assert np.ptp(made) > 0 and (made == scores(bordered)[:, 1:-2, 3:-1, 2:-2]).all()


@pytest.mark.slow
def test_processes_that_share_an_nnunet_find_one_mask_and_the_same_limits(tmp_path) -> None:
    folder = nnunet(
        tmp_path / "net", [unet(0, 2)], channels={"0": "T1", "1": "CT"},
        configuration={"normalization_schemes": ["ZScoreNormalization", "CTNormalization"],
                       "use_mask_for_norm": [True, False], "spacing": [2.0, 1.0, 1.0]},
    )  # fmt: skip
    volume = np.zeros((2, 12, 40, 40), "uint16")
    volume[:, 1:-1, 5:36, 3:38] = noise(2, 10, 31, 35)
    volume[:, 4:8, 15:22, 18:25] = 0
    np.save(tmp_path / "volume.npy", volume)
    run = tmp_path / "run"
    words = (
        f"infer {tmp_path}/volume.npy {tmp_path}/out.zarr --model {folder} --devices cpu "
        f"--axes czyx --in-voxel-size 2 1.3 0.8 mm --head-kind scores --block 8 16 16 "
        f"--run-dir {run}"
    ).split()
    steps = ["--prepare --workers 2", "--statistics 2/2", "--statistics 1/2", "--part 1/2",
             "--part 2/2", "--finish"]  # fmt: skip
    assert [main([*words, *step.split()]) for step in steps] == [0] * 6
    shared = open_source(str(tmp_path / "out.zarr")).read(Box((0,) * 5, (1, 3, 12, 40, 40)))[0]
    with np.load(run / "statistics" / "mask-0.npz") as arrays:
        mask = FilledMask(Box((1, 5, 3), (11, 36, 38)), arrays["bits"])
    assert mask.read(mask.box).all(), "the hole is filled"
    t1, ct = json.loads((run / "statistics.json").read_text())["0"]["channels"]
    inner = volume[0, 1:-1, 5:36, 3:38]
    assert t1["lower"] == pytest.approx(inner.mean()) and t1["scale"] == pytest.approx(inner.std())
    ends = (inner.min(), inner.max())
    assert t1["limits"][0] == pytest.approx([(ends[0] - t1["lower"]) / t1["scale"]])
    assert t1["limits"][1] == pytest.approx([(ends[1] - t1["lower"]) / t1["scale"]])
    assert ct["limits"] == [pytest.approx([-250 / 120]), pytest.approx([400 / 120])]
    alone = infer(volume, folder, np.zeros((3, 12, 40, 40), "float32"), head_kind="scores",
                  in_voxel_size=("2", "1.3", "0.8", "mm"), block=40)  # fmt: skip
    assert np.array_equal(shared, alone) and np.ptp(alone) > 0
    outside = np.ones(volume.shape[1:], bool)
    outside[1:-1, 5:36, 3:38] = False
    assert not alone[:, outside].any() and alone[:, ~outside].any(0).all()


class Foreign:
    def __reduce__(self) -> Any:
        return print, ("code of a stranger",)


def test_what_an_nnunet_wants_and_is_not_done_is_refused(tmp_path, capsys) -> None:
    folder = tmp_path / "net"

    def refused(**more: Any) -> str:
        nnunet(folder, [unet(0)], **more)
        with pytest.raises(UsageError) as caught:
            infer(noise(1, 16, 16, 16), folder, np.zeros((1, 16, 16, 16), "uint8"))
        return str(caught.value)

    assert "Mine" in refused(configuration={"normalization_schemes": ["Mine"]})
    assert main(["info", str(folder)]) == 2
    out, err = capsys.readouterr()
    assert "patch" in out and "penstock infer" not in out
    assert "its normalisation Mine is not one of CT" in err and err.count("\n") == 1
    assert "cascade" in refused(configuration={"previous_stage": "3d_lowres"})
    other = refused(channels={"0": "CT", "1": "PET"})
    assert "belongs to another model than the network of its plans (nnUNetTrainer may" in other
    assert "do not fit its checkpoints: it lacks 'normalization_schemes'" in refused(
        plans={"configurations": {"3d_fullres": {
            "patch_size": [16] * 3, "architecture": unet(0)[0]}}})  # fmt: skip
    said = unet(0)[0] | {"network_class_name": "os.system"}
    assert "os.system" in refused(configuration={"architecture": said})
    said = unet(0)[0]
    said["arch_kwargs"]["strides"] = [[1, 1, 1]]
    assert "checkpoints: strides must have as many entries" in refused(
        configuration={"architecture": said}
    )
    both = {"normalization_schemes": ["NoNormalization"] * 2, "use_mask_for_norm": [False] * 2}
    nnunet(folder, [unet(0, 2)], channels={"0": "CT", "1": "PET"}, configuration=both)
    with pytest.raises(UsageError, match=r"takes 2 \(CT, PET\) at once; .* give"):
        infer(noise(1, 16, 16, 16), folder, np.zeros((1, 16, 16, 16), "uint8"))
    nnunet(folder, [unet(0)])
    state = {"network_weights": {}, "logging": Foreign()}
    torch.save(state, folder / "fold_0/checkpoint_final.pth")
    with pytest.raises(UsageError, match=r"holds builtins\.print beside tensors"):
        load_model(str(folder))
    (folder / "fold_0/checkpoint_final.pth").unlink()
    with pytest.raises(UsageError, match="lacks a fold_N"):
        load_model(str(folder))
    assert "stranger" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("named", "because"),
    [("../weights.pt", "lies outside of it"), ("/etc/passwd", "lies outside of it"),
     ("https://example.org/weights.pt", "nothing is downloaded"), ("w.pt", "lacks w.pt")],
)  # fmt: skip
def test_a_path_that_leads_out_of_a_package_is_refused(named: str, because: str, tmp_path) -> None:
    (tmp_path / "weights.pt").write_bytes(b"")
    (tmp_path / "in").mkdir()
    with pytest.raises(UsageError, match=because):
        Parcel(tmp_path / "in", tmp_path / "in", trusted=True).file(named)


@pytest.mark.parametrize("inputs", [{"image": 5}, {"image": {"num_channels": "two"}}, [1]])
def test_files_of_a_package_that_hold_something_else_are_refused(inputs: Any, tmp_path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "model.pt").touch()
    (tmp_path / "configs" / "inference.json").write_text("{}")
    metadata = {"network_data_format": {"inputs": inputs}}
    (tmp_path / "configs" / "metadata.json").write_text(json.dumps(metadata))
    with pytest.raises(UsageError, match=f"^--model {tmp_path}: its files are malformed: "):
        load_model(str(tmp_path))


def test_a_zip_that_is_damaged_or_leads_out_is_refused(tmp_path, capsys) -> None:
    np.save(tmp_path / "v.npy", np.zeros((4, 4), "uint8"))
    path = tmp_path / "model.zip"

    def answer() -> str:
        command = ["infer", str(tmp_path / "v.npy"), str(tmp_path / "o.ome.zarr")]
        assert main([*command, "--model", str(path)]) == 2
        assert not (tmp_path / "o.ome.zarr").exists()
        return capsys.readouterr().err

    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("rdf.yaml", "type: model")
        archive.writestr("../../evil.txt", "out")
    assert "leads out of it" in answer() and not (tmp_path.parent / "evil.txt").exists()
    path.write_bytes(path.read_bytes()[:60])
    assert "damaged zip" in answer()
    assert main(["info", str(path)]) == 2 and "damaged zip" in capsys.readouterr().err
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "nothing")
    assert "holds no model" in answer()


def test_a_training_is_a_model(tmp_path) -> None:
    folder = tmp_path / "trained"
    folder.mkdir()
    net = load_model("denoise-tiny").module
    torch.save(net.state_dict(), folder / "best_model.pth")
    head = {"kind": "scores", "target": "mask", "loss": "bce", "returns": "logits"}
    facts = {"scaling": {"lower": 10.0, "scale": 500.0}, "heads": {"out": head},
             "voxel": {"size": [2.0, 1.0, 1.0], "unit": "micrometer"}}  # fmt: skip
    (folder / "training_results.json").write_text(json.dumps({"facts": facts}))
    args = {"workload": "pairs", "model": "denoise-tiny", "channels": None}
    (folder / "args.json").write_text(json.dumps(args))
    volume = noise(1, 16, 16, 16)
    made = infer(volume, folder, np.zeros((16, 16, 16), "float32"), patch=16, overlap=0)
    with torch.no_grad():
        values = torch.from_numpy((volume[None].astype("float32") - 10) / 500)
        wanted = net(values).sigmoid()[0, 0].numpy()
    assert np.abs(made - wanted).max() < 1e-4
    recipe = load_model(str(folder)).recipe
    assert recipe is not None and recipe.spacing == (2, 1, 1)
    (folder / "args.json").write_text(json.dumps(args | {"model": "net.py:make"}))
    with pytest.raises(UsageError, match=r"net\.py:make is code"):
        load_model(str(folder))


def test_a_function_of_a_batch_is_a_model() -> None:
    volume = noise(16, 16, 16)
    out = np.zeros(volume.shape, "float32")
    penstock.run_inference(
        volume, out, model=lambda batch: batch * 2 + 1, normalize="none", patch=8, overlap=0,
        devices="cpu", head_kind="scores",
    )  # fmt: skip
    assert (out == volume * 2.0 + 1).all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the libraries that make the package
@pytest.mark.parametrize("kind", ["state", "script"])
def test_a_package_reproduces_its_test_tensors_and_runs(kind: str, tmp_path, capsys) -> None:
    package = bioimage(tmp_path / "made", kind)
    assert main(["info", str(package), "--trust-model", "--test"]) == 0
    shown = capsys.readouterr().out
    assert "equal: the largest difference" in shown and "percentiles 1 and 99.8" in shown
    volume = np.load(tmp_path / "made" / "in.npy")[0][:, None]
    made = infer(volume, package, np.zeros((2, 1, 32, 48), "float32"), trust_model=True)
    away = np.abs(made[:, 0] - np.load(tmp_path / "made" / "out.npy")[0])
    assert away[:, 1:-1, 1:-1].max() < 1e-5, "at the edge the network sees mirrored voxels"
    assert main(["info", str(package)]) == 2
    assert "only opened with --trust-model" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the libraries that make the package
def test_a_package_that_is_not_what_it_says_is_refused(tmp_path) -> None:
    with pytest.raises(UsageError, match="keras_hdf5, which is not run; convert"):
        load_model(str(bioimage(tmp_path / "keras", "keras")))
    with zipfile.ZipFile(bioimage(tmp_path / "state")) as archive:
        archive.extractall(tmp_path / "open")
    weights = tmp_path / "open" / "weights.pt"
    state = torch.load(weights, weights_only=True)
    torch.save({name: value + 1 for name, value in state.items()}, weights)
    with pytest.raises(UsageError, match="SHA-256 differs"):
        load_model(str(tmp_path / "open"), trust=True)
    weights.unlink()
    with pytest.raises(UsageError, match=r"lacks weights\.pt"):
        load_model(str(tmp_path / "open"), trust=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the libraries that make the package
def test_what_a_bundle_wants_and_is_not_done_is_refused(tmp_path) -> None:
    def refused(**changes: Any) -> str:
        with pytest.raises(UsageError) as caught:
            load_model(str(bundle(tmp_path / "bundle", **changes)))
        return str(caught.value)

    def steps(name: str, **values: Any) -> dict[str, Any]:
        return {"_target_": "Compose", "transforms": [{"_target_": name, **values}]}

    assert "CropForeground of its input" in refused(preprocessing=steps("CropForegroundd"))
    assert "KeepLargestConnectedComponent of its output" in refused(
        postprocessing=steps("KeepLargestConnectedComponentd")
    )
    assert "--trust-model" in refused(network_def={"_target_": "os.system", "command": "true"})
    assert "--trust-model" in refused(network_def={"_target_": "UNet", "channels": "$print(1)"})
    assert "not in monai.networks" in refused(network_def={"_target_": "NoSuchNet"})
    assert "--trust-model" in refused(preprocessing={"transforms": "$@others"})
    off = steps("CropForegroundd", _disabled_="$True")
    assert "$True, which may turn off" in refused(preprocessing=off)
    unknown = {"_target_": "UNet", "spatial_dims": 3, "img_size": 96}
    assert "unexpected keyword argument 'img_size'" in refused(network_def=unknown)
    lists = {"subtrahend": [1.0] * 2, "divisor": [1.0] * 3, "channel_wise": True}
    assert "malformed: shape mism" in refused(preprocessing=steps("NormalizeIntensityd", **lists))
    bundle(tmp_path / "bundle")
    (tmp_path / "bundle" / "models" / "model.pt").unlink()
    with pytest.raises(UsageError, match=r"lacks models/model\.pt"):
        load_model(str(tmp_path / "bundle"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the libraries that make the package
def test_code_of_a_bundle_runs_if_it_is_trusted(tmp_path) -> None:
    made = []
    for number in range(2):
        folder = bundle(
            tmp_path / str(number), network_def={"_target_": "scripts.net.Net"},
            steps=[{"_target_": "ScaleIntensityd", "_disabled_": "$1 > 0"},
                   {"_target_": "NormalizeIntensityd"}],
            preprocessing={"_target_": "Compose", "transforms": "$@steps[:]"},
        )  # fmt: skip
        (folder / "scripts").mkdir()
        (folder / "scripts" / "net.py").write_text(
            f"import torch\nclass Net(torch.nn.Conv3d):\n    number = {number}\n"
            "    def __init__(self):\n        super().__init__(1, 2, 1)\n"
        )
        torch.save(torch.nn.Conv3d(1, 2, 1).state_dict(), folder / "models" / "model.pt")
        with pytest.raises(UsageError, match="only opened with --trust-model"):
            load_model(str(folder))
        made.append(load_model(str(folder), trust=True))
    assert [model.module.module.number for model in made] == [0, 1], "not the other's module"
    recipe = made[0].recipe
    assert recipe is not None and recipe.normalisation == (Normalisation("moments"),)


def test_z_scores_are_exact_and_merge_in_any_order() -> None:
    from penstock.data.normalize import MeanAndDeviation, Normalisation

    values = (np.random.default_rng(0).normal(1e6, 3, 10_000)).astype("float32")
    pieces = [MeanAndDeviation() for _ in range(7)]
    for counter, piece in zip(pieces, np.array_split(values, 7), strict=True):
        counter.add(piece)
    results = []
    for order in (pieces, pieces[::-1]):
        total = MeanAndDeviation()
        for counter in order:
            total.merge(counter.counts)
        total.advance()
        results.append((total.mean, total.deviation, total.count))
    assert results[0] == results[1]
    exact = values.astype("float64")
    assert results[0][0] == pytest.approx(math.fsum(exact) / len(exact), rel=1e-14)
    assert results[0][1] == pytest.approx(exact.std(), rel=1e-6)
    masked = Normalisation("moments", nonzero=True).of_array(np.array([0.0, 0, 2, 4]))
    assert (masked.lower, masked.scale) == (3.0, 1.0)
    assert masked.applied(np.array([0.0, 5.0])).tolist() == [0.0, 2.0]
