"""The names of the files in a run folder, and how they are read. No other room spells them.

    run.json         name, settings, fingerprint and plan of the run; the maker of its blocks:
                     versions, code and kind of machine
    done.log         one line for each block with its checksums, appended and synced after the
                     block is written; see `block_log`
    statistics.json  exact global percentiles
    metrics.jsonl    rows of telemetry
    retries.jsonl    a row for each read or write that failed and was tried again
    stacks.txt       the stack of each thread, if the run stopped making progress
    ended.json       why a run ended before it was done; a run that was killed leaves none
    summary.json     written last, by a run that succeeded

Each of several processes that write one run has files of its own, such as done-NAME.log.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...base import RUN_FILE, SUMMARY_FILE, TRACEBACK_FILE, json_object
from ...data import Located

LOG_FILE = "done.log"
SCALINGS_FILE = "statistics.json"
METRICS_FILE = "metrics.jsonl"
RETRIES_FILE = "retries.jsonl"
STACKS_FILE = "stacks.txt"
ENDING_FILE = "ended.json"
STATISTICS_FOLDER = "statistics"
"""Folder for counts of values by several processes, before they are merged."""
FOUND_FOLDERS = VIEWS, HOLES, OBJECTS = "views", "holes", "objects"
"""Folders of a labelling, until it is done: what a round finds, in a file *.npz for each block."""
OWNERS_FILE, HOLES_FILE = "owners.npz", "holes.npz"
"""The owners of a decoder's objects, and the background that a labelling fills."""
IDS_FILE, STARTS_FILE = "ids.npy", "starts.npy"
"""The final numbers of objects. The second file is written last, when the output is there."""
AMBIGUOUS_FILE = "ambiguous.csv"
"""The rows of the table that a reader should look at; the picture of some lies beside it."""
LOGS_FOLDER = "done/"
"""Folder of the logs of a run folder in a bucket; see `bucket_folder`."""
RUN_FILES = (RUN_FILE, LOG_FILE, SCALINGS_FILE, METRICS_FILE, SUMMARY_FILE,
             RETRIES_FILE, STACKS_FILE, ENDING_FILE, TRACEBACK_FILE)  # fmt: skip
"""The files of a run folder."""


def own_name(name: str, writer: str) -> str:
    """The name of one writer's own file. The name of a writer may have any characters.

    >>> own_name("done.log", "tcp://10.0.0.1:80")
    'done-tcp-10.0.0.1-80.log'
    """
    stem, dot, suffix = name.partition(".")
    return f"{stem}-{plain_name(writer)}{dot}{suffix}"


def plain_name(writer: str) -> str:
    """The name of a writer as a part of a file's name."""
    return re.sub(r"[^A-Za-z0-9._*-]+", "-", writer).strip("-")


def of_each(name: str) -> str:
    """The glob pattern of the own files of all writers.

    >>> of_each("done.log")
    'done-*.log'
    """
    return own_name(name, "*")


def is_run(content: bytes) -> bool:
    """Whether this is a run.json."""
    return {"settings", "fingerprint"} <= json_object(content).keys()


def is_label_run(run: Mapping[str, Any]) -> bool:
    """Whether a run.json is that of ``penstock label``, and not of ``infer``."""
    return run.get("verb") == "label"


def default_run_dir(sink: Located) -> Path | None:
    """The run folder of an output: beside a local store, in the working folder for a remote one.
    None for an array in memory.

    If the name of the store does not say which array is meant, a hash of its address is added.
    """
    store = sink.local_path
    if store is not None and str(store.resolve()) == sink.address:
        return store.with_name(store.name + ".penstock")
    if store is None:
        if "://" not in sink.address:
            return None
        store = Path(sink.address.rstrip("/").rpartition("/")[2])
    address = hashlib.sha256(sink.address.encode()).hexdigest()[:8]
    return store.with_name(f"{store.name}-{address}.penstock")
