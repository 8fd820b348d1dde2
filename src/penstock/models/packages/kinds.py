"""The kinds of packages, and which of them a path is, by the names of its files."""

from __future__ import annotations

import importlib
import zipfile
from collections.abc import Callable, Sequence
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

    def is_of(self, names: Sequence[str]) -> bool:
        """Whether files with these names make a package of this kind."""
        return any(set(group) <= set(names) for group in self.files)


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

    Raises:
        UsageError: It is a folder or a zip file of no kind.
    """
    if not isinstance(model, str) or not (path := Path(model)).exists():
        return None
    if path.is_dir():
        names = [str(file.relative_to(path)) for file in (*path.glob("*"), *path.glob("*/*"))]
    elif path.suffix == ".zip":
        try:
            with zipfile.ZipFile(path) as archive:
                inside = archive.namelist()
        except (zipfile.BadZipFile, OSError) as error:
            raise UsageError(f"--model {path} is a damaged zip file") from error
        top = f"{Path(inside[0]).parts[0]}/" if inside else ""
        names = [*inside, *(name.removeprefix(top) for name in inside)]
    elif path.name in ("rdf.yaml", "bioimageio.yaml"):
        names = [path.name]
    else:
        return None
    for kind, its in KINDS.items():
        if its.is_of(names):
            return kind
    if path.is_dir() and path.name.isidentifier():  # it may be a model's name as well
        return None
    wanted = "; ".join(f"{kind}: {' and '.join(its.files[0])}" for kind, its in KINDS.items())
    raise UsageError(f"--model {path} holds no model: none of these is in it ({wanted})")
