"""How busy GPUs were, from lines of nvidia-smi in the log of a job."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

MOST_READINGS = 1 << 20
"""The maximum number of readings that are kept: those of a week."""

_READING = re.compile(
    r"MiB\s*/\s*\d+MiB\s*\|\s*(\d{1,3})%"
    r"|^\d{1,3}, *(\d{1,3}) ?%, *\d{1,3} ?%"
    r"|\bGPU[-_ ]util(?:i[sz]ation)?\s*[:=]\s*(\d{1,3}(?:\.\d+)?) ?%",
    re.IGNORECASE,
)
"""A row of what nvidia-smi prints, a row of its CSV without names, and a line of a user's own."""
_NAMES = re.compile(
    r"(?:.*,)?\s*utilization\.gpu(?: |,|$)|#\s*(?:Date\s+)?(?:Time\s+)?gpu\s", re.IGNORECASE
)
"""The names of columns, as ``nvidia-smi --query-gpu`` and ``nvidia-smi dmon`` print them."""
_PERCENT = re.compile(r"(\d{1,3}) ?%?")


@dataclass
class GpuReadings:
    """Readings of GPU-Util of all GPUs, in the order of their lines."""

    table: tuple[str, int, int] | None = None
    """The separator of the table of nvidia-smi that was last begun, the place of the readings, and
    the number of columns."""
    percents: list[float] = field(default_factory=list)

    def take(self, line: str) -> bool:
        """Keep the reading of a line, or the names of the columns of those that come. Returns False
        if the line is neither."""
        if _NAMES.match(line):
            comma = r"\s*,\s*" if "," in line else r"\s+"
            names = [name.partition(" ")[0] for name in re.split(comma, line.strip("# \t"))]
            place = next((i for i, n in enumerate(names) if n in ("utilization.gpu", "sm")), None)
            # The rows of `nvidia-smi pmon` are of processes.
            self.table = None if place is None or "pid" in names else (comma, place, len(names))
            return True
        reading = _READING.search(line) or self._in_table(line)
        if reading and len(self.percents) < MOST_READINGS:
            self.percents.append(float(reading[reading.lastindex or 0]))
        return reading is not None

    def _in_table(self, line: str) -> re.Match[str] | None:
        if self.table is None:
            return None
        comma, place, count = self.table
        cells = re.split(comma, line.strip())
        return _PERCENT.fullmatch(cells[place]) if len(cells) == count else None
