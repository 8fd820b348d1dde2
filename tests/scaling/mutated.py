"""Logs that a bad disk, two writers or a joker got at."""

import random


def mutated(text: bytes, rng: random.Random) -> bytes:
    """A log that a bad disk, two writers or a joker got at."""
    data = bytearray(text)
    for _ in range(rng.randint(1, 12)):
        at, size = rng.randrange(len(data) + 1), rng.choice((1, 1, 5, 40, 400))
        kind = rng.randrange(6)
        if kind == 0:
            del data[at : at + size]
        elif kind == 1:
            data[at:at] = rng.randbytes(size)
        elif kind == 2:
            data[at:at] = data[rng.randrange(len(data) + 1) :][:size]
        elif kind == 3:
            data[at:at] = rng.choice(JOKES)
        elif kind == 4 and (digits := [i for i, b in enumerate(data) if 48 <= b < 58]):
            data[rng.choice(digits)] = rng.choice(b"0123456789-.e")
        else:
            data = data[: max(at, 1)]
    return bytes(data)


JOKES = (
    b"\rJob ID:", b"9" * 400, b"Effective batch size: 0\n", b"Max epochs: -1\n", b"\x1b[A" * 9,
    b"Total training time: 1e999 seconds\n", b"Batch size (per GPU): 0\n", b"(" * 300, b" " * 3000,
    b"Epoch 999999999/0: 1/1 [", b"Number of tasks: 99999999999999999999\n", b"\n" * 40, b"| | |",
    b"Total training time: nan\n", b"val_acc=--e..1", b"MiB / 1MiB | 999% ", b"Restarts: x\n",
    b"SLURM_JOB_ID:    \n", b"a-" * 200 + b"-epoch=", b"Best checkpoint: " + b"-epoch" * 50 + b"\n",
)  # fmt: skip
