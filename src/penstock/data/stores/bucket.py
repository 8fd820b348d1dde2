"""Named objects below a URL, such as the files of a run: each is read and written whole."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from ...base import Incomplete, UsageError, describe, redact
from .kvstore import address, explained_errors, kvstore_of, open_kvstore, ts
from .transient import is_transient

PATIENCE_S = 30.0
"""Seconds for which a failed request is repeated, once the store has answered."""
LONGEST_WAIT_S = 1.0
AT_ONCE = 64
"""Objects that are read or deleted at a time."""

Result = TypeVar("Result")


class Bucket:
    """The objects below a URL. Every method raises `UsageError` where the store refuses, and
    `Incomplete` where a store that has answered before does not answer any more."""

    def __init__(self, url: str) -> None:
        """``url`` names a bucket or a prefix in it. No request is sent yet."""
        self.url = url.rstrip("/")
        self._opened: Any = None
        self._has_answered = False

    @property
    def address(self) -> str:
        """The canonical text of the URL, as `Located.address`."""
        return address(self._kvstore.spec())

    @property
    def _kvstore(self) -> Any:
        if self._opened is None:
            self._opened = open_kvstore(kvstore_of(f"{self.url}/"), redact(self.url))
        return self._opened

    def read(self, name: str) -> bytes | None:
        """The content of an object, None if it does not exist."""
        return next(self.read_all([name]))

    def read_all(self, names: Iterable[str]) -> Iterator[bytes | None]:
        """The content of each object in the order of ``names``; None for one that does not exist.

        Up to `AT_ONCE` are read at a time.
        """
        for some in _batches(names):
            reads = self._do(some, lambda kvstore, name: kvstore.read(name))
            yield from (bytes(r.value) if r.state == "value" else None for r in reads)

    def write(self, name: str, content: bytes) -> None:
        """Write an object, whole or not at all.

        Args:
            name: Its name below the URL.
            content: Its bytes.
        """
        self._do([name], lambda kvstore, name: kvstore.write(name, content))

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects. Missing objects are ignored."""
        for some in _batches(names):
            self._do(some, lambda kvstore, name: kvstore.write(name, None))

    def names(self, prefix: str) -> list[str]:
        """The names that begin with ``prefix``, sorted."""
        # The first name behind all that begin so.
        end = prefix and prefix[:-1] + chr(ord(prefix[-1]) + 1)
        keys = ts.KvStore.KeyRange(prefix, end)
        (listed,) = self._do([""], lambda kvstore, _: kvstore.list(keys))
        return sorted(key.decode(errors="replace") for key in listed)

    def _do(self, names: Iterable[str], start: Callable[[Any, str], Any]) -> list[Any]:
        """Start a request for each name and wait for all. Repeat them while their errors may
        pass."""
        end = time.monotonic() + PATIENCE_S * self._has_answered
        while True:
            try:
                with explained_errors(redact(self.url)):
                    futures = [start(self._kvstore, name) for name in names]
                    results = [future.result() for future in futures]
                self._has_answered = True
                return results
            except UsageError as error:
                if not is_transient(error):
                    raise
                if time.monotonic() > end:
                    if self._has_answered:
                        raise Incomplete(f"{describe(error)}; run again with --resume") from error
                    raise
            time.sleep(random.uniform(0, LONGEST_WAIT_S))


def _batches(names: Iterable[str]) -> Iterator[list[str]]:
    several = list(names)
    return (several[at : at + AT_ONCE] for at in range(0, len(several), AT_ONCE))
