"""The files of a run folder: where it lies, that it is one, and how its JSON is written."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base import TRACEBACK_FILE, UsageError, is_draft, replacing, scrubbed
from ..data import Located
from .log_file import own_name
from .unit_log import parse_line


class RunFiles:
    """The folder of a run, in which several processes may write."""

    def __init__(self, folder: Path | None) -> None:
        """``folder`` is None for a run that leaves nothing."""
        self.folder = folder
        self.writer: str | None = None
        """Name of this process among several that write the run; None if it writes alone."""

    def save(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file of the folder, completely or not at all."""
        path = self.path(name)
        if path is not None:
            with replacing(path) as draft:
                draft.write_text(json.dumps(scrubbed(content), indent=2, default=str) + "\n")

    def own_path(self, name: str) -> Path | None:
        """The file of this process, where several that share the run each have one."""
        path = self.path(name)
        if path is None or self.writer is None:
            return path
        return path.with_name(own_name(name, self.writer))

    def path(self, name: str) -> Path | None:
        return None if self.folder is None else self.folder / name


def default_run_dir(sink: Located) -> Path | None:
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


def check_ours(folder: Path) -> None:
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
    return all(
        parse_line(line) or line[:1] in (b"?", b"#") for line in lines if line.endswith(b"\n")
    )
