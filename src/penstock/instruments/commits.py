"""Commits of a git repository: their hashes by name.

Each question is one call of git; the answer is None if git does not know. Names come from users and
from records, so each is passed as one word behind ``--end-of-options``.
"""

from __future__ import annotations

import re
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
