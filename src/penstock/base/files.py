"""Files written whole or not at all, lock files, and checks of paths that the user gives."""

from __future__ import annotations

import itertools
import os
import re
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from .errors import UsageError, as_usage_error, describe
from .json_texts import json_object, json_text, parsed_json

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a path beside ``path`` to write to; the file takes the place of ``path`` at the end.

    Where the block fails, ``path`` stays as it was and nothing is left beside it. Where ``path`` is
    a link, the file behind it is replaced. A device or a pipe is written to directly.
    """
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        yield path
        return
    path = real(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = _draft(path.parent)
    try:
        yield draft
        # On the disk before it has the name, or a crash may leave an empty file in the old one's
        # place.
        with draft.open("r+b") as written:  # Windows syncs only what may be written
            os.fsync(written.fileno())
        if path.exists():
            shutil.copymode(path, draft)
        draft.replace(path)
    except OSError as error:
        if error.errno and error.filename in (None, str(draft)):  # such as a full disk
            error.filename = str(path)
        raise
    finally:
        draft.unlink(missing_ok=True)


def set_aside(path: Path) -> None:
    """Rename the file of an earlier part of a run, if there is one: its name gets a number."""
    if path.exists():
        # From their number on, and maybe further: one of them may be gone.
        numbers = itertools.count(len(list(path.parent.glob(f"{path.stem}*{path.suffix}"))))
        asides = (path.with_stem(f"{path.stem}-{number}") for number in numbers)
        path.rename(next(aside for aside in asides if not aside.exists()))


def at_home(path: str | Path) -> Path:
    """A path in which ``~`` is the user's home, as in a shell: a name such as ``./~draft``, or that
    of nobody's home, stays as it is."""
    return Path(os.path.expanduser(path))  # noqa: PTH111  # what Path has raises for nobody


def absolute(path: str | Path) -> Path:
    """An absolute path without ``~`` and ``..``, which TensorStore does not take.

    Links are followed only where a ``..`` stands, since it means the folder behind them.
    """
    path = at_home(path)
    return path.resolve() if ".." in path.parts else path.absolute()


def is_draft(name: str) -> bool:
    """Whether a file is a draft that a killed process left behind; see `replacing`."""
    return re.fullmatch(r"\.penstock-[0-9a-f]{16}\.part", name) is not None


def _draft(folder: Path) -> Path:
    """A new, empty file. Nobody can foresee its name, and so plant a link there."""
    draft = folder / f".penstock-{secrets.token_hex(8)}.part"
    nofollow = getattr(os, "O_NOFOLLOW", 0)  # Windows has none
    os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | nofollow, 0o666))
    return draft


def cache_folder() -> Path:
    """The folder for what may be lost and made anew, in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "penstock"


def real(path: str | Path) -> Path:
    """The path with every link in it resolved."""
    return Path(os.path.realpath(path))


def lock_file(file: IO[Any], *, wait: bool = False, shared: bool = False) -> bool:
    """Lock an open file for this process, until it is closed or the process ends.

    Args:
        file: The open file.
        wait: Wait while another process holds the lock.
        shared: Let others lock it like this at the same time.

    Returns:
        False where another process holds the lock. True as well on systems without locks: Windows,
        and some file systems.
    """
    if fcntl is None:
        return True
    try:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(file, kind | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def is_locked(path: Path) -> bool:
    """Whether another process has locked a file; False on a system without locks."""
    with path.open("rb") as file:
        return not lock_file(file, shared=True)  # so two processes may check at the same moment


@contextmanager
def held_alone(path: Path, doing: str) -> Iterator[None]:
    """Hold a lock file during the block, then remove it.

    The lock ends with the process, however that ends.

    Args:
        path: The lock file.
        doing: The work of this process in the folder, such as ``runs a suite``.

    Yields:
        Nothing.

    Raises:
        UsageError: Another process holds the file; the message names it.
    """
    made = not path.parent.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        file = path.open("a+")
        if not lock_file(file):
            file.close()
            check_alone(path, doing)
            continue  # the other process has just ended
        with suppress(OSError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                break
        file.close()  # another process removed it as it ended
    try:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
    finally:
        with suppress(OSError):
            path.unlink()  # while it is locked: later it may be another process's
        file.close()
        if made:
            with suppress(OSError):  # unless something is in it
                path.parent.rmdir()


def check_alone(path: Path, doing: str) -> None:
    """Check that no process holds a lock file.

    Args:
        path: The lock file; see `held_alone`.
        doing: The work of the process that holds it.

    Raises:
        UsageError: A process holds it; the message names it.
    """
    try:
        with path.open("r+") as file:
            if lock_file(file):
                return
            who = file.read().strip() or "another process"
    except FileNotFoundError:
        return
    raise UsageError(f"{path.parent}: {who} {doing} there now; end it first, or wait for it")


_ADDRESS = re.compile(r"\w\w:/")
"""The start of a URL. `Path` leaves one slash of two, and a drive of Windows has one letter."""


def check_local(path: Path, flag: str) -> None:
    """Refuse a URL or a spec given for a file or folder of this machine.

    Otherwise a folder would be made with the URL as its name, and a key in the URL would show.

    Args:
        path: The path that the user gave.
        flag: The flag that it was given by.

    Raises:
        UsageError: It is a URL or a spec.
    """
    if not path.is_absolute() and _ADDRESS.search(str(path)):
        raise UsageError(f"{flag}: a URL was given; give a place on this machine")


def check_ends(path: Path, named: str) -> None:
    """Refuse a device or pipe where a file is read as a whole; a shell's ``<(...)`` has a writer.

    Args:
        path: The path that the user gave.
        named: What messages call it.

    Raises:
        UsageError: It is one.
    """
    if path.is_char_device() or (path.is_fifo() and path.parent.name != "fd"):
        kind = "device" if path.is_char_device() else "pipe"
        raise UsageError(f"{named} is a {kind}, which may never end")


def check_folder(out: Path, flag: str) -> None:
    """Check that a folder can be written to, or made. Nothing is created.

    Args:
        out: The folder.
        flag: The flag that it was given by.

    Raises:
        UsageError: It is no folder, may not be written to, or lies inside an array.
    """
    check_local(out, flag)
    there = nearest(out)
    if not there.is_dir():
        raise UsageError(f"{flag} {out}: {there} is not a folder")
    if why := unwritable(there):
        raise UsageError(f"{flag} {out}: {there} may not be written to ({why})")
    if (store := store_around(out)) is not None:
        raise UsageError(f"{flag} {out} lies inside the array {store}; give a folder outside it")


def check_apart(out: Path, flag: str, read: Mapping[str, Path | None]) -> None:
    """Check that an output folder lies in no folder that is read.

    Args:
        out: The output folder.
        flag: The flag that it was given by.
        read: The folders that are read, by their flags; None is skipped.

    Raises:
        UsageError: It is one of those folders, or lies in one.
    """
    for name, folder in read.items():
        if folder is not None and real(out).is_relative_to(real(folder)):
            raise UsageError(f"{flag} {out} lies inside {name} {folder}; give a folder outside it")


def nearest(path: Path) -> Path:
    """The path itself, or the first of its parents that exists."""
    # os.path.exists is false where this user may not look; Path.exists raises.
    return next(p for p in (path, *path.absolute().parents) if os.path.exists(p))  # noqa: PTH110


def unwritable(folder: Path) -> str:
    """The reason why no file can be made in a folder, found by trying; empty where one can."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return error.strerror or describe(error)


STORE_FILES = ("zarr.json", ".zarray", ".zgroup", "attributes.json")
"""Files of which a Zarr or N5 array or group has one."""
_STORE_KEYS = {"zarr_format", "n5", "dataType"}
"""Keys of which such a file has one."""
_ARRAY_KEYS = {"shape", "dataType"}
"""Keys of which that of an array has one."""


def store_around(path: Path) -> Path | None:
    """The outermost folder, from the root down to the path, that is a Zarr or N5 array or group."""
    around = (*reversed(real(path).parents), real(path))
    return next((place for place in around if _has_one_of(_STORE_KEYS, place)), None)


def is_array(folder: Path) -> bool:
    """Whether a folder is a Zarr or N5 array."""
    return _has_one_of(_ARRAY_KEYS, folder)


def is_of_store(content: bytes) -> bool:
    """Whether the content of such a file is that of a Zarr or N5 array or group."""
    return not _STORE_KEYS.isdisjoint(json_object(content))


def _has_one_of(keys: Set[str], folder: Path) -> bool:
    """Whether such a file in a folder has one of some keys."""
    for file in (folder / name for name in STORE_FILES):
        with suppress(OSError):
            if file.is_file() and not keys.isdisjoint(json_object(file.read_bytes())):
                return True
    return False


def write_json(path: str | Path, document: Any, indent: int | None = 2) -> None:
    """Write a document as JSON, whole or not at all.

    Args:
        path: The file.
        document: As for `json_text`.
        indent: As for `json_text`.
    """
    with replacing(path) as draft:
        draft.write_text(json_text(document, indent), encoding="utf-8")


def read_json(path: Path) -> Any:
    """The document in a JSON file.

    Raises:
        UsageError: The file cannot be read, or is not JSON.
    """
    with as_usage_error(f"{path} is not JSON", ValueError), system_errors(f"{path} cannot be read"):
        return parsed_json(path.read_bytes())


def append_line(file: IO[bytes], line: str) -> None:
    """Add a line to a file that is open to be read and appended to.

    If a kill or a full disk left half a line at the end of the file, that line is ended first.

    Args:
        file: The file.
        line: The line, without its newline.
    """
    file.write(b"\n" * ends_torn(file) + line.encode() + b"\n")


def ends_torn(file: IO[bytes]) -> bool:
    """Whether the last line of an open file has no end. The file then stands at its end."""
    if file.seek(0, os.SEEK_END) == 0:
        return False
    file.seek(-1, os.SEEK_END)
    return file.read() != b"\n"


def system_errors(what: str) -> AbstractContextManager[None]:
    """The context `as_usage_error` of an `OSError`; ``what`` is such as ``OUT.csv cannot be
    written``."""
    return as_usage_error(what, OSError)


def remove(paths: Iterable[Path]) -> None:
    """Remove files and folders; of a link the link alone."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
