"""The run folder: what a run keeps beside its output, so that a killed run can be resumed.

    run.json         name, settings and fingerprint of the run; the makers of its units: versions,
                     code and kind of machine
    done.log         one line for each write unit, appended and synced after the unit is written;
                     "# maker N" says who made those below it, at first it is maker 0
    statistics.json  exact global percentiles
    metrics.jsonl    rows of telemetry
    summary.json     written last, by a run that succeeded

A line that is not whole, because the run was killed, is ignored and its unit is written again. To
write a unit twice does no harm; to leave out one that was never written would.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from ..base import TRACEBACK_FILE, UsageError, is_draft, replacing, scrubbed
from ..data import Sink
from ..instruments import set_aside

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

Key = tuple[int, ...]
_OLDER = {"code": "of an older version"}
"""The maker of a run that was begun by a version which noted none."""


class Journal:
    """The record of one run. Without a folder it only counts."""

    def __init__(
        self,
        folder: Path | None,
        fingerprint: Mapping[str, Any],
        maker: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = folder
        self.fingerprint: dict[str, Any] = scrubbed(json.loads(json.dumps(fingerprint)))
        self.makers: list[dict[str, Any]] = [json.loads(json.dumps(maker or {}))]
        self.maker = 0
        """Index of this process among the makers."""
        self.run = uuid.uuid4().hex
        """Name of the run, also in the marker of its output. A resumed run keeps its name."""
        self.lacking: list[str] = []
        """One sentence that says why the run folder is not locked; empty if it is."""
        self.done: set[Key] = set()
        self.statistics: dict[str, dict[str, Any]] = {}
        self.written = self.skipped = self.voxels = 0
        self._replaces: list[str | None] = []
        """Names of the runs that made the outputs which this run replaces."""
        self._before: Mapping[str, Any] | None = None
        self._anyway = False
        self._log: IO[str] | None = None
        self._lock = threading.Lock()

    @classmethod
    def open(
        cls,
        folder: Path | None,
        fingerprint: Mapping[str, Any],
        maker: Mapping[str, Any] | None = None,
        *,
        resume: bool,
        anyway: bool = False,
    ) -> Journal:
        """Open a run folder, and if ``resume`` read what an earlier run left. Creates nothing.

        Raises `UsageError` if the earlier run had other settings, naming the first difference, or
        if the folder is no run folder. ``anyway`` allows another ``maker``.
        """
        journal = cls(folder, fingerprint, maker)
        if folder is not None:
            there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
            if not there.is_dir() or not os.access(there, os.W_OK):
                raise UsageError(f"--run-dir {folder}: {there} is no folder that can be written to")
            _check_ours(folder)
        if not resume or folder is None or not (folder / "run.json").exists():
            return journal
        before = _read(folder / "run.json")
        journal._check_same(_settled(before.get("fingerprint", {})))
        journal._join(before.get("makers", [_OLDER]), anyway)
        journal._before, journal._anyway = before, anyway
        journal._replaces = before.get("replaces", [])
        journal.run = before.get("run", journal.run)
        log = folder / "done.log"
        lines = log.read_bytes().splitlines(keepends=True) if log.exists() else []
        journal.done = {key for line in lines if (key := _parse(line)) is not None}
        journal.skipped = len(journal.done)
        statistics = folder / "statistics.json"
        if statistics.exists():
            journal.statistics = _read(statistics)
        return journal

    def _check_same(self, before: Mapping[str, Any]) -> None:
        if (name := _differing(before, self.fingerprint)) is not None:
            raise UsageError(
                f"--resume: the run in {self.folder} had {name} {before[name]!r}, this one has "
                f"{self.fingerprint[name]!r}; give the same settings, or --overwrite instead"
            )

    def _join(self, makers: list[dict[str, Any]], anyway: bool) -> None:
        """Add this process to the makers of the run, or find it among them."""
        (mine,) = self.makers
        name = _differing(makers[-1], mine)
        if mine not in makers:
            if name is not None and not anyway:
                raise UsageError(
                    f"--resume: the run in {self.folder} was made with {name} "
                    f"{makers[-1][name]!r}, here it is {mine[name]!r}, which may change voxels; "
                    "--resume-anyway goes on and notes which blocks are whose, --overwrite begins "
                    "anew"
                )
            makers = [*makers, mine]
        self.makers, self.maker = makers, makers.index(mine)

    def check_maker(self, output: str, made_by: str | None) -> None:
        """Raise `UsageError` if a run is resumed whose output belongs to another run by now.

        ``made_by`` is the run that the marker of the output names, or None.
        """
        if self._before is None:
            self._replaces = list({*self._replaces, made_by})  # called again while the job waits
            return
        if not self.done and made_by in self._replaces:
            return  # killed before the marker named it: all of the output is written anyway
        mine = self._before.get("run")
        if made_by is None and (mine is None or self._anyway or not self._before.get("locked")):
            return  # made before there were markers, or where none could be
        if made_by is None:
            raise UsageError(
                f"--resume: no lock beside {output} names the run in {self.folder} any more, so "
                "the output may be another's; --resume-anyway goes on, --overwrite begins anew"
            )
        if made_by != mine:
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
        self.folder.mkdir(parents=True, exist_ok=True)
        self._log = (self.folder / "done.log").open("a")
        try:
            why = _claim(self._log)
        except BlockingIOError:
            self.close()
            raise UsageError(
                f"--run-dir {self.folder}: another process is writing this output"
            ) from None
        if why is not None:
            self.lacking.append(f"--run-dir {self.folder} has no lock: {why}")

    def begin(self, settings: Mapping[str, Any], *, locked: bool = False) -> None:
        """Make the folder and start the log. Units that were done before stay in it.

        ``locked`` says that the output's marker names this run. Raises `UsageError`, and changes
        nothing, if another process writes this run.
        """
        if self.folder is None:
            return
        self.lock()
        assert self._log is not None
        if not self.done:
            self._log.truncate(0)
            (self.folder / "statistics.json").unlink(missing_ok=True)
        elif not (self.folder / "done.log").read_bytes().endswith(b"\n"):
            # The log is only appended to, so a kill cannot lose what is done. A torn line is made
            # invalid before it is ended: half of "0 1 1 12" would say that 0 1 1 1 is done.
            self._log.write("?\n")
            self._log.flush()
        for old in ("summary.json", TRACEBACK_FILE):
            (self.folder / old).unlink(missing_ok=True)
        if self.done:  # by the run that is resumed
            set_aside(self.folder / "metrics.jsonl")
        # Written first: it says which run the folder belongs to.
        run = {
            "run": self.run,
            "locked": locked,
            "replaces": self._replaces,
            "settings": settings,
            "fingerprint": self.fingerprint,
            "makers": self.makers,
        }
        self.save("run.json", run)
        self.save("statistics.json", self.statistics)
        if len(self.makers) > 1:
            self._append(f"# maker {self.maker}\n")

    def note(self, key: Key, voxels: int) -> None:
        """Note that a unit of so many voxels has been written."""
        with self._lock:
            self.written += 1
            self.voxels += voxels
            self._append(_line(key))

    def _append(self, line: str) -> None:
        if self._log is not None:
            self._log.write(line)
            self._log.flush()
            os.fsync(self._log.fileno())

    def save_statistics(self, volume: int, scaling: Mapping[str, Any]) -> None:
        self.statistics[str(volume)] = dict(scaling)
        self.save("statistics.json", self.statistics)

    def save(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file of the folder, completely or not at all."""
        path = self.path(name)
        if path is not None:
            with replacing(path) as draft:
                draft.write_text(json.dumps(scrubbed(content), indent=2, default=str) + "\n")

    def path(self, name: str) -> Path | None:
        return None if self.folder is None else self.folder / name

    def close(self) -> None:
        if self._log is not None:
            with contextlib.suppress(OSError):  # `note` has raised it already
                self._log.close()
            self._log = None


def default_run_dir(sink: Sink) -> Path | None:
    """The run folder of an output: beside a local store, in the working folder for a remote one.
    None for an array in memory.

    If the name of the store does not say which array is meant, a hash of its address is added.
    """
    store = sink.local_path
    if store is not None and str(store.resolve()) == sink.address:
        return store.with_name(store.name + ".penstock")
    if store is None:
        if "://" not in sink.address:
            return None
        store = Path(sink.address.rstrip("/").rpartition("/")[2])
    address = hashlib.sha256(sink.address.encode()).hexdigest()[:8]
    return store.with_name(f"{store.name}-{address}.penstock")


def _claim(file: IO[str]) -> str | None:
    """Lock an open file for this process, until it is closed or the process ends.

    Returns the reason why there is no lock, or None. Raises `BlockingIOError` if another process
    has locked the file.
    """
    if fcntl is None:
        return "this system has no flock"
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        return f"its file system refuses it: {error.strerror}"
    return None


def _check_ours(folder: Path) -> None:
    """Refuse a folder that holds files and is no run folder. Nothing in it is changed."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    # A run that ends before it has begun may leave these.
    names = {name for name in names if name != TRACEBACK_FILE and not is_draft(name)}
    if not names or _is_ours(folder, names):
        return
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    raise UsageError(
        f"--run-dir {folder}: holds {min(names)}{others} and is no run folder; name another one"
    )


def _is_ours(folder: Path, names: set[str]) -> bool:
    """Whether a folder is a run folder: by its run.json, or by its log if that is damaged or
    missing."""
    with contextlib.suppress(ValueError, OSError):
        run = json.loads((folder / "run.json").read_bytes())
        if isinstance(run, dict) and {"settings", "fingerprint"} <= run.keys():
            return True
    if "done.log" not in names:
        return False
    lines = (folder / "done.log").read_bytes().splitlines(keepends=True)
    if not lines:
        return names <= {"done.log", "statistics.json"}
    # The last line may be torn.
    return all(_parse(line) or line[:1] in (b"?", b"#") for line in lines if line.endswith(b"\n"))


def _settled(fingerprint: dict[str, Any]) -> dict[str, Any]:
    """A fingerprint as this version writes it: older ones kept the folder of a model's file."""
    if "model" in fingerprint:
        name, *rest = fingerprint["model"]
        fingerprint["model"] = [Path(name).name, *rest]
    return fingerprint


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first key whose value differs. What an older version did not note counts as equal."""
    return next((name for name, value in now.items() if before.get(name, value) != value), None)


def _line(key: Key) -> str:
    return " ".join(map(str, key)) + "\n"


def _parse(line: bytes) -> Key | None:
    """The unit that a line names. None for a line that is damaged or not whole."""
    whole = re.fullmatch(rb"(\d+) (-?\d+) (-?\d+) (-?\d+)\n", line)
    return tuple(int(part) for part in whole.groups()) if whole else None


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise UsageError(f"--resume: {path} is damaged; give --overwrite to begin anew") from error
    return content
