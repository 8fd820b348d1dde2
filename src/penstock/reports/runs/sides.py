"""The two sides of a comparison as runs of a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...instruments import Record
from ..run_settings import differing_knobs
from .catalogue import Catalogue
from .folder_runs import shown_inference, shown_training
from .ledger_runs import named_by, run_of_record
from .page_data import page_data
from .shown_run import ShownRun


def page_of_sides(names: Sequence[str], sides: Sequence[Sequence[Record]]) -> dict[str, Any]:
    """The runs of a page that opens on the two sides of a comparison.

    Args:
        names: What the user named.
        sides: The launches of each, as `launches_named` reads them.

    Returns:
        The runs as `page_data` gives them; the first case of each side is picked.
    """
    knobs = differing_knobs(record for side in sides for record in side)
    runs, picked = [], []
    for letter, name, records in zip("AB", names, sides, strict=True):
        of_side = [
            replace(
                run,
                key=f"{letter}{run.key}",
                case=f"{letter}{run.case}",
                name=f"{letter}: {run.name}",
                title=f"{letter}: {run.title or run.name}",
            )
            for run in (_run_of(record, name, knobs) for record in records)
        ]
        runs += of_side
        picked += [run.case for run in of_side[:1]]
    asked = [run.key for run in runs if run.case in picked]
    return page_data(Catalogue.holding(runs), asked)


def _run_of(record: Record, source: str, knobs: Sequence[str]) -> ShownRun:
    folder = Path(record.id)  # of a run folder; the identifier of a launch is no path
    if record.scenario == "training" and folder.is_dir():
        return shown_training(folder)
    if record.scenario == "infer" and folder.is_dir():
        return shown_inference(folder)
    return named_by(knobs, run_of_record(record, source), record)
