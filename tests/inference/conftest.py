"""Fixtures of all test files of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from ..places import ROOT


@pytest.fixture(scope="session", autouse=True)
def _tests_walked_once() -> Iterator[None]:
    """Each run of a net that a test defines looks for all that its file imports: 5 ms, as long as
    the rest of a small job. These files stay as they are."""
    if find_spec("torch") is None:  # some tests of plans go without it
        yield
        return
    from penstock.inference.opening import identity

    real, kept = identity._close, dict[tuple[Path, Path], dict[str, Path]]()
    walking = False

    def close(file: Path, root: Path, files: dict[str, Path]) -> None:
        nonlocal walking
        if walking or not file.is_relative_to(ROOT / "tests"):
            real(file, root, files)
            return
        if (file, root) not in kept:
            walking, reached = True, dict[str, Path]()
            try:
                real(file, root, reached)
            finally:
                walking = False
            kept[file, root] = reached
        files.update(kept[file, root])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(identity, "_close", close)
        yield
