"""What benchmarks write into README.md, each between markers of its own."""

from __future__ import annotations

from pathlib import Path

README = Path(__file__).resolve().parent / "README.md"


def write(name: str, text: str) -> None:
    """Put a report between the markers of a name, and leave the rest alone."""
    markers = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, begin, rest = README.read_text().partition(markers[0])
    _, end, after = rest.partition(markers[1])
    if not (begin and end):
        raise SystemExit(f"{README.name} has lost its markers {' '.join(markers)}")
    README.write_text(f"{before}{begin}\n{text}\n{end}{after}")
