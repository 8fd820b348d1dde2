"""Reads the logs of all processes of a run as they grow."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from .block_log import Key, Note, read_entries, read_lines
from .block_set import BlockSet
from .folder import Folder


class Notes:
    """The logs of a run, each read on from where the last look ended.

    A read gives the blocks noted since the last one; the first read gives all. Later reads do not
    know the makers of blocks. Blocks are not taken off the list while a run is at work, so what an
    earlier read gave stays true.
    """

    def __init__(
        self, folder: Folder, run: str, makers: list[dict[str, Any]] | None = None
    ) -> None:
        """``makers`` are those of run.json. Makers that only logs name are added to them."""
        self.folder, self.run = folder, run
        self.makers = [{}] if makers is None else makers
        self._seen: dict[str, int] = {}
        """How far each log was read."""
        self.damaged: list[bytes] = []
        """The lines that cannot be read. While a process writes a log, its last line may be under
        way."""

    def fresh(self) -> dict[Key, Note]:
        """The new blocks and their notes. Each takes some hundred bytes."""
        notes: dict[Key, Note] = {}
        for lines in self.folder.new_lines(self.run, self._seen):
            notes |= read_lines(lines, self.makers, self.damaged)
        return notes

    def blocks(self) -> BlockSet:
        """The new blocks."""
        every = BlockSet()
        for made in self._made():
            for blocks in made.values():
                every.update(blocks)
        return every

    def counts(self) -> Counter[int]:
        """Number of new blocks of each maker. A block that two have made counts for the first."""
        every, counts = BlockSet(), Counter[int]()
        for made in self._made():
            for maker, blocks in made.items():
                before = len(every)
                every.update(blocks)
                counts[maker] += len(every) - before
        return +counts

    def _made(self) -> Iterator[dict[int, BlockSet]]:
        """The new blocks of each log, by their makers."""
        for lines in self.folder.new_lines(self.run, self._seen):
            made: dict[int, BlockSet] = defaultdict(BlockSet)
            for key, note in read_entries(lines, self.makers, self.damaged):
                if note is not None:
                    made[note.maker].add(key)
                    continue
                for blocks in made.values():
                    blocks.discard(key)
            yield made
