"""Restore the state of the calling process that the library changes while it works.

The number of torch's threads is set for the calling thread alone. `torch.set_num_threads` would set
it for the process too, and every thread that starts meanwhile would take that number and keep it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from .errors import Deferred

torch = Deferred("torch", "infer")


class torch_threads(contextlib.ContextDecorator):
    """Context in which torch uses ``count`` threads in the calling thread; None changes nothing.
    Called with a function, it gives one that does its work within.

    Entering it takes a microsecond, so it may be put around a single copy.
    """

    def __init__(self, count: int | None) -> None:
        self._count = count
        self._before = self._mkl = 0

    def __enter__(self) -> None:
        if self._count is not None:
            library = _library()
            self._before = library.now()
            library.set_openmp(self._count)
            self._mkl = library.set_mkl(self._count)

    def __exit__(self, *_: object) -> None:
        if self._count is not None:
            library = _library()
            library.set_openmp(self._before)
            library.set_mkl(self._mkl)


class _Threading(NamedTuple):
    """Functions of the libraries that torch links: they set the calling thread's threads."""

    now: Callable[[], int]
    set_openmp: Callable[[int], Any]
    set_mkl: Callable[[int], int]
    """It returns the number that it replaces, 0 where the thread had none of its own."""


_OF_THREAD = threading.local()


def _library() -> _Threading:
    library: _Threading | None = getattr(_OF_THREAD, "library", None)
    if library is None:
        torch.get_num_threads()  # the thread takes the number of the process, once
        library = _OF_THREAD.library = _linked()
    return library


@lru_cache(maxsize=1)
def _linked() -> _Threading:
    name = {"darwin": "libtorch_cpu.dylib", "win32": "torch_cpu.dll"}
    path = Path(torch.__file__).parent / "lib" / name.get(sys.platform, "libtorch_cpu.so")
    try:
        # Calls of a PyDLL keep the interpreter's lock. They take nanoseconds, and whoever gives the
        # lock away for them may wait for it for long.
        library = ctypes.PyDLL(str(path))
        now, set_openmp = library.omp_get_max_threads, library.omp_set_num_threads
    except (OSError, AttributeError):  # then set the number of the whole process
        return _Threading(torch.get_num_threads, torch.set_num_threads, lambda count: 0)
    mkl = getattr(library, "MKL_Set_Num_Threads_Local", lambda count: 0)
    return _Threading(now, set_openmp, mkl)


@contextlib.contextmanager
def cuda_flags_kept() -> Iterator[None]:
    """On exit, restore the flags of CUDA's arithmetic."""
    before: list[tuple[Any, str, Any]] = []
    for place, name in _CUDA_FLAGS:
        # Not every torch has the newer flags. Where only the newer ones were set, the older ones
        # cannot be read, and need not be put back.
        with contextlib.suppress(AttributeError, RuntimeError):
            part = attrgetter(place)(torch.backends)
            before.append((part, name, getattr(part, name)))
    try:
        yield
    finally:
        for part, name, value in before:
            setattr(part, name, value)


_CUDA_FLAGS = (
    ("cuda.matmul", "allow_tf32"),
    ("cudnn", "allow_tf32"),
    ("cudnn", "benchmark"),
    ("cuda.matmul", "fp32_precision"),
    ("cudnn.conv", "fp32_precision"),
    ("cudnn.rnn", "fp32_precision"),
)
"""Flags in the order in which they are put back: an older one sets the newer ones too."""


@contextlib.contextmanager
def modes_kept(model: Any) -> Iterator[None]:
    """On exit, restore the training mode of each part of the caller's module."""
    modules = getattr(model, "modules", None)
    before = [(part, part.training) for part in modules()] if modules is not None else []
    try:
        yield
    finally:
        for part, training in before:
            part.training = training


@contextlib.contextmanager
def frozen_garbage() -> Iterator[None]:
    """Freeze the objects that exist now, so that the garbage collector does not search them.

    Python can only unfreeze all objects, so nothing is done if the caller has frozen some.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def importing(module: str) -> Iterator[None]:
    """Import a module without the garbage collector, which would search its objects again and again
    as they are made, for an eighth of a start. They stay as long as the process, and so are frozen.
    Nothing is done for a module that is there."""
    if module in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def environment_kept() -> Iterator[None]:
    """On exit, restore the environment's variables."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value


@contextlib.contextmanager
def script_hidden() -> Iterator[None]:
    """Until exit, hide the script of this process from those that it starts by ``spawn``. They
    would run it again, with the work that started them, unless it asks for ``__main__``."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


@contextlib.contextmanager
def caller_kept() -> Iterator[None]:
    """On exit, restore the random states, the environment's variables and the flags of CUDA."""
    import numpy as np

    python, numpys = random.getstate(), np.random.get_state()
    # Asking for a GPU's state would start CUDA.
    gpus = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    try:
        with environment_kept(), cuda_flags_kept(), torch.random.fork_rng(gpus):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpys)


BATCH_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)
)
"""Signals with which a batch system says, perhaps several times, that a job's time is up, or nearly
up; Windows has no SIGUSR1."""


@contextlib.contextmanager
def signals_handled(handlers: Mapping[int, object]) -> Iterator[None]:
    """Set handlers of signals, and restore the ones before at the end."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}  # type: ignore[arg-type]
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
