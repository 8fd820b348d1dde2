"""Commits of a git repository: their hashes by name, their order, and their number between two.

Each question is one call of git; the answer is None if git does not know. Names come from users and
from records, so each is passed as one word behind ``--end-of-options``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from .environment import ask_git

SHORT = 10
"""The digits of a commit that a reader sees."""
_HASH = re.compile(r"[0-9a-f]{4,64}")


def is_hash(name: str) -> bool:
    """Whether a name may be the beginning of a commit's hash."""
    return _HASH.fullmatch(name) is not None


def short_commit(commit: str) -> str:
    """A commit as a reader sees it, its ``+dirty`` kept.

    >>> short_commit("66eeca7f00d66eeca7f00d66eeca7f00d66eeca7+dirty")
    '66eeca7f00+dirty'
    """
    name, plus, dirty = commit.partition("+")
    return name[:SHORT] + plus + dirty


def commit_named(name: str, folder: Path | None = None) -> str | None:
    """The hash of a commit by one of git's names for it, such as ``main`` or ``HEAD~1``.

    Args:
        name: The name that a user typed.
        folder: A folder of the repository; None for the current one.

    Returns:
        The hash; None where there is no repository, or nothing in it has that name.
    """
    words = ["rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}"]
    return ask_git(words, folder)


def in_order(commits: Sequence[str], folder: Path | None = None) -> list[str] | None:
    """Commits by ancestry, the oldest first, and among unrelated ones by their time.

    Args:
        commits: Hashes, each once.
        folder: A folder of the repository; None for the current one.

    Returns:
        The same hashes; None where git does not know all of them.
    """
    if not commits or not all(map(is_hash, commits)):
        return None
    words = ["rev-list", "--topo-order", "--date-order", "--reverse", "--end-of-options", *commits]
    listed = ask_git(words, folder)
    if listed is None:
        return None
    place = {commit: number for number, commit in enumerate(listed.split())}
    return sorted(commits, key=place.__getitem__) if place.keys() >= set(commits) else None


def commits_between(before: str, after: str, folder: Path | None = None) -> int | None:
    """The number of commits that are in ``after`` and not in ``before``.

    Args:
        before: A hash.
        after: A hash.
        folder: A folder of the repository; None for the current one.

    Returns:
        The number; None where git does not know both.
    """
    if not (is_hash(before) and is_hash(after)):
        return None
    words = ["rev-list", "--count", "--end-of-options", f"{before}..{after}"]
    count = ask_git(words, folder)
    return int(count) if count is not None else None
