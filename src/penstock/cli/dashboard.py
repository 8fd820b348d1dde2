"""``penstock dashboard FOLDER ...``: runs compared in a browser, while they go on and after."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..base import UsageError, check_local, plural, require
from ..reports import Catalogue, Report, serve_runs
from ..scaling import report_of_scaling, runs_of_others

PORT = 5006
EXAMPLES = """
penstock dashboard outputs logs            # all runs in two folders, at http://localhost:5006/
penstock dashboard outputs --port 0        # at any port that is free
penstock report outputs --html runs.html   # the same page as a file
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folders",
        type=Path,
        nargs="+",
        metavar="FOLDER",
        help="a folder that is searched for runs, ledgers, output of SLURM jobs and stores of "
        "MLflow; or one of these, or an export of Comet",
    )
    parser.add_argument(
        "--port", type=int, default=PORT, help=f"the port; 0 for any that is free (default: {PORT})"
    )


def run(args: argparse.Namespace) -> int:
    for folder in args.folders:
        check_local(folder, "FOLDER")
    require("jinja2", "plot")
    catalogue = Catalogue(args.folders, runs_of_others)

    def say(address: str) -> None:
        runs = plural(len(catalogue.runs), "run")
        print(f"{address}  {runs}; Ctrl-C ends it", flush=True)

    serve_runs(catalogue, lambda: _about(args.folders, len(catalogue.runs)), args.port, say)
    return 0


def _about(folders: list[Path], count: int) -> Report:
    """The report beside the runs: how the trainings among them scale, if they do."""
    title = f"Penstock: {', '.join(folder.resolve().name or str(folder) for folder in folders)}"
    verdict = f"{plural(count, 'run')}; the page is renewed as they go on."
    try:
        study = report_of_scaling(folders, title, lambda sentence: None)
    except UsageError:  # there is no training
        return Report(title, [verdict])
    if len(study.chapters) == 1:  # no study, so there is a list of the trainings alone
        return Report(title, [verdict, *study.verdict])
    return Report(title, [verdict, *study.verdict], study.about, study.chapters)
