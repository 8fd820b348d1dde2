"""The models that have a name, and the check of a model's name before torch is imported."""

from __future__ import annotations

import difflib
import importlib.util
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from ..base import HeadKind, UsageError, extension_names, find_extension
from .packages.kinds import check_holds_package, package_kind
from .reach import Reach

_HERE = Path(__file__).parent
PROGRAMS = (".pt2", ".pt", ".ts", ".torchscript")
_GROUP = "penstock.models"


@dataclass(frozen=True)
class Entry:
    """A model of the registry."""

    factory: str
    summary: str
    weights: Path | None = None
    needs_weights: bool = False
    kind: HeadKind = "intensity"
    """The kind of its heads."""
    reach: Reach | None = None
    """Its reach as `find_reach` finds it; None if nobody has looked."""


def _alike(*, period: int, context: int, seen: int) -> Reach:
    """What `find_reach` finds of a 3-D network that sees equally far to all sides."""
    near, far, grid = (context,) * 3, (seen,) * 3, (period,) * 3
    return Reach("", grid, near, near, far, far, step=grid, places=8)


_ATTENTION = Reach("encoder.blocks.0.attn.proj (FrozenLinear) sees the whole patch")

REGISTRY = {
    "denoise-net": Entry(
        "penstock.models.unet3d:denoise_net",
        "3-D UNet of the exaSPIM denoiser, width 32 to 512; give its --weights",
        needs_weights=True,
        reach=Reach("inc.double_conv.1 (GroupNorm) sees the whole patch"),
    ),
    "denoise-tiny": Entry(
        "penstock.models.unet3d:denoise_tiny",
        "small 3-D UNet with weights for fluorescence microscopy",
        _HERE / "denoise_tiny.safetensors",
        reach=_alike(period=4, context=8, seen=11),
    ),
    "identity": Entry(
        "torch.nn:Identity",
        "returns its input: measures the pipeline alone",
        reach=_alike(period=1, context=0, seen=0),
    ),
    "prithvi-refiner-tiny": Entry(
        "penstock.models.prithvi:tiny",
        "2-D, 6 bands: Prithvi-EO encoder with LoRA, ConvNeXt head; untrained without --weights",
        reach=_ATTENTION,
    ),
    "prithvi-refiner-100m": Entry(
        "penstock.models.prithvi:m100", "the same, of 89 M parameters", reach=_ATTENTION
    ),
    "prithvi-refiner-300m": Entry(
        "penstock.models.prithvi:m300", "the same, of 307 M parameters", reach=_ATTENTION
    ),
    "prithvi-refiner-600m": Entry(
        "penstock.models.prithvi:m600",
        "the same, of 637 M parameters and a patch of 14",
        reach=_ATTENTION,
    ),
}


def added_model(model: Any) -> EntryPoint | None:
    """The entry point of a model that another package adds by this name. None for all others."""
    if not isinstance(model, str) or model in REGISTRY or ":" in model:
        return None
    return None if Path(model).suffix in (".py", *PROGRAMS) else find_extension(_GROUP, model)


def model_files(model: Any) -> list[Path]:
    """The files that a model is made from, as far as its name tells.

    Args:
        model: A name, a reference or a file; anything that is no text has none.

    Returns:
        Those that exist.
    """
    if not isinstance(model, str) or model in REGISTRY:
        return []
    if package_kind(model) is not None:
        return [Path(model)]
    place = model if model.endswith(PROGRAMS) else model.rpartition(":")[0]
    files = (Path(place), Path(f"{place.replace('.', '/')}.py"))
    return [file for file in files if file.is_file()]


def check_model_name(model: Any, flag: str) -> None:
    """Refuse a name that no model has. Imports nothing but the package that holds a reference.

    Args:
        model: A name, a reference or a file; anything that is no text passes.
        flag: The flag that the error names.

    Raises:
        UsageError: There is no such model; the error lists the known names.
    """
    if not isinstance(model, str) or model in REGISTRY or added_model(model) is not None:
        return
    if package_kind(model) is not None:
        return
    check_holds_package(Path(model), flag)
    place, colon, _ = model.rpartition(":")
    file = Path(place if colon and place.endswith(".py") else model)
    if file.suffix in (".py", *PROGRAMS):
        if not colon and file.suffix == ".py":
            raise UsageError(f"{flag} {model} names no function; say {model}:FUNCTION")
        if not file.is_file():
            raise UsageError(f"{flag} {model}: there is no file {file}")
        return
    if not colon:
        names = sorted({*REGISTRY, *extension_names(_GROUP)})
        near = difflib.get_close_matches(model, names, 1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise UsageError(
            f"{flag} {model!r} is unknown{meant}; it is one of {', '.join(names)}, "
            "package.module:function, file.py:function, a .pt2 / TorchScript file, or the folder "
            "of a training, an nnU-Net, a MONAI bundle or a bioimage.io package"
        )
    top = place.partition(".")[0]
    beside = Path(top).is_dir() or Path(f"{top}.py").is_file()
    if not beside and (not top.isidentifier() or importlib.util.find_spec(top) is None):
        raise UsageError(f"{flag} {model}: there is no module {top}")
