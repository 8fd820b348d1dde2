"""Verify an output: every block is there, can be decoded, and has the checksum that was noted."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

from numpy.typing import NDArray

from ..base import Flow, Incomplete, PenstockError, Stopped, describe, plural
from ..data import Box, Grid, Source, indices, is_damage
from ..instruments import Probe
from .run_folder.block_log import Key, digest_of
from .run_folder.names import LOG_FILE
from .run_folder.reader import RunFolder, Stored
from .stages.retries import Retries

SLAB_BYTES = 64 * 2**20
"""Bytes of a block that a thread holds at a time, unless one layer of its chunks has more."""

MOST_LISTED = 100_000
"""The most blocks without a note that are findings; more of them are a number."""

Kind = Literal["missing", "damaged", "different"]
_NOTHING = "none of its chunks is stored"


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with a block."""

    key: Key
    kind: Kind
    output: str
    what: str


@dataclass
class Proof:
    """The result of verifying an output: what was read, and what is wrong with it."""

    blocks: int
    """Number of blocks in the run's plan."""
    proven: int = 0
    proven_bytes: int = 0
    """Decoded bytes of the blocks that are proven."""
    findings: list[Finding] = field(default_factory=list)
    unlisted: int = 0
    """Blocks that no log names, beyond the first `MOST_LISTED`, which are findings."""

    def of_kind(self, kind: Kind) -> list[Finding]:
        """The findings of a kind, by block."""
        return sorted((f for f in self.findings if f.kind == kind), key=lambda f: f.key)

    @property
    def bad(self) -> set[Key]:
        return {finding.key for finding in self.findings}


@dataclass(frozen=True, slots=True)
class Recomputed:
    """The blocks that were computed anew, and how they compare."""

    sampled: int
    population: int
    """Number of blocks from which the sample was drawn."""
    findings: list[Finding]

    @property
    def equal(self) -> int:
        """Blocks that have the same bits in all outputs."""
        return self.sampled - len({finding.key for finding in self.findings})


def verify_run(
    run: RunFolder,
    readers: int,
    retry_for: float,
    progress: Callable[[int], None],
    only: Collection[Key] | None = None,
) -> Proof:
    """Read every block of a run, and compare it with the checksum in the log.

    Args:
        run: The run.
        readers: Number of threads. Each holds a slab of a block at a time.
        retry_for: Seconds for which a read is tried again if its fault may pass.
        progress: A function that is called with the number of blocks that were read.
        only: The blocks to read, all by default.

    Returns:
        What is proven and what is not.

    Raises:
        PenstockError: The store cannot be read.
    """
    total = run.num_blocks if only is None else len(only)
    proof, flow, lock = Proof(total), Flow(), threading.Lock()
    keys = run.notes if only is None else only
    seen = total - len(keys)
    # A run that has just begun may have a thousand million of these.
    every = run.keys() if only is None else ()
    unnoted = (key for key in every if key not in run.notes)
    proof.findings += [_not_noted(run, key) for key in islice(unnoted, min(seen, MOST_LISTED))]
    proof.unlisted = seen - len(proof.findings)
    retries = Retries(retry_for, None, Probe().clock, lambda: None)

    def verify(key: Key) -> None:
        nonlocal seen
        findings = list(_findings(run, key, flow, retries))
        with lock:
            seen += 1
            _count(proof, run, key, findings)

    flow.each("verify", keys, verify, readers)
    flow.join(lambda: progress(seen))
    progress(seen)
    return proof


def _count(proof: Proof, run: RunFolder, key: Key, findings: list[Finding]) -> None:
    if findings:
        proof.findings += findings
    else:
        proof.proven += 1
        proof.proven_bytes += sum(
            stored.box(key[0], run.blocks.cell(key[1:])).size * stored.written.source.dtype.itemsize
            for stored in run.outputs
        )


def _findings(run: RunFolder, key: Key, flow: Flow, retries: Retries) -> Iterator[Finding]:
    """The faults of a block, output by output."""
    checks = run.notes.get(key, ())
    if len(checks) != len(run.outputs):
        yield _not_noted(run, key)
        return
    for number, stored in enumerate(run.outputs):
        name = stored.written.name
        box = stored.box(key[0], run.blocks.cell(key[1:]))
        wanted = checks[number]
        where = f"{run.named(key)} of {name}"

        def look(stored: Stored = stored, box: Box = box, wanted: str = wanted) -> str:
            digest = digest_of(_slabs(stored.written.source, box))
            return "" if digest == wanted else _difference(stored, box)

        try:
            what = retries.run(flow, name, where, look)
        except Stopped:  # another thread has failed, so this block is neither good nor bad
            raise
        except Exception as error:
            if not is_damage(error):
                tried = isinstance(error, Incomplete) and error.__cause__  # the fault itself
                raise PenstockError(f"reading {where}: {describe(tried or error)}") from error
            what = describe(error)
        if what:
            yield Finding(key, "missing" if what == _NOTHING else "damaged", name, what)


def _not_noted(run: RunFolder, key: Key) -> Finding:
    name = run.outputs[0].written.name
    return Finding(key, "missing", name, f"is not noted in {LOG_FILE}")


def _difference(stored: Stored, box: Box) -> str:
    """Describe a block with wrong values, and whether its chunks are there."""
    source = stored.written.source
    grid = Grid(source.domain, source.chunks, source.grid_origin)
    cells = [grid.cell(index) for index in indices(grid.touching(box))]
    absent = source.absent(cells) if source.tells_absent else []
    if len(absent) == len(cells):
        return _NOTHING
    what = "has other values than were written"
    if absent:
        what += (
            f"; not stored: {len(absent)} of its {plural(len(cells), 'chunk')}, first {absent[0]}"
        )
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
