"""One marker beside a store: who writes which outputs there, and which run made each.

It is JSON. ``claims`` has an entry for each output, by its path below the store:

    run      the run that made the output, or null. A new run puts its own name here once its run
             folder is begun, just before it makes the output anew
    owner    the process that writes it and its machine, null when it has ended
    beat     grows every `claim.RENEW_S` that the owner lives
    time     the time of the last beat, by the owner's clock

Each change is written on condition that the marker is as it was read, so only one of two that want
an output gets it. A process of this machine that is gone has left its output. One of another
machine has left it when no beat is seen for `LEASE_S`; no two clocks are compared for that.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import platform
import random
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from ...base import PenstockError, UsageError, describe
from .protocols import Sink

SUFFIX = ".penstock-lock"
_METADATA = {"zarr.json": b"zarr_format", ".zgroup": b"zarr_format", ".zarray": b"zarr_format",
             "attributes.json": b"n5"}  # fmt: skip
_DRIVERS = ("file", "s3", "gcs")
LEASE_S = 30.0
FORGOTTEN_S = 3600.0
"""A beat as old as this by the clock is not waited for."""
_TRIES = 100
"""Tries to change a marker that others keep changing."""
HELD: set[str] = set()
"""The claims of this process that have not ended."""

Entry = dict[str, Any]


class NoLock(Exception):
    """The store cannot be locked; the message says why."""


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

    def take(self, check: Callable[[str, str | None], None]) -> None:
        from .kvstore import open_kvstore

        HELD.add(self.owner["claim"])
        try:
            self._kvstore = open_kvstore(dict(self.store), self._of(""))
            self._take(check)
            if self.store["driver"] != "file":
                self._prove()
        except UsageError as error:
            if error.__cause__ is None:
                raise
            raise NoLock(describe(error)) from error

    def _take(self, check: Callable[[str, str | None], None]) -> None:
        since, first = _now(), dict[str, Entry]()
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
                if lives is None and _now() - since < LEASE_S:
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
        """Find out whether the store heeds conditions: some servers take every write."""
        missing = self._read(f"{self.key}-{self.owner['claim']}")[1]
        if self._write(self._read()[0], missing):
            self._write(None, self._read()[1])
            raise NoLock("its server takes every write, whatever the condition")

    def check(self) -> None:
        """Raise `Lost` where another run has taken an output, seen before or now."""
        if _now() - self._renewed > LEASE_S / 2:
            self.renew()
        elif self.store["driver"] == "file" or _now() - self._seen > 1:
            with self._lock, self._naming_the_lock():
                self._our_beat(self._read()[0])
        if self._lost is not None:
            raise self._lost

    def renew(self, *, last: bool = False) -> None:
        with self._lock, self._naming_the_lock():
            for _ in range(_TRIES):
                began = _now()
                entries, generation = self._read()
                beat = self._our_beat(entries) + 1
                if self._write(entries | self._entries(beat, last), generation):
                    self._renewed = began
                    return
                time.sleep(random.random() / 20)
            raise UsageError("others change it all the time")

    def release(self) -> None:
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
        self._seen = _now()
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
            raise UsageError(f"{self.key} is no lock of Penstock's; move it away") from None
        return entries, marker.stamp.generation

    def _write(self, entries: Mapping[str, Entry] | None, generation: bytes) -> bool:
        """Write the marker if it is still of that generation; whether it was."""
        from .kvstore import explained_errors

        text = None if entries is None else json.dumps({"claims": entries}, indent=1).encode()
        with explained_errors(self.key):
            stamp = self._kvstore.write(self.key, text, if_equal=generation).result()
        return bool(stamp.generation)


def _now() -> float:
    """Seconds that go on while the process is stopped and the machine sleeps."""
    if hasattr(time, "CLOCK_BOOTTIME"):  # only on Linux does the other one stop
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


@cache
def _machine() -> str:
    """A text for this machine since its start and for the processes that can be seen from here."""
    words = [platform.node()]
    with contextlib.suppress(OSError):
        words.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError, AttributeError):
        words.append(str(Path("/proc/self/ns/pid").readlink()))
    return " ".join(words)


def _lives(entry: Entry) -> bool | None:
    """Whether the owner of an output is at work; None where it cannot be told from here."""
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


# --- where the marker lies ------------------------------------------------------------------------


def why_no_lock(sink: Sink) -> str | None:
    """The reason why an output cannot be locked, by its spec; None where it seems that it can."""
    try:
        base_of(sink)
    except NoLock as why:
        return f"{sink.name} has no lock: {why}"
    return None


def is_marked(sink: Sink) -> bool:
    """Whether a run of `infer` is or was at a local output."""
    with contextlib.suppress(NoLock):
        place = place_of(sink)
        return place is not None and Path(place[0]["path"], place[1]).is_file()
    return False


def base_of(sink: Sink) -> tuple[dict[str, Any], list[str]] | None:
    """The key-value store that holds an output's bytes, as TensorStore's JSON, and the names of the
    stores inside it that lead to the output. None for an output that no other process sees.
    """
    if sink.root is None:
        _check_in_memory(sink)
        return None
    spec, inside = sink.root.spec(retain_context=True).to_json(), list[str]()
    while isinstance(spec.get("base"), Mapping):
        inside.append(f"{spec['driver']}:{spec.get('path', '')}".rstrip("/"))
        spec = spec["base"]
    if spec["driver"] == "memory":
        return None
    if spec["driver"] not in _DRIVERS:
        raise NoLock(f"TensorStore's {spec['driver']} is not known to heed conditions")
    for knob, is_off in {
        "file_io_locking": spec.get("file_io_locking", {}).get("mode") == "none",
        "use_conditional_write": spec.get("use_conditional_write") is False,
    }.items():
        if is_off:
            raise NoLock(f"its spec turns {knob} off")
    if spec["driver"] == "s3":  # or TensorStore looks first and writes then, with a gap between
        spec["use_conditional_write"] = True
    return spec, inside


def _check_in_memory(sink: Sink) -> None:
    """Raise `NoLock` for what TensorStore does not write and other processes may see."""
    array = getattr(sink, "array", None)
    while array is not None:
        if isinstance(array, mmap.mmap):
            raise NoLock("it is an array in a file that others may map too")
        array = getattr(array, "base", None)
    if sink.local_path is not None or "://" in sink.address:
        raise NoLock("the package that writes it has none")


def place_of(sink: Sink) -> tuple[dict[str, Any], str, str] | None:
    """The folder and the name of an output's marker, and the output's path below that name."""
    base = base_of(sink)
    if base is None:
        return None
    spec, inside = base
    path, anchor = str(spec.get("path", "")), ""
    if spec["driver"] == "file":
        resolved = Path(path).resolve()
        path, anchor = resolved.relative_to(resolved.anchor).as_posix(), resolved.anchor
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts:
        raise NoLock("it has no folder beside which a lock could lie")
    top = _outermost({**spec, "path": anchor}, parts)
    folder = anchor + "".join(f"{part}/" for part in parts[:top])
    return {**spec, "path": folder}, f"{parts[top]}{SUFFIX}", "/".join([*parts[top + 1 :], *inside])


def _outermost(root: Mapping[str, Any], parts: Sequence[str]) -> int:
    """The index of the first part that is a store by its name or by what it holds."""
    from .kvstore import open_kvstore

    named = (i for i, part in enumerate(parts) if part.endswith((".zarr", ".n5")))
    top = next(named, len(parts) - 1)
    with contextlib.suppress(UsageError):
        kvstore = open_kvstore(dict(root), "")
        metadata = [
            {key: kvstore.read("/".join([*parts[: i + 1], key])) for key in _METADATA}
            for i in range(top)
        ]
        for i, reads in enumerate(metadata):
            for key, read in reads.items():
                with contextlib.suppress(ValueError, OSError):  # that may not be read
                    if _METADATA[key] in read.result().value:
                        return i
    return top
