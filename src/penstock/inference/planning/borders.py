"""The cost of the patches on borders of parts, if they are computed twice or spilled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...base import InferConfig, format_bytes, format_count, format_seconds
from ..tiling.part_work import part_work
from ..tiling.parts import IDLE_PARTS, Parts
from .memory import Facts
from .spill_room import Spill

SPILL_BANDWIDTH = 200e6
"""Bytes per second at which a worker is assumed to spill and to read back, if the rate is neither
given nor measured. A local disk is several times as fast. It is a fair guess for each of many
workers that share a file system."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to treat borders, with its expected cost."""

    parts: int
    patches: int
    read_bytes: int
    """Decoded bytes that are read."""
    seconds: float | None
    """Seconds of the job; None if the time of a patch is unknown."""


@dataclass(frozen=True, slots=True)
class Ways:
    """Both ways, and which is taken."""

    recomputed: Way
    spilled: Way
    spill: Spill
    rates: str
    """The rates from which the seconds are computed, and their sources."""
    spills: bool
    """True if parts spill."""
    why: str
    one: int
    """Number of patches that a single process would compute."""

    def lines(self) -> Iterator[tuple[str, str]]:
        """Both ways in words, line by line: (what, how much)."""
        yield "  recompute", self._words(self.recomputed)
        yield "  spill", f"{self._words(self.spilled)}; {self.spill.line()}"
        yield "  rates", self.rates
        yield "  taken", f"{'spill' if self.spills else 'recompute'}: {self.why}"

    def _words(self, way: Way) -> str:
        took = "" if way.seconds is None else f", {format_seconds(way.seconds)} predicted"
        parts = f"{format_count(way.parts)} parts, " * (self.recomputed.parts != self.spilled.parts)
        times, read = way.patches / self.one, format_bytes(way.read_bytes)
        patches = f"{format_count(way.patches)} patches, {times:.2f} of one process's"
        return f"{parts}{patches}, {read} read{took}"


def weigh(
    config: InferConfig,
    facts: Facts,
    recomputed: tuple[Parts, int],
    spilled: tuple[Parts, int],
    spill: Spill,
    *,
    fits: bool,
) -> Ways:
    """Choose the way that the settings ask for, or else the one that should end first.

    Args:
        config: The settings of the job.
        facts: The facts, with the seconds of a patch and the rate of spilling if they are known.
        recomputed: Parts that compute their borders twice, and the bytes that they read.
        spilled: Parts that spill, and the bytes that they read.
        spill: What they spill.
        fits: Whether the job fits the memory if parts spill.

    Returns:
        Both ways, and the choice.
    """
    ways = _way(*recomputed, facts, 0.0), _way(*spilled, facts, spill.bytes / spill_rate(facts))
    if config.spill == "always":
        spills, why = True, "--spill always"
    elif config.cluster is None:
        spills, why = False, "only the workers of --cluster spill"
    elif config.max_spill is not None and spill.peak > config.max_spill:
        limit = format_bytes(config.max_spill)
        spills, why = False, f"--max-spill {limit} is less than the job would spill at once"
    elif not fits:
        spills, why = False, "spilling does not fit the memory"
    elif ways[0].seconds is None or ways[1].seconds is None:
        spills, why = False, "the time of a patch is unknown; give --rate"
    else:
        spills, why = ways[1].seconds < ways[0].seconds, "it is predicted to end first"
    one = spilled[0].geometry.cores.cells.size * spilled[0].num_volumes
    return Ways(*ways, spill, _rates(facts), spills, why, one)


def spill_rate(facts: Facts) -> float:
    """Bytes per second at which a worker writes, or reads, spilled pieces.

    Args:
        facts: The facts, with the rate if it is known.

    Returns:
        The known rate, or else `SPILL_BANDWIDTH`.
    """
    return facts.spill_rate or SPILL_BANDWIDTH


def _rates(facts: Facts) -> str:
    scratch = f"{format_bytes(spill_rate(facts))}/s of scratch for each worker"
    source = facts.spill_rate_from if facts.spill_rate else "assumed; give --spill-rate"
    patch = ""
    if facts.patch_seconds is not None:
        patch = f"{format_seconds(facts.patch_seconds)} a patch ({facts.patch_seconds_from}), "
    return f"{patch}{scratch} ({source})"


def _way(parts: Parts, read_bytes: int, facts: Facts, scratch: float) -> Way:
    """The cost of a way. Its seconds run from the first part to the end. ``scratch`` is the seconds
    that one worker would take to write all pieces, and again to read them."""
    work, each = part_work(parts), facts.patch_seconds
    if each is None:
        return Way(len(parts), work.total, read_bytes, None)
    last = max(work.largest, work.total / parts.workers + IDLE_PARTS * work.largest)
    moved = 2 * scratch / min(parts.workers, len(parts))
    return Way(len(parts), work.total, read_bytes, last * each + moved)
