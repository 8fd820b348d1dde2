"""Small networks in folders and zip files, as nnU-Net, bioimage.io and MONAI leave them."""

import hashlib
import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import penstock

Array = NDArray[Any]


def infer(volume: Array, folder: Path, out: Array, **knobs: Any) -> Array:
    """The output of a model for a volume of channels, z y x, whose voxels are as the model's."""
    np.save(folder.parent / "volume.npy", volume)
    if "in_voxel_size" not in knobs:
        knobs["voxel_size"] = "none"
    penstock.run_inference(
        str(folder.parent / "volume.npy"), out, model=str(folder), axes="czyx", devices="cpu",
        run_dir=folder.parent / "run", overwrite=True, **knobs,
    )  # fmt: skip
    return out


def noise(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(1, 900, shape).astype("uint16")


CT = {"mean": 300.0, "std": 120.0, "percentile_00_5": 50.0, "percentile_99_5": 700.0}
LABELS = {"background": 0, "a": 1, "b": 2}
UNET = "dynamic_network_architectures.architectures.unet.PlainConvUNet"


def unet(
    seed: int, channels: int = 1, outputs: int = 3, axes: int = 3
) -> tuple[dict[str, Any], nn.Module]:
    """The plans of a small network, and the network."""
    architectures = pytest.importorskip("dynamic_network_architectures.architectures.unet")
    arguments = {
        "n_stages": 2, "features_per_stage": [4, 6], "kernel_sizes": [[3] * axes] * 2,
        "strides": [[1] * axes, [2] * axes], "n_conv_per_stage": [1, 1],
        "n_conv_per_stage_decoder": [1], "conv_bias": True,
        "norm_op_kwargs": {"eps": 1e-5, "affine": True},
    }  # fmt: skip
    torch.manual_seed(seed)
    conv, norm = getattr(nn, f"Conv{axes}d"), getattr(nn, f"InstanceNorm{axes}d")
    net = architectures.PlainConvUNet(
        input_channels=channels, num_classes=outputs, conv_op=conv, norm_op=norm,
        nonlin=nn.LeakyReLU, deep_supervision=True, **arguments
    )  # fmt: skip
    named = {
        "conv_op": f"torch.nn.modules.conv.{conv.__name__}", "nonlin": "torch.nn.LeakyReLU",
        "norm_op": f"torch.nn.modules.instancenorm.{norm.__name__}",
    }  # fmt: skip
    said = {"network_class_name": UNET, "arch_kwargs": arguments | named,
            "_kw_requires_import": list(named)}  # fmt: skip
    net.decoder.deep_supervision = False
    return said, net.eval()


def nnunet(
    folder: Path, nets: Any, *, configuration: Any = (), plans: Any = (), **dataset: Any
) -> Path:
    """An nnU-Net folder of networks, a fold each."""
    said = nets[0][0]
    last = len(said["arch_kwargs"]["kernel_sizes"][0]) - 1
    channels = dataset.pop("channels", {"0": "CT"})
    folder.mkdir(exist_ok=True)
    written = {
        "transpose_forward": [0, 1, 2],
        "foreground_intensity_properties_per_channel": {str(i): CT for i in range(len(channels))},
        "configurations": {
            "base": {
                "patch_size": [16, 16, 16], "spacing": [3.0, 1.0, 1.0], "architecture": said,
                "normalization_schemes": ["CTNormalization"], "use_mask_for_norm": [False],
                **dict(configuration),
            },
            "3d_fullres": {"inherits_from": "base"},
        },
        **dict(plans),
    }  # fmt: skip
    (folder / "plans.json").write_text(json.dumps(written))
    labelled = {"channel_names": channels, "labels": LABELS, **dataset}
    (folder / "dataset.json").write_text(json.dumps(labelled))
    for fold, (_, net) in enumerate(nets):
        (folder / f"fold_{fold}").mkdir(exist_ok=True)
        state = {
            "network_weights": net.state_dict(), "_best_ema": np.float64(0.5),
            "logging": {"losses": [np.float32(1.0)]},
            "init_args": {"configuration": "3d_fullres"},
            "inference_allowed_mirroring_axes": (0, last),
        }  # fmt: skip
        torch.save(state, folder / f"fold_{fold}" / "checkpoint_final.pth")
    return folder


def bundle(folder: Path, **changes: Any) -> Path:
    """A MONAI bundle of a small network."""
    nets = pytest.importorskip("monai.networks.nets")
    keywords = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2, "channels": [4, 8],
                "strides": [2]}  # fmt: skip
    (folder / "configs").mkdir(parents=True, exist_ok=True)
    (folder / "models").mkdir(exist_ok=True)
    torch.manual_seed(0)
    torch.save(nets.UNet(**keywords).state_dict(), folder / "models" / "model.pt")
    image = {"num_channels": 1, "spatial_shape": [8, 8, 12], "channel_def": {"0": "image"}}
    metadata = {"network_data_format": {"inputs": {"image": image}}}
    (folder / "configs" / "metadata.json").write_text(json.dumps(metadata))
    scale = {"_target_": "ScaleIntensityRanged", "a_min": -50, "a_max": 700, "b_min": 0, "b_max": 1,
             "clip": True}  # fmt: skip
    config = {
        "outputs": 2,
        "network_def": {"_target_": "UNet", **keywords, "out_channels": "@outputs"},
        "network": "$@network_def.to(@device)",
        "preprocessing": {"_target_": "Compose", "transforms": [{"_target_": "LoadImaged"}, scale]},
        "inferer": {"_target_": "SlidingWindowInferer", "roi_size": [8, 8, 12], "overlap": 0.5},
        "postprocessing": {
            "_target_": "Compose",
            "transforms": [{"_target_": "Activationsd", "softmax": True},
                           {"_target_": "AsDiscreted", "argmax": True}],
        },
    } | changes  # fmt: skip
    (folder / "configs" / "inference.json").write_text(json.dumps(config))
    return folder


CODE = """
import torch
class Net(torch.nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, width, 3, padding=1)
        self.last = torch.nn.Conv2d(width, 2, 1)
    def forward(self, x):
        return self.last(torch.relu(self.conv(x)))
"""


def bioimage(folder: Path, kind: str = "state") -> Path:
    """A package of `bioimageio.spec`, as a zip file."""
    spec = pytest.importorskip("bioimageio.spec")
    form = pytest.importorskip("bioimageio.spec.model.v0_5")
    folder.mkdir()
    (folder / "net.py").write_text(CODE)
    loader = importlib.util.spec_from_file_location("net_of_a_package", folder / "net.py")
    module = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(module)
    torch.manual_seed(0)
    net = module.Net().eval()
    torch.save(net.state_dict(), folder / "weights.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, and packages hold it
        torch.jit.trace(net, torch.zeros(1, 1, 16, 16)).save(str(folder / "net.ts"))
    x = (np.random.default_rng(0).random((1, 1, 32, 48)) * 200 + 20).astype("float32")
    low, high = np.percentile(x, [1, 99.8])
    scaled = ((x - low) / (high - low + 1e-6)).astype("float32")
    with torch.no_grad():
        y = net(torch.from_numpy(scaled)).sigmoid().numpy()
    np.save(folder / "in.npy", x)
    np.save(folder / "out.npy", y)
    (folder / "doc.md").write_text("# A net")
    weights = {
        "state": lambda: {"pytorch_state_dict": form.PytorchStateDictWeightsDescr(
            source=folder / "weights.pt", pytorch_version="2.0",
            sha256=hashlib.sha256((folder / "weights.pt").read_bytes()).hexdigest(),
            architecture=form.ArchitectureFromFileDescr(source=folder / "net.py", callable="Net"))},
        "script": lambda: {"torchscript": form.TorchscriptWeightsDescr(
            source=folder / "net.ts", pytorch_version="2.0")},
        "keras": lambda: {"keras_hdf5": form.KerasHdf5WeightsDescr(
            source=folder / "weights.pt", tensorflow_version="2.0")},
    }[kind]()  # fmt: skip
    size = form.ParameterizedSize(min=16, step=16)
    described = form.ModelDescr(
        name="tiny net", description="a test", authors=[form.Author(name="A")], covers=[],
        cite=[form.CiteEntry(text="x", url="https://example.org")], license="MIT",
        documentation=form.FileDescr(source=folder / "doc.md"),
        inputs=[form.InputTensorDescr(
            id="raw", test_tensor=form.FileDescr(source=folder / "in.npy"),
            axes=[form.BatchAxis(), form.ChannelAxis(channel_names=["dapi"]),
                  *(form.SpaceInputAxis(id=axis, size=size) for axis in "yx")],
            preprocessing=[form.ScaleRangeDescr(kwargs=form.ScaleRangeKwargs(
                axes=["y", "x"], min_percentile=1, max_percentile=99.8))])],
        outputs=[form.OutputTensorDescr(
            id="prob", test_tensor=form.FileDescr(source=folder / "out.npy"),
            axes=[form.BatchAxis(), form.ChannelAxis(channel_names=["fg", "edge"]),
                  *(form.SpaceOutputAxisWithHalo(
                      id=axis, halo=2, size=form.SizeReference(tensor_id="raw", axis_id=axis))
                    for axis in "yx")],
            postprocessing=[form.SigmoidDescr()])],
        weights=form.WeightsDescr(**weights),
    )  # fmt: skip
    return Path(spec.save_bioimageio_package(described, output_path=folder / "net.zip"))


def message(*fields: tuple[int, Any]) -> bytes:
    """A message of protocol buffers, of numbers, texts and messages."""

    def varint(number: int) -> bytes:
        return (
            bytes([number]) if number < 128 else bytes([number % 128 + 128]) + varint(number >> 7)
        )

    made = b""
    for field, value in fields:
        if isinstance(value, int):
            made += varint(field << 3) + varint(value)
        else:
            body = value.encode() if isinstance(value, str) else value
            made += varint(field << 3 | 2) + varint(len(body)) + body
    return made


def onnx_of(
    conv: nn.Module, sides: str | tuple[int, ...] = "bcyx", *, opset: int = 17, beside: str = ""
) -> bytes:
    """A convolution of 3 voxels with padding as an ONNX network, from `raw` to `prob`.

    Its sides are numbers, or letters that stand for any. The kernel lies in the file ``beside``.
    """

    def tensor(name: str, values: torch.Tensor, *content: tuple[int, Any]) -> bytes:
        each = [(1, side) for side in values.shape]
        content = content or ((9, values.detach().numpy().tobytes()),)
        return message(*each, (2, 1), (8, name), *content)

    def value(name: str, sides: Any) -> bytes:
        shape = message(*((1, message((1 + isinstance(side, str), side))) for side in sides))
        return message((1, name), (2, message((1, message((1, 1), (2, shape))))))

    there = [(13, message((1, "location"), (2, beside))), (14, 1)] if beside else []
    pads = message((1, "pads"), *[(8, 1)] * 2 * (len(sides) - 2), (20, 7))
    node = message((1, "raw"), (1, "w"), (1, "b"), (2, "prob"), (4, "Conv"), (5, pads))
    graph = message(
        (1, node), (2, "net"), (5, tensor("w", conv.weight, *there)), (5, tensor("b", conv.bias)),
        (11, value("raw", sides)), (12, value("prob", "abcde"[: len(sides)])),
    )  # fmt: skip
    return message((1, 8), (7, graph), (8, message((1, ""), (2, opset))))
