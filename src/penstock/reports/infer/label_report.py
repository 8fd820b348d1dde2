"""A run of ``penstock label`` as a report."""

from __future__ import annotations

import csv
from itertools import islice
from pathlib import Path
from typing import Any

from ...base import RUN_FILE, SUMMARY_FILE, plural, read_json
from ...inference import AMBIGUOUS_FILE, PlaneEnds, RunLook, is_label_run
from ..content import Chapter, Report
from ..table import Section, settings_table

_ROWS = 20
"""The most objects that are listed."""


def is_labelling(folder: Path) -> bool:
    """Whether it is the folder of a run of ``penstock label``."""
    content: Any = read_json(folder / RUN_FILE)
    return isinstance(content, dict) and is_label_run(content)


def report_of_labels(folder: Path) -> Report:
    """The report of a labelling.

    Args:
        folder: The folder, with run.json in it.

    Returns:
        The report.

    Raises:
        UsageError: It cannot be read.
    """
    settings = read_json(folder / RUN_FILE)["settings"]
    sections = [Section("Settings", settings_table(settings))]
    name, summary = folder.name.removesuffix(".penstock"), folder / SUMMARY_FILE
    if not summary.is_file():
        state = RunLook(folder).status().line()
        return Report(name, [f"Not done: {state}."], (), [Chapter(f"Objects: {name}", sections)])
    done: dict[str, Any] = read_json(summary)
    verdict = [f"{plural(done['objects'], 'object')}, and {done['left_out']:,} left out."]
    if done["ends"]:
        verdict.append(f"{PlaneEnds(**done['ends']).sentence()}.")
    if done["joined"] is not None:
        verdict.append(
            f"Several blocks see {done['joined']:,}, the halo cuts {done['cut']:,}, and "
            f"{done['ambiguous']:,} are ambiguous."
        )
    if (listed := folder / AMBIGUOUS_FILE).is_file():
        with listed.open(encoding="utf-8", newline="") as file:
            rows = [*islice(csv.reader(file), _ROWS + 1)]
        more = f"The largest; all are in {listed}, and the picture {listed.with_suffix('.png')}."
        sections.insert(0, Section("Ambiguous objects", rows, [more]))
    about = [f"{done['taken']}, with {done['connectivity']} neighbours"]
    return Report(name, verdict, about, [Chapter(f"Objects: {name}", sections)])
