"""The workers of a job: which of them take items, which are left out and why, and how many died."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..base import Incomplete, UsageError, describe, format_bytes, format_seconds, plural
from .items import NEEDS, UnfitWorker, admit, dismiss

ANSWER_S = 10.0
"""Seconds within which a worker must say whether it may take items."""

FIRST_S = 10.0
"""Seconds until it is said that there is no worker. Each further sentence comes after twice the
time."""


@dataclass(slots=True)
class Workers:
    """A Dask client and its workers, with what a job needs to know of them."""

    client: Any
    """The ``distributed.Client``."""
    where: str
    """Name of the workers in messages."""
    timeout_s: float = float("inf")
    """Longest time without a worker, or in which workers go and nothing is done."""
    say: Callable[[str], None] = lambda sentence: None
    versions: Mapping[str, str] = field(default_factory=dict)
    """The client's versions of what a worker must have, by name."""
    token: str = field(default_factory=lambda: f"penstock-{uuid.uuid4().hex[:12]}")
    """Name of the resource that an item takes."""
    fit: dict[str, str] = field(default_factory=dict)
    """The host of each worker that takes items now, by address."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Reasons why workers take no items, by address."""
    served: bool = False
    """True if an item is done: if all fitting workers leave, another one may come."""
    deaths: int = 0
    retried: int = 0
    """Numbers of workers that died, and of items that failed and were tried again."""
    gone: list[int | None] = field(default_factory=list)
    """Memory limits of the workers that left or died since an item was done, or some of one saved.
    One is replaced by the next."""
    _facts: Mapping[str, Any] = field(default_factory=dict)
    """Dask's facts of each worker, by address."""
    _since: float = field(default_factory=lambda: time.monotonic())
    _due: float = FIRST_S

    def look(self) -> bool:
        """Look which workers are there, and let newcomers take items. Returns whether any does.

        Raises:
            UsageError: No worker may take part, and none ever could.
            Incomplete: There was no worker, or no progress, for too long.
        """
        if self.none_fits():
            first = min(self._facts.keys() & self.left_out.keys())
            raise UsageError(f"--cluster: no worker can take part. {first}: {self.left_out[first]}")
        return self.wait(len(self.fit))

    def wait(self, present: int) -> bool:
        """Measure how long no worker has been there, or how long workers go without progress.

        A worker that dies again and again is there most of the time. So its coming ends no wait:
        only progress does. Nor does it help to leave in order, again and again: a nanny whose
        worker takes too much memory first sends SIGTERM.

        Args:
            present: The number of workers that take items now.

        Returns:
            Whether any does.

        Raises:
            Incomplete: The wait has lasted too long.
        """
        now = time.monotonic()
        if present and len(self.gone) < 2:
            self._since, self._due = now, FIRST_S
            return True
        waited = now - self._since
        if waited >= self.timeout_s:
            what = f"no worker of {self.where} was there"
            if len(self.gone) > 1:
                limit = f" (memory limit {format_bytes(self.gone[-1])})" if self.gone[-1] else ""
                gone = f"{plural(len(self.gone), 'worker')} of {self.where}{limit} left or died"
                what = f"{gone}, and there was no progress"
            raise Incomplete(
                f"{what} for {format_seconds(waited)} (--worker-timeout); if the run had begun, "
                "--resume continues it"
            )
        if not present and waited >= self._due:
            self._due = 2 * waited
            self.say(f"waiting for a worker of {self.where}, {format_seconds(waited)} so far")
        return present > 0

    def none_fits(self) -> bool:
        """Look which workers are there. Returns whether all are left out, and none ever served."""
        self._see()
        # A worker whose memory is nearly full is paused, and may stay so.
        here = {each for each, facts in self._facts.items() if facts["status"] == "running"}
        # A nanny may have started another one at the same address: it lacks the token.
        had = {each for each in here if self.token in self._facts[each]["resources"]}
        fit = had - self.left_out.keys()
        question = admit, self.token, self.versions
        newcomers = here - had - self.left_out.keys()
        for address, answer in self.ask_each(*question, within_s=ANSWER_S, of=newcomers).items():
            if answer is None:
                fit.add(address)
            elif isinstance(answer, UnfitWorker):
                self.left_out[address] = str(answer)
            elif not isinstance(answer, OSError | LookupError):  # it is not gone, nor too slow
                self.left_out[address] = f"it lacks this Penstock ({describe(answer)}){NEEDS}"
        self.fit = {each: self._facts[each]["host"] for each in fit}
        return bool(here) and here <= self.left_out.keys() and not self.served

    def _see(self) -> None:
        """See which workers are there, and note those that left or died since."""
        before = self._facts
        # A client whose scheduler is lost, and sought again, knows of none.
        self._facts = self.client.scheduler_info(n_workers=-1).get("workers", {})
        for address in before.keys() - self._facts.keys() - self.left_out.keys():
            self.gone.append(before[address]["memory_limit"])  # it may be why
            with contextlib.suppress(Exception):  # the scheduler may be gone
                words = [word for _, word in self.client.get_events(address)]
                self.deaths += any(not word.get("expected", True) for word in words)

    def leave_out(self, address: str, reason: str) -> bool:
        """Give a worker no more items.

        Args:
            address: Its address.
            reason: Why, in a sentence.

        Returns:
            True if all are left out, and none ever served.
        """
        self.left_out[address] = reason
        self.ask_each(dismiss, self.token, within_s=ANSWER_S, of=[address])
        return self.none_fits()

    def ask_each(
        self,
        function: Callable[..., Any],
        *args: Any,
        within_s: float,
        of: Iterable[str] | None = None,
    ) -> dict[str, Any]:
        """Call a function on workers at once, beside their items.

        Args:
            function: The function, which workers can load. It is quick, or a coroutine function.
            args: Its arguments.
            within_s: Most seconds for an answer.
            of: Addresses of the workers that are asked; by default, of those that take items.

        Returns:
            By address, the answer, or the exception of a worker that raised one, that is gone, or
            that did not answer in time. Empty if the scheduler is gone.
        """

        async def answer(address: str) -> Any:
            asked = self.client.run(function, *args, workers=[address], on_error="return")
            return (await asyncio.wait_for(asked, within_s))[address]

        async def all_of(addresses: Iterable[str]) -> list[Any]:
            return await asyncio.gather(*map(answer, addresses), return_exceptions=True)

        asked = [*(self.fit if of is None else of)]
        with contextlib.suppress(Exception):  # the scheduler is gone
            answers = self.client.sync(all_of, asked, callback_timeout=2 * within_s)
            return dict(zip(asked, answers, strict=True))
        return {}

    @property
    def resources(self) -> dict[str, float]:
        """What an item takes of a worker: all of it, and a GPU if any worker has some."""
        have_gpus = any("GPU" in facts["resources"] for facts in self._facts.values())
        return {self.token: 1, **({"GPU": 1} if have_gpus else {})}

    def peers(self) -> int:
        """Largest number of workers on one host."""
        return max(Counter(self.fit.values()).values(), default=1)

    def notes(self, kind: str) -> list[str]:
        """Sentences on the workers that matter for the results.

        Args:
            kind: What an item is, such as ``scene``.

        Returns:
            The sentences.
        """
        self._see()
        counts = {
            f"Workers: {plural(self.deaths, 'worker')} died on the way": self.deaths,
            f"{kind.capitalize()}s: {self.retried} failed and tried again": self.retried,
        }
        left_out = [f"Left out: {address}: {why}" for address, why in self.left_out.items()]
        return [note for note, count in counts.items() if count] + left_out
