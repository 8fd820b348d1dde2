"""Penstock imported anew, as a fresh interpreter would, where its libraries are loaded already."""

import contextlib
import io
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from unittest.mock import patch

import pytest

OPTIONAL = frozenset(
    """
    bioimage_cpp cc3d comet_ml contourpy dask faster_coco_eval fastremap h5py imagecodecs jinja2
    liffile lightning_fabric lightning_utilities markupsafe matplotlib mlflow nd2 netCDF4 nibabel
    numcodecs obstore pandas pyarrow pydicom pylibCZIrw pynvml rasterio safetensors scipy skimage
    tensorboard tensorstore tifffile torch torchvision xarray xxhash zarr zarrs
    """.split()
)
"""Libraries of the extras: the core goes without them."""


class Absent:
    """A finder for which some libraries are not installed; it notes who was asked for."""

    def __init__(self, libraries: Collection[str]) -> None:
        self.libraries, self.asked = frozenset(libraries), set[str]()

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        top = name.partition(".")[0]
        if top in self.libraries:
            self.asked.add(top)
            raise ModuleNotFoundError(f"No module named {top!r}", name=top)


@contextmanager
def imported_anew(without: Collection[str] = ()) -> Iterator[set[str]]:
    """Within it no module of Penstock has been imported, and the libraries ``without`` cannot be;
    after it, all are those of before. It gives a set of those that were asked for nevertheless."""
    absent, gone = Absent(without), {"penstock", *without}
    before = _forget(gone)
    sys.meta_path.insert(0, absent)
    try:
        yield absent.asked
    finally:
        sys.meta_path.remove(absent)
        _forget(gone)
        sys.modules.update(before)


def _forget(gone: Collection[str]) -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] in gone]
    return {name: sys.modules.pop(name) for name in names}


def run_anew(code: str, words: Sequence[str] = (), without: Collection[str] = ()) -> str:
    """What code prints that imports Penstock anew. It asks for none of the libraries ``without``,
    not even to go on without them."""
    printed = io.StringIO()
    with (
        patch.object(sys, "argv", ["-c", *words]),
        contextlib.redirect_stdout(printed),
        imported_anew(without) as asked,
    ):
        exec(code, {"__name__": "__main__"})
    assert not asked
    return printed.getvalue()


class Ended(NamedTuple):
    """What became of a process."""

    code: int
    """As `subprocess` has it: a signal is a number below zero."""
    out: str
    err: str


def forked(work: Callable[[], object], folder: Path) -> Ended:
    """Have some work done by a fork of this process."""
    return fork(work, folder)()


def fork(work: Callable[[], object], folder: Path) -> Callable[[], Ended]:
    """Begin some work in a fork of this process: its libraries are loaded, and what it does to
    itself is gone with it. It may compute nothing with torch, whose threads are not forked.

    What is returned waits for its end.
    """
    sys.stdout.flush()
    with warnings.catch_warnings():  # from Python 3.12 on it warns where there are threads
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    files = [folder / name for name in ("forked.out", "forked.err")]
    if not child:
        code = 1
        try:
            os.chdir(folder)
            for number, file in enumerate(files, 1):
                os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(n, "w")) for n in (1, 2))
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def ended() -> Ended:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return Ended(code, *(file.read_text() if file.exists() else "" for file in files))

    return ended


def run_fresh(code: str, words: Sequence[str] = (), without: Collection[str] = ()) -> str:
    """The same in a fresh interpreter, in which all libraries are and those are not loaded."""
    code += f"\nimport sys; assert not [*filter(sys.modules.get, {tuple(without)!r})]"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


WAYS = (run_anew, pytest.param(run_fresh, marks=pytest.mark.slow))
