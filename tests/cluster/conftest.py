"""One SLURM for all tests of this folder that ask for it, and one parser of ``slurm``."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Sequence

import pytest

from penstock import cli

from .slurm_cluster import Cluster


@pytest.fixture(scope="package", autouse=True)
def _parser_made_once() -> Iterator[None]:
    """To make the parser of ``slurm`` takes longer than most of its commands do."""
    real = cli.parser_of
    kept = functools.cache(lambda: real(["slurm"]))

    def parser_of(words: Sequence[str]) -> argparse.ArgumentParser:
        return kept() if words[:1] == ["slurm"] else real(words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "parser_of", parser_of)
        yield


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Until the last of them, as it takes the network of this thread with it."""
    made = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture
def used(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The cluster, with this process as its user."""
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, cluster.environment[name])
    return cluster
