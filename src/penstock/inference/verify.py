"""Verify an output: every unit is there, can be decoded, and has the checksum that was noted."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from numpy.typing import NDArray

from ..base import Flow, Incomplete, PenstockError, Stopped, describe
from ..data import Box, Grid, Source, indices, is_damage
from ..instruments import Probe
from .run_folder.checks import digest_of
from .run_folder.reader import RunFolder, Stored
from .run_folder.unit_log import CHECKSUM, Key
from .stages.retries import Retries

SLAB_BYTES = 64 * 2**20
"""Bytes of a unit that a thread holds at a time, unless one layer of its chunks has more."""

Kind = Literal["missing", "damaged", "different"]
_NOTHING = "none of its chunks is stored"


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with a unit."""

    key: Key
    kind: Kind
    output: str
    what: str


@dataclass
class Proof:
    """The result of verifying an output: what was read, and what is wrong with it."""

    units: int
    """Number of units in the run's plan."""
    proven: int = 0
    proven_bytes: int = 0
    """Decoded bytes of the units that are proven."""
    unprovable: int = 0
    """Units that were read, but have no checksum in the log."""
    findings: list[Finding] = field(default_factory=list)

    def of_kind(self, kind: Kind) -> list[Finding]:
        """The findings of a kind, by unit."""
        return sorted((f for f in self.findings if f.kind == kind), key=lambda f: f.key)

    @property
    def bad(self) -> set[Key]:
        return {finding.key for finding in self.findings}


def verify_run(
    run: RunFolder, readers: int, retry_for: float, progress: Callable[[int], None]
) -> Proof:
    """Read every unit of a run, and compare it with the checksum in the log.

    Args:
        run: The run.
        readers: Number of threads. Each holds a slab of a unit at a time.
        retry_for: Seconds for which a read is tried again if its fault may pass.
        progress: A function that is called with the number of units that were read.

    Returns:
        What is proven and what is not.

    Raises:
        PenstockError: The store cannot be read.
    """
    proof, flow, lock = Proof(run.num_units), Flow(), threading.Lock()
    keys, seen = iter(run.keys()), 0
    retries = Retries(retry_for, None, Probe().clock, lambda: None)

    def work() -> None:
        nonlocal seen
        while not flow.failed:
            with lock:
                key = next(keys, None)
            if key is None:
                return
            findings = list(_findings(run, key, flow, retries))
            with lock:
                seen += 1
                _count(proof, run, key, findings)

    for number in range(readers):
        flow.spawn(f"verify-{number}", work)
    flow.join(lambda: progress(seen))
    progress(seen)
    return proof


def _count(proof: Proof, run: RunFolder, key: Key, findings: list[Finding]) -> None:
    if findings:
        proof.findings += findings
    elif not _provable(run, key):
        proof.unprovable += 1
    else:
        proof.proven += 1
        proof.proven_bytes += sum(
            stored.box(key[0], run.units.cell(key[1:])).size * stored.written.source.dtype.itemsize
            for stored in run.outputs
        )


def _provable(run: RunFolder, key: Key) -> bool:
    """Whether the log has a checksum that this version can compute."""
    note = run.notes[key]
    maker = run.makers[note.maker] if note.maker < len(run.makers) else {}
    return len(note.checks) == len(run.outputs) and maker.get("checksum") == CHECKSUM


def _findings(run: RunFolder, key: Key, flow: Flow, retries: Retries) -> Iterator[Finding]:
    """The faults of a unit, output by output."""
    if key not in run.notes:
        name = run.outputs[0].written.name
        yield Finding(key, "missing", name, "was never written")
        return
    provable = _provable(run, key)
    for number, stored in enumerate(run.outputs):
        name = stored.written.name
        box = stored.box(key[0], run.units.cell(key[1:]))
        wanted = run.notes[key].checks[number][1:] if provable else None
        where = f"{run.named(key)} of {name}"

        def look(stored: Stored = stored, box: Box = box, wanted: str | None = wanted) -> str:
            digest = digest_of(_slabs(stored.written.source, box))
            return "" if wanted in (None, digest) else _difference(stored, box)

        try:
            what = retries.run(flow, name, where, look)
        except Stopped:
            raise
        except Exception as error:
            if not is_damage(error):
                tried = isinstance(error, Incomplete) and error.__cause__  # the fault itself
                raise PenstockError(f"reading {where}: {describe(tried or error)}") from error
            what = describe(error)
        if what:
            yield Finding(key, "missing" if what == _NOTHING else "damaged", name, what)


def _difference(stored: Stored, box: Box) -> str:
    """Describe a unit with wrong values, and whether its chunks are there."""
    source = stored.written.source
    grid = Grid(source.domain, source.chunks, source.grid_origin)
    cells = [grid.cell(index) for index in indices(grid.touching(box))]
    absent = source.absent(cells) if source.tells_absent else []
    if len(absent) == len(cells):
        return _NOTHING
    what = "has other values than were written"
    if absent:
        what += f"; not stored: {len(absent)} of its {len(cells)} chunks, first {absent[0]}"
    return what


def _slabs(source: Source, box: Box) -> Iterator[NDArray[Any]]:
    """The voxels of a box in C order, in pieces of whole chunks that a thread can hold."""
    channels = box.shape[1]
    if channels > 1 and source.chunks[1] > 1:  # channel by channel would decode chunks again
        yield source.read(box)
        return
    layer = math.prod(box.shape[3:]) * source.dtype.itemsize
    depth = source.chunks[2] * max(1, SLAB_BYTES // (layer * source.chunks[2]))
    step = (1, 1, depth, *box.shape[3:])
    anchor = (*box.start[:2], source.grid_origin[2], *box.start[3:])
    for piece in Grid(box, step, anchor):
        yield source.read(piece)
