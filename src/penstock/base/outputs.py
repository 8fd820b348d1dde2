"""Output files that the user names, and whether existing ones may be replaced.

A file may be replaced where Penstock wrote it and nobody has edited it since. A register beside it,
``.penstock-files``, holds its name and the hash of its content. The mark is kept outside because a
CSV has no room for one. A JSON report of an earlier version is in no register; it counts as ours
if its ``format`` is one of ours. Any other file is refused before the work begins, unless the user
gives ``--replace``.

    check_outputs()  ── before the work ──▶  writing_output()  a file written whole, at the end
                                     begin_output() .. end_output()  a file that grows on the way
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from .errors import UsageError
from .files import (
    append_line,
    check_local,
    nearest,
    real,
    replacing,
    store_around,
    system_errors,
    unwritable,
)

REGISTER = ".penstock-files"
LOCK_SUFFIX = ".penstock-lock"
"""Suffix of the file beside an output that names its writer."""
_BEGUN = "begun"
"""Stands in place of a hash while Penstock writes: a kill may leave the file in any state."""
_REPORTS = ("penstock-suite", "penstock-jobs")
"""Formats of reports: these can be made again from records, unlike a data set or a study."""
_MOST_JSON = 2**24
"""Bytes of the largest JSON that is looked into. Formats of ours are smaller."""


def check_outputs(
    *named: tuple[str, Path | None], replace: bool = False, inputs: Iterable[Path] = ()
) -> None:
    """Check the files that a command is to write. Nothing is created.

    Args:
        named: Flags and the files given by them; None is skipped.
        replace: Whether files that are not ours may be replaced.
        inputs: Files and folders that are read.

    Raises:
        UsageError: A file cannot be written, is an input or another output, lies inside an input
            or a Zarr or N5 array, or is not ours to replace.
    """
    read = {real(path): path for path in inputs}
    taken: dict[Path, str] = {}
    for flag, path in named:
        if path is None:
            continue
        place = real(path)
        _check_place(flag, path)
        if place in read:
            raise UsageError(f"{flag} {path} is an input; give another name")
        if (folder := next((read[p] for p in place.parents if p in read), None)) is not None:
            raise UsageError(f"{flag} {path} lies in {folder}, which is an input")
        if place in taken:
            raise UsageError(f"{flag} {path} is {taken[place]} too; give each a name of its own")
        taken[place] = flag
        if not replace:
            check_replaceable(path, flag)


def check_replaceable(path: Path, flag: str = "") -> None:
    """Check that a file is ours to replace.

    Args:
        path: The file, or a folder.
        flag: The flag that it was given by, for the message.

    Raises:
        UsageError: Penstock did not write it, or it was edited since.
    """
    if is_written_by_us(path):
        return
    what = f"{flag} {path}".lstrip()
    edited = "has been edited since Penstock wrote it"
    why = edited if _states_of(real(path)) else "is not known to be Penstock's"
    raise UsageError(f"{what} {why}; --replace replaces it anyway")


def is_written_by_us(path: Path) -> bool:
    """Whether the file may be replaced: nobody but Penstock wrote it."""
    place = real(path)
    if place.is_dir():  # the register has the name of a folder, and no hash
        return not any(place.iterdir()) or _BEGUN in _states_of(place)
    if not place.is_file() or not place.stat().st_size:
        return True
    states = _states_of(place)
    if not states or states[-1] == _BEGUN:
        return bool(states) or _names_our_format(place)
    digest = _digest(place)
    return digest in states or digest in _states_of(place)  # another run may have replaced it


@contextlib.contextmanager
def writing_output(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Write an output as `replacing` does, and note in the register that it is ours.

    Args:
        path: The file.
        replace: Whether a file that is not ours may be replaced.

    Yields:
        The path to write to.

    Raises:
        UsageError: It is a folder, or not ours to replace.
    """
    if path.is_dir():
        raise UsageError(f"{path} cannot be written: it is a folder")
    if not replace:
        check_replaceable(path)
    with replacing(path) as draft:
        yield draft
        if draft.is_file():  # a device keeps no file
            _note(real(path), _digest(draft))


def write_output(flag: str, path: Path, text: str, *, replace: bool) -> None:
    """Write a whole text to an output.

    Args:
        flag: The flag that the file was given by.
        path: The file.
        text: Its content.
        replace: Whether a file that is not ours may be replaced.

    Raises:
        UsageError: It cannot be written, or is not ours to replace.
    """
    with (
        system_errors(f"{flag} {path} cannot be written"),
        writing_output(path, replace=replace) as draft,
    ):
        draft.write_text(text, encoding="utf-8")


def begin_output(path: Path) -> None:
    """Note that Penstock begins to write a file or a folder. It counts as ours even after a
    crash."""
    _note(real(path), _BEGUN)


def end_output(path: Path) -> None:
    """Note that a file is finished. If it is edited later, it counts as the user's."""
    if real(path).is_file():
        _note(real(path), _digest(real(path)))


def _check_place(flag: str, path: Path) -> None:
    check_local(path, flag)
    if path.name.endswith((REGISTER, LOCK_SUFFIX)):
        raise UsageError(f"{flag} {path} is a name that Penstock keeps for itself; give another")
    if path.exists() and not path.is_file() and not path.is_dir():
        return  # a device or a pipe
    there = nearest(path)
    store = store_around(path.parent)
    if there == path and there.is_dir():
        why = f"cannot be written: {there} is a folder"
    elif there != path and not there.is_dir():
        why = f"cannot be written: {there} is not a folder"
    elif store is not None:
        why = f"lies inside the array {store}; give a place outside it"
    elif reason := unwritable(there if there.is_dir() else real(there).parent):
        why = f"cannot be written: {there} is read-only ({reason})"
    else:
        return
    raise UsageError(f"{flag} {path} {why}")


def _names_our_format(place: Path) -> bool:
    """Whether the file is a JSON report of ours, as an earlier version left it."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        if place.suffix == ".json" and place.stat().st_size <= _MOST_JSON:
            document = json.loads(place.read_bytes())
            return isinstance(document, dict) and document.get("format") in _REPORTS
    return False


def _register(place: Path) -> Path:
    """The register beside a file; one for each user in a shared folder such as ``/tmp``."""
    shared = hasattr(os, "getuid") and place.parent.stat().st_mode & stat.S_ISVTX
    return place.with_name(f"{REGISTER}-{os.getuid()}" if shared else REGISTER)


def _states_of(place: Path) -> list[str]:
    """The hashes, or `_BEGUN`, that the register holds of a file, the oldest first."""
    states = []
    with contextlib.suppress(OSError):
        for line in _register(place).read_bytes().splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a torn line
                entry = json.loads(line)
                if entry["name"] == place.name:
                    states.append(str(entry["sha256"]))
    return states


def _note(place: Path, sha256: str) -> None:
    """Append to the register. Where that fails, the next run asks for ``--replace``."""
    if _states_of(place)[-1:] == [sha256]:
        return
    line = json.dumps({"name": place.name, "sha256": sha256})
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    with contextlib.suppress(OSError):
        mode = place.parent.stat().st_mode & 0o666  # all who may write in the folder
        register = os.open(_register(place), flags, mode)
        with os.fdopen(register, "r+b", buffering=0) as file:
            with contextlib.suppress(OSError):  # another user's
                _register(place).chmod(mode)
            append_line(file, line)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
