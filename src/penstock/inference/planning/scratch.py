"""Measure how fast the disk of a run folder is, with a temporary file."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from ...base import nearest
from ...instruments import drop_pages_of

PROBE_BYTES = 2**26
PROBE_S = 1.0
"""Most seconds of writing, and of reading."""
_BLOCK = 2**22


def scratch_rate(folder: Path) -> float | None:
    """Measure the bytes per second at which a disk is written and read back.

    The file is synced and, if possible, dropped from the page cache, as a job spills more than its
    memory holds. No file is left behind, not even by a kill if the system allows unnamed files.

    Args:
        folder: A folder, which need not exist yet.

    Returns:
        The harmonic mean of both rates; None if no file can be written, or the disk is too full.
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
