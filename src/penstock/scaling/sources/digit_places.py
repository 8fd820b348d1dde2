"""Lines that differ only in their digits, read by position.

A long log has few kinds of lines, millions of times. The shape of a line is the line with a 0 for
each digit. If nothing is kept of the first line of a shape, nothing is kept of the others. If it is
a bar of progress, or a line of an epoch, the others have the same numbers at the same bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .attempt import SCORE, Attempt

LONGEST = 512
"""The maximum length in bytes of a line whose shape is kept."""
MOST = 1 << 14
"""The maximum number of shapes; when it is reached, all are forgotten."""
_AS_ZERO = bytes.maketrans(b"123456789", b"0" * 9)
LABEL = rb"(?:[ \t]*(?:\d{1,6}: ?|\[[^][\x00-\x1f]{1,60}\]:? ?))?"
"""The label that srun or torchrun puts before a line."""
_BAR = re.compile(
    LABEL + rb"Epoch (\d{1,9})(/\d{1,9})?: +\d{1,3}%\|[^|/\[\x00-\x1f\x7f]*\| *(\d{1,9})/(\d{1,9}) "
    rb"\[[\d:]+<[\d:?]+, *[\d.?]+(?:it/s|s/it)(?:, \w+=[-+.\w]+)*\] *"
)
_EPOCH = re.compile(
    LABEL
    + rb"epoch (\d{1,9})( of \d{1,9})?, step \d+ of \d+: loss [-+.\de]+;(?: \w+ [-+.\de]+,?)* *"
)
"""Plain lines of progress. They contain neither the end of a job nor a line of another rank."""
_NOT_FINITE = re.compile(rb"nan|inf", re.IGNORECASE)
_PLAIN = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d{1,2})?")


@dataclass(frozen=True, slots=True)
class NumberPlaces:
    """The places of the numbers in lines of progress of one shape."""

    epoch: slice
    of_all: bool
    """True for "Epoch 1/50" and "epoch 1 of 50", which count from 1."""
    counts: tuple[slice, ...]
    """The places of the numbers of steps done and of all; none in a line that ends an epoch."""
    scores: tuple[tuple[str, slice], ...]

    def read(self, line: bytes, attempt: Attempt) -> None:
        """Take the numbers of a line into an attempt."""
        epoch, ended = int(line[self.epoch]) - self.of_all, True
        if self.counts:
            done, steps = (line[place] for place in self.counts)
            ended = done == steps
            attempt.take_progress(epoch, int(steps), ended=ended)
        else:
            attempt.take_end_of_epoch(epoch)
        at = epoch if ended else None
        for name, place in self.scores:
            attempt.take_score(name, float(line[place]), at)


class Shapes:
    """The shapes of a log's lines."""

    def __init__(self) -> None:
        self._known: dict[bytes, NumberPlaces | None] = {}
        """The places of a shape; None if nothing of its lines is kept."""

    def take(self, line: bytes, attempt: Attempt) -> bool:
        """Take a line into an attempt by the shape that it shares with an earlier one.

        Returns:
            False if its shape is not known.
        """
        try:
            places = self._known[line.translate(_AS_ZERO)]
        except KeyError:
            return False
        if places is not None:
            places.read(line, attempt)
        return True

    def learn(self, line: bytes, *, kept: bool) -> None:
        """Note the shape of a line that was parsed in full; ``kept`` says if something was kept."""
        if len(line) > LONGEST:
            return
        places = places_in(line) if kept else None
        if places is None and kept:
            return
        if len(self._known) == MOST:
            self._known.clear()
        self._known[line.translate(_AS_ZERO)] = places


def places_in(line: bytes) -> NumberPlaces | None:
    """The places of the numbers in a line; None if it is no plain line of progress."""
    matched = _BAR.fullmatch(line) or _EPOCH.fullmatch(line)
    if matched is None or _NOT_FINITE.search(line):
        return None
    scores = list(SCORE.finditer(line.decode("latin-1")))  # a byte is a character
    if not all(_PLAIN.fullmatch(score[2]) for score in scores):
        return None
    epoch, _, *counts = (slice(*matched.span(group)) for group in range(1, matched.re.groups + 1))
    places = tuple((score[1], slice(*score.span(2))) for score in scores)
    return NumberPlaces(epoch, matched[2] is not None, tuple(counts), places)
