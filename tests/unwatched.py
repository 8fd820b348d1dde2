"""What is kept of a run says how busy the machine was and which commit ran: two looks at all
processes, a quarter of a second apart, and a process of git."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from penstock.instruments import environment


@functools.cache
def _commit_in(folder: Path) -> Any:
    return _git(folder)


_git = environment._git


def look_at_nobody(patch: pytest.MonkeyPatch) -> None:
    """Until this patch is undone nobody looks and nobody waits. Git is asked once a folder."""

    def kept(folder: Path | None = None) -> Any:
        return _commit_in((folder or Path()).absolute())

    patch.setattr(environment, "WATCH_S", 0.0)
    patch.setattr(environment, "_cpu_seconds_of_others", dict)
    patch.setattr(environment, "_git", kept)
