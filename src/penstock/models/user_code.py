"""The user's own code, found by ``package.module:name`` or ``file.py:name``.

While such code is imported and its function is called, its imports also find modules beside the
file and in the current folder. Only the user's code finds them: neither folder is on the import
path, so a ``triton.py`` there never takes the place of a library. Installed modules come first.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from ..base import UsageError, describe, where_in_users_code


class _Beside:
    """Finds modules in some folders, but only for imports by modules that were found there."""

    def __init__(self, folders: Sequence[Path], *asking: str) -> None:
        self._folders = [str(folder) for folder in folders]
        self._own = {__name__, *asking}
        self.made = set[str]()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None or _asker() not in self._own:
            return None
        spec = PathFinder.find_spec(name, self._folders)
        if spec is not None:
            self._own.add(name)
            self.made.add(name)
        return spec


def _asker() -> str:
    """The top package of the module whose ``import`` is under way."""
    frame = sys._getframe(2)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] not in ("importlib", "_frozen_importlib"):
            return name if name == __name__ else name.partition(".")[0]
        frame = frame.f_back  # type: ignore[assignment]
    return ""


@contextlib.contextmanager
def beside(folders: Sequence[Path], *asking: str, forget: bool = False) -> Iterator[None]:
    """A context in which some modules find others in folders.

    Args:
        folders: The folders.
        asking: Top packages of the modules whose imports are meant.
        forget: Whether what was imported is forgotten at the end, so that others of the same name
            can be.
    """
    finder = _Beside(folders, *asking)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [*sys.modules] if forget else ():
            if name.partition(".")[0] in finder.made:
                del sys.modules[name]


@contextlib.contextmanager
def find_reference(reference: str) -> Iterator[Any]:
    """Yield the object that ``module:name`` or ``file.py:name`` names. Call it inside the context,
    since modules beside it are found only there.

    Args:
        reference: The module or file, and the name in it.

    Yields:
        The object.

    Raises:
        UsageError: There is no such file. Errors of the import itself pass unchanged.
    """
    place, _, attribute = reference.rpartition(":")
    file = Path(place) if place.endswith(".py") else None
    if file is not None and not file.is_file():
        raise UsageError(f"{reference}: there is no file {file}")
    name = f"penstock_user_{file.stem}" if file is not None else place.partition(".")[0]
    folders = [Path.cwd()] if file is None else [file.resolve().parent, Path.cwd()]
    with beside(folders, name):
        module = _module_of(place, file, name)
        if not hasattr(module, attribute):  # Python's own words have our name of the module
            raise AttributeError(f"{place} has no attribute {attribute!r}")
        yield getattr(module, attribute)


def _module_of(place: str, file: Path | None, name: str) -> ModuleType:
    if file is None:
        return importlib.import_module(place)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses and pickles look for it
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def error_in_user_code(error: BaseException) -> str:
    """An error of the user's code in a sentence: its type, its first line, its file and line."""
    return f"{type(error).__name__}: {describe(error)}{where_in_users_code(error)}"
