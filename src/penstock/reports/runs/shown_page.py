"""The page of runs: its plain values, which are rows of the list and details as far as a page has
room, and its server, which renews it as records come."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ...base import plural
from ..charts.chart import document_of, thinned
from ..content import Report
from ..loopback import LoopbackHandler, LoopbackServer
from ..page import html_page
from ..places import places_of
from .catalogue import Catalogue
from .shown_run import RunCurve, RunDetails, ShownRun, unit_of, words_of

MOST_ROWS = 5_000
"""Rows that a page holds; it says how many runs it leaves out."""
MOST_BYTES = 5 * 2**18
"""Bytes of details. With its rows a page of a hundred runs has less than 3 MB."""
_POINTS = (40, 400)
_POINTS_OF_ALL = 8_000
"""Points of a curve: fewer if there are many runs."""
_FIRST_METRICS = (
    "step.median_s", "training_s", "seconds", "best.score", "final.val_loss", "final.val_acc",
    "samples_per_s", "voxels_per_s", "work.samples", "work.pixels", "memory.host_peak",
    "memory.device_peak",
)  # fmt: skip
_FIRST_CURVES = (
    "val_loss", "train_loss", "train_loss_step", "val_acc", "step_s", "cpu_percent", "rss_bytes",
    "gpu0_util_percent", "gpu0_memory_bytes", "read_bytes_per_s", "write_bytes_per_s",
)  # fmt: skip


def page_data(
    catalogue: Catalogue, asked: Collection[str] = (), live: bool = False
) -> dict[str, Any]:
    """The runs of a page.

    Args:
        catalogue: The runs.
        asked: The keys of the runs whose details come first; none for the newest ones.
        live: Whether a server gives the details of other runs.

    Returns:
        Rows, details by the keys of runs, and what is picked at first: the two newest cases, or the
        runs that are asked for.
    """
    rows = list(catalogue.runs[:MOST_ROWS])
    first = [catalogue.by_key[key] for key in asked if key in catalogue.by_key]
    newest = list(dict.fromkeys(run.case for run in first or rows))
    cases = newest if first else newest[:2]
    ordered = [*first, *sorted(rows, key=lambda run: run.case not in cases)]
    ordered = list({run.key: run for run in ordered}.values())
    notes = list(catalogue.notes)
    if more := len(catalogue.runs) - len(rows):
        notes.append(f"{plural(more, 'older run')} left out: name a folder that holds fewer.")
    details = _details(catalogue, ordered[: len(first)] if live and first else ordered)
    parts = "metrics", "curves", "settings"
    names = {part: {n for d in details.values() for n in d[part]} for part in parts}
    numbers = names["metrics"] | names["curves"]
    words = {name: name.replace("_", "-") for name in names["settings"]}  # as flags have them
    words |= {name: words_of(name) for name in numbers}
    return {
        "live": live,
        "version": catalogue.version,
        "rows": [_row(run) for run in rows],
        "picked": cases[:200],
        "notes": notes,
        "details": details,
        "order": {
            "metrics": _first(_FIRST_METRICS, names["metrics"]),
            "curves": _first(_FIRST_CURVES, names["curves"]),
        },
        "units": {n: unit for n in numbers if (unit := unit_of(n))},
        "words": {name: shown for name, shown in words.items() if shown != name},
    }


def _first(names: Iterable[str], held: Collection[str]) -> list[str]:
    """The names that are held, the most important first."""
    return list(dict.fromkeys([*(name for name in names if name in held), *sorted(held)]))


def _row(run: ShownRun) -> dict[str, Any]:
    names = "key case name title kind status source workload machine model began seconds".split()
    values = {name: getattr(run, name) for name in names}
    values |= {"title": run.title or run.name, "tags": dict(run.tags)}
    values["seconds"] = document_of(run.seconds)
    return {name: value for name, value in values.items() if value not in (None, "", {})}


def _details(catalogue: Catalogue, runs: Collection[ShownRun]) -> dict[str, dict[str, Any]]:
    """The details of as many runs as there is room for."""
    least, most = _POINTS
    points = max(least, min(most, _POINTS_OF_ALL // max(1, len(runs))))
    details, room = {}, MOST_BYTES
    for run in runs:
        document = _document(catalogue.details(run), points)
        room -= len(json.dumps(document))
        if room < 0:
            break
        details[run.key] = document
    return details


def _document(details: RunDetails, points: int) -> dict[str, Any]:
    return {
        "settings": dict(details.settings),
        "metrics": dict(details.metrics),
        "curves": {name: _curve(curve, points) for name, curve in details.curves.items()},
        "pictures": [
            {"name": each.caption, "figure": document_of(each.draw())} for each in details.pictures
        ],
        **({"error": details.error} if details.error else {}),
    }


def _curve(curve: RunCurve, points: int) -> dict[str, Any]:
    at = thinned(curve.values, points)
    columns: Mapping[str, Any] = {"values": curve.values, **curve.places}
    document: dict[str, Any] = {n: document_of(c[at]) for n, c in columns.items()}
    return document | ({"machine": 1} if curve.of_machine else {})


def page_of_sides(names: Sequence[str]) -> dict[str, Any]:
    """The runs of a page that opens on the two sides of a comparison.

    Args:
        names: What the user named, as `launches_named` takes it.

    Returns:
        The runs as `page_data` gives them; the newest case of each side is picked.
    """
    runs: list[ShownRun] = []
    asked: list[str] = []
    for letter, name in zip("AB", names, strict=True):
        side = [
            replace(
                run,
                key=f"{letter}{run.key}",
                case=f"{letter}{run.case}",
                name=f"{letter}: {run.name}",
                title=f"{letter}: {run.title or run.name}",
            )
            for run in Catalogue(place.path for place in places_of(Path(name))).runs
        ]
        runs += side
        asked += [run.key for run in side if run.case == side[0].case]
    return page_data(Catalogue.holding(runs), asked)


_MOST_ASKED = 200
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}


def serve_runs(
    catalogue: Catalogue, about: Callable[[], Report], port: int, say: Callable[[str], None]
) -> None:
    """Serve the page until the process is interrupted.

    Args:
        catalogue: The runs.
        about: Makes the report that the page holds beside the runs.
        port: The port; 0 for any that is free.
        say: Function that takes the address of the page when it is served.

    Raises:
        UsageError: The port is taken.
    """
    with RunsServer(_PageHandler, port) as server:
        server.catalogue, server.about = catalogue, about
        say(f"http://localhost:{server.port}/")
        server.serve()


class RunsServer(LoopbackServer):
    """The server, and what its answers are made of."""

    catalogue: Catalogue
    about: Callable[[], Report]


class _PageHandler(LoopbackHandler):
    """Answers a request for the page or its data. No request names a file."""

    server: RunsServer

    def do_GET(self) -> None:
        if self.refused():
            return
        asked = urlsplit(self.path)
        query = parse_qs(asked.query, max_num_fields=2 * _MOST_ASKED)
        keys, catalogue = query.get("run", [])[:_MOST_ASKED], self.server.catalogue
        catalogue.refresh()
        if asked.path == "/":
            page = html_page(self.server.about(), page_data(catalogue, keys, live=True))
            self._answer("text/html", page)
        elif asked.path != "/data.json":
            self.send_error(404)
        elif "again" not in query and query.get("version") == [str(catalogue.version)]:
            self._answer("application/json", "", 204)
        else:
            document = page_data(catalogue, keys, live=True)
            self._answer("application/json", json.dumps(document))

    def _answer(self, kind: str, text: str, status: int = 200) -> None:
        body = text.encode(errors="replace")
        self.begin(status, f"{kind}; charset=utf-8", len(body), _HEADERS)
        self.wfile.write(body)
