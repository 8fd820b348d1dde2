"""A preload module of Dask's workers: it imports torch and the rest while another worker opens the
job."""

from __future__ import annotations

import contextlib
import importlib
import threading
from typing import Any


def dask_setup(worker: Any) -> None:
    """Begin to import what the tasks of a job need. Dask calls this in each worker process.

    Args:
        worker: The ``distributed.Worker``.
    """
    threading.Thread(target=_load, daemon=True).start()


def _load() -> None:
    with contextlib.suppress(Exception):  # the first task says what is wrong
        importlib.import_module(f"{__package__.rpartition('.')[0]}.opening.job")
