"""Other packages: their versions, and their entry points, found by name and imported only if the
user names them.

Penstock's own names win: callers look among those first.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version

from .errors import MissingDependency, PenstockError, UsageError, describe, where_in_users_code
from .safe_text import scrub


@functools.cache
def installed_version(distribution: str) -> str | None:
    """The version of a distribution, or None where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def extension_names(group: str) -> list[str]:
    """The names that other packages add to a group such as ``penstock.models``."""
    return sorted({entry.name for entry in entry_points(group=group)})


def find_extension(group: str, name: str) -> EntryPoint | None:
    """The entry point of a name. It is not imported.

    Args:
        group: A group such as ``penstock.models``.
        name: A name in it.

    Returns:
        The entry point, or None where no package adds the name.

    Raises:
        UsageError: Two packages add the name.
    """
    entries = list(entry_points(group=group, name=name))
    if len(entries) > 1:
        owners = " and ".join(sorted(map(_owner, entries)))
        raise UsageError(f"{name!r} in {group} is an entry point of {owners}; uninstall one")
    return entries[0] if entries else None


@contextlib.contextmanager
def blaming(entry: EntryPoint | None, where: str) -> Iterator[None]:
    """Name the package of an entry point in errors that its code raises.

    Args:
        entry: The entry point in use. None changes nothing: the code is Penstock's own.
        where: The beginning of the message, which says what was being done.

    Yields:
        Nothing.

    Raises:
        UsageError: The block failed. A `MissingDependency` passes unchanged.
    """
    try:
        yield
    except MissingDependency:
        raise
    except Exception as error:
        if entry is None:
            raise
        sentence = str(error)
        if not isinstance(error, PenstockError):
            place = where_in_users_code(error)
            sentence = f"{where}: {type(error).__name__}: {describe(error)}{place}"
        owner = f"{entry.name} is an entry point of {_owner(entry)}"
        raise UsageError(scrub(f"{sentence}; {owner}")) from error


def _owner(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "a package without a name"
