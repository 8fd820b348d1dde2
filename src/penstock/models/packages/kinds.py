"""The kinds of packages, and which of them a path is, by the names of its files."""

from __future__ import annotations

import importlib
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...base import RESULTS, UsageError


@dataclass(frozen=True)
class PackageKind:
    """A kind of package: the files that show it, and what reads it."""

    files: tuple[tuple[str, ...], ...]
    """Names of files; a package of the kind has all of one of these groups."""
    room: str
    """The module of its reader, which has a function ``read``."""

    def reader(self) -> Callable[[Any], Any]:
        """The function that reads it."""
        read: Callable[[Any], Any] = importlib.import_module(self.room, __package__).read
        return read

    def is_of(self, holds: Callable[[str], bool]) -> bool:
        """Whether a place that ``holds`` files of some names is a package of this kind."""
        return any(all(map(holds, group)) for group in self.files)


TRAINING = "training of Penstock"
"""It is read as the name of a network and its weights."""
KINDS = {
    "bioimage.io package": PackageKind((("rdf.yaml",), ("bioimageio.yaml",)), ".bioimageio"),
    "nnU-Net v2 folder": PackageKind((("plans.json", "dataset.json"),), ".nnunet"),
    "MONAI bundle": PackageKind((("configs/metadata.json",),), ".monai_bundle"),
    TRAINING: PackageKind(((RESULTS,),), ""),
}


def package_kind(model: Any) -> str | None:
    """The kind of package that lies at a path; None if none does.

    Args:
        model: What the user says of a model.
    """
    if not isinstance(model, str) or not model or not (path := Path(model)).exists():
        return None
    if path.is_dir():
        return _kind(lambda name: (path / name).is_file())
    if zipfile.is_zipfile(path) and path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            inside = set(archive.namelist())
        tops = {name.partition("/")[0] + "/" for name in inside}
        return _kind(lambda name: bool({name, *(top + name for top in tops)} & inside))
    return _kind(lambda name: name == path.name) if path.suffix == ".yaml" else None


def _kind(holds: Callable[[str], bool]) -> str | None:
    return next((kind for kind, its in KINDS.items() if its.is_of(holds)), None)


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
        wanted = "; ".join(f"{kind}: {' and '.join(its.files[0])}" for kind, its in KINDS.items())
        raise UsageError(
            f"{flag} {path} holds no model: it lacks the files of each kind ({wanted})"
        )
