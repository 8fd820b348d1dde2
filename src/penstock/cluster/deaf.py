"""A preload of Dask's worker: it is deaf to Ctrl-C, which in a terminal that it shares with the
client is the client's to answer."""

from __future__ import annotations

import signal
from typing import Any


def dask_setup(worker: Any) -> None:
    """Ignore Ctrl-C. Dask calls this in the process of a worker.

    Args:
        worker: The ``distributed.Worker``.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
