"""The lock of an output: while a run writes it, every other run is kept out.

The lock is the file ``NAME.penstock-lock`` beside the outermost Zarr or N5 store NAME that holds
the output, however the user names that place. It is JSON. ``outputs`` has an entry for each output,
by its path below the store:

    made_by  the run that made the output, or null. A new run puts its own id here once its run
             folder is begun, just before it makes the output anew
    holder   the run that writes the output, its run folder, process and machine, and since when;
             null when it has ended

A change is written only if the file is still as it was read, so exactly one of two runs that want
an output gets it. Nothing beats and nothing expires. Whether the process of a holder lives is known
on its own machine only. Elsewhere a lock stands until it is released, or until the user says by
``--take-over`` that the holder has ended. A run reads the lock before each write, so one that was
stopped and woken writes nothing into an output that is another's by now.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...base import PenstockError, UsageError, describe
from .kvstore import explained_errors, open_kvstore
from .lock_place import HELD, Entry, NoLock, is_left_behind, is_living, place_of, this_holder
from .protocols import Located
from .transient import is_transient

RELEASE_WITHIN_S = 10.0
"""Seconds that a run waits at its end for each answer of a store. Then its lock stays behind."""
_TRIES = 100
"""Tries to change a file that others keep changing, such as runs into arrays of one group."""
Entries = dict[str, Entry]
Check = Callable[[str, str | None], None]


class Lost(PenstockError):
    """Another run has taken the output."""

    ends_job = True


class OutputLock:
    """The lock of the outputs of one run, from `take` to `release`. Without outputs it holds
    nothing and never fails."""

    def __init__(self) -> None:
        self.lacking: list[str] = []
        """Why an output is not locked, a sentence for each."""
        self._files: list[_LockFile] = []
        self._owns = True
        """Whether this process releases the lock."""

    @classmethod
    def take(
        cls,
        sinks: Sequence[Located],
        run: str,
        *,
        folder: Path | str | None = None,
        check: Check = lambda output, made_by: None,
        take_over: bool = False,
        member: bool = False,
    ) -> OutputLock:
        """Lock all outputs for a run, or none.

        The same run is never refused. Another one is refused while the process of the holder lives,
        and if that cannot be known.

        Args:
            sinks: The outputs.
            run: The id of the run.
            folder: The run folder, which the lock names for whoever is kept out.
            check: Called with each output's name and the run that made it, None where that is not
                known; it raises where the job cannot go on with the output.
            take_over: Whether to take a lock although nothing shows that its holder has ended.
            member: Whether this is one of several processes of the run that only open its outputs.
                It takes nothing and releases nothing; the lock must name the run already.

        Returns:
            The lock.

        Raises:
            UsageError: Another run holds an output.
            Lost: The lock does not name the run of a member.
            PenstockError: A store does not answer, by a fault that may pass.
        """
        lock = cls()
        lock._owns = not member
        try:
            for file in lock._find(sinks, run, folder):
                try:
                    file.join() if member else file.take(check, take_over)
                    lock._files.append(file)
                except NoLock as why:
                    lock.lacking += [f"{name} has no lock: {why}" for name in file.outputs.values()]
        except BaseException:
            lock.release()
            raise
        return lock

    @classmethod
    def briefly(
        cls, sinks: Sequence[Located], take_over: bool = False
    ) -> contextlib.closing[OutputLock]:
        """A context with the lock of outputs, for a change that is no run's. See `take`."""
        return contextlib.closing(cls.take(sinks, uuid.uuid4().hex, take_over=take_over))

    def _find(
        self, sinks: Sequence[Located], run: str, folder: Path | str | None
    ) -> list[_LockFile]:
        """The files that lock some outputs. Arrays of one group share a file."""
        files: dict[str, _LockFile] = {}
        for sink in sinks:
            try:
                place = place_of(sink)
            except NoLock as why:
                self.lacking.append(f"{sink.name} has no lock: {why}")
                continue
            if place is not None:
                store, key, path = place
                address = json.dumps([store, key], sort_keys=True)
                file = files.setdefault(address, _LockFile(store, key, run, folder))
                file.outputs[path] = sink.name
        return [*files.values()]

    @property
    def holds(self) -> bool:
        """Whether any output is locked."""
        return bool(self._files)

    def name(self) -> None:
        """Name this run as the maker of the outputs."""
        for file in self._files:
            file.change(made_by=file.run)

    def check(self) -> None:
        """Raise `Lost` where an output is another run's by now. Each file is read once."""
        for file in self._files:
            file.check(file.read()[0])

    def hand_over(self) -> None:
        """Leave the lock to other processes of the run. It stands, whatever becomes of this
        process, until one that takes it for the same run releases it."""
        for file in self._files:
            file.change(holder={**file.holder, "pid": None})
        self._owns = False

    def release(self) -> None:
        """Free the outputs, if the store answers. The file still names the run that made them."""
        for file in self._files:  # first: what follows may be interrupted
            HELD.discard(file.holder["token"])
        for file in self._files if self._owns else ():
            file.timeout = RELEASE_WITHIN_S
            with contextlib.suppress(PenstockError):
                file.change(holder=None)

    close = release
    """A lock ends with `contextlib.closing`."""


class _LockFile:
    """One file, and the outputs of one run that it covers."""

    def __init__(
        self, store: Mapping[str, Any], key: str, run: str, folder: Path | str | None
    ) -> None:
        self.store, self.key, self.run = store, key, run
        self.outputs: dict[str, str] = {}
        """The name of each output, by its path below the store."""
        self.holder = this_holder(run, folder)
        self.timeout: float | None = None
        """Seconds to wait for an answer of the store; None to leave that to the store."""
        self._kvstore: Any = None

    def _open(self) -> None:
        self._kvstore = open_kvstore(dict(self.store), self._name_at(""))

    def join(self) -> None:
        """Open the file, which names the run already. Raises like `take`, and `Lost`."""
        with self._or_no_lock():
            self._open()
            self.check(self.read()[0])

    def take(self, check: Check, take_over: bool) -> None:
        """Take the outputs; see `OutputLock.take`. Raises `NoLock` if the store cannot be
        locked."""
        # Before the file names it: from then on another run of this process must find it alive.
        HELD.add(self.holder["token"])
        try:
            with self._or_no_lock():
                self._open()
                while not self._write(*self._taken(check, take_over)):
                    pass  # another process was faster; what it has written may refuse this one
                if self.store["driver"] != "file":
                    self._prove()
        except BaseException:
            HELD.discard(self.holder["token"])
            raise

    @contextlib.contextmanager
    def _or_no_lock(self) -> Iterator[None]:
        """A context in which a fault of the store that stays means that it cannot be locked."""
        try:
            yield
        except PenstockError as error:
            if error.__cause__ is None:
                raise
            if is_transient(error):
                raise PenstockError(describe(error)) from error
            raise NoLock(describe(error)) from error

    def _taken(self, check: Check, take_over: bool) -> tuple[Entries, bytes]:
        """The entries with this run as the holder, and the generation that they follow."""
        entries, generation = self.read()
        for path, name in self.outputs.items():
            check(name, entries.get(path, {}).get("made_by"))
        for path in filter(self._touches, entries):
            self._refuse_for(path, entries[path]["holder"], take_over)
        kept = {path: entry for path, entry in entries.items() if not self._touches(path)}
        ours = {
            path: {"made_by": entries.get(path, {}).get("made_by"), "holder": self.holder}
            for path in self.outputs
        }
        return kept | ours, generation

    def _touches(self, path: str) -> bool:
        """Whether an output at that path lies in one of ours, or one of ours in it."""
        pairs = ((f"{path}/", f"{ours}/") for ours in self.outputs)
        return any(not path or a.startswith(b) or b.startswith(a) or b == "/" for a, b in pairs)

    def _refuse_for(self, path: str, holder: Entry | None, take_over: bool) -> None:
        """Raise `UsageError` if another run keeps this one from an output."""
        if holder is None or holder["run"] == self.run:
            return
        lives = is_living(holder)
        gone = self.store["driver"] == "file" and is_left_behind(holder, Path(self.store["path"]))
        if lives is False or (lives is None and (take_over or gone)):
            return
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["since"]))
        where = f" of {holder['folder']}" if holder["folder"] else ""
        whose = f"run {holder['run']!s:.8}{where}"
        if lives:
            said = f"for {whose} since {since}; end it first"
            said = f"process {holder['pid']} on {holder['host']} is writing it {said}"
        else:
            process = f"process {holder['pid']}" if holder["pid"] else "no single process"
            said = (
                f"{whose} holds it since {since} ({process} on {holder['host']}), and it cannot be "
                "seen from here whether that run has ended; if it has, --take-over takes the output"
            )
        raise UsageError(f"{self._name_at(path)}: {said}")

    def _prove(self) -> None:
        """Check that the store honours conditional writes: some servers accept every write."""
        # A write on the condition of another file, which is not there. It must be refused.
        missing = self.read(f"{self.key}-{self.holder['token']}")[1]
        if self._write(self.read()[0], missing):
            self._write(None, self.read()[1])
            raise NoLock("its server takes every write, whatever the condition")

    def check(self, entries: Entries) -> None:
        """Raise `Lost` if an entry of ours is gone or is another run's."""
        for path, name in self.outputs.items():
            entry = entries.get(path)
            run = entry and (entry["holder"] or {"run": entry["made_by"]})["run"]
            if run != self.run:
                by = f"run {run!s:.8} has taken it" if entry else f"{self.key} was removed"
                raise Lost(f"this run has lost {name}: {by}; nothing more is written")

    def change(self, **fields: Any) -> None:
        """Change fields of the entries that this process holds. Raises `Lost` like `check`."""
        for _ in range(_TRIES):
            entries, generation = self.read()
            self.check(entries)
            token = self.holder["token"]
            ours = {
                path: entries[path] | fields
                for path in self.outputs
                if (entries[path]["holder"] or {}).get("token") == token
            }
            if not ours or self._write(entries | ours, generation):
                return
            time.sleep(random.random() / 20)  # apart from the others who change it
        raise PenstockError(f"the lock {self.key}: others change it all the time")

    def _name_at(self, path: str) -> str:
        """The name of the output at a path, else of our first one."""
        return self.outputs.get(path) or next(iter(self.outputs.values()))

    def read(self, key: str = "") -> tuple[Entries, bytes]:
        """The entries and the generation of the file."""
        with self._naming_faults():
            lock = self._kvstore.read(key or self.key).result(timeout=self.timeout)
        if lock.state != "value":
            return {}, lock.stamp.generation
        try:
            # TensorStore 0.1.86 writes over what a process that was killed has left beside the
            # file, and keeps the end of that if it is longer.
            entries = dict(json.JSONDecoder().raw_decode(lock.value.decode())[0]["outputs"])
            for entry in entries.values():
                _ = entry["made_by"], entry["holder"]
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"{self.key} is not a lock of Penstock's; move it away") from None
        return entries, lock.stamp.generation

    def _write(self, entries: Entries | None, generation: bytes) -> bool:
        """Write the file if its generation is still this one; return whether it was."""
        text = None if entries is None else json.dumps({"outputs": entries}, indent=1).encode()
        with self._naming_faults():
            written = self._kvstore.write(self.key, text, if_equal=generation)
            return bool(written.result(timeout=self.timeout).generation)

    def _naming_faults(self) -> contextlib.AbstractContextManager[None]:
        """A context in which faults of the store name the lock. They are no fault of the user's."""
        return explained_errors(f"the lock {self.key}", PenstockError)


def run_at(output: Located) -> str | None:
    """The run that the lock of an output names as its maker; None where there is no lock.

    Args:
        output: The output.

    Returns:
        The id of the run.

    Raises:
        UsageError: The file is no lock.
        PenstockError: The file cannot be read.
    """
    try:
        place = place_of(output)
    except NoLock:
        return None
    if place is None:
        return None
    store, key, path = place
    file = _LockFile(store, key, "", None)
    file.outputs[path] = output.name
    file._open()
    return file.read()[0].get(path, {}).get("made_by")
