"""Output files that the user names, and whether existing ones may be replaced.

A file may be replaced where Penstock wrote it and nobody has edited it since. Penstock writes the
hash of a file into an extended attribute of it, ``user.penstock``, because a CSV has no room for a
mark. The attribute travels with the file, and an editor that writes a new file drops it. Any other
file is refused before the work begins, unless the user gives ``--overwrite``. A system without
extended attributes knows no file as ours, so there a command that is repeated needs the flag.

    check_outputs()  ── before the work ──▶  writing_output()  a file written whole, at the end
                                     begin_output() .. end_output()  a file that grows on the way
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from .errors import UsageError
from .files import check_local, nearest, real, replacing, store_around, system_errors, unwritable

LOCK_SUFFIX = ".penstock-lock"
"""Suffix of the file beside an output that names its writer."""
_MARK = "user.penstock"
_BEGUN = b"begun"
"""Stands in place of a hash while Penstock writes: a kill may leave the file in any state."""


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
    why = edited if _mark_of(real(path)) else "is not known to be Penstock's"
    raise UsageError(f"{what} {why}; --overwrite replaces it")


def is_written_by_us(path: Path) -> bool:
    """Whether the file may be replaced: nobody but Penstock wrote it."""
    place = real(path)
    if place.is_dir():
        return not any(place.iterdir()) or _mark_of(place) == _BEGUN
    if not place.is_file() or not place.stat().st_size:
        return True
    # The mark and the content are those of one open file: another run may replace it meanwhile.
    with place.open("rb") as file:
        mark = _mark_of(file.fileno())
        return mark == _BEGUN or mark == hashlib.file_digest(file, "sha256").hexdigest().encode()


@contextlib.contextmanager
def writing_output(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Write an output as `replacing` does, and mark it as ours.

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
        end_output(draft)


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
    """Mark a file, or a folder that is there, as one that Penstock begins to write. It counts as
    ours even after a crash."""
    place = real(path)
    if not place.exists():
        place.touch()
    _mark(place, _BEGUN)


def end_output(path: Path) -> None:
    """Mark a file as finished. If it is edited later, it counts as the user's."""
    place = real(path)
    if place.is_file():  # a device keeps no mark
        with place.open("rb") as file:
            _mark(place, hashlib.file_digest(file, "sha256").hexdigest().encode())


def _check_place(flag: str, path: Path) -> None:
    check_local(path, flag)
    if path.name.endswith(LOCK_SUFFIX):
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


def _mark_of(place: Path | int) -> bytes:
    """The mark of a file or folder: a hash, `_BEGUN`, or nothing."""
    with contextlib.suppress(OSError, AttributeError):  # Python has the calls on Linux alone
        return os.getxattr(place, _MARK)
    return b""


def _mark(place: Path, state: bytes) -> None:
    """Set the mark. Where that fails, the next run asks for ``--overwrite``."""
    with contextlib.suppress(OSError, AttributeError):
        os.setxattr(place, _MARK, state)
