"""Libraries that are imported when a test first uses them."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest


class _Later:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # which pytest looks for in all that a file holds
            raise AttributeError(name)
        return getattr(import_module(self._name), name)


def imported_later(name: str) -> Any:
    """A library, in whose absence the tests of a file are skipped. Each worker of xdist collects
    all files and runs some: what it runs not, it need not load."""
    if find_spec(name.partition(".")[0]) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)
    return _Later(name)
