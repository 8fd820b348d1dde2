"""What is kept of a run says how busy the machine was: a look at all its processes, and another a
quarter of a second later."""

from __future__ import annotations

import pytest

from penstock.instruments import environment


def look_at_nobody(patch: pytest.MonkeyPatch) -> None:
    """Until this patch is undone nobody looks, and nobody waits."""
    patch.setattr(environment, "WATCH_S", 0.0)
    patch.setattr(environment, "_cpu_seconds_of_others", dict)
