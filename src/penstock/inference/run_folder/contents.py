"""Read files of a run folder: whether one is a run.json, and the last rows of others."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

TAIL_BYTES = 2**20
"""Number of bytes that are read at the end of a file of rows, about 20 minutes of metrics."""


def tail_of(file: Path) -> bytes:
    """The end of a file of rows; nothing if it cannot be read."""
    with contextlib.suppress(OSError), file.open("rb") as rows:
        rows.seek(max(0, rows.seek(0, os.SEEK_END) - TAIL_BYTES))
        return rows.read()
    return b""


def rows_of(tail: bytes) -> list[dict[str, Any]]:
    """The rows at the end of a file, without incomplete ones."""
    rows = []
    for line in tail.splitlines():
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and "time" in row:
                rows.append(row)
    return rows


def is_run(content: bytes) -> bool:
    """Whether this is a run.json."""
    with contextlib.suppress(ValueError):
        run = json.loads(content)
        return isinstance(run, dict) and {"settings", "fingerprint"} <= run.keys()
    return False
