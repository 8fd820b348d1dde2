"""One SLURM for all tests of this folder that ask for it."""

from collections.abc import Iterator

import pytest

from .slurm_cluster import Cluster


@pytest.fixture(scope="package")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    """Until the last of them, as it takes the network of this thread with it."""
    made = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture
def used(cluster: Cluster, monkeypatch) -> Cluster:
    """The cluster, with this process as its user."""
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, cluster.environment[name])
    return cluster
