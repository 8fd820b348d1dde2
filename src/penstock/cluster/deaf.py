"""A preload of Dask's worker, which makes it ignore Ctrl-C: in a shared terminal, the client
answers it."""

from __future__ import annotations

import signal
from typing import Any


def dask_setup(worker: Any) -> None:
    """Ignore Ctrl-C. Dask calls this in the process of a worker.

    Args:
        worker: The ``distributed.Worker``.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
