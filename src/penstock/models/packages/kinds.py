"""The kinds of packages, and which of them a path is, by the names of its files."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...base import RESULTS, UsageError

TRAINING = "training of Penstock"
"""It is read as the name of a network and its weights."""
BIOIMAGEIO, NNUNET, MONAI = "bioimage.io package", "nnU-Net v2 folder", "MONAI bundle"
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
    if path.is_dir():
        return _kind(lambda name: (path / name).is_file())
    if zipfile.is_zipfile(path) and path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            inside = set(archive.namelist())
        tops = {name.partition("/")[0] + "/" for name in inside}
        return _kind(lambda name: bool({name, *(top + name for top in tops)} & inside))
    return _kind(lambda name: name == path.name) if path.suffix == ".yaml" else None


def _kind(holds: Callable[[str], bool]) -> str | None:
    shown = (kind for kind, groups in KINDS.items() if any(all(map(holds, g)) for g in groups))
    return next(shown, None)


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
