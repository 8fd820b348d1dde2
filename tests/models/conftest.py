"""Fixtures that several test files of this folder share."""

import warnings
from pathlib import Path
from typing import Any

import pytest


def _exported(net: Any, path: Path) -> Path:
    import torch

    from .kit import X

    sizes = {"x": {0: torch.export.Dim("batch", min=1, max=64)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of its compiler
        torch.export.save(torch.export.export(net.eval(), (X,), dynamic_shapes=sizes), path)
    return path


@pytest.fixture(scope="session")
def plain(tmp_path_factory) -> Path:
    """A program of torch.export, of any batch up to 64."""
    import torch

    from .kit import Net

    torch.manual_seed(0)
    return _exported(Net(), tmp_path_factory.mktemp("programs") / "net.pt2")


@pytest.fixture(scope="session")
def little(tmp_path_factory) -> Path:
    """Such a program of one layer, which torch reads in a sixth of the time."""
    from .kit import Layer

    return _exported(Layer(), tmp_path_factory.mktemp("programs") / "net.pt2")
