"""Launches on the workers of a cluster, all of one kind of machine.

    client   launches in the order of the sweep ------>  workers, each one launch at a time
             <- the record of each, as its launch ends

A worker supervises a launch as `in_turn` does on one machine, with the same process, deadline and
memory limit. It works in the folder in which the client was started, so that relative paths of a
case mean the same. One launch at a time is made on a host, as launches share its memory bandwidth,
caches and disk. The record has the environment of the worker's machine. A training is written into
its own folder, which the client moves into place; so a worker that only seemed dead, and goes on,
does no harm.
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...base import (
    ARGS,
    Incomplete,
    PenstockError,
    UsageError,
    absolute,
    lock_file,
    read_json,
    scrubbed,
    write_json,
)
from ...cluster import (
    OF_WORKERS,
    FailedItem,
    UnfitWorker,
    Workers,
    share,
    still_wanted,
)
from ...instruments import Failure, Record, case_key, collect_environment, parse_record
from .request import Launch
from .supervisor import LaunchPlace, run_launch

BENCH_LIBRARIES = ("penstock-dl", "numpy", "torch", "torchvision", "tensorstore", "zarr", "dask")
"""The distributions whose versions affect the measurements."""
OUT = "output_dir"
"""The setting of a case that names its output folder."""
SEEN_S = 30.0
"""Seconds within which a network file system shows a worker's files to the client."""
_LOOK_S = 0.2

Kind = Mapping[str, Any]
"""Facts that workers must have in common, so that their launches may be compared."""


@dataclass(frozen=True, slots=True)
class RemoteLaunch:
    """A launch as it is sent to a worker."""

    launch: Launch
    needs: tuple[Path, ...]
    """Absolute paths that the worker must see."""
    folder: Path
    """The folder in which the client was started."""
    variables: Mapping[str, str]
    kind: Kind | None
    """The kind of the first worker; None before it has answered."""
    client: str = ""
    """Eight digits, with which the names of drafts begin that are for this client."""


class LaunchesOnCluster:
    """A launcher that runs launches on the workers of a cluster."""

    def __init__(
        self, workers: Workers, inputs: Iterable[str | Path], variables: Mapping[str, str]
    ) -> None:
        """Prepare.

        Args:
            workers: the workers.
            inputs: files and folders that every launch reads; URLs are left out.
            variables: the environment variables of this process before it started workers.
        """
        paths = [Path(path) for path in inputs if "://" not in str(path)]
        self._workers, self._folder = workers, Path.cwd()
        relative = any(not path.is_absolute() for path in paths)
        self._needs = (*[self._folder] * relative, *map(absolute, paths))
        self._variables = {name: variables[name] for name in OF_WORKERS & variables.keys()}
        self._kind: Kind | None = None
        self._parents: set[Path] = set()
        self._client = workers.token[-8:]

    def __call__(self, launches: Iterable[Launch]) -> Iterator[tuple[Launch, Record]]:
        """Run launches; see `sweep`.

        Raises:
            UsageError: no worker can run them with these settings.
            Incomplete: there is no worker, or the client does not see a worker's files.
        """
        shared = share(self._workers, launch_task, launches, work_of=self._work_of)
        try:
            for launch, result in shared:
                if isinstance(result, FailedItem):
                    yield launch, _failed(launch, result, self._kind)
                    continue
                line, draft = result
                record = parse_record(line)
                if draft is not None:
                    _move(Path(draft), Path(launch.case[OUT]))
                self._kind = self._kind or kind_of(record.environment)
                yield launch, record
        finally:
            for parent in self._parents:
                # Of launches that were given up. Another client may have drafts beside them.
                for path in parent.glob(f".penstock-{self._client}*.part"):
                    shutil.rmtree(path, ignore_errors=True)

    def like(self, records: Iterable[Record]) -> None:
        """Take only workers of the kind that measured these records."""
        for record in records:
            self._kind = kind_of(record.environment) or self._kind

    def notes(self) -> list[str]:
        """Sentences about the workers, for the end of the command's output."""
        return self._workers.notes("case")

    def _work_of(self, launch: Launch) -> RemoteLaunch:
        needs = self._needs
        if OUT in launch.case:
            parent = absolute(launch.case[OUT]).parent
            self._parents.add(parent)
            needs = (*needs, parent)
        return RemoteLaunch(launch, needs, self._folder, self._variables, self._kind, self._client)


def kind_of(environment: Mapping[str, Any]) -> Kind | None:
    """The kind of a worker: its machine, and its share of that machine. Launches on workers of one
    kind may be compared. None if the environment has no machine key.
    """
    if not environment.get("machine_key"):
        return None
    return {"machine": environment["machine_key"], **(environment.get("limits") or {})}


def _failed(launch: Launch, failure: FailedItem, kind: Kind | None) -> Record:
    """The record of a launch that no worker completed.

    Raises `UsageError` for an error that every launch would meet.
    """
    if failure.exit_code == UsageError.exit_code:
        raise failure.error()
    return Record.model_validate(
        {
            "id": uuid.uuid4().hex,
            "time": datetime.now().astimezone().isoformat(timespec="milliseconds"),
            "scenario": launch.scenario,
            "case": scrubbed(dict(launch.case)),
            "key": case_key(launch.scenario, launch.case),
            "launch": launch.number,
            "order": launch.order,
            "status": "crash",
            "environment": {"machine_key": kind["machine"]} if kind else {},
            "error": Failure(stage="start", message=failure.sentence),
        }
    )


def _move(draft: Path, out: Path) -> None:
    """Move a training that a worker wrote into place."""
    end = time.monotonic() + SEEN_S
    while not draft.is_dir():
        if time.monotonic() > end:
            raise Incomplete(
                f"{out.parent} does not hold what a worker wrote there; --output-dir must be a "
                "folder that all workers share"
            )
        time.sleep(_LOOK_S)
    args = draft / ARGS
    if args.is_file():  # it holds the draft's name
        write_json(args, {**read_json(args), OUT: str(out)})
    draft.replace(out)


# --- on a worker ----------------------------------------------------------------------------------


def launch_task(work: RemoteLaunch) -> tuple[str, str | None]:
    """Run a launch, on a worker.

    Args:
        work: the launch.

    Returns:
        The line of its record, and the folder that it wrote, if it writes one.

    Raises:
        UnfitWorker: the worker does not see what the launch needs, or is of another kind.
    """
    from distributed import get_worker

    wanted = still_wanted()
    with host_held(wanted):
        return launch_here(work, get_worker().address, wanted)


@contextlib.contextmanager
def host_held(wanted: Callable[[], bool]) -> Iterator[None]:
    """Hold this host once no other worker of this user measures on it. The lock ends with the
    process.

    Args:
        wanted: called now and then; when it returns False, the worker stops waiting.

    Raises:
        PenstockError: no client waits for the launch any more.
    """
    path = Path(tempfile.gettempdir(), f"penstock-launch-{os.getuid()}.lock")
    # The folder is everybody's: a link that lies there is not followed.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor) as file:
        while not lock_file(file):
            if not wanted():
                raise PenstockError("no client waits for this launch any more")
            time.sleep(_LOOK_S)
        yield


def launch_here(
    work: RemoteLaunch, address: str, wanted: Callable[[], bool]
) -> tuple[str, str | None]:
    """`launch_task` for a given worker.

    Args:
        work: the launch.
        address: the address of the worker.
        wanted: returns False when the client no longer waits for the task.

    Returns:
        The line of its record, and the folder that it wrote, if it writes one.
    """
    here = platform.node()
    for path in work.needs:
        if not path.exists():
            raise UnfitWorker(f"the worker on {here} does not see {path}")
    kind = _kind_here()
    if work.kind is not None and work.kind != kind:
        other = ", ".join(f"{n} {kind.get(n)}" for n in kind if kind.get(n) != work.kind.get(n))
        raise UnfitWorker(
            f"the worker on {here} is not like the first ({other}), and times of unlike machines "
            "are not compared"
        )
    launch, draft = work.launch, None
    case = launch.case
    if OUT in case:
        name = f".penstock-{work.client}{secrets.token_hex(4)}.part"  # as `is_draft` knows them
        draft = str(absolute(case[OUT]).parent / name)
        launch = replace(launch, case={**case, OUT: draft})
    mine = {name: text for name, text in os.environ.items() if name not in OF_WORKERS}
    place = LaunchPlace(
        folder=work.folder if work.folder.is_dir() else None,
        variables={**mine, **work.variables},
        facts={"worker": {"host": here, "address": address}},
        wanted=wanted,
    )
    record = run_launch(launch, place=place)
    is_there = draft is not None and Path(draft).is_dir()
    return record.line(), draft if is_there else None


@lru_cache(maxsize=1)
def _kind_here() -> Kind:
    return kind_of(collect_environment()) or {}
