"""The record of one run: which blocks are written, by whom, what a resume needs, how it ended.

`names` lists what lies in the folder of a run.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...base import (
    RUN_FILE,
    SUMMARY_FILE,
    TRACEBACK_FILE,
    Incomplete,
    PenstockError,
    UsageError,
    describe,
    scrubbed,
)
from .block_log import CHECKSUM, BlockSet, Key, line_of
from .folder import Log, Notes, check_same, folder_at, read_document, read_run
from .names import (
    ENDING_FILE,
    LOG_FILE,
    METRICS_FILE,
    RETRIES_FILE,
    SCALINGS_FILE,
    STACKS_FILE,
    STATISTICS_FOLDER,
    of_each,
    own_name,
)

_OF_ONE_START = (SUMMARY_FILE, ENDING_FILE, TRACEBACK_FILE,
                 *(f(n) for n in (RETRIES_FILE, STACKS_FILE) for f in (str, of_each)))  # fmt: skip
"""Files about one start of a run, which are removed when it is resumed."""
_OF_ONE_RUN = (
    SCALINGS_FILE,
    f"{STATISTICS_FOLDER}/",
    *map(of_each, (LOG_FILE, SUMMARY_FILE, METRICS_FILE)),
)
"""Files that are also removed when a run begins anew."""


class Prepared(NamedTuple):
    """How a run is cut for several processes."""

    part: tuple[int, ...]
    """Shape of a part, z y x."""
    elements: int
    """Number of processes."""

    @classmethod
    def read(cls, place: Path | str | None) -> Prepared:
        """Read it from a run folder. Raises `UsageError` if the run is not prepared."""
        prepared = None if place is None else read_run(place).get("prepared")
        if prepared is None:
            raise UsageError(
                f"no run is prepared in {place}; run --prepare --workers N first, with a --run-dir "
                "that all processes see"
            )
        return cls(tuple(prepared["part"]), prepared["elements"])


class Journal:
    """The record of one run. Without a folder it only counts blocks."""

    def __init__(
        self,
        place: Path | str | None,
        fingerprint: Mapping[str, Any],
        maker: Mapping[str, Any] | None = None,
    ) -> None:
        """``place`` is the path or URL of the folder, None for a run without one."""
        self.folder = None if place is None else folder_at(place)
        self.writer: str | None = None
        """Name of this process among several that write the run; None if it writes alone."""
        # By way of JSON, as it is compared with what an earlier run wrote: tuples are lists there.
        self.fingerprint: dict[str, Any] = scrubbed(json.loads(json.dumps(fingerprint)))
        noted = {**(maker or {}), "checksum": CHECKSUM}
        self.maker: dict[str, Any] = json.loads(json.dumps(noted))
        """Code, versions and machine. They are the same for all blocks of a run."""
        self.run = uuid.uuid4().hex
        """Name of the run, also in the marker of its output. A resumed run keeps its name."""
        self.lacking: list[str] = []
        """One sentence that says why the run folder is not locked; empty if it is."""
        self.done = BlockSet()
        self.statistics: dict[str, dict[str, Any]] = {}
        self.written = self.skipped = self.voxels = 0
        self._replaces: list[str | None] = []
        """Names of the runs that made the outputs which this run replaces."""
        self.before: Mapping[str, Any] = {}
        """The run.json of the run that is resumed, empty if there is none."""
        self._log: Log | None = None
        self._notes: Notes | None = None
        self._lock = threading.Lock()

    @property
    def here(self) -> Path | None:
        """A folder of this machine for the records of this process."""
        return None if self.folder is None else self.folder.here

    def save(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file of the folder, completely or not at all."""
        if self.folder is not None:
            text = json.dumps(scrubbed(content), indent=2, default=str) + "\n"
            self.folder.write(name, text.encode())

    def own_name(self, name: str) -> str:
        """The name of this process's own file, if several processes share the run."""
        return name if self.writer is None else own_name(name, self.writer)

    def own_rows(self, name: str) -> Path | None:
        """The local file to which this process appends rows."""
        return None if self.folder is None else self.folder.here / self.own_name(name)

    def named(self, name: str) -> str:
        """The path of a file of the folder, for messages."""
        return name if self.folder is None else f"{self.folder}/{name}"

    @classmethod
    def open(
        cls,
        place: Path | str,
        fingerprint: Mapping[str, Any],
        maker: Mapping[str, Any] | None = None,
        *,
        resume: bool,
    ) -> Journal:
        """Open a run folder, and if ``resume`` read what an earlier run left. Creates nothing.

        Raises `UsageError` if the earlier run had other settings or another ``maker``, naming the
        first difference, or if the folder is not a run folder.
        """
        journal = cls(place, fingerprint, maker)
        folder = journal.folder
        assert folder is not None
        folder.check()
        if not resume or not (before := read_run(folder)):
            return journal
        check_same(folder, before.get("fingerprint", {}), journal.fingerprint)
        check_same(folder, before.get("maker", {}), journal.maker)
        journal.before = before
        journal._replaces = before.get("replaces", [])
        journal.run = before.get("run", journal.run)
        journal._notes = notes = Notes(folder, before)
        journal.refresh()
        journal.skipped = len(journal.done)
        if lost := notes.lost(journal.skipped):
            warnings.warn(lost, RuntimeWarning, stacklevel=3)
        return journal

    def refresh(self) -> None:
        """Read which blocks other processes have written, and which percentiles they have found."""
        if self.folder is None:
            return
        if self._notes is None:
            self._notes = Notes(self.folder, read_run(self.folder))
        self.done = self._notes.blocks()
        self.statistics = read_document(self.folder, SCALINGS_FILE) or self.statistics

    def check_maker(self, output: str, made_by: str | None, take_over: bool = False) -> None:
        """Raise `UsageError` if this run is resumed, but its output now belongs to another run.

        ``made_by`` is the run that the marker of the output names, or None: then only
        ``take_over`` goes on.
        """
        if not self.before:
            self._replaces = list({*self._replaces, made_by})  # called again while the job waits
            return
        if not self.done and made_by in self._replaces:
            return  # killed before the marker named this run: all of the output is written anyway
        if made_by is None and (take_over or not self.before.get("locked")):
            return  # made where no marker can be written
        if made_by is None:
            raise UsageError(
                f"--resume: no lock beside {output} names the run in {self.folder} any more, so "
                "the output may be another run's; --take-over goes on, --overwrite begins anew"
            )
        if made_by != self.run:
            raise UsageError(
                f"--resume: {output} was made anew by another run than that in {self.folder}; "
                "resume that one, or --overwrite"
            )

    def lock(self) -> None:
        """Make the folder and lock its log. The log is not changed.

        Raises `UsageError` if another process writes this run.
        """
        if self.folder is None or self._log is not None:
            return
        try:
            self._log = self.folder.log(self.run, self.writer, self.fingerprint.get("outputs", ()))
        except BlockingIOError:
            raise UsageError(
                f"--run-dir {self.folder}: another process is writing this output"
            ) from None
        if self._log.lacking is not None:
            self.lacking.append(f"--run-dir {self.folder} has no lock: {self._log.lacking}")

    def join(self) -> None:
        """Begin the log of this ``writer`` in the folder of a run that several processes share."""
        self.lock()
        if self._log is not None:
            self._log.begin(anew=False)

    def begin(self, facts: Mapping[str, Any], *, prepared: Prepared | None = None) -> None:
        """Make the folder and start the log. Blocks that were done before stay in it.

        ``facts`` are fields of run.json: ``settings``, ``name`` and ``tags``, ``plan`` and its
        ``blocks``, and ``locked``, which says that the output's marker names the run. ``prepared``
        says how several processes share it. Raises as `lock`.
        """
        if self.folder is None:
            return
        self.lock()
        assert self._log is not None
        # Before run.json names this run: a kill in between must not leave it the blocks of another.
        self._log.begin(anew=not self.done)
        self.folder.delete(*_OF_ONE_START)
        if self.done:  # so a run is resumed
            # Rows count their seconds from the start, so each start has a file of its own.
            self.folder.set_aside(METRICS_FILE)
        else:
            self._notes = None  # the run begins anew: forget what was read of the old logs
            self.folder.delete(*_OF_ONE_RUN)
        run = {  # written first: it says which run the folder belongs to
            "run": self.run,
            **facts,
            "replaces": self._replaces,
            "fingerprint": self.fingerprint,
            "maker": self.maker,
            # A run that is resumed or repaired keeps its parts for those who share it.
            "prepared": prepared._asdict() if prepared else self.before.get("prepared"),
        }
        self.save(RUN_FILE, run)
        self.save(SCALINGS_FILE, self.statistics)

    def note(self, key: Key, voxels: int, checks: Sequence[str] = ()) -> None:
        """Note that a block of ``voxels`` has been written, with a check for each output."""
        # Several threads write blocks, and `+=` is more than one step.
        with self._lock:
            self.written += 1
            self.voxels += voxels
            if self._log is not None:
                self._log.append(line_of(key, checks))

    def flush(self) -> None:
        """Sync the notes. Raises `UsageError` if the store of the run folder refuses."""
        if self._log is not None:
            self._log.flush()

    def save_statistics(self, volume: int, scaling: Mapping[str, Any]) -> None:
        self.statistics[str(volume)] = dict(scaling)
        self.save(SCALINGS_FILE, self.statistics)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None
        if self.folder is not None:
            self.folder.close()


class EndRequest:
    """Asks a running job to end: it reads no more bricks, and writes the blocks that are complete.

    A signal handler may call it, as it never waits.
    """

    def __init__(self) -> None:
        self.why = ""
        """The first that asked, such as SIGTERM; empty while nothing has asked."""
        self._since = 0.0

    def ask(self, why: str) -> None:
        """Ask the job to end.

        Args:
            why: What asks, such as ``SIGTERM``: the subject of the sentence that is printed.
        """
        if not self.why:
            # Before `why`, which other threads look at first.
            self._since = time.monotonic()
            self.why = why

    def check(self, grace_s: float) -> None:
        """Raise `Incomplete` if the job was asked to end more than ``grace_s`` ago."""
        if self.why and time.monotonic() - self._since >= grace_s:
            raise Incomplete(f"{self.why} ended the job; run again with --resume")


@contextlib.contextmanager
def noting_end(save: Callable[[str, Mapping[str, Any]], None]) -> Iterator[None]:
    """If the job fails, save the reason in its run folder; ``save`` writes the file."""
    try:
        yield
    except BaseException as error:
        ours = isinstance(error, PenstockError)
        sentence = describe(error) if ours else f"{type(error).__name__}: {describe(error)}"
        if isinstance(error, KeyboardInterrupt):
            sentence = "interrupted"
        with contextlib.suppress(OSError, PenstockError):
            save(ENDING_FILE, {"time": time.time(), "error": sentence})
        raise
