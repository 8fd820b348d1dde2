"""A process that was started for another's sake ends with it, however that ended.

A launcher leaves its number in `PARENT`; what it starts calls `end_with_parent`. On Linux the
kernel sends the signal. It does so when the *thread* ends that started the process, so a launcher
starts its processes in a thread that outlives them, as each that waits for them does. Elsewhere,
and where the launcher was gone before anything could be asked of the kernel, a thread looks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import psutil

PARENT = "PENSTOCK_PARENT"
LOOK_EVERY_S = 1.0
SAVE_WITHIN_S = 60.0
"""How long a process that is asked to end may take to save."""
_SET_DEATH_SIGNAL = 1
KILL = getattr(signal, "SIGKILL", signal.SIGTERM)
"""On Windows SIGTERM is as final."""


def for_children() -> dict[str, str]:
    """The variables of a process that is to end with this one."""
    return {**os.environ, PARENT: str(os.getpid())}


def end_with_parent(number: int = KILL) -> None:
    """End, by that signal, with the process that started this one, where it has asked for it; so do
    processes that this one forks."""
    named = os.environ.get(PARENT, "")
    if not named.isdecimal() or int(named) == os.getpid():
        return
    parent = os.getppid()
    if ask := death_signal(number):
        ask()
        _forks_too()
    watched = (parent, int(named), number)  # not the same where torchrun stands between
    threading.Thread(target=_watch, args=watched, name="parent", daemon=True).start()


def death_signal(number: int = KILL) -> Callable[[], None] | None:
    """What asks the kernel to send this process a signal when its parent ends; only Linux's does.

    It may be called in a process that was just forked.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork: after it no lock may be taken

    def ask() -> None:
        prctl(_SET_DEATH_SIGNAL, number)

    return ask


def _forks_too() -> None:
    """Workers of a loader, for example. A thread other than the first may end before its forks."""
    kill = death_signal(KILL)
    in_main = True

    def before() -> None:
        nonlocal in_main
        in_main = threading.current_thread() is threading.main_thread()

    def after() -> None:
        if in_main and kill is not None:
            kill()

    os.register_at_fork(before=before, after_in_child=after)


def _lives(pid: int) -> bool:
    """One that has ended, and of which nobody has taken note yet, does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:  # it may not be asked
        return True


def _watch(parent: int, named: int, number: int) -> None:
    while os.getppid() == parent and _lives(named):
        time.sleep(LOOK_EVERY_S)
    with contextlib.suppress(OSError):
        os.kill(os.getpid(), number)
    time.sleep(SAVE_WITHIN_S)
    os.kill(os.getpid(), KILL)
