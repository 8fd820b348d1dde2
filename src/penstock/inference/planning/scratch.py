"""How fast the disk of a run folder is, by a file that is gone at once."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from ...base import nearest
from ...instruments import drop_pages_of

PROBE_BYTES = 2**26
PROBE_S = 1.0
"""Seconds after which no more is written, or read."""
_BLOCK = 2**22


def scratch_rate(folder: Path) -> float | None:
    """Bytes per second that a disk takes, and that it gives back.

    What was written is synced and dropped from the page cache where that can be done: a job spills
    more than its memory holds. The file has no name where the system allows it, and none is left.

    Args:
        folder: A folder, which need not be there yet.

    Returns:
        The rate; None where no file can be made, or the disk is too full.
    """
    content, back = os.urandom(_BLOCK), bytearray(_BLOCK)
    try:
        with tempfile.TemporaryFile(dir=nearest(folder), buffering=0) as file:
            began = time.perf_counter()
            written = read = 0
            while written < PROBE_BYTES and time.perf_counter() - began < PROBE_S:
                written += file.write(content)
            os.fsync(file.fileno())
            drop_pages_of(file.fileno())
            middle = time.perf_counter()
            file.seek(0)
            while read < written and time.perf_counter() - middle < PROBE_S:
                read += file.readinto(back) or 0
            end = time.perf_counter()
    except OSError:
        return None
    return 2 / ((middle - began) / written + (end - middle) / read)
