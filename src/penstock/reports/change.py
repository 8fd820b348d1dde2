"""A change that may make a run faster: what it may give, how to test it, and whether it did."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base import Knobs, as_words, plural
from ..instruments import Interval
from .table import Section


@dataclass(frozen=True)
class Change:
    """One change to a run."""

    what: str
    """Words for the change, a clause: ``2 workers that load batches in place of 0``."""
    why: str
    """The measurement that supports it, as a clause."""
    gain: Interval
    """Speed with the change over speed without it. An end is None if it has no bound."""
    basis: str
    """The basis of the interval: an assumption for each end, and a count."""
    settings: Mapping[str, Any]
    """Settings that differ in a run that tests the change; empty if no setting makes it."""
    command: str = ""
    """The command that would test it."""

    def sentence(self) -> str:
        """The change, its gain, and the basis of the gain, in a sentence."""
        low, high = self.gain.low, self.gain.high
        why = self.why[:1].upper() + self.why[1:]
        if low is None and high is None:
            return f"{self.what}: the gain is not known, because {self.basis}. {why}."
        ends = f"[{_end(low)}-{_end(high)}: {self.basis}]"
        return f"{self.what}: {self.gain.value:.2f}x as fast {ends}. {why}."


def _end(end: float | None) -> str:
    return "?" if end is None else f"{end:.2f}"


def ranked(changes: Sequence[Change]) -> list[Change]:
    """Changes by expected gain, the largest first; those with an unknown gain are last."""
    return sorted(changes, key=lambda c: (c.gain.high is None, -c.gain.value))


def change_section(changes: Sequence[Change], more: Sequence[str] = ()) -> list[Section]:
    """The section of a report on what to change; none if no measurement supports a change.

    Args:
        changes: Changes in any order.
        more: Sentences that come first.

    Returns:
        A section with a table of the commands that would test the changes, or nothing.
    """
    ordered = ranked(changes)
    commands = [(c.what, c.command) for c in ordered if c.command]
    table = [("change", "command that tests it"), *commands] if commands else []
    lines = [*more, *(change.sentence() for change in ordered)]
    return [Section("What to change", table, lines)] if lines else []


def command_of(verb: Sequence[str], model: type[Knobs], settings: Mapping[str, Any]) -> str:
    """The command line of some settings.

    Args:
        verb: The words before the flags.
        model: The knobs.
        settings: Values by name. Names that are no knobs of ``model`` are left out.

    Returns:
        A line for a shell, with quotes where it needs them.
    """
    kept = {
        name: value
        for name, value in settings.items()
        if name in model.model_fields and value not in ([], ())
    }
    return shlex.join([*verb, *as_words(model, kept)])


def place_beside(path: str, settings: Mapping[str, Any]) -> str:
    """A path for the output of a test, beside the output of the run.

    >>> place_beside("out/d.ome.zarr", {"prep_workers": 8})
    'out/d-prep-workers-8.ome.zarr'
    """
    place = Path(path)
    stem, dot, suffix = place.name.partition(".")
    words = [f"{name.replace('_', '-')}-{_plain(value)}" for name, value in settings.items()]
    return str(place.with_name("-".join([stem, *words]) + dot + suffix))


def _plain(value: Any) -> str:
    values = value if isinstance(value, list | tuple) else [value]
    return "-".join(str(each) for each in values)


@dataclass(frozen=True)
class Held:
    """A change that was tested, and its measured gain."""

    change: Change
    where: str
    """The run that tested it."""
    measured: Interval
    """Its speed over the speed of the explained run."""
    doubt: str = ""
    """Reason not to trust a test that gained less than expected, as a clause; or empty."""

    @property
    def verdict(self) -> str:
        """Say whether the measured gain lies in the expected interval, and how certain that is."""
        if self.change.gain.low is None and self.change.gain.high is None:
            return "was tested"
        low = self.change.gain.low if self.change.gain.low is not None else 0.0
        high = self.change.gain.high if self.change.gain.high is not None else float("inf")
        if low <= self.measured.value <= high:
            return "held"
        ends = (self.measured.low, self.measured.high)
        if None not in ends and ends[0] <= high and ends[1] >= low:  # type: ignore[operator]
            return "may have held"
        if self.measured.value > high:
            return "gave more"
        return "cannot be told" if self.doubt else "did not hold"

    def sentence(self) -> str:
        low, high = self.measured.low, self.measured.high
        ends = "" if low is None or high is None else f"{low:.2f}-{high:.2f}, "
        gain, verdict = self.change.gain, self.verdict
        expected = f"{gain.value:.2f}x [{_end(gain.low)}-{_end(gain.high)}] was expected"
        if verdict == "was tested":
            expected = "no gain was predicted"
        doubt = f"; {self.doubt}" if verdict == "cannot be told" else ""
        return (
            f"{self.change.what} {verdict}: {self.where} was {self.measured.value:.2f}x as fast "
            f"[{ends}{plural(self.measured.n, 'launch')} each]; {expected}{doubt}."
        )
