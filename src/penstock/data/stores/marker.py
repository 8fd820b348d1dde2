"""One marker beside a store: the writer of each output in it, and the run that made the output.

It is JSON. ``claims`` has an entry for each output, by its path below the store:

    run      the run that made the output, or null. A new run puts its own name here once its run
             folder is begun, just before it makes the output anew
    owner    the process that writes it and its machine, null when it has ended
    beat     grows every `claim.RENEW_S` that the owner lives
    time     the time of the last beat, by the owner's clock

A change is written only if the marker is still as it was read, so only one of two processes that
want an output gets it. A process of this machine that has ended has given up its output. A process
of another machine has given it up if no beat is seen for `LEASE_S`, by the reader's clock alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import random
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from ...base import LOCK_SUFFIX, PenstockError, UsageError, describe
from .fence import wait_for_writes
from .marker_place import NoLock, place_of
from .protocols import Located
from .transient import is_transient

LEASE_S = 30.0
FORGOTTEN_S = 3600.0
"""Seconds. An owner whose last beat is older, by the time in it, counts as ended."""
_TRIES = 100
"""Tries to change a marker that others keep changing."""
HELD: set[str] = set()
"""The claims of this process that have not ended."""

Entry = dict[str, Any]


class Lost(PenstockError):
    """Another run has taken the output."""


class Marker:
    """One marker, and the outputs of one run that it covers."""

    def __init__(self, store: Mapping[str, Any], key: str, run: str) -> None:
        self.store, self.key, self.run = store, key, run
        self.outputs: dict[str, str] = {}
        """The name of each output, by its path below the store."""
        self.owner: dict[str, Any] = {
            "host": platform.node(),
            "machine": _machine(),
            "pid": os.getpid(),
            "started": psutil.Process().create_time(),
            "claim": uuid.uuid4().hex,
        }
        self.made_by: dict[str, str | None] = {}
        """The run that the marker names, by path."""
        self._kvstore: Any = None
        self._renewed = self._seen = 0.0
        self._lost: Lost | None = None
        self._lock = threading.Lock()

    @property
    def folder(self) -> Path | None:
        """The folder of the store that the marker lies beside; None for a store elsewhere."""
        if self.store["driver"] != "file":
            return None
        return Path(self.store["path"], self.key.removesuffix(LOCK_SUFFIX))

    def take(self, check: Callable[[str, str | None], None]) -> None:
        """Make the outputs this run's, once no other process writes them; see `Claims.take`.

        Raises:
            NoLock: the store cannot be locked.
            UsageError: another process writes an output.
            PenstockError: the store does not answer, by a fault that may pass.
        """
        from .kvstore import open_kvstore

        HELD.add(self.owner["claim"])
        try:
            self._kvstore = open_kvstore(dict(self.store), self._of(""))
            self._take(check)
            if self.store["driver"] != "file":
                self._prove()
            elif not wait_for_writes(self.folder, LEASE_S):
                self.release()
                raise UsageError(
                    f"--out-spec {self._of('')}: a process is in the middle of writing it and does "
                    "not go on; end it first"
                )
        except UsageError as error:
            passes = is_transient(error)
            if error.__cause__ is None or passes:
                HELD.discard(self.owner["claim"])
            if passes:
                raise PenstockError(f"the lock {self.key}: {describe(error)}") from error
            if error.__cause__ is None:
                raise
            raise NoLock(describe(error)) from error

    def _take(self, check: Callable[[str, str | None], None]) -> None:
        since, first = clock(), dict[str, Entry]()
        while True:
            entries, generation = self._read()
            self.made_by = {p: entries[p]["run"] if p in entries else None for p in self.outputs}
            for path, name in self.outputs.items():
                check(name, self.made_by[path])
            others = {
                path: entry
                for path, entry in entries.items()
                if self._touches(path) and entry["owner"] != self.owner
            }
            first = first or others
            unknown = []
            for path, entry in others.items():
                lives = _lives(entry)
                if lives or (lives is None and first.get(path) != entry):
                    raise UsageError(f"--out-spec {self._of(path)}: {_writer(entry)} is writing it")
                if lives is None and clock() - since < LEASE_S:
                    unknown.append(entry)
            if not unknown:
                kept = {path: entry for path, entry in entries.items() if path not in others}
                if self._write(kept | self._entries(0), generation):
                    return
            elif others is first:
                warnings.warn(
                    f"--out-spec {self._of('')}: {_writer(unknown[0])} wrote it last; it has "
                    f"{LEASE_S:.0f} s to show that it still does",
                    RuntimeWarning,
                    stacklevel=2,
                )
            time.sleep(LEASE_S / 60)

    def _prove(self) -> None:
        """Check that the store honours conditional writes: some servers accept every write."""
        missing = self._read(f"{self.key}-{self.owner['claim']}")[1]
        if self._write(self._read()[0], missing):
            self._write(None, self._read()[1])
            raise NoLock("its server takes every write, whatever the condition")

    def check(self) -> None:
        """Raise `Lost` where another run has taken an output, seen before or now."""
        if clock() - self._renewed > LEASE_S / 2:
            self.renew()
        else:
            self._check_now()

    def _check_now(self) -> None:
        """Read the marker, if that is cheap or a second has passed. Raises `Lost` like `check`."""
        if self.store["driver"] == "file" or clock() - self._seen > 1:
            with self._lock, self._naming_the_lock():
                self._our_beat(self._read()[0])
        if self._lost is not None:
            raise self._lost

    def renew(self, *, last: bool = False) -> None:
        """Write the next beat; ``last`` gives the outputs up. Raises `Lost` as `check` does."""
        with self._lock, self._naming_the_lock():
            for _ in range(_TRIES):
                began = clock()
                entries, generation = self._read()
                beat = self._our_beat(entries) + 1
                if self._write(entries | self._entries(beat, last), generation):
                    self._renewed = began
                    return
                time.sleep(random.random() / 20)
            raise UsageError("others change it all the time")

    def release(self) -> None:
        """Give the outputs up, if the store answers."""
        with contextlib.suppress(PenstockError):  # the lease ends by itself
            self.renew(last=True)

    def _our_beat(self, entries: Mapping[str, Entry]) -> int:
        """The beat of our entries; raises `Lost` where one is no longer ours."""
        for path, name in self.outputs.items():
            entry = entries.get(path)
            if entry is None or entry["owner"] != self.owner:
                by = f"{_writer(entry)} has made it anew" if entry else f"{self.key} was removed"
                self._lost = Lost(f"this run has lost {name}: {by}; nothing more is written")
                raise self._lost
        self._seen = clock()
        return int(entries[next(iter(self.outputs))]["beat"])

    @contextlib.contextmanager
    def _naming_the_lock(self) -> Iterator[None]:
        try:
            yield
        except UsageError as error:
            raise PenstockError(f"the lock {self.key}: {describe(error)}") from error

    def _touches(self, path: str) -> bool:
        """Whether an output at that path lies in one of ours, or one of ours in it."""
        pairs = ((f"{path}/", f"{ours}/") for ours in self.outputs)
        return any(not path or a.startswith(b) or b.startswith(a) or b == "/" for a, b in pairs)

    def _of(self, path: str) -> str:
        """The name of the output at a path, else of our first one."""
        return self.outputs.get(path) or next(iter(self.outputs.values()))

    def _entries(self, beat: int, last: bool = False) -> dict[str, Entry]:
        """The entries of our outputs."""
        entry = {"owner": None if last else self.owner, "beat": beat, "time": time.time()}
        return {path: {"run": run, **entry} for path, run in self.made_by.items()}

    def _read(self, key: str = "") -> tuple[dict[str, Entry], bytes]:
        """The entries and the generation of the marker."""
        from .kvstore import explained_errors

        with explained_errors(key or self.key):
            marker = self._kvstore.read(key or self.key).result()
        if marker.state != "value":
            return {}, marker.stamp.generation
        try:
            entries = dict(json.loads(marker.value)["claims"])
            for entry in entries.values():
                _ = entry["run"], entry["owner"], entry["beat"], entry["time"]
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"{self.key} is not a lock of Penstock's; move it away") from None
        return entries, marker.stamp.generation

    def _write(self, entries: Mapping[str, Entry] | None, generation: bytes) -> bool:
        """Write the marker if its generation is still this one; return whether it was."""
        from .kvstore import explained_errors

        text = None if entries is None else json.dumps({"claims": entries}, indent=1).encode()
        with explained_errors(self.key):
            stamp = self._kvstore.write(self.key, text, if_equal=generation).result()
        return bool(stamp.generation)


def clock() -> float:
    """A clock in seconds that also runs while the process is stopped or the machine sleeps."""
    if hasattr(time, "CLOCK_BOOTTIME"):  # only on Linux does the other one stop
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


@cache
def _machine() -> str:
    """A name for this boot of this machine, and for the namespace of its process ids."""
    words = [platform.node()]
    with contextlib.suppress(OSError):
        words.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError, AttributeError):
        words.append(str(Path("/proc/self/ns/pid").readlink()))
    return " ".join(words)


def _lives(entry: Entry) -> bool | None:
    """Whether the owner of an output is at work; None if this machine cannot tell."""
    owner = entry["owner"]
    if owner is None:
        return False
    if owner["machine"] != _machine():
        return False if time.time() - entry["time"] > FORGOTTEN_S else None
    if owner["pid"] == os.getpid():
        return owner["claim"] in HELD
    try:
        process = psutil.Process(owner["pid"])
        same = abs(process.create_time() - owner["started"]) < 2
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def _writer(entry: Entry) -> str:
    owner = entry["owner"]
    return f"process {owner['pid']} on {owner['host']}" if owner else f"run {entry['run']!s:.8}"


def run_at(output: Located) -> str | None:
    """The run that the marker of an output names; None where there is no marker.

    Args:
        output: the output.

    Returns:
        The id of the run.

    Raises:
        UsageError: the marker cannot be read.
    """
    from .kvstore import open_kvstore

    try:
        place = place_of(output)
    except NoLock:
        return None
    if place is None:
        return None
    store, key, path = place
    marker = Marker(store, key, "")
    marker._kvstore = open_kvstore(dict(store), output.name)
    entry = marker._read()[0].get(path)
    return None if entry is None else entry["run"]
