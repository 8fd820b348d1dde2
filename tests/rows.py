"""Tables on disk."""

import csv
from pathlib import Path


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV, each of which has all its fields."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(None not in row and None not in row.values() for row in rows), "a line is ragged"
    return rows
