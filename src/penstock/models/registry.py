"""What a model's name means, before torch is imported: a model of the registry, one that another
package adds, a file, or a package of a kind that the names of its files show."""

from __future__ import annotations

import difflib
import importlib.util
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from ..base import RESULTS, HeadKind, UsageError, extension_names, find_extension, plural


@dataclass(frozen=True, slots=True)
class Reach:
    """How far a network sees. Tuples have an entry for each axis that the network takes, in the
    order z y x; they are empty where no overlap makes tiling exact."""

    blame: str = ""
    """The reason that no overlap makes tiling exact, such as a layer that sees the whole patch;
    else empty."""
    period: tuple[int, ...] = ()
    """Least shift of the input that only shifts the output."""
    before: tuple[int, ...] = ()
    """Voxels of context that a core which starts on the grid needs before it."""
    after: tuple[int, ...] = ()
    """Voxels that a core which ends on the grid needs after it."""
    seen_before: tuple[int, ...] = ()
    """Voxels that the farthest seeing voxel of the output sees before itself."""
    seen_after: tuple[int, ...] = ()
    """Voxels that it sees after itself."""
    step: tuple[int, ...] = ()
    """Sides of patches are multiples of it: the network takes them, and they end on its grid."""
    partly: bool = False
    """True if the search ended before it was known: it cost more than it may, or the network cannot
    be searched."""
    places: int = 0
    """Number of places at which tiles were compared with a larger input, and were equal."""

    @property
    def exact(self) -> bool:
        """True if there is an overlap at which no voxel of a core sees a cut."""
        return not self.blame

    def line(self) -> str:
        """The same in words."""
        if self.blame:
            return f"no overlap is {'known to be ' * self.partly}exact: {self.blame}"
        sides = (
            f"{low}" if low == high else f"{low} before, {high} after"
            for low, high in zip(self.before, self.after, strict=True)
        )
        return f"reach {' / '.join(sides)}, checked at {plural(self.places, 'place')}"


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


def _alike(*, period: int, context: int, seen: int, places: int) -> Reach:
    """What `find_reach` finds of a 3-D network that sees equally far to all sides."""
    near, far, grid = (context,) * 3, (seen,) * 3, (period,) * 3
    return Reach("", grid, near, near, far, far, step=grid, places=places)


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
        reach=_alike(period=4, context=8, seen=11, places=20),
    ),
    "identity": Entry(
        "torch.nn:Identity",
        "returns its input: measures the pipeline alone",
        reach=_alike(period=1, context=0, seen=0, places=120),
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


TRAINING = "training of Penstock"
"""It is read as the name of a network and its weights."""
BIOIMAGEIO, NNUNET, MONAI = "bioimage.io package", "nnU-Net v2 folder", "MONAI bundle"
ONNX = "ONNX file"
KINDS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    BIOIMAGEIO: (("rdf.yaml",), ("bioimageio.yaml",)),
    NNUNET: (("plans.json", "dataset.json"),),
    MONAI: (("configs/metadata.json",),),
    TRAINING: ((RESULTS,),),
}
"""Groups of names of files by the kind that they show: a package of it has all files of one."""


def package_kind(model: Any) -> str | None:
    """The kind of package that lies at a path; None if none does.

    Args:
        model: What the user says of a model.
    """
    if not isinstance(model, str) or not model or not (path := Path(model)).exists():
        return None
    if path.suffix == ".onnx" and path.is_file():
        return ONNX
    if path.is_dir():
        names = {name for groups in KINDS.values() for group in groups for name in group}
        there = {name for name in names if (path / name).is_file()}
    elif path.suffix == ".zip" and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            inside = archive.namelist()
        there = {*inside, *(name.partition("/")[2] for name in inside)}  # or all in one folder
    else:
        there = {path.name} if path.suffix == ".yaml" else set()
    return next(
        (kind for kind, groups in KINDS.items() if any(there.issuperset(g) for g in groups)), None
    )


def check_holds_package(path: Path, flag: str) -> None:
    """Refuse a folder or a zip file that is none of these packages.

    Args:
        path: What the user names as a model.
        flag: The flag that the error names.

    Raises:
        UsageError: It is one that holds no package, or a damaged zip file.
    """
    if path.suffix == ".zip" and path.is_file() and not zipfile.is_zipfile(path):
        raise UsageError(f"{flag} {path} is a damaged zip file")
    if path.is_dir() or (path.suffix == ".zip" and path.is_file()):
        wanted = "; ".join(f"{kind}: {' and '.join(groups[0])}" for kind, groups in KINDS.items())
        raise UsageError(
            f"{flag} {path} holds no model: it lacks the files of each kind ({wanted})"
        )


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


def _holds_weights(path: Path) -> bool:
    """Whether a file holds weights, or a pickle around them, and no program."""
    if path.suffix in (".pth", ".ckpt", ".safetensors"):
        return path.is_file()
    if not zipfile.is_zipfile(path):
        return False
    inside = set[str]()
    # Of a damaged file the loader of its kind says so.
    with suppress(zipfile.BadZipFile, ValueError, OSError), zipfile.ZipFile(path) as archive:
        inside = {name.rpartition("/")[2] for name in archive.namelist()}
    return "data.pkl" in inside and "constants.pkl" not in inside  # which TorchScript has


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
    if _holds_weights(Path(model)):
        raise UsageError(
            f"{flag} {model} holds weights, and no program: name what makes the network, as "
            "file.py:function, and give this file by --weights"
        )
    place, colon, _ = model.rpartition(":")
    file = Path(place if colon and place.endswith(".py") else model)
    if file.suffix in (".py", ".onnx", *PROGRAMS):
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
            "package.module:function, file.py:function, a .pt2, TorchScript or ONNX file, or the "
            "folder of a training, an nnU-Net, a MONAI bundle or a bioimage.io package"
        )
    top = place.partition(".")[0]
    beside = Path(top).is_dir() or Path(f"{top}.py").is_file()
    if not beside and (not top.isidentifier() or importlib.util.find_spec(top) is None):
        raise UsageError(f"{flag} {model}: there is no module {top}")
