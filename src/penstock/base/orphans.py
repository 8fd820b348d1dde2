"""Child processes that end when the process that started them ends, even if it is killed.

A launcher leaves its process number in the variable `PARENT`; the child calls `end_with_parent`,
and from then on a thread of it checks every second. A child that is not ours can only be told by
the kernel: `death_signal`, on Linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping

import psutil

PARENT = "PENSTOCK_PARENT"
LOOK_EVERY_S = 1.0
SAVE_WITHIN_S = 60.0
"""The time that a process has to save after it was asked to end. Then it is killed."""
_SET_DEATH_SIGNAL = 1
KILL = getattr(signal, "SIGKILL", signal.SIGTERM)
"""The signal that no process survives; on Windows SIGTERM."""


def for_children(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a child process that ends with this one: ``variables``, or this
    process's."""
    return {**(os.environ if variables is None else variables), PARENT: str(os.getpid())}


def end_with_parent(number: int = KILL) -> None:
    """End this process within a second of its launcher's end, if that has set `PARENT`."""
    named = os.environ.get(PARENT, "")
    if not named.isdecimal() or int(named) == os.getpid():
        return
    watched = (os.getppid(), int(named), number)  # they differ if torchrun stands between
    threading.Thread(target=_watch, args=watched, name="parent", daemon=True).start()


def death_signal(number: int = KILL) -> Callable[[], None] | None:
    """A function that asks the kernel to send this process a signal when its parent ends.

    The kernel does so when the *thread* that started the child ends. The function may be called in
    a process that was just forked. None where the system is not Linux.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork: after it no lock may be taken

    def ask() -> None:
        prctl(_SET_DEATH_SIGNAL, number)

    return ask


def _lives(pid: int) -> bool:
    """Whether a process runs. A zombie, which has ended, does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:  # this user may not look
        return True


def _watch(parent: int, named: int, number: int) -> None:
    while os.getppid() == parent and _lives(named):
        time.sleep(LOOK_EVERY_S)
    if number == KILL:  # which leaves no time to end its own children
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
    with contextlib.suppress(OSError):
        os.kill(os.getpid(), number)
    time.sleep(SAVE_WITHIN_S)
    os.kill(os.getpid(), KILL)
