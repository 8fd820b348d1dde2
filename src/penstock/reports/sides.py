"""What a user names as a side of a comparison: a ledger, runs, or a commit of a ledger."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..base import UsageError, plural
from ..instruments import Record, commit_named, commit_of, is_hash, short_commit
from .launches import launches_of
from .places import places_of
from .words import listed

_SHORTEST = 4
"""Fewest digits of a hash that name a commit."""
_NAMED = 5
"""Most commits that a message names."""


def launches_named(name: str, ledgers: Sequence[Path]) -> list[Record]:
    """The launches of a side that a user named.

    Args:
        name: A path, or a commit: its hash, the beginning of its hash, or a name that git knows.
        ledgers: Ledgers, or folders of ledgers, that are searched for the launches of a commit.

    Returns:
        The launches; there is at least one.

    Raises:
        UsageError: There are no launches, or the commit is unknown or not unique.
    """
    path = Path(name)
    beside = path.with_name(f"{path.name}.penstock") if path.name else path
    if path.exists() or beside.exists():
        records = launches_of(places_of(path))
        if not records:
            raise UsageError(f"{name} holds no launch")
        return records
    if not ledgers:
        raise UsageError(
            f"{name} is no file or folder; if it is a commit, name its ledger with --ledger"
        )
    records = [r for path in ledgers for r in launches_of(places_of(path))]
    return launches_at(name, records, listed([str(path) for path in ledgers]))


def launches_at(name: str, records: Sequence[Record], source: str) -> list[Record]:
    """The launches that were made at a commit, by the state of git in their records.

    Args:
        name: The commit's hash, its beginning, or what git calls it; with ``+dirty`` behind it,
            the launches made with changes on top of it.
        records: Launches.
        source: Where they are from, for an error.

    Returns:
        The launches.

    Raises:
        UsageError: No launch was made there, or there are several such commits.
    """
    made = [(commit_of(r.environment.get("git")), r) for r in records]
    commits = sorted({commit for commit, _ in made if commit})
    wanted, plus, dirty = name.partition("+")
    matches = _matching(wanted, plus + dirty, commits)
    if not matches and (full := commit_named(wanted)):
        matches = _matching(full, plus + dirty, commits)
    if len(matches) > 1:
        raise UsageError(f"commit {name} is not one but {_some(matches)} in {source}")
    if not matches:
        with_changes = _matching(wanted, "+dirty", commits)
        hint = f"; {name}+dirty names its launches with changes" if with_changes else ""
        at = f"it has launches of {_some(commits)}" if commits else "no launch of it names a commit"
        raise UsageError(f"{name} is no path, and no launch of {source} was made at it: {at}{hint}")
    return [record for commit, record in made if commit == matches[0]]


def _matching(name: str, changes: str, commits: Sequence[str]) -> list[str]:
    """The commits whose hash begins with ``name``, with or without changes on top."""
    if len(name) < _SHORTEST or not is_hash(name):
        return []
    split = (commit.partition("+") for commit in commits)
    return [a + plus + b for a, plus, b in split if a.startswith(name) and plus + b == changes]


def _some(commits: Sequence[str]) -> str:
    shown = [short_commit(commit) for commit in commits[:_NAMED]]
    more = len(commits) - len(shown)
    return listed([*shown, *([plural(more, "other")] * bool(more))])
