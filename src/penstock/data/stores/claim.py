"""The outputs of one run, held from its begin to its end: no other run writes them meanwhile.

The marker is ``NAME.penstock-lock`` beside the outermost Zarr or N5 store NAME that an output lies
in, however the user names that place; `marker` describes it. A run reads it before it writes a
unit, and stops if another run has taken its output.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ...base import PenstockError
from .fence import writing
from .joined import JoinedMarker
from .marker import HELD, Marker
from .marker_place import NoLock, place_of
from .protocols import Sink

RENEW_S = 5.0
RELEASE_WITHIN_S = 10.0
"""Seconds that a run waits at its end for a store that does not answer. Then it lets its claims
expire."""


class Claims:
    """The outputs of one run, held from `take` to `close`."""

    def __init__(self) -> None:
        self.lacking: list[str] = []
        """Why an output is not locked, a sentence for each."""
        self._markers: dict[str, Marker] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="claims", daemon=True)

    @classmethod
    def take(
        cls, sinks: Sequence[Sink], run: str, check: Callable[[str, str | None], None]
    ) -> Claims:
        """Claim all outputs for a run, or none.

        Args:
            sinks: the outputs.
            run: the id of the run.
            check: called with each output's name and the run that made it, None where that is not
                known; it raises where the job cannot go on with the output.

        Returns:
            The claims, held until `close`.

        Raises:
            UsageError: another process writes an output.
            PenstockError: a store does not answer, by a fault that may pass.
        """
        claims, held = cls(), []
        for sink in sinks:
            claims._find(sink, run)
        try:
            for address, marker in list(claims._markers.items()):
                try:
                    marker.take(check)
                    held.append(marker)
                except NoLock as why:
                    names = marker.outputs.values()
                    claims.lacking += [f"{name} has no lock: {why}" for name in names]
                    del claims._markers[address]
        except BaseException:
            for marker in held:
                marker.release()
            raise
        claims._thread.start()
        return claims

    @classmethod
    def join(
        cls,
        sinks: Sequence[Sink],
        run: str,
        owner: Mapping[str, Any],
        *,
        beats: bool,
        ends: bool = False,
    ) -> Claims:
        """Write into outputs that several processes hold together.

        Args:
            sinks: the outputs.
            run: the id of the run.
            owner: the owner that the processes share, as `owner` or `owner_of_array` gives it.
            beats: whether this process keeps the claim alive, as each element of an array does;
                the workers of a cluster leave that to their client, and stop where it is silent.
            ends: whether `close` ends the claim for all of them.

        Returns:
            The claims. `close` leaves them to the others.

        Raises:
            Lost: another run has taken the outputs.
            PenstockError: a store does not answer, by a fault that may pass.
        """
        claims = cls()
        for sink in sinks:
            claims._find(
                sink, run, partial(JoinedMarker, owner=dict(owner), beats=beats, ends=ends)
            )
        for address, marker in list(claims._markers.items()):
            try:
                marker.take(lambda output, made_by: None)
            except NoLock as why:
                claims.lacking += [f"{name} has no lock: {why}" for name in marker.outputs.values()]
                del claims._markers[address]
        if beats:
            claims._thread.start()
        else:
            claims._ended.set()
        return claims

    @property
    def owner(self) -> dict[str, Any]:
        """The owner in the markers, which other processes may join."""
        return next((marker.owner for marker in self._markers.values()), {})

    def _find(self, sink: Sink, run: str, made: Callable[..., Marker] = Marker) -> None:
        try:
            place = place_of(sink)
        except NoLock as why:
            self.lacking.append(f"{sink.name} has no lock: {why}")
            return
        if place is not None:
            store, key, path = place
            address = json.dumps([store, key], sort_keys=True)
            marker = self._markers.setdefault(address, made(store, key, run))
            marker.outputs[path] = sink.name

    def name(self) -> None:
        """Name this run as the maker of the outputs."""
        for marker in self._markers.values():
            marker.made_by = dict.fromkeys(marker.outputs, marker.run)
            marker.renew()

    def check(self) -> None:
        """Raise `Lost` where another run has taken an output."""
        for marker in self._markers.values():
            marker.check()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """A context in which a unit may be written: no other run takes an output meanwhile.

        Raises:
            Lost: another run has taken an output.
        """
        with contextlib.ExitStack() as fences:
            for marker in self._markers.values():
                fences.enter_context(writing(marker.folder))
            self.check()
            yield

    def confirm(self) -> None:
        """Raise `Lost` unless every output has been this run's up to now."""
        for marker in self._markers.values():
            marker.renew()

    def close(self) -> None:
        """Release the outputs. The marker still names the run that made them."""
        if self._ended.is_set():
            return
        for marker in self._markers.values():  # first: what follows may be interrupted
            HELD.discard(marker.owner["claim"])
        self._ended.set()
        releasing = threading.Thread(target=self._release, name="release", daemon=True)
        releasing.start()
        releasing.join(RELEASE_WITHIN_S)

    def _release(self) -> None:
        self._thread.join()
        for marker in self._markers.values():
            marker.release()

    def _beat(self) -> None:
        while not self._ended.wait(RENEW_S):
            for marker in self._markers.values():
                # A store that does not answer may answer next time. A lost output stays lost.
                with contextlib.suppress(PenstockError):
                    marker.renew()
