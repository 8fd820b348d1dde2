"""Made-up launches of a model, and the CSV that the seed wrote of some."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.instruments.record import Record

from ..bench.records import made_record

MIB, GIB = 2**20, 2**30

SEED_CSV = (
    "avg_time_ms,batch_size,device,memory_allocated_mb,memory_peak_mb,memory_reserved_mb,mode,"
    "model_params,model_size_mb,std_time_ms,throughput_samples_per_sec,tile_size,timestamp\r\n"
    "29.7,1,cpu,0.0,0.0,0.0,inference,6600532,25.2,0.7,33.6,256,2025-10-14T10:14:38\r\n"
    "45.9,1,cpu,0.0,0.0,0.0,inference,6600532,25.2,1.4,21.8,384,2025-10-14T10:14:44\r\n"
)
"""In the shape of the seed's own writer: sorted columns, carriage returns."""

GPU_CSV = """\
timestamp, index, name, memory.used [MiB], utilization.gpu [%]
2025/09/12 23:59:58.000, 0, NVIDIA A10G, 1024 MiB, 87 %
2025/09/12 23:59:58.003, 1, NVIDIA A10G, 0 MiB, 0 %
2025/09/12 23:59:59.000, 0, NVIDIA A10G, 2048 MiB, [N/A]
2025/09/12 23:59:59.003, 1, NVIDIA A10G, 512 MiB, 10 %
2025/09/13 00:00:00.000, 0, NVIDIA A10G, 3072 MiB, 100 %
2025/09/13 00:00:00.003, 1, NVIDIA A10G, [Unknown Error], 20 %
"""
"""What nvidia-smi writes of two cards, over midnight."""

MEASURED = {(256, 1): 29.718066, (256, 2): 43.777886, (384, 1): 45.901424, (384, 2): 73.835202}
"""Milliseconds, as the seed's file has them: what its document says of them must come out."""


def launch(
    tile: int | str = 256,
    batch: int = 1,
    number: int = 0,
    seconds: Sequence[float] = (0.03,),
    status: str = "ok",
    case: dict[str, Any] | None = None,
    **fields: Any,
) -> Record:
    """A record of scenario ``model``; ``case`` and ``fields`` override what it usually is."""
    knobs: dict[str, Any] = {
        "model": "prithvi-refiner-tiny", "weights": None, "mode": "inference", "tile": str(tile),
        "batch": batch, "channels": None, "dtype": "float32", "amp": False, "compile": False,
        "channels_last": False, "checkpointing": False, "halo": 0, "device": "cpu",
        "threads": None, "seed": 0, "budget": None, **(case or {}),
    }  # fmt: skip
    sides = [int(side) for side in str(tile).split("x")]
    sides = sides * 2 if len(sides) == 1 else sides
    usual: dict[str, Any] = {
        "id": f"{tile}-{batch}-{number}",
        "time": f"2026-11-21T14:00:0{number % 10}+00:00",
        "work": {
            "samples": batch,
            "pixels": batch * int(np.prod(sides)),
            "useful_pixels": batch * int(np.prod([side - 2 * knobs["halo"] for side in sides])),
        },
        "samples_s": {"step": tuple(seconds)},
        "facts": {"parameters": 1000, "model_bytes": 3 * 2**20, "tile_shape": sides},
        "environment": {"machine_key": "here"},
    }
    if status != "ok":
        usual |= {"work": {}, "samples_s": {}, "error": {"stage": "measure", "message": status}}
    usual |= fields
    return made_record(usual.pop("scenario", "model"), knobs, number, status, **usual)


def sweep(
    milliseconds: dict[tuple[int, int], float],
    launches: int = 5,
    spread: float = 0.01,
    **fields: Any,
) -> list[Record]:
    """Launches whose medians are exactly those given and lie ``spread`` about them."""
    shifts = np.linspace(-spread, spread, launches) if launches > 1 else [0.0]
    return [
        launch(tile, batch, number, ms / 1e3 * (1 + shift) * np.linspace(0.995, 1.005, 9), **fields)
        for (tile, batch), ms in milliseconds.items()
        for number, shift in enumerate(shifts)
    ]


TIMES = {(256, 1): 30.0, (256, 2): 44.0, (384, 1): 46.0, (384, 2): 74.0, (384, 4): 147.0}
"""Pixels a second: 2.18, 2.98, 3.21, 3.99 and 4.01 million."""
HOST = {"machine_key": "here", "machine": {"memory_bytes": 8 * GIB}}


def sized(
    times: dict[tuple[int, int], float], environment: dict[str, Any] = HOST, **fields: Any
) -> list[Record]:
    """A sweep whose peak is 1 GiB for a million pixels."""
    return [
        record
        for (tile, batch), ms in times.items()
        for record in sweep(
            {(tile, batch): ms},
            memory={"host_peak": tile * tile * batch * GIB // 10**6},
            environment=environment,
            **fields,
        )
    ]
