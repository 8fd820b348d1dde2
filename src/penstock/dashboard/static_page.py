"""A comparison as files for a web server: a page that loads no other file, and CSVs beside it."""

from __future__ import annotations

from dataclasses import replace as changed
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

from bokeh.embed import components
from bokeh.resources import Resources

from ..base import UsageError, check_folder, check_outputs, plural, write_output
from .catalogue import Catalogue
from .compare import runs_sheet, selected_of
from .listed_run import ListedRun
from .markup import rendered, style
from .sheet import csv_of, html_of
from .tabs import TITLES, content_of, sheet_of
from .view import Tab, View, view_of

NEWEST = 10
"""Number of the newest runs that are compared if no link is given."""


def write_static(catalogue: Catalogue, out: Path, link: str, replace: bool) -> list[Path]:
    """Write the comparison of a link, all its tabs on one page.

    Args:
        catalogue: The runs, refreshed once.
        out: The folder.
        link: The link of a view, or its query; empty for the newest runs.
        replace: Replace files that Penstock did not write.

    Returns:
        The files.

    Raises:
        UsageError: There is no such run, or a file cannot be written.
    """
    check_folder(out, "--static")
    view = view_of(urlsplit(link).query if "?" in link else link)
    runs = _runs_of(catalogue, view, link)
    selected, notes = selected_of(runs, catalogue.details)
    texts = {"runs.csv": csv_of(runs_sheet(runs))}
    parts: list[dict[str, Any]] = []
    figures: list[Any] = []
    for tab in get_args(Tab):
        shown = _view_of_tab(view, tab)
        content = content_of(tab, selected, shown)
        parts.append(
            {
                "title": TITLES[tab],
                "notes": content.notes,
                "count": len(content.figures),
                "markup": content.markup,
                "tables": [html_of(sheet) for sheet in content.sheets],
            }
        )
        figures += content.figures
        if (sheet := sheet_of(tab, selected, shown, content)).head:
            texts[f"{tab}.csv"] = csv_of(sheet)
    script, elements = components(figures) if figures else ("", ())
    drawn = iter(elements)
    for part in parts:
        part["figures"] = [*islice(drawn, part["count"])]
    template = files(__package__).joinpath("still.html.jinja").read_text()
    texts["index.html"] = rendered(
        template,
        runs=html_of(runs_sheet(runs)),
        notes=notes,
        parts=parts,
        script=script,
        style=style(),
        resources=Resources("inline", components=["bokeh"]).js_raw if figures else [],
        files=sorted(texts),
    )
    check_outputs(*(("--static", out / name) for name in texts), replace=replace)
    for name, text in texts.items():
        write_output("--static", out / name, text, replace=replace)
    return [out / name for name in sorted(texts)]


def _runs_of(catalogue: Catalogue, view: View, link: str) -> list[ListedRun]:
    """The runs that a view selects, or the newest ones if it selects none."""
    keys = view.runs or tuple(run.key for run in catalogue.runs[:NEWEST])
    runs = [run for key in keys if (run := catalogue.by_key.get(key))]
    if lost := len(keys) - len(runs):
        raise UsageError(f"{plural(lost, 'run')} of --view {link} cannot be found")
    if not runs:
        raise UsageError("there is no run to compare")
    return runs


def _view_of_tab(view: View, tab: Tab) -> View:
    """The view with another tab open. Chosen curves belong to their tab, so another tab starts
    without any."""
    return changed(view, tab=tab, curves=view.curves if tab == view.tab else ())
