"""A preload of Dask's worker: it loads torch and the rest while another worker opens the job."""

from __future__ import annotations

import contextlib
import importlib
import threading
from typing import Any


def dask_setup(worker: Any) -> None:
    """Begin to load what the tasks of a job need. Dask calls this in the process of a worker.

    Args:
        worker: The ``distributed.Worker``.
    """
    threading.Thread(target=_load, daemon=True).start()


def _load() -> None:
    with contextlib.suppress(Exception):  # the first task says what is wrong
        importlib.import_module(f"{__package__.rpartition('.')[0]}.opening.job")
        # A run on shapes alone asks for it, at most operators of a net: a second of work.
        importlib.import_module("torch._dynamo")
