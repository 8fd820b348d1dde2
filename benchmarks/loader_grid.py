"""The grid of ``loader.py --grid``: our loader and five others on many layouts.

Every launch is a fresh process that reads four epochs, of which the median of the last three counts
(of a cold array one, from its opening on); a round is a launch of every contender, in an
order of its own. What is compared is the mean of the logarithm of (ours / theirs), round by round,
with Student's interval: five rounds, and up to thirty, of ours and of who comes near, while the
interval holds 1.05. Who takes three times as long as the best after two rounds is out of the race.

What was measured is appended to one file after each layout and order. Another call measures what
that file lacks, so the grid can be done in parts; the page is made of all that is in the file.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import special

import readme
from loader_epoch import BATCH, CONTENDERS, LAYOUTS, OURS, QUICK, THREADS, Layout, write
from penstock.instruments import page_cache as pagecache

HERE = Path(__file__).resolve().parent
MOST = 1.05
"""The upper bound of our time over the best contender's."""
NEAR, FAR = 1.5, 3.0
"""Who takes so many times as long as the best is no longer measured after five rounds, and after
two."""
EPOCHS = 3
"""That are timed after the first one, which meets memory that is new to the process."""
KEPT = "loader-grid.jsonl.gz"
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


def ratio(rows: Sequence[Row], other: str, what: str = "seconds") -> Ratio:
    """Paired by round, 95 %: of an epoch, or (``first_s``) of opening and the first one."""
    ours, theirs = (
        {r["round"]: r[what] for r in rows if r["contender"] == who} for who in (OURS, other)
    )
    logs = np.log([ours[n] / theirs[n] for n in sorted(set(ours) & set(theirs))])
    mean = float(logs.mean())
    wide = math.inf
    if len(logs) > 1:
        wide = float(
            special.stdtrit(len(logs) - 1, 0.975) * logs.std(ddof=1) / math.sqrt(len(logs))
        )
    return Ratio(math.exp(mean), math.exp(mean - wide), math.exp(mean + wide), len(logs))


class Verdict(NamedTuple):
    best: str
    against: Ratio
    decided: str
    """met, missed or undecided."""


def verdict(rows: Sequence[Row]) -> Verdict:
    """Against the contender that our loader is least ahead of, of those measured to the last."""
    others = sorted({r["contender"] for r in rows} - {OURS})
    ratios = {other: ratio(rows, other) for other in racing(rows, others, FAR)}
    last = max(each.rounds for each in ratios.values())
    ratios = {other: each for other, each in ratios.items() if each.rounds == last}
    best = max(ratios, key=lambda other: ratios[other].value)
    worst = max(ratios.values(), key=lambda each: each.high)
    decided = "met" if worst.high <= MOST else "missed" if ratios[best].low > MOST else "undecided"
    return Verdict(best, ratios[best], decided)


def racing(rows: Sequence[Row], others: Sequence[str], times: float) -> list[str]:
    """The others that take less than so many times as long as the best of them."""
    values = {other: ratio(rows, other).value for other in others}
    return [other for other in others if values[other] * times > max(values.values())]


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
    layouts: Mapping[str, Layout],
    others: Sequence[str],
    rounds: tuple[int, int],
    there: Container[tuple[str, str]],
) -> Iterator[list[Row]]:
    """The rows of every layout and order that is not there, one layout on disk at a time."""
    with tempfile.TemporaryDirectory(prefix="penstock-grid-") as place:
        folder = Path(place)
        for name, layout in layouts.items():
            orders = [order for order in (*SHUFFLES, COLD) if (name, order) not in there]
            if not orders:
                continue
            path = folder / "array.zarr"
            write(layout, path)
            for order in orders:
                job = {
                    "layout": name, "path": str(path), "shuffle": SHUFFLES.get(order, "none")
                }  # fmt: skip
                for contender in (OURS, *others) if order == "shuffled" else (OURS,):
                    wrong = launch(folder, **job, contender=contender, verify=True)["wrong"]
                    if wrong:
                        raise SystemExit(f"{contender} on {name}: {wrong} values are wrong")
                yield _rounds(folder, job, order, others, (2, 2) if order == COLD else rounds)
            shutil.rmtree(path)


def _rounds(
    folder: Path, job: Mapping[str, Any], order: str, others: Sequence[str], rounds: tuple[int, int]
) -> list[Row]:
    rows: list[Row] = []
    files = [file for file in Path(job["path"]).rglob("*") if file.is_file()]
    prepare: Callable[[Any], Any] = pagecache.drop_pages if order == COLD else pagecache.warm_pages
    contenders = [OURS, *others]
    least, most = rounds
    for number in range(most):
        if number >= least and (len(rows) < 2 or verdict(rows).decided != "undecided"):
            break
        if number in (2, least):
            contenders = [OURS, *racing(rows, others, NEAR if number == least else FAR)]
        for contender in random.Random(number).sample(contenders, len(contenders)):
            prepare(files)
            before = os.getloadavg()[0]
            epochs = 0 if order == COLD else EPOCHS
            answer = launch(folder, **job, contender=contender, verify=False, epochs=epochs)
            rows.append({
                "layout": job["layout"], "order": order, "round": number, "contender": contender,
                "load": before, "day": f"{datetime.now(UTC):%Y-%m-%d}", **answer,
            })  # fmt: skip
    print(line_of(rows), flush=True)
    return rows


# --- what it says -------------------------------------------------------------------------------


def groups(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    by_place: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        by_place.setdefault((row["layout"], row["order"]), []).append(row)
    return by_place


def line_of(rows: Sequence[Row]) -> str:
    """One line of the table."""
    against = verdict(rows)
    ours = [r for r in rows if r["contender"] == OURS]
    seconds = float(np.median([r["seconds"] for r in ours]))
    engine = str(ours[0]["engine"]).partition(":")[0]
    decided = "" if rows[0]["order"] == COLD else against.decided
    cells = (
        rows[0]["layout"], rows[0]["order"], f"{seconds:.2f} s", against.best, str(against.against),
        str(against.against.rounds), decided, engine,
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def spread(each: Collection[Sequence[Row]], other: str, what: str = "seconds") -> str:
    """The median of `ratio` over layouts and orders, and the least and most."""
    ratios = [ratio(rows, other, what).value for rows in each]
    return f"{float(np.median(ratios)):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def page(rows: Sequence[Row], layouts: Mapping[str, Layout]) -> list[str]:
    """The table and its sentences."""
    each = groups(rows)
    warm = {key: group for key, group in each.items() if key[1] != COLD}
    lines = [
        f"| {' | '.join(COLUMNS)} |",
        "|---|---|--:|---|--:|--:|---|---|",
        *(line_of(group) for group in each.values()),
        "",
    ]
    verdicts = {key: verdict(group) for key, group in warm.items()}
    for decided in ("met", "missed", "undecided"):
        named = [f"{a} {b}" for (a, b), v in verdicts.items() if v.decided == decided]
        which = f": {'; '.join(named)}" if named and decided != "met" else ""
        lines.append(
            f"- {decided} on {len(named)} of {len(verdicts)} warm layouts and orders{which}"
        )
    for other in sorted({row["contender"] for row in rows} - {OURS}):
        line = f"- the median of our time over {other}'s is {spread(warm.values(), other)}"
        if other != "torch":  # whose workers have read an epoch before its clock starts
            first = spread(warm.values(), other, "first_s")
            line += f"; of opening and the first epoch, {first}"
        lines.append(line)
    # A reason may name the array, which lay in a folder of that day.
    reasons = {re.sub(r"\S+/array\.zarr: ", "", r["engine"]) for r in rows if r["engine"]}
    lines += [f"- engine {reason}" for reason in sorted(reasons)]
    there = {row["layout"] for row in rows}
    notes = [f"- {name}: {layout.told}" for name, layout in layouts.items() if name in there]
    missing = [
        f"{name} {order}"
        for name in layouts
        for order in (*SHUFFLES, COLD)
        if (name, order) not in each
    ]
    lines += [f"- not yet measured: {'; '.join(missing)}"] if missing else []
    lines += ["", *notes]
    return lines


def head(rows: Sequence[Row], kept: str) -> str:
    loads, days = [r["load"] for r in rows], sorted({r["day"] for r in rows})
    return (
        f"{' and '.join(days)}, {THREADS} threads, batches of {BATCH}, "
        f"the median of {EPOCHS} epochs after a first; "
        f"{len(rows)} launches at a load of {min(loads):.1f} to {max(loads):.1f}: "
        f"[raw samples](results/{kept})."
    )


def read(path: Path) -> list[Row]:
    if not path.exists():
        return []
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def main(results: Path, quick: bool, only: Sequence[str], report: bool) -> None:
    """Measure what is not there yet, and write the page of all that is."""
    layouts = QUICK if quick else LAYOUTS
    if unknown := [name for name in only if name not in layouts]:
        raise SystemExit(f"--only {', '.join(unknown)}: the layouts are {', '.join(layouts)}")
    kept = results / KEPT
    rows = read(kept)
    if not report:
        results.mkdir(parents=True, exist_ok=True)
        asked = {name: layouts[name] for name in only or layouts}
        others, rounds = (CONTENDERS[:2], (2, 2)) if quick else (CONTENDERS, (5, 30))
        for launches in measured(asked, others, rounds, groups(rows)):
            with gzip.open(kept, "at") as file:  # so that what is stopped loses nothing before
                file.writelines(json.dumps(row) + "\n" for row in launches)
            rows += launches
    if not rows:
        raise SystemExit(f"{kept} holds nothing; measure first")
    text = "\n".join([head(rows, kept.name), "", *page(rows, layouts)])
    print(text)
    if not quick:
        readme.write("loader-grid", text)
