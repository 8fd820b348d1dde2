"""The errors that Penstock raises, and their exit codes.

    PenstockError                1  a job failed
    ├── UsageError               2  the request cannot be done as given      (a ValueError)
    │   ├── Undecided            2  the request can be read in several ways
    │   ├── Refused              2  the plan does not fit this machine
    │   └── MissingDependency    2  an optional package is absent            (an ImportError)
    ├── StageError               1  a stage failed on an item; 3 if --resume can go on at once
    ├── Incomplete               3  not every planned block was written
    │   ├── StoreAway            3  a store has failed for longer than the job waits
    │   ├── StoreFull            3  a store has no room left
    │   └── OutOfMemory          3  a device, or the host, has no memory left for a batch
    └── NotComparable            4  two measurements cannot be compared

A message is one sentence that names the numbers and the flag or path at fault. A function of Python
tells its errors its parameters, and their text then has these in place of flags.
"""

from __future__ import annotations

import importlib
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType, ModuleType
from typing import Any

DISTRIBUTION = "penstock-dl"
"""The name of this package for pip; the index knows another project as ``penstock``."""


_FLAG = re.compile(r"(?<![\w-])--[a-z](?:[a-z0-9-]*[a-z0-9])?")


class PenstockError(Exception):
    """Base of every error that Penstock raises on purpose."""

    exit_code = 1
    ends_job = False
    """True if the rest of the job would fail alike, on other workers too."""
    parameters: Mapping[str, str] = MappingProxyType({})
    """The parameters that stand for flags; empty on a command line. See `config.knobs`."""

    def __str__(self) -> str:
        def spelled(flag: re.Match[str]) -> str:
            return f"`{self.parameters[flag[0]]}`" if flag[0] in self.parameters else flag[0]

        return _FLAG.sub(spelled, self.with_flags)

    @property
    def with_flags(self) -> str:
        """The message as a command line says it."""
        return super().__str__()


class UsageError(PenstockError, ValueError):
    """The request cannot be done as given; nothing was created or deleted."""

    exit_code = 2


class Undecided(UsageError):
    """The request can be read in several ways. ``answers`` are flags, each of which chooses one."""

    def __init__(self, message: str, answers: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.answers = tuple(answers)


class Refused(UsageError):
    """The plan is sound but this machine cannot hold it."""


class MissingDependency(UsageError, ImportError):
    """An optional package is absent; the message holds the line that installs it."""


class StageError(PenstockError):
    """A stage failed on a brick or block. The cause is chained."""

    def __init__(self, stage: str, where: str, cause: BaseException) -> None:
        self.stage, self.where = stage, where
        place = where_in_users_code(cause)
        ours = isinstance(cause, PenstockError)
        kind = f"{type(cause).__name__}: " if place and not ours else ""
        super().__init__(f"{stage} failed at {where}: {kind}{describe(cause)}{place}")
        if isinstance(cause, Incomplete):
            self.exit_code = cause.exit_code


class Incomplete(PenstockError):
    """The job ended without error but some planned blocks were never written."""

    exit_code = 3


class StoreAway(Incomplete):
    """A store has failed for longer than a job waits for it; the last fault is chained."""


class StoreFull(Incomplete):
    """A store has no room left; the last fault is chained."""

    ends_job = True


class OutOfMemory(Incomplete):
    """A device, or the host, has no memory left for a batch; the last fault is chained."""

    ends_job = True


class NotComparable(PenstockError):
    """Two measurements cannot be compared: they differ in other settings too, or share no case."""

    exit_code = 4


def describe(error: BaseException) -> str:
    """The first line of an error's message, or its type where it has none. If it ends with a colon,
    three more count."""
    message = error.with_flags if isinstance(error, PenstockError) else str(error)
    lines = [line.strip() for line in message.strip().splitlines()]
    if not lines:
        return type(error).__name__
    return " ".join((lines[0], "; ".join(lines[1:4] if lines[0].endswith(":") else ()))).strip()


@contextmanager
def as_usage_error(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """A context in which an error of others is a `UsageError`.

    Args:
        what: The sentence without the reason, such as ``OUT.csv cannot be written``.
        kinds: The errors that are meant; none stands for all.

    Raises:
        UsageError: An error was raised; the message ends with its reason.

    >>> with as_usage_error("a.json is no record"):
    ...     {}["id"]
    Traceback (most recent call last):
    penstock.base.errors.UsageError: a.json is no record: it lacks 'id'
    """
    meant: tuple[type[Exception], ...] = kinds or (Exception,)
    try:
        yield
    except (PenstockError, MemoryError):
        raise
    except meant as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else describe(error)
        if isinstance(error, OSError) and error.strerror:
            reason = error.strerror
        raise UsageError(f"{what}: {reason}") from error


def well_formed(what: str, *others: type[Exception]) -> AbstractContextManager[None]:
    """The context `as_usage_error` of content that lacks members, or has others.

    Args:
        what: The sentence without the reason.
        others: Further errors that a reader of the content raises.

    Returns:
        The context.
    """
    usual = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError)
    return as_usage_error(what, *usual, *others)


def check_equal(what: str, values: Mapping[str, Any]) -> None:
    """Check that all values are equal.

    Args:
        what: What the values are, in the plural.
        values: The values by the names of their owners.

    Raises:
        UsageError: They are not; the message lists them.

    >>> check_equal("the numbers of samples", {"inputs": 5, "targets": 4})
    Traceback (most recent call last):
    penstock.base.errors.UsageError: the numbers of samples differ: inputs 5, targets 4
    """
    if len(set(values.values())) > 1:
        each = ", ".join(f"{name} {value}" for name, value in values.items())
        raise UsageError(f"{what} differ: {each}")


_READERS = "h5py imagecodecs liffile nd2 nibabel pydicom pylibCZIrw rasterio tifffile".split()
_NOT_THE_USERS = frozenset({"penstock", "torch", "numpy", "onnxruntime", *_READERS})


def where_in_users_code(error: BaseException) -> str:
    """The place in the user's code where an error was raised, as `` (FILE, line N)``.

    The user's code is all code but that of Penstock, torch, numpy, Python and readers of files. The
    text is empty if the traceback has none of it.
    """
    place = ""
    for link in causes_of(error):
        for frame, line in traceback.walk_tb(link.__traceback__):
            # `__main__` may be a module of Penstock; its spec names the package.
            spec = frame.f_globals.get("__spec__")
            name = spec.name if spec else frame.f_globals.get("__name__", "")
            top = str(name).partition(".")[0]
            file = frame.f_code.co_filename
            a_library = top in _NOT_THE_USERS or top in sys.stdlib_module_names
            if not file.startswith("<") and (not a_library or top == "__main__"):
                place = f" ({file}, line {line})"
        if place:
            break
    return place


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of that, and so on."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__


_OS_ERROR = re.compile(r"\[os_error_code='(\d+)'\]")


def error_number(error: BaseException) -> int | None:
    """The number of an error of the system; TensorStore has it in the text of a `ValueError`."""
    if isinstance(error, OSError):
        return error.errno
    number = _OS_ERROR.search(str(error))
    return None if number is None else int(number[1])


def require(module: str, extra: str) -> ModuleType:
    """Import an optional module.

    Args:
        module: Its full name, such as ``safetensors.torch``.
        extra: The extra of Penstock that installs it; empty where none does.

    Returns:
        The module.

    Raises:
        MissingDependency: It is not installed; the message has the line that installs it.

    >>> require("json", "infer").__name__
    'json'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        if error.name is not None and error.name.partition(".")[0] != package:
            raise
        raise missing(package, extra) from error


class Deferred:
    """An optional module that is imported, as by `require`, where something of it is first used.
    So who imports a room of ours that uses it needs neither the module nor its seconds."""

    def __init__(self, module: str, extra: str) -> None:
        self._asked = module, extra

    def __getattr__(self, name: str) -> Any:
        return getattr(require(*self._asked), name)


BROUGHT = ("torch", "torchvision", "tensorstore", "safetensors", "lightning_utilities", "xxhash")
"""Packages that are imported plainly and may be absent; others of an extra are `require`d."""


def absent(error: BaseException, extra: str) -> MissingDependency | None:
    """The error for a module that is not there.

    Args:
        error: The error of an import, or any other.
        extra: The extra of Penstock that would bring the module.

    Returns:
        The error, or None where no module lacks, or no extra brings it.
    """
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    package = (name or "").partition(".")[0]
    return missing(package, extra) if package in BROUGHT else None


def missing(package: str, extra: str) -> MissingDependency:
    """The error for a package that is not installed.

    Args:
        package: Its name.
        extra: The extra of Penstock that brings it; empty where none does.

    Returns:
        The error, whose message has the line that installs it.

    >>> print(missing("torch", "infer"))
    torch is not installed; run: pip install 'penstock-dl[infer]'
    """
    what = f"'{DISTRIBUTION}[{extra}]'" if extra else package
    return MissingDependency(f"{package} is not installed; run: pip install {what}")
