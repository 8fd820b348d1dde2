"""``penstock status RUN``: the progress of a run of ``infer``, read from the files of its
folder."""

from __future__ import annotations

import argparse
import time

from ..inference import RunLook, run_folder_of

EVERY_S = 5.0
"""Seconds between two lines of --watch."""


EXAMPLES = """
penstock status denoised.ome.zarr
penstock status denoised.ome.zarr --watch
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_of", metavar="RUN", help="an output of infer or label, or its run folder"
    )
    parser.add_argument(
        "--watch", action="store_true", help="repeat every 5 s while a process works on it"
    )


def run(args: argparse.Namespace) -> int:
    look = RunLook(run_folder_of(args.run_of))
    while True:
        status = look.status()
        print(status.line(), flush=True)
        if not args.watch or status.state not in ("running", "begun"):
            return 0 if status.state in ("running", "done") else 3
        time.sleep(EVERY_S)
