"""The memory that a loader takes, and the engine that fits ``max_memory``."""

from __future__ import annotations

from ..base import LoaderConfig, Refused, format_bytes
from .engines.engine import Engine


def num_buffers(config: LoaderConfig) -> int:
    """The number of batches in memory: those ahead, and the one in use."""
    return max(1, config.queue) + 1


def buffer_bytes(nbytes: int, pin: bool) -> int:
    """Bytes of the buffer of a batch. Torch rounds pinned memory up to powers of two."""
    return 1 << (nbytes - 1).bit_length() if pin else nbytes


def scratch_bytes(engine: Engine, config: LoaderConfig) -> int:
    """The most memory that is taken besides the batches, in bytes."""
    ahead = num_buffers(config) - 1
    return engine.scratch_bytes + engine.bytes_in_flight(config.batch_size, ahead)


def fit_memory(engine: Engine, config: LoaderConfig, batch_bytes: int) -> int | None:
    """The most batches in memory, None without a limit. Where the engine takes too much, it is made
    to save memory.

    Args:
        engine: The engine that was opened.
        config: The settings of the loader.
        batch_bytes: Bytes of one batch.

    Raises:
        Refused: ``max_memory`` is too little. The message has both sizes and a remedy.
    """
    limit, needed = config.max_memory, num_buffers(config)
    if limit is None:
        return None
    if limit < scratch_bytes(engine, config) + needed * batch_bytes:
        engine.save_memory()
    scratch = scratch_bytes(engine, config)
    room = (limit - scratch) // batch_bytes
    if room < needed:
        remedy = f"queue {room - 1} would fit" if room >= 2 else "lower batch_size"
        if engine.name != "native":
            remedy += ", or take engine native where it reads the arrays: it needs less scratch"
        raise Refused(
            f"max_memory {format_bytes(limit)} is too little for {needed} batches of "
            f"{format_bytes(batch_bytes)} (queue {config.queue} and one in use) and "
            f"{format_bytes(scratch)} of scratch and cache; {remedy}"
        )
    return room
