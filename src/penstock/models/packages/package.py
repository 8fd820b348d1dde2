"""What all kinds of packages have in common: the files of one, and the network that it becomes."""

from __future__ import annotations

import importlib
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from numpy.typing import NDArray
from torch import Tensor, nn

from ...base import UsageError, as_usage_error, well_formed
from ..recipe import Recipe
from ..registry import BIOIMAGEIO, MONAI, NNUNET, ONNX

_ROOMS = {BIOIMAGEIO: ".bioimageio", NNUNET: ".nnunet", MONAI: ".monai_bundle", ONNX: ".onnx"}
"""The module that reads each kind, with a function ``read``."""
_UNPACKED: list[tempfile.TemporaryDirectory[str]] = []
"""Folders of zip files, which are removed as the process ends: code of a package is read later."""


@dataclass(frozen=True)
class TensorsToMatch:
    """What a package says that its network makes of an input."""

    given: NDArray[Any]
    """Shape (1, channels, spatial...), not normalised."""
    expected: tuple[NDArray[Any], ...]
    """One for each head, with the same axes."""
    relative: float
    absolute: float
    """The largest difference that counts as equal is absolute + relative * expected."""


@dataclass(frozen=True)
class Package:
    """A network and what belongs to it."""

    module: nn.Module
    recipe: Recipe
    in_channels: int
    spatial_axes: int
    tests: Callable[[], TensorsToMatch] | None = None
    """Reads its test tensors; None if it has none."""


@dataclass(frozen=True)
class Parcel:
    """The folder of a package, from which no path leads out."""

    path: Path
    """The path that the user named."""
    folder: Path
    """The folder that holds its files: ``path``, or that of an unpacked zip file."""
    trusted: bool
    """True if code of the package may be run."""

    def file(self, name: str) -> Path:
        """A file of the package.

        Args:
            name: Its path in the package.

        Raises:
            UsageError: The path leads out of the package, or is a URL, or there is no such file.
        """
        if "://" in name:
            raise UsageError(f"--model {self.path} names {name}, and nothing is downloaded; put "
                             "the file into the package")  # fmt: skip
        file = (self.folder / name).resolve()
        if not file.is_relative_to(self.folder.resolve()):
            raise UsageError(f"--model {self.path} names {name}, which lies outside of it")
        if not file.is_file():
            raise UsageError(f"--model {self.path} lacks {name}")
        return file

    def sentence(self, what: str) -> str:
        """What is wrong with the package, in a sentence that names it."""
        return f"--model {self.path}: {what}"

    def refuse(self, what: str) -> UsageError:
        """The error that names what Penstock cannot do of a package."""
        return UsageError(self.sentence(what))

    def named(self, reference: str, by: str) -> Any:
        """What ``module.name`` names, which something in the package names.

        Raises:
            UsageError: It is not installed.
        """
        module, _, name = reference.rpartition(".")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise self.refuse(f"{by} {reference}, which is not installed") from error

    def needs_trust(self, what: str) -> None:
        """Refuse to run code of the package unless the user trusts it.

        Raises:
            UsageError: The user did not say so.
        """
        if not self.trusted:
            raise self.refuse(f"{what} may run any code, and is only opened with --trust-model, if "
                              "you trust who made it")  # fmt: skip


def unpacked(path: Path, into: Path) -> Path:
    """The folder of a zip file's content.

    Args:
        path: The zip file.
        into: An empty folder.

    Returns:
        The folder that holds the package: ``into``, or the only folder in it.

    Raises:
        UsageError: It is damaged, or a path in it leads out of it.
    """
    with (
        as_usage_error(
            f"--model {path} is a damaged zip file",
            zipfile.BadZipFile,
            OSError,
            EOFError,
            ValueError,
        ),
        zipfile.ZipFile(path) as archive,
    ):
        for name in archive.namelist():
            inner = PurePosixPath(name.replace("\\", "/"))
            if inner.is_absolute() or ".." in inner.parts or ":" in name:
                raise UsageError(f"--model {path} holds {name}, which leads out of it")
        archive.extractall(into)
    inside = list(into.iterdir())
    return inside[0] if len(inside) == 1 and inside[0].is_dir() else into


def open_package(path: Path, kind: str, *, trusted: bool) -> Package:
    """Open a package.

    Args:
        path: Its folder, its zip file, or the file that describes it.
        kind: Its kind, as `package_kind` says.
        trusted: Whether code of it may be run.

    Returns:
        The network in eval mode and what belongs to it.

    Raises:
        UsageError: It is damaged, or wants what is not done; the error names it.
        MissingDependency: The library of its kind is not installed.
    """
    folder = path if path.is_dir() else path.parent
    if path.suffix == ".zip":
        made = tempfile.TemporaryDirectory()
        _UNPACKED.append(made)
        folder = unpacked(path, Path(made.name))
    room = importlib.import_module(_ROOMS[kind], __package__)
    parcel = Parcel(path, folder, trusted)
    with well_formed(parcel.sentence("its files are malformed")):
        package: Package = room.read(parcel)
    package.module.eval()
    return package


class InOrder(nn.Module):
    """A network that has its axes in another order than z y x, or its channels elsewhere."""

    def __init__(self, module: nn.Module, takes: str, gives: Sequence[str], ours: str) -> None:
        super().__init__()
        self.module, self.takes, self.gives, self.ours = module, takes, tuple(gives), ours

    def forward(self, x: Tensor) -> Any:
        outputs = self.module(x.permute([self.ours.index(letter) for letter in self.takes]))
        if isinstance(outputs, Tensor):
            return in_our_order(outputs, self.gives[0])
        return [in_our_order(each, order) for each, order in zip(outputs, self.gives, strict=True)]


def in_our_order(tensor: Tensor, order: str) -> Tensor:
    """A tensor whose axes are in another order, along batch, channels (one if it has none), z y x.

    Args:
        tensor: The tensor.
        order: The letters of its axes, as ``bxyz``.
    """
    if "c" not in order:
        tensor, order = tensor.unsqueeze(1), order.replace("b", "bc", 1)
    return tensor.permute([order.index(letter) for letter in "bczyx" if letter in order])


def in_order(module: nn.Module, takes: str, gives: Sequence[str]) -> nn.Module:
    """A network whose axes are batch, channels, z y x; itself if they are already.

    Args:
        module: The network.
        takes: The letters of the axes of its input, as ``bcxyz``.
        gives: Those of each head.
    """
    ours = "bc" + "".join(letter for letter in "zyx" if letter in takes)
    return module if {takes, *gives} == {ours} else InOrder(module, takes, gives, ours)


class MeanOf(nn.Module):
    """A network that gives the mean of several, such as the folds of a training."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.each = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        total = self.each[0](x)
        for module in self.each[1:]:
            total = total + module(x)
        return total / len(self.each)
