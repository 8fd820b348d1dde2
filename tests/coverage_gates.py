"""What the default tests reach, held to two gates: ``python tests/coverage_gates.py``.

``make check`` runs the default tests under coverage, subprocesses included. Lines and branches are
counted together, as ``coverage report`` does. A gate may be raised and is never lowered.
"""

import json
import tempfile
from pathlib import Path

import coverage

from house import PACKAGE, pure_rooms

PURE, WHOLE = 95.0, 88.0
"""Percent of the lines and branches of the pure rooms, and of all rooms."""


def reached() -> dict[str, tuple[int, int]]:
    """Lines and branches that were run, and those that there are, of each file."""
    measured = coverage.Coverage()
    measured.combine()
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "coverage.json")
        measured.json_report(outfile=str(page), include=[f"{PACKAGE}/*"])
        files = json.loads(page.read_text())["files"]
    counts = {}
    for path, file in files.items():
        of = file["summary"]
        name = str(Path(path).resolve().relative_to(PACKAGE))
        ran = of["covered_lines"] + of["covered_branches"]
        counts[name] = ran, of["num_statements"] + of["num_branches"]
    return counts


def main() -> int:
    counts = reached()
    pure = set(pure_rooms())
    failed = False
    for what, names, gate in (("pure rooms", pure & counts.keys(), PURE), ("all", counts, WHOLE)):
        percent = 100 * sum(counts[n][0] for n in names) / sum(counts[n][1] for n in names)
        failed |= percent < gate
        print(f"{what}: {percent:.1f} % of {len(names)} files, at least {gate:g} %")
    if failed:
        least = sorted(counts, key=lambda name: counts[name][0] - counts[name][1])[:20]
        for name in least:
            print(f"  {counts[name][1] - counts[name][0]:5} not reached in {name}")
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
