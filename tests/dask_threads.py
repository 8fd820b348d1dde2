"""Workers of Dask that are threads of the test's own process: nothing is imported anew."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def threads_of_this_process(workers: int = 2) -> Iterator[str]:
    """The address of a scheduler of the user's own, and of so many workers."""
    import distributed

    # The port of its server is a free one, and not that of another cluster on this machine.
    free = "127.0.0.1:0"
    with distributed.LocalCluster(
        workers, 1, processes=False, host="127.0.0.1", protocol="tcp", dashboard_address=free
    ) as cluster:
        yield cluster.scheduler_address
