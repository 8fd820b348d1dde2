"""Files that a user names for us to write, and whether what is there already is ours to replace.

A file is ours where a register beside it, ``.penstock-files``, holds its name and the hash of what
is in it: Penstock wrote it, and nobody has edited it since. Most kinds of file have room for a mark
of their own and a CSV has none, so the mark is kept outside for all of them alike. Of JSON that
names a format of ours, and of which no register tells, an earlier version's, that is mark enough.
What is not ours is refused before the work begins, unless the user says ``--replace``.

    check()  ── before the work ──▶  writing()  a file that comes whole, at the end
                                     begin() .. end()  a file that grows while the work goes on
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import UsageError
from .files import check_local, nearest, real, replacing, store_around, unwritable

REGISTER = ".penstock-files"
_BEGUN = "begun"
"""In place of a hash: Penstock was at the file, and a kill may have left it in any state."""
_PIECE = 2**20
_MOST_JSON = 2**24
"""Bytes. The formats of ours are lists of parts, and smaller."""


def check_outputs(
    *named: tuple[str, Path | None], replace: bool = False, inputs: Iterable[Path] = ()
) -> None:
    """Raise `UsageError` for a file, by its flag, that cannot be written or is not ours to replace.

    No output may be one of the ``inputs``, another output, or inside a Zarr or N5 array, whatever
    ``replace`` says. An output of None is none. Nothing is created.
    """
    read = {real(path): path for path in inputs}
    taken: dict[Path, str] = {}
    for flag, path in named:
        if path is None:
            continue
        place = real(path)
        _check_place(flag, path)
        if place in read:
            raise UsageError(f"{flag} {path} is what is read; give another name")
        if place in taken:
            raise UsageError(f"{flag} {path} is {taken[place]} too; give each a name of its own")
        taken[place] = flag
        if not replace:
            check_replaceable(path, flag)


def check_replaceable(path: Path, flag: str = "") -> None:
    """Raise `UsageError` for a file that Penstock did not write, or that was edited since."""
    if is_written_by_us(path):
        return
    what = f"{flag} {path}".lstrip()
    edited = "has been edited since Penstock wrote it"
    why = edited if _states_of(real(path)) else "is not known as Penstock's"
    raise UsageError(f"{what}: what is there {why}; --replace replaces it all the same")


def is_written_by_us(path: Path) -> bool:
    """Whether nothing of somebody else's is lost where the file is replaced."""
    place = real(path)
    if place.is_dir():  # of a folder the name alone is known
        return not any(place.iterdir()) or _BEGUN in _states_of(place)
    if not place.is_file() or not place.stat().st_size:
        return True
    states = _states_of(place)
    if not states or states[-1] == _BEGUN:
        return bool(states) or _names_our_format(place)
    digest = _digest(place)
    return digest in states or digest in _states_of(place)  # another may have replaced it meanwhile


@contextmanager
def writing_output(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """`replacing` for a file that is ours from now on; refuses as `check_replaceable` does."""
    if path.is_dir():
        raise UsageError(f"{path} cannot be written: it is a folder")
    if not replace:
        check_replaceable(path)
    with replacing(path) as draft:
        yield draft
        if draft.is_file():  # a device keeps no file
            _note(real(path), _digest(draft))


def write_output(flag: str, path: Path, text: str, *, replace: bool) -> None:
    """`writing_output` of a whole text. Raises `UsageError` with the flag where it fails."""
    try:
        with writing_output(path, replace=replace) as draft:
            draft.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{flag} {path} cannot be written: {error.strerror}") from error


def begin_output(path: Path) -> None:
    """From now on the file grows, or the folder fills, and is ours however that ends."""
    _note(real(path), _BEGUN)


def end_output(path: Path) -> None:
    """The file is as it will stay: what is edited from now on is the user's."""
    if real(path).is_file():
        _note(real(path), _digest(real(path)))


def _check_place(flag: str, path: Path) -> None:
    check_local(path, flag)
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
    with contextlib.suppress(OSError, ValueError, RecursionError):
        if place.suffix == ".json" and place.stat().st_size <= _MOST_JSON:
            document = json.loads(place.read_bytes())
            return isinstance(document, dict) and str(document.get("format")).startswith("penstock")
    return False


def _register(place: Path) -> Path:
    """Where everybody may make files and nobody may remove another's, each has a register."""
    shared = hasattr(os, "getuid") and place.parent.stat().st_mode & stat.S_ISVTX
    return place.with_name(f"{REGISTER}-{os.getuid()}" if shared else REGISTER)


def _states_of(place: Path) -> list[str]:
    """What the register holds of a file, the oldest first."""
    states = []
    with contextlib.suppress(OSError):
        for line in _register(place).read_bytes().splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # of a line that was torn
                entry = json.loads(line)
                if entry["name"] == place.name:
                    states.append(str(entry["sha256"]))
    return states


def _note(place: Path, sha256: str) -> None:
    """Append to the register. Where it cannot be kept, the next run asks for ``--replace``."""
    if _states_of(place)[-1:] == [sha256]:
        return
    line = json.dumps({"name": place.name, "sha256": sha256}) + "\n"
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    with contextlib.suppress(OSError):
        mode = place.parent.stat().st_mode & 0o666  # who may write there may write into it
        register = os.open(_register(place), flags, mode)
        with os.fdopen(register, "r+b", buffering=0) as file:
            with contextlib.suppress(OSError):  # it is another's
                _register(place).chmod(mode)
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else "\n" + line  # one before was torn
            file.write(line.encode())


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()
