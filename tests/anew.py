"""Penstock imported anew, as a fresh interpreter would, where its libraries are loaded already."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def imported_anew() -> Iterator[None]:
    """Within it no module of Penstock has been imported; after it, all are those of before."""
    before = _forget()
    try:
        yield
    finally:
        _forget()
        sys.modules.update(before)


def _forget() -> dict[str, object]:
    names = [name for name in sys.modules if name.partition(".")[0] == "penstock"]
    return {name: sys.modules.pop(name) for name in names}
