"""What other packages add by entry points: found by name, imported only where it is named.

A name of our own comes first: whoever asks here has looked there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points

from .errors import MissingDependency, PenstockError, UsageError, describe, where_in_users_code
from .secrets import scrub


def extension_names(group: str) -> list[str]:
    """The names that other packages add to a group such as ``penstock.models``."""
    return sorted({entry.name for entry in entry_points(group=group)})


def find_extension(group: str, name: str) -> EntryPoint | None:
    """The entry point of a name, not imported; `UsageError` where two packages add that name."""
    entries = list(entry_points(group=group, name=name))
    if len(entries) > 1:
        owners = " and ".join(sorted(map(_owner, entries)))
        raise UsageError(f"{name!r} in {group} is an entry point of {owners}; uninstall one")
    return entries[0] if entries else None


@contextlib.contextmanager
def blaming(entry: EntryPoint | None, where: str) -> Iterator[None]:
    """What fails within is one sentence, which says whose entry point it is; not of None, which is
    of no other package. Raises `UsageError`."""
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
