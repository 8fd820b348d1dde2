"""Fixtures that several test files of this folder share."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program of torch.export, of any batch up to 64."""
    import torch

    from .kit import Net, X

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("programs") / "net.pt2"
    sizes = {"x": {0: torch.export.Dim("batch", min=1, max=64)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of its compiler
        torch.export.save(torch.export.export(Net().eval(), (X,), dynamic_shapes=sizes), path)
    return path
