"""Cases of scenario ``loader``, as a launch measures them and as records."""

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.bench.measure import Rules, measure_scenario
from penstock.data.packed.write import write_dataset
from penstock.data.weather import Preset, World
from penstock.instruments.record import Failure, Record

from .records import made_record

SAMPLES = 16
"""The samples of the packed data set that the tests of this folder read."""
GRID = (12, 24)
_FIELDS = {"inputs": (("tmp", 0), ("tmp2m", 0), ("pressfc", 0)), "targets": (("tmp", 1),)}
WEATHER = Preset(_FIELDS, chunk=13)
"""The weather of ``penstock generate``, of few variables: 3 chunks a sample."""
SAMPLE_BYTES = (15 + 13) * math.prod(GRID) * 4
COMMON: dict[str, Any] = {
    "batch": 2, "threads": 2, "shuffle": "sample", "window": None, "seed": 0, "cache": "warm",
    "batches": 3, "warmup": 1,
}  # fmt: skip


def weather(folder: Path, samples: int = SAMPLES, seed: int = 0, shards: int | None = None) -> Path:
    world = World(GRID, seed)
    write_dataset(
        folder, WEATHER.layouts(GRID), range(samples), lambda index: world.sample(WEATHER, index),
        shards=shards, workers=1, overwrite=False, facts={"seed": seed},
    )  # fmt: skip
    return folder


def case(data: Path, **knobs: Any) -> dict[str, Any]:
    return {**COMMON, "data": str(data), "loader": "penstock", **knobs}


def measured(scenario: Any, batches: int = 3) -> dict[str, Any]:
    """A scenario as a launch measures it."""
    series = {"seconds": 0.0, "precision": 0.0, "series": batches, "warmup_samples": 1}
    with contextlib.closing(scenario):
        return measure_scenario(scenario, Rules(**series), lambda stage: None)


def record(launch: int, seconds: float, status: str = "ok", **knobs: Any) -> Record:
    full_case = case(Path("/data"), batch=4, dataset="d") | knobs
    scenario = "ladder" if "rung" in full_case else "loader"
    if status != "ok":
        error = Failure(stage="setup", message="pip install 'penstock-dl[loaders]'")
        return made_record(scenario, full_case, launch, status, error=error)
    facts = {"resident": 1.0, "read_amplification": 1.25, "stored_bytes": 3e6, "cpu_s_per_gb": 2.0}
    facts |= {"duplicates": 0, "missing": 0, "wrong": 0}
    work = {"samples": 4, "bytes": 8e6}
    samples = {"step": tuple(seconds * f for f in (0.5, 1.0, 1.5))}
    return made_record(scenario, full_case, launch, samples_s=samples, work=work, facts=facts)


def own_array(
    path: Path, kind: str, shape: tuple[int, ...], chunks: list[int] | None = None
) -> NDArray[Any]:
    """Somebody's array: of a Zarr, of an N5, or in an OME-Zarr image."""
    ts = pytest.importorskip("tensorstore")
    values = np.arange(math.prod(shape), dtype=np.uint16).reshape(shape)
    level = path / "0" if kind == "ome" else path
    driver, key = ("n5", "blockSize") if kind == "n5" else ("zarr", "chunks")
    metadata: dict[str, Any] = {key: chunks or [1, *(3 for _ in shape[2:]), 8]}
    if kind == "n5":
        metadata |= {"dimensions": shape, "dataType": "uint16", "compression": {"type": "raw"}}
    else:
        metadata |= {"shape": shape, "dtype": "<u2"}
    spec = {"driver": driver, "kvstore": f"file://{level}/", "metadata": metadata, "create": True}
    ts.open(spec).result().write(values).result()
    if kind == "ome":
        image = {"multiscales": [{"version": "0.4", "datasets": [{"path": "0"}]}]}
        (path / ".zattrs").write_text(json.dumps(image))
        (path / ".zgroup").write_text('{"zarr_format": 2}')
    return values
