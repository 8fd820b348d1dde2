"""Who may write an output, and which run made it: a marker beside the store.

The marker is ``NAME.penstock-lock`` beside the outermost Zarr or N5 store NAME that an output lies
in, however the user names that place. It is JSON, and ``claims`` has an entry for each output there
by its path below NAME:

    run      the run that made the output, null where none has; another one takes its place when
             its run folder is begun, just before it makes the output anew
    owner    the process that writes it and its machine, null when it has ended
    beat     grows every `RENEW_S` that the owner lives
    time     of the last beat, by the owner's clock

Each change is written on condition that the marker is as it was read, so of two who want an output
one gets it. A process of this machine that is gone has left its output. One of another machine has
left it when no beat is seen for `LEASE_S`; no two clocks are compared for that. A writer looks here
before each unit: one that was stopped so long that another run took the output stops.
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

LEASE_S = 30.0
RENEW_S = 5.0
FORGOTTEN_S = 3600.0
"""A beat as old as this by the clock is not waited for."""
SUFFIX = ".penstock-lock"
_METADATA = {"zarr.json": b"zarr_format", ".zgroup": b"zarr_format", ".zarray": b"zarr_format",
             "attributes.json": b"n5"}  # fmt: skip
_DRIVERS = ("file", "s3", "gcs")
_TRIES = 100
"""At a change before which others keep coming."""
_HELD: set[str] = set()
"""The claims of this process that have not ended."""

Entry = dict[str, Any]


class Lost(PenstockError):
    """Another run has taken the output."""


class _NoLock(Exception):
    """The store has no lock; the message says why. It is caught here and told as a reason."""


def why_no_lock(sink: Sink) -> str | None:
    """Why an output cannot be locked, as far as its spec tells; None where it seems that it can."""
    try:
        _base(sink)
    except _NoLock as why:
        return f"{sink.name} has no lock: {why}"
    return None


def is_marked(sink: Sink) -> bool:
    """Whether a run of `infer` is or was at a local output."""
    with contextlib.suppress(_NoLock):
        place = _place(sink)
        return place is not None and Path(place[0]["path"], place[1]).is_file()
    return False


class Claims:
    """The outputs of one run, held from `take` to `close`."""

    def __init__(self) -> None:
        self.lacking: list[str] = []
        """Why an output is not locked, a sentence for each."""
        self._markers: dict[str, _Marker] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="claims", daemon=True)

    @classmethod
    def take(
        cls, sinks: Sequence[Sink], run: str, check: Callable[[str, str | None], None]
    ) -> Claims:
        """Claim all outputs for ``run``, or none.

        ``check`` is given each output's name and the run that made it, None where that is not
        known, and raises where the job cannot go on with it. Raises `UsageError` where another
        process writes an output.
        """
        claims, held = cls(), []
        for sink in sinks:
            claims._find(sink, run)
        try:
            for address, marker in list(claims._markers.items()):
                try:
                    marker.take(check)
                    held.append(marker)
                except _NoLock as why:
                    claims.lacking += [f"{name} has no lock: {why}" for name in marker.names]
                    del claims._markers[address]
        except BaseException:
            for marker in held:
                marker.release()
            raise
        claims._thread.start()
        return claims

    def _find(self, sink: Sink, run: str) -> None:
        try:
            place = _place(sink)
        except _NoLock as why:
            self.lacking.append(f"{sink.name} has no lock: {why}")
            return
        if place is not None:
            store, key, path = place
            address = json.dumps([store, key], sort_keys=True)
            marker = self._markers.setdefault(address, _Marker(store, key, run))
            marker.paths.append(path)
            marker.names.append(sink.name)

    def name(self) -> None:
        """From now on the outputs are made by this run."""
        for marker in self._markers.values():
            marker.made_by = dict.fromkeys(marker.paths, marker.run)
            marker.renew()

    def check(self) -> None:
        """Raise `Lost` where another run has taken an output."""
        for marker in self._markers.values():
            marker.check()

    def confirm(self) -> None:
        """Raise `Lost` unless every output has been this run's up to now."""
        for marker in self._markers.values():
            marker.renew()

    def close(self) -> None:
        """Let go of the outputs. The marker goes on telling which run made them."""
        if self._ended.is_set():
            return
        for marker in self._markers.values():  # first: what follows may be interrupted
            _HELD.discard(marker.owner["claim"])
        self._ended.set()
        self._thread.join()
        for marker in self._markers.values():
            marker.release()

    def _beat(self) -> None:
        while not self._ended.wait(RENEW_S):
            for marker in self._markers.values():
                # A store that does not answer may answer next time. What is lost stays lost.
                with contextlib.suppress(PenstockError):
                    marker.renew()


class _Marker:
    """One marker, and the outputs of a run that it is of."""

    def __init__(self, store: Mapping[str, Any], key: str, run: str) -> None:
        self.store, self.key, self.run = store, key, run
        self.names: list[str] = []
        self.paths: list[str] = []
        self.owner: dict[str, Any] = {
            "host": platform.node(),
            "machine": _machine(),
            "pid": os.getpid(),
            "started": psutil.Process().create_time(),
            "claim": uuid.uuid4().hex,
        }
        self.made_by: dict[str, str | None] = {}
        """For each path, the run that the marker names."""
        self._kvstore: Any = None
        self._renewed = self._seen = 0.0
        self._lost: Lost | None = None
        self._lock = threading.Lock()

    def take(self, check: Callable[[str, str | None], None]) -> None:
        from .kvstore import open_kvstore

        _HELD.add(self.owner["claim"])
        try:
            self._kvstore = open_kvstore(dict(self.store), self.names[0])
            self._take(check)
            if self.store["driver"] != "file":
                self._prove()
        except UsageError as error:
            if error.__cause__ is None:
                raise
            raise _NoLock(describe(error)) from error

    def _take(self, check: Callable[[str, str | None], None]) -> None:
        since, first = _now(), dict[str, Entry]()
        while True:
            entries, generation = self._read()
            self.made_by = {p: entries[p]["run"] if p in entries else None for p in self.paths}
            for name, path in zip(self.names, self.paths, strict=True):
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
                    raise UsageError(f"--out-spec {self._of(path)}: {_told(entry)} is writing it")
                if lives is None and _now() - since < LEASE_S:
                    unknown.append(entry)
            if not unknown:
                kept = {path: entry for path, entry in entries.items() if path not in others}
                if self._write(kept | self._entries(0), generation):
                    return
            elif others is first:
                warnings.warn(
                    f"--out-spec {self.names[0]}: {_told(unknown[0])} wrote it last; it has "
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
            raise _NoLock("its server takes every write, whatever the condition")

    def check(self) -> None:
        """Raise `Lost` where it is known, or seen now, that another run has taken an output."""
        if _now() - self._renewed > LEASE_S / 2:
            self.renew()
        elif self.store["driver"] == "file" or _now() - self._seen > 1:
            with self._lock, self._telling():
                self._own(self._read()[0])
        if self._lost is not None:
            raise self._lost

    def renew(self, *, last: bool = False) -> None:
        with self._lock, self._telling():
            for _ in range(_TRIES):
                began = _now()
                entries, generation = self._read()
                beat = self._own(entries) + 1
                if self._write(entries | self._entries(beat, last), generation):
                    self._renewed = began
                    return
                time.sleep(random.random() / 20)
            raise UsageError("others change it all the time")

    def release(self) -> None:
        with contextlib.suppress(PenstockError):  # the lease ends by itself
            self.renew(last=True)

    def _own(self, entries: Mapping[str, Entry]) -> int:
        """The beat of our entries; raises `Lost` where one is no longer ours."""
        for name, path in zip(self.names, self.paths, strict=True):
            entry = entries.get(path)
            if entry is None or entry["owner"] != self.owner:
                by = f"{_told(entry)} has made it anew" if entry else f"{self.key} was removed"
                self._lost = Lost(f"this run has lost {name}: {by}; nothing more is written")
                raise self._lost
        self._seen = _now()
        return int(entries[self.paths[0]]["beat"])

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except UsageError as error:
            raise PenstockError(f"the lock {self.key}: {describe(error)}") from error

    def _touches(self, path: str) -> bool:
        """Whether what is written there touches an output of ours."""
        pairs = ((f"{path}/", f"{own}/") for own in self.paths)
        return any(not path or a.startswith(b) or b.startswith(a) or b == "/" for a, b in pairs)

    def _of(self, path: str) -> str:
        return next(
            (n for n, own in zip(self.names, self.paths, strict=True) if own == path), self.names[0]
        )

    def _entries(self, beat: int, last: bool = False) -> dict[str, Entry]:
        """Those of our outputs."""
        entry = {"owner": None if last else self.owner, "beat": beat, "time": time.time()}
        return {path: {"run": run, **entry} for path, run in self.made_by.items()}

    def _read(self, key: str = "") -> tuple[dict[str, Entry], bytes]:
        """The entries and the generation of the marker."""
        from .kvstore import explained_errors

        with explained_errors(key or self.key):
            found = self._kvstore.read(key or self.key).result()
        if found.state != "value":
            return {}, found.stamp.generation
        try:
            entries = dict(json.loads(found.value)["claims"])
            for entry in entries.values():
                _ = entry["run"], entry["owner"], entry["beat"], entry["time"]
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"{self.key} is no lock of Penstock's; move it away") from None
        return entries, found.stamp.generation

    def _write(self, entries: Mapping[str, Entry] | None, generation: bytes) -> bool:
        """Whether the marker was still that of a generation, and is now another one."""
        from .kvstore import explained_errors

        text = None if entries is None else json.dumps({"claims": entries}, indent=1).encode()
        with explained_errors(self.key):
            stamp = self._kvstore.write(self.key, text, if_equal=generation).result()
        return bool(stamp.generation)


def _base(sink: Sink) -> tuple[dict[str, Any], list[str]] | None:
    """The key-value store that holds an output's bytes, as TensorStore's JSON, and the names that
    lead on in those inside it; None for one that no other process sees."""
    if sink.root is None:
        array = getattr(sink, "array", None)
        while array is not None:
            if isinstance(array, mmap.mmap):
                raise _NoLock("it is an array in a file that others may map too")
            array = getattr(array, "base", None)
        if sink.local_path is not None or "://" in sink.address:
            raise _NoLock("the package that writes it has none")
        return None
    spec, inside = sink.root.spec(retain_context=True).to_json(), list[str]()
    while isinstance(spec.get("base"), Mapping):
        inside.append(f"{spec['driver']}:{spec.get('path', '')}".rstrip("/"))
        spec = spec["base"]
    if spec["driver"] == "memory":
        return None
    if spec["driver"] not in _DRIVERS:
        raise _NoLock(f"TensorStore's {spec['driver']} is not known to heed conditions")
    if spec.get("file_io_locking", {}).get("mode") == "none":
        raise _NoLock("its spec turns file_io_locking off")
    if spec.get("use_conditional_write") is False:
        raise _NoLock("its spec turns use_conditional_write off")
    if spec["driver"] == "s3":  # or TensorStore looks first and writes then, with a gap between
        spec["use_conditional_write"] = True
    return spec, inside


def _place(sink: Sink) -> tuple[dict[str, Any], str, str] | None:
    """The folder and the name of an output's marker, and the output's path below that name."""
    base = _base(sink)
    if base is None:
        return None
    spec, inside = base
    path, anchor = str(spec.get("path", "")), ""
    if spec["driver"] == "file":
        resolved = Path(path).resolve()
        path, anchor = resolved.relative_to(resolved.anchor).as_posix(), resolved.anchor
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts:
        raise _NoLock("it has no folder beside which a lock could lie")
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
        found = [
            {key: kvstore.read("/".join([*parts[: i + 1], key])) for key in _METADATA}
            for i in range(top)
        ]
        for i, reads in enumerate(found):
            for key, read in reads.items():
                with contextlib.suppress(ValueError, OSError):  # that may not be read
                    if _METADATA[key] in read.result().value:
                        return i
    return top


def _now() -> float:
    """Seconds that go on while the process is stopped and the machine sleeps."""
    if hasattr(time, "CLOCK_BOOTTIME"):  # only on Linux does the other one stop
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


@cache
def _machine() -> str:
    """The machine since it was started, and which processes can be seen from here."""
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
        return owner["claim"] in _HELD
    try:
        process = psutil.Process(owner["pid"])
        same = abs(process.create_time() - owner["started"]) < 2
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def _told(entry: Entry) -> str:
    owner = entry["owner"]
    return f"process {owner['pid']} on {owner['host']}" if owner else f"run {entry['run']!s:.8}"
