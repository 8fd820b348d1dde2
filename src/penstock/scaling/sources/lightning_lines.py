"""What Lightning itself prints of a training: its processes, its device, its end.

Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/4
Restored all states from the checkpoint at out/epoch=2-step=330.ckpt
`Trainer.fit` stopped: `max_epochs=5` reached.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

FINISHED = re.compile(r"`Trainer\.fit` stopped: `max_(epochs|steps)=(\d{1,15})` reached")
_MEMBER = re.compile(r"\bMEMBER:? \d+/(\d{1,7})\b|\. Starting with (\d{1,7}) processes")
_ACCELERATOR = re.compile(r"(GPU|TPU|HPU|IPU) available: \w+(?: \(\w+\))?, us(?:ed|ing): (\w+)")
_CUDA = re.compile(r"You are using a CUDA device \('([^']+)'\)")
_RESTORED = re.compile(r"Restor(?:ing|ed all) states from the checkpoint(?: path)? at (.*)")
_EPOCH_IN_NAME = re.compile(r".*\bepoch=(\d{1,9})")


@dataclass
class LightningLines:
    """What Lightning's own lines say of one training."""

    finished: bool = False
    """True if it has reached its last epoch or step."""
    restored: bool = False
    """True if it went on from a checkpoint."""
    first_epoch: int | None = None
    """The epoch after that of the checkpoint."""
    later: dict[str, str] = field(default_factory=dict)
    """Fields that were printed after the end, where another training or a test may begin."""

    def take(self, line: str) -> dict[str, str] | None:
        """The fields that a line of this training tells; None if it is no line of Lightning's."""
        if end := FINISHED.search(line):
            self.finished = True
            return {f"max {end[1]}": end[2]}
        if restored := _RESTORED.search(line):
            self.restored = True
            if self.first_epoch is None and (name := _EPOCH_IN_NAME.match(restored[1])):
                self.first_epoch = int(name[1]) + 1
            return {}
        fields = _device_fields(line)
        if fields and self.finished:
            self.later |= fields
            return {}
        return fields


def _device_fields(line: str) -> dict[str, str] | None:
    if member := _MEMBER.search(line):
        return {"members": member[1] or member[2]}
    if cuda := _CUDA.search(line):
        return {"gpu 0": cuda[1]}
    if accelerator := _ACCELERATOR.search(line):
        used = accelerator[2] not in ("False", "0")
        if accelerator[1] == "GPU":
            return {"cuda available": str(used)}
        return {"gpu 0": accelerator[1]} if used else {}
    return None
