"""Locks on the GPU or the cores that a case uses, so that no case of another worker uses them too.

A worker locks a file for the GPU or for each core that it may use, in the host's folder for
temporary files. So workers with different cores, such as jobs of SLURM, do not wait for each other,
and a worker that dies frees its locks.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...base import PenstockError, is_locked, lock_file, plural
from ...instruments import Nvml

LOOK_EVERY_S = 0.2
"""Seconds between two tries to take a lock that another case holds."""
CASE = "case-"
"""The prefix of the lock file of a running case."""
_COUNT = itertools.count()


def taken_by(scenario: str, case: Mapping[str, Any]) -> list[str]:
    """Names of the GPU and the cores of this host that a case uses.

    A model on a GPU takes the GPU. Whatever reads data, or computes on the CPU, takes the cores.

    Args:
        scenario: the name of the scenario.
        case: its knobs.

    Returns:
        ``gpu-0``, or a name such as ``core-3`` for each core, or both.
    """
    device = str(case.get("device") or "cpu")
    gpus = visible_gpus() if device == "auto" or device.startswith("cuda") else []
    names = [f"gpu-{gpus[0]}"] if gpus else []
    return names if gpus and scenario == "model" else [*names, *_cores()]


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as the driver or the variable names them."""
    said = os.environ.get("CUDA_VISIBLE_DEVICES")
    if said is None:
        return [str(gpu["index"]) for gpu in Nvml()()]
    return [re.sub(r"[^\w-]", "_", name.strip()) for name in said.split(",") if name.strip()]


def taken_words(names: Sequence[str]) -> list[str]:
    """The names in short form, for a record: ``["gpu-1", "2 cores"]``."""
    cores = sum(name.startswith("core-") for name in names)
    words = [name for name in names if not name.startswith("core-")]
    return words + [plural(cores, "core")] * bool(cores)


@contextlib.contextmanager
def held(names: Sequence[str], wanted: Callable[[], bool]) -> Iterator[None]:
    """Hold these resources, once no other case of this host holds any of them.

    Args:
        names: the names.
        wanted: called now and then; when it returns False, the worker stops waiting.

    Raises:
        PenstockError: no client waits for the case any more, or the folder of the locks belongs to
            another user.
    """
    folder = _folder()
    places = [folder / f"{name}.lock" for name in names]
    while (locks := _locked(places)) is None:
        if not wanted():
            raise PenstockError("no client waits for this case any more")
        time.sleep(LOOK_EVERY_S * (0.5 + random.random()))
    mine = folder / f"{_case()}{next(_COUNT)}.lock"
    with locks, mine.open("a") as file:
        lock_file(file, wait=True)
        try:
            yield
        finally:
            mine.unlink(missing_ok=True)


def running_beside() -> int:
    """The number of cases of other workers that run on this host now."""
    beside = 0
    for path in _folder().glob(f"{CASE}*.lock"):
        with contextlib.suppress(OSError):
            beside += not path.name.startswith(_case()) and is_locked(path)
    return beside


def _case() -> str:
    return f"{CASE}{os.getpid()}-"


def _cores() -> list[str]:
    all_of_them = range(os.cpu_count() or 1)
    here = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else all_of_them
    return [f"core-{number}" for number in sorted(here)]


def _folder() -> Path:
    user = os.getuid() if hasattr(os, "getuid") else 0
    folder = Path(tempfile.gettempdir()) / f"penstock-cases-{user}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or (user and folder.stat().st_uid != user):
        raise PenstockError(f"{folder} is not a folder of this user")
    return folder


def _locked(places: Sequence[Path]) -> contextlib.ExitStack | None:
    """Hold locks of all files, or of none."""
    with contextlib.ExitStack() as locks:
        for place in places:
            if not lock_file(locks.enter_context(place.open("a"))):
                return None
        return locks.pop_all()
