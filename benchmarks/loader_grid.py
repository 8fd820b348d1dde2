"""The grid of ``loader.py --grid``: our loader and five others on many layouts.

Every launch is a fresh process that reads one epoch; a round is a launch of every contender, in an
order of its own. What is compared is the mean of the logarithm of (ours / theirs), round by round,
with Student's interval: five rounds, and up to thirty, of ours and of who comes near, while the
interval holds 1.05.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import t as student

import readme
from loader_epoch import BATCH, CONTENDERS, LAYOUTS, OURS, QUICK, THREADS, Layout, write
from penstock import pagecache

HERE = Path(__file__).resolve().parent
MOST = 1.05
"""The upper bound of our time over the best contender's."""
NEAR = 1.5
"""Who takes so many times as long as the best is no longer measured after the first rounds."""
COLUMNS = (
    "layout", "order", "our epoch", "best contender", "our time / its time", "rounds", "target",
    "engine",
)  # fmt: skip
COLD = "in order, cold"
SHUFFLES = {"in order": "none", "shuffled": "global"}

Row = dict[str, Any]


class Ratio(NamedTuple):
    """Our time over another's."""

    value: float
    low: float
    high: float
    rounds: int

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f} - {self.high:.2f}]"


def ratio(rows: Sequence[Row], other: str) -> Ratio:
    """Paired by round, 95 %."""
    ours, theirs = (
        {r["round"]: r["seconds"] for r in rows if r["contender"] == who} for who in (OURS, other)
    )
    logs = np.log([ours[n] / theirs[n] for n in sorted(set(ours) & set(theirs))])
    mean = float(logs.mean())
    wide = math.inf
    if len(logs) > 1:
        wide = float(student.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / math.sqrt(len(logs)))
    return Ratio(math.exp(mean), math.exp(mean - wide), math.exp(mean + wide), len(logs))


class Verdict(NamedTuple):
    best: str
    against: Ratio
    decided: str
    """met, missed or undecided."""


def verdict(rows: Sequence[Row]) -> Verdict:
    """Against the contender that our loader is least ahead of."""
    others = {r["contender"] for r in rows} - {OURS}
    ratios = {other: ratio(rows, other) for other in sorted(others)}
    best = max(ratios, key=lambda other: ratios[other].value)
    worst = max(ratios.values(), key=lambda found: found.high)
    decided = "met" if worst.high <= MOST else "missed" if ratios[best].low > MOST else "undecided"
    return Verdict(best, ratios[best], decided)


# --- measuring ----------------------------------------------------------------------------------


def launch(folder: Path, **job: Any) -> dict[str, Any]:
    """One process of ``loader_epoch.py``."""
    asked, answer = folder / "job.json", folder / "answer.json"
    answer.unlink(missing_ok=True)
    asked.write_text(json.dumps(job))
    command = [sys.executable, str(HERE / "loader_epoch.py"), str(asked), str(answer)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode or not answer.exists():
        what = f"{job['contender']} on {job['layout']}, {job['shuffle']}"
        raise SystemExit(f"{what} failed:\n{done.stderr[-2000:]}")
    return dict(json.loads(answer.read_text()))


def measured(
    layouts: Mapping[str, Layout], others: Sequence[str], rounds: tuple[int, int]
) -> Iterator[Row]:
    """The rows of every layout, one layout on disk at a time."""
    with tempfile.TemporaryDirectory(prefix="penstock-grid-") as place:
        folder = Path(place)
        for name, layout in layouts.items():
            path = folder / "array.zarr"
            write(layout, path)
            for shuffle in SHUFFLES:
                job = {"layout": name, "path": str(path), "shuffle": SHUFFLES[shuffle]}
                for contender in (OURS, *others) if shuffle == "shuffled" else (OURS,):
                    wrong = launch(folder, **job, contender=contender, verify=True)["wrong"]
                    if wrong:
                        raise SystemExit(f"{contender} on {name}: {wrong} values are wrong")
                yield from _rounds(folder, job, shuffle, others, rounds)
            job = {"layout": name, "path": str(path), "shuffle": "none"}
            yield from _rounds(folder, job, COLD, others, (2, 2))
            shutil.rmtree(path)


def _rounds(
    folder: Path, job: Mapping[str, Any], order: str, others: Sequence[str], rounds: tuple[int, int]
) -> Iterator[Row]:
    rows: list[Row] = []
    files = [file for file in Path(job["path"]).rglob("*") if file.is_file()]
    prepare: Callable[[Any], Any] = pagecache.drop if order == COLD else pagecache.warm
    contenders = [OURS, *others]
    least, most = rounds
    for number in range(most):
        if number >= least and (len(rows) < 2 or verdict(rows).decided != "undecided"):
            break
        if number == least:
            best = max(ratio(rows, other).value for other in others)
            contenders = [OURS, *(o for o in others if ratio(rows, o).value * NEAR > best)]
        for contender in random.Random(number).sample(contenders, len(contenders)):
            prepare(files)
            before = os.getloadavg()[0]
            answer = launch(folder, **job, contender=contender, verify=False)
            rows.append({
                "layout": job["layout"], "order": order, "round": number, "contender": contender,
                "load": before, **answer,
            })  # fmt: skip
    print(line_of(rows), flush=True)
    yield from rows


# --- what it says -------------------------------------------------------------------------------


def groups(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["layout"], row["order"]), []).append(row)
    return found


def line_of(rows: Sequence[Row]) -> str:
    """One line of the table."""
    found = verdict(rows)
    ours = [r for r in rows if r["contender"] == OURS]
    seconds = float(np.median([r["seconds"] for r in ours]))
    engine = str(ours[0]["engine"]).partition(":")[0]
    decided = "" if rows[0]["order"] == COLD else found.decided
    cells = (
        rows[0]["layout"], rows[0]["order"], f"{seconds:.2f} s", found.best, str(found.against),
        str(found.against.rounds), decided, engine,
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def page(rows: Sequence[Row], layouts: Mapping[str, Layout]) -> list[str]:
    """The table and its sentences."""
    each = groups(rows)
    warm = {key: own for key, own in each.items() if key[1] != COLD}
    lines = [
        f"| {' | '.join(COLUMNS)} |",
        "|---|---|--:|---|--:|--:|---|---|",
        *(line_of(own) for own in each.values()),
        "",
    ]
    verdicts = {key: verdict(own) for key, own in warm.items()}
    for decided in ("met", "missed", "undecided"):
        named = [f"{a} {b}" for (a, b), v in verdicts.items() if v.decided == decided]
        told = f": {'; '.join(named)}" if named and decided != "met" else ""
        lines.append(
            f"- {decided} on {len(named)} of {len(verdicts)} warm layouts and orders{told}"
        )
    for other in sorted({row["contender"] for row in rows} - {OURS}):
        ratios = [ratio(own, other).value for own in warm.values()]
        lines.append(
            f"- the median of our time over {other}'s is {float(np.median(ratios)):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f})"
        )
    reasons = {r["engine"] for r in rows if r["engine"]}
    lines += [f"- engine {reason}" for reason in sorted(reasons)]
    there = {row["layout"] for row in rows}
    told = [f"- {name}: {layout.told}" for name, layout in layouts.items() if name in there]
    lines += ["", *told]
    return lines


def head(rows: Sequence[Row], day: str, kept: str) -> str:
    loads = [r["load"] for r in rows]
    return (
        f"{day}, {THREADS} threads, batches of {BATCH}, one epoch a launch; {len(rows)} launches "
        f"at a load of {min(loads):.1f} to {max(loads):.1f}: [raw samples](results/{kept})."
    )


def main(results: Path, quick: bool, only: Sequence[str], report: Sequence[Path]) -> None:
    """Measure, or take what was measured, and write the page and the raw samples."""
    layouts = {n: v for n, v in (QUICK if quick else LAYOUTS).items() if not only or n in only}
    if report:
        rows = [json.loads(x) for p in report for x in gzip.decompress(p.read_bytes()).splitlines()]
    else:
        rows = list(
            measured(layouts, CONTENDERS[:2] if quick else CONTENDERS, (2, 2) if quick else (5, 30))
        )
    day = f"{datetime.now(UTC):%Y-%m-%d}"
    kept = results / f"{day}-loader-grid.jsonl.gz"
    results.mkdir(parents=True, exist_ok=True)
    with gzip.open(kept, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    text = "\n".join([head(rows, day, kept.name), "", *page(rows, layouts)])
    print(text)
    if not quick:
        readme.write("loader-grid", text)
