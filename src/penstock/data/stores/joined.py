"""A marker that several processes hold together, under one owner.

The elements of an array share an owner that is named after their run; each of them beats. The
workers of a cluster share the owner of their client, which beats for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...base import PenstockError
from .marker import LEASE_S, Entry, Lost, Marker, clock


def owner_of_array(run: str) -> dict[str, Any]:
    """The owner that all elements of an array write into the marker.

    Args:
        run: The id of their run.

    Returns:
        The owner. It names no machine, so only its beats tell whether it is alive.
    """
    return {"host": "an array", "machine": f"array {run}", "pid": 0, "started": 0.0, "claim": run}


class JoinedMarker(Marker):
    """A marker under an owner that several processes share."""

    def __init__(
        self,
        store: Mapping[str, Any],
        key: str,
        run: str,
        *,
        owner: dict[str, Any],
        beats: bool,
        ends: bool,
    ) -> None:
        super().__init__(store, key, run)
        self.owner, self.beats, self.ends = owner, beats, ends
        self._beat, self._beaten = -1, clock()
        """The last beat that was seen, and the time when it was first seen."""
        self._missed = False
        """Whether the store failed to answer when the marker was last read."""

    def _take(self, check: Callable[[str, str | None], None]) -> None:
        """Join the owner. Its first process has made the entries already."""
        entries, generation = self._read()
        self.made_by = dict.fromkeys(self.outputs, self.run)
        while self.beats and all(self._is_free(entries.get(path)) for path in self.outputs):
            if self._write(entries | self._entries(0), generation):
                return
            entries, generation = self._read()
        self._our_beat(entries)

    def _is_free(self, entry: Entry | None) -> bool:
        """Whether the run has made the output and nobody writes it now."""
        return entry is not None and entry["run"] == self.run and entry["owner"] is None

    def _prove(self) -> None:
        """Do nothing: the owner's first process has checked that the store honours conditions."""

    def _our_beat(self, entries: Mapping[str, Entry]) -> int:
        beat = super()._our_beat(entries)
        if beat != self._beat or self._missed:  # then the client cannot beat either
            self._beat, self._beaten, self._missed = beat, clock(), False
        elif not self.beats and clock() - self._beaten > LEASE_S:
            self._lost = Lost("the client of this job has been silent; nothing more is written")
            raise self._lost
        return beat

    def check(self) -> None:
        """Raise `Lost` where another run has taken an output, or the client is silent."""
        if self.beats:
            super().check()
        else:
            self._check_now()

    def _check_now(self) -> None:
        try:
            super()._check_now()
        except Lost:
            raise
        except PenstockError:
            self._missed = True
            raise

    def renew(self, *, last: bool = False) -> None:
        """Beat, if that is this process's task. The claim outlives the process."""
        if self.beats:
            super().renew(last=last)
        else:
            self._check_now()

    def release(self) -> None:
        """Leave the claim to the others, if this process does not end it for all."""
        if self.ends:
            super().release()
