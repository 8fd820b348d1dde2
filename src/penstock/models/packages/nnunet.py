"""nnU-Net v2 folders: the plans, the data set and the folds of a training.

    nnUNetTrainer__nnUNetPlans__3d_fullres/plans.json, dataset.json, fold_0/checkpoint_final.pth

The network is built by `dynamic_network_architectures`, as the plans say. Checkpoints are read as
tensors and plain values. A prediction is the mean of the folds. Patches overlap by half and are
joined by a Gaussian window, and the channel of the highest score is written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ...base import UsageError, as_usage_error, read_json, require
from ...data import Normalisation
from ..recipe import HeadRecipe, Recipe, Sliding
from ..weights import put_weights, read_tensors
from .package import MeanOf, Package, Parcel, in_order

_CHECKPOINTS = ("checkpoint_final.pth", "checkpoint_best.pth")
_ARCHITECTURES = "dynamic_network_architectures"
_RESAMPLED = (
    "resample_data_or_seg_to_shape",
    "resample_torch_fornnunet",
    "resample_torch_simple",
)
_ALLOWED = (_ARCHITECTURES, "torch.nn")
"""Libraries whose classes the plans may name."""
_ANISOTROPY = 3.0
"""The ratio of the sides of a voxel beyond which nnU-Net resamples slices, and takes the nearest
one."""
_EARLIER = {"PlainConvUNet": "n_conv_per_stage", "ResidualEncoderUNet": "n_blocks_per_stage"}
"""Networks of plans before nnU-Net 2.3, and what they call the convolutions of a stage."""
_LEAST = 1e-8
"""The least deviation that nnU-Net divides by."""


def read(parcel: Parcel) -> Package:
    """Open the folder of an nnU-Net training.

    Args:
        parcel: The folder.

    Returns:
        The network and its recipe.

    Raises:
        UsageError: A file is missing or damaged, or the training is a cascade, or names a
            normalisation or network that is not known.
        MissingDependency: `dynamic_network_architectures` is not installed.
    """
    plans = read_json(parcel.file("plans.json"))
    dataset = read_json(parcel.file("dataset.json"))
    checkpoints = [_checkpoint(parcel, fold) for fold in _folds(parcel)]
    # The classes that the plans name may raise anything.
    with as_usage_error(parcel.sentence("its plans do not fit its checkpoints")):
        name = checkpoints[0]["init_args"]["configuration"]
        configuration = _configuration(plans["configurations"], name)
        if configuration.get("previous_stage"):
            raise parcel.refuse(
                f"{name} is a cascade, which takes the output of another training as input; give "
                "the folder of 3d_fullres or 3d_lowres"
            )
        names = dataset.get("channel_names") or dataset["modality"]
        channels = [names[number] for number in sorted(names, key=int)]
        outputs, reduce = _outputs(dataset)
        nets = []
        for checkpoint in checkpoints:
            net = _network(parcel, configuration, len(channels), outputs)
            trainer = checkpoint.get("trainer_name", "nnUNetTrainer")
            name = f"the network of its plans ({trainer} may have made another)"
            put_weights(net, name, checkpoint["network_weights"], parcel.sentence("a checkpoint"))
            nets.append(net)
        axes = _axes(parcel, plans["transpose_forward"], configuration["patch_size"])
        mirrors = checkpoints[0].get("inference_allowed_mirroring_axes") or ()
        zyx = [letter for letter in "zyx" if letter in axes]
        recipe = replace(
            _recipe(parcel, plans, configuration, axes),
            channels=tuple(map(str, channels)),
            reduce=reduce,
            mirrors=tuple(sorted(zyx.index(axes[axis]) for axis in mirrors)),
        )
    takes = "bc" + axes
    module = in_order(nets[0] if len(nets) == 1 else MeanOf(nets), takes, [takes])
    return Package(module, recipe, len(channels), len(axes))


def _folds(parcel: Parcel) -> list[Path]:
    """The checkpoints of the folds, without that of all cases if there are others."""
    files = []
    for fold in sorted(parcel.folder.glob("fold_*")):
        there = [fold / name for name in _CHECKPOINTS if (fold / name).is_file()]
        files += there[:1]
    several = [file for file in files if file.parent.name != "fold_all"]
    if not files:
        raise parcel.refuse(f"lacks a fold_N/{_CHECKPOINTS[0]}")
    return several or files


def _checkpoint(parcel: Parcel, file: Path) -> Mapping[str, Any]:
    """A checkpoint, which may hold scalars of numpy besides tensors."""
    file = parcel.file(str(file.relative_to(parcel.folder)))
    scalar: Any = np.float64(0).__reduce__()[0]
    safe: list[Any] = [
        scalar,
        (scalar, "numpy.core.multiarray.scalar"),
        np.dtype,
        *(type(np.dtype(kind)) for kind in ("f8", "f4", "i8", "i4", "bool")),
    ]
    with torch.serialization.safe_globals(safe):
        checkpoint = read_tensors(file, "--model")
    if not isinstance(checkpoint, Mapping) or "network_weights" not in checkpoint:
        raise parcel.refuse(f"{file.name} holds no network_weights")
    return checkpoint


def _configuration(configurations: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A configuration with all that it inherits."""
    said = configurations[name]
    base = said.get("inherits_from")
    return (_configuration(configurations, base) if base else {}) | said


def _outputs(dataset: Mapping[str, Any]) -> tuple[int, str]:
    """The number of output channels, and how labels are made of them."""
    labels = {name: value for name, value in dataset["labels"].items() if name != "ignore"}
    if not any(isinstance(value, list) and len(value) > 1 for value in labels.values()):
        return len(set(map(str, labels.values()))), "argmax"
    regions = [value for value in labels.values() if value not in (0, [0])]
    order = ",".join(str(int(label)) for label in dataset["regions_class_order"])
    return len(regions), f"regions:{order}"


def _network(
    parcel: Parcel, configuration: Mapping[str, Any], channels: int, outputs: int
) -> nn.Module:
    """The network that the plans describe, without weights."""
    require(_ARCHITECTURES, "nnunet")
    architecture = configuration.get("architecture") or _earlier(parcel, configuration)
    keywords = dict(architecture["arch_kwargs"])
    for name in architecture["_kw_requires_import"]:
        if keywords[name] is not None:
            keywords[name] = _named(parcel, keywords[name])
    made: nn.Module = _named(parcel, architecture["network_class_name"])(
        input_channels=channels, num_classes=outputs, deep_supervision=False, **keywords
    )
    return made


def _earlier(parcel: Parcel, said: Mapping[str, Any]) -> dict[str, Any]:
    """The architecture in plans of an nnU-Net before 2.3, such as those of TotalSegmentator."""
    name, axes, stages = said["UNet_class_name"], len(said["patch_size"]), said["conv_kernel_sizes"]
    if name not in _EARLIER:
        raise parcel.refuse(f"its plans name the network {name}, and only {' and '.join(_EARLIER)} "
                            "are made")  # fmt: skip
    width, most = said["UNet_base_num_features"], said["unet_max_num_features"]
    return {
        "network_class_name": f"{_ARCHITECTURES}.architectures.unet.{name}",
        "_kw_requires_import": ["conv_op", "norm_op", "nonlin"],
        "arch_kwargs": {
            "n_stages": len(stages),
            "features_per_stage": [min(width * 2**stage, most) for stage in range(len(stages))],
            "conv_op": f"torch.nn.Conv{axes}d",
            "kernel_sizes": stages,
            "strides": said["pool_op_kernel_sizes"],
            _EARLIER[name]: said["n_conv_per_stage_encoder"],
            "n_conv_per_stage_decoder": said["n_conv_per_stage_decoder"],
            "conv_bias": True,
            "norm_op": f"torch.nn.InstanceNorm{axes}d",
            "norm_op_kwargs": {"eps": 1e-5, "affine": True},
            "nonlin": "torch.nn.LeakyReLU",
        },
    }


def _named(parcel: Parcel, reference: str) -> Any:
    """A class of a library that the plans may name."""
    if not any(f"{reference}.".startswith(f"{library}.") for library in _ALLOWED):
        raise parcel.refuse(
            f"its plans name {reference}, and only classes of {' and '.join(_ALLOWED)} are used; "
            "give a function that makes it: --model FILE.py:FUNCTION --weights"
        )
    return parcel.named(reference, "its plans name")


def _axes(parcel: Parcel, transpose: Sequence[int], patch: Sequence[int]) -> str:
    """The axes of the network, as letters of the volume's axes."""
    axes = "".join("zyx"[axis] for axis in transpose)
    if len(patch) == 3:
        return axes
    if axes[0] != "z":
        raise parcel.refuse(f"its 2-D network sees slices along {axes[0]}; only those along z are "
                           "made, so turn the volume first")  # fmt: skip
    return axes[1:]


def _recipe(
    parcel: Parcel, plans: Mapping[str, Any], configuration: Mapping[str, Any], axes: str
) -> Recipe:
    """What the plans say of input and output."""

    def zyx(values: Sequence[Any], absent: Any) -> Any:
        return tuple(values[axes.index(each)] if each in axes else absent for each in "zyx")

    patch = zyx(configuration["patch_size"], 1)
    counted = plans.get("foreground_intensity_properties_per_channel") or {}
    each, refused = [], ""
    schemes, masked = configuration["normalization_schemes"], configuration["use_mask_for_norm"]
    for number, scheme in enumerate(schemes):
        try:
            each.append(_normalisation(scheme, masked[number], counted.get(str(number)) or {}))
        except UsageError as error:
            refused = parcel.sentence(str(error))
    return Recipe(
        str(parcel.path),
        normalisation=tuple(each),
        refused=refused,
        unit="millimeter",
        scaled_first=True,
        **_resampled(parcel, configuration, zyx(configuration["spacing"][-len(axes) :], math.nan)),
        patch=patch,
        overlap=zyx([side // 2 for side in configuration["patch_size"]], 0),
        sliding=Sliding("gaussian", "narrowed", fill=0.0),
        heads={"out": HeadRecipe("scores")},
        crops=True,
    )


def _resampled(parcel: Parcel, configuration: Mapping[str, Any], spacing: Any) -> dict[str, Any]:
    """What the plans say of resampling, as words of a recipe."""
    name = configuration.get("resampling_fn_data", "resample_data_or_seg_to_shape")
    said = configuration.get("resampling_fn_data_kwargs") or {}
    order = said.get("order", 3) if name == "resample_data_or_seg_to_shape" else 1
    if name == "no_resampling_data_or_seg_hack":
        return {}
    if name not in _RESAMPLED or order not in (0, 1, 3) or said.get("order_z", 0) != 0:
        raise parcel.refuse(
            f"its {name} with {said} is not done, only {', '.join(_RESAMPLED)} with order 0, 1 or "
            "3 and order_z 0 are; resample the volume first, and leave spacing out of it with "
            "no_resampling_data_or_seg_hack in plans.json"
        )
    forced = said.get("force_separate_z") if name != "resample_torch_simple" else False
    most = _ANISOTROPY if forced is None else 1.0 if forced else None
    return {"spacing": spacing, "order": order, "most_anisotropy": most}


def _normalisation(scheme: str, masked: bool, counted: Mapping[str, float]) -> Normalisation:
    """The normalisation of one channel. Raises `UsageError` for one that Penstock does not have."""
    if scheme == "CTNormalization":
        mean, scale = counted["mean"], max(counted["std"], _LEAST)
        low, high = counted["percentile_00_5"], counted["percentile_99_5"]
        clip = (low - mean) / scale, (high - mean) / scale
        return Normalisation(lower=mean, upper=mean + scale, clip=clip)
    schemes = {
        "ZScoreNormalization": Normalisation(
            "moments", least=_LEAST, nonzero=masked, masked=masked
        ),
        "NoNormalization": Normalisation(),
        "RescaleTo01Normalization": Normalisation("percentiles", 0, 100),
        "RGBTo01Normalization": Normalisation(upper=255),
    }
    if scheme not in schemes:
        raise UsageError(
            f"its normalisation {scheme} is not one of CTNormalization, {', '.join(schemes)}; "
            "give --normalize zscore or another"
        )
    return schemes[scheme]
