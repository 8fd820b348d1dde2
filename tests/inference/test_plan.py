"""The plan against what really happens: blocks held, bytes decoded, memory taken and given back."""

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
import tifffile

import penstock
from penstock.base import InferConfig, UsageError, build
from penstock.data import Box, OutputLock, open_source
from penstock.inference.opening.job import Job
from penstock.inference.opening.seams import patch_shape
from penstock.inference.opening.selection import select
from penstock.inference.planning.plan import make_plan
from penstock.inference.run_folder.journal import Journal
from penstock.inference.stages import pipeline
from penstock.inference.stages.pipeline import MemoryCeiling
from penstock.inference.stages.reading import BrickReader, wanted_bricks
from penstock.inference.stages.run import Run
from penstock.inference.tiling.traffic import largest_brick

from ..parameters import mainly
from ..preloaded import started
from ..traced import traced
from .kit import SEED, config, facts


def test_the_seeds_volume_computes_each_patch_once() -> None:
    """6 TB, patch 64, overlap 10: 1.67 computed voxels per voxel; the reference needs 1.95."""
    plan = make_plan(config(), facts((20480, 10640, 14192)), SEED)
    assert plan.patch_amplification == pytest.approx((64 / 54) ** 3, rel=0.04)
    assert plan.read_amplification < 1.1
    assert plan.num_blocks == 80 * 42 * 56
    assert plan.memory.total < plan.memory_limit


@pytest.mark.parametrize(
    "knobs", [{}, {"workers": 1000}, {"seam_mode": "blend", "normalize": "percentile"}]
)
def test_a_petabyte_plans_in_constant_memory(knobs: dict[str, Any]) -> None:
    with traced() as most:
        plan = make_plan(config(**knobs), facts((80_000, 80_000, 80_000)), SEED)
        peak = most()
    assert plan.input_bytes == 1.024e15
    assert plan.parts[len(plan.parts) - 1].box.stop == (80_000, 80_000, 80_000)
    assert plan.border_amplification < 1.2
    assert peak < 50e6


def test_less_memory_means_smaller_parts_and_then_a_refusal() -> None:
    seen = []
    for limit in ("40GB", "10GB", "3GB"):
        plan = make_plan(config(max_memory=limit), facts((20480, 10640, 14192)), SEED)
        plan.refuse()
        assert plan.memory.total <= plan.memory_limit
        seen.append((len(plan.geometry.parts), plan.patch_amplification))
    assert seen == sorted(seen)
    assert seen[0][0] < seen[-1][0]
    with pytest.raises(penstock.Refused, match=r"MiB of host memory but may take 200 MiB; give"):
        make_plan(config(max_memory="200MiB"), facts((20480, 10640, 14192)), SEED).refuse()


def test_too_little_device_memory_is_refused() -> None:
    plan = make_plan(
        config(),
        facts((512,) * 3, devices=("cuda",), device_bytes=10**8, forward_bytes=10**9),
        SEED,
    )
    with pytest.raises(penstock.Refused, match=r"95.4 MiB are free; give a smaller --batch"):
        plan.refuse()


def test_a_smaller_batch_is_no_cure_where_it_is_the_smallest() -> None:
    for batch, cure in ((2, "a smaller --patch"), (64, "a smaller --batch or --patch")):
        large = facts((512,) * 3, batch=batch, forward_bytes=10**12)
        with pytest.raises(penstock.Refused, match=rf"; give {cure} \(now 64"):
            make_plan(config(), large, SEED).refuse()


def test_what_autocast_keeps_and_what_is_pinned_is_counted() -> None:
    gpu: dict[str, Any] = {"devices": ("cuda",), "device_bytes": 10**11, "weight_bytes": 10**9}
    plain, half = (
        make_plan(config(), facts((512,) * 3, **gpu, cast_bytes=cast), SEED)
        for cast in (0, 10**9 // 2)
    )
    assert half.device_peak - plain.device_peak == 10**9 // 2
    assert half.memory.total == plain.memory.total
    # As many of the largest bricks as there is room for are read, and come down, in memory that
    # torch pins in powers of two.
    brick, count = largest_brick(plain.geometry), plain.pinned_bricks
    assert count == plain.brick_budget // plain.brick_bytes(brick) > 2
    each, rest = divmod(plain.memory.bricks - plain.brick_budget, count)
    read, down = plain.read_buffer_bytes, plain.brick_buffer_bytes
    assert rest == 0 and read + down <= each < 2 * (read + down) and each.bit_count() <= 2
    assert plain.device_peak > 10**9 + plain.brick_budget + 2**26, "what cuBLAS works in"
    plain, half = (
        make_plan(config(), facts((512,) * 3, cast_bytes=cast), SEED) for cast in (0, 10**6)
    )
    assert half.memory.forward - plain.memory.forward == 10**6
    assert plain.memory.bricks == plain.brick_budget
    assert plain.pinned_bricks == 0


@pytest.mark.slow
@pytest.mark.parametrize("spoilt", mainly([False, True], 1))
def test_a_brick_of_floats_is_prepared_with_no_more_than_the_plan_holds(spoilt: bool) -> None:
    data = np.arange(100 * 200 * 200, dtype="float32").reshape(100, 200, 200)
    if spoilt:
        data[50, :, 7] = np.nan
    job = Job(
        build(
            InferConfig,
            {"in_spec": data, "out_spec": data * 0, "model_type": "identity", "patch": 16,
             "overlap": 4, "block": 256, "devices": "cpu", "normalize": "percentile"},
        )
    )  # fmt: skip
    (brick,) = wanted_bricks(job, set())
    reader = BrickReader(Run(job, Journal(None, {}), OutputLock()), {})
    loaded = reader.fetch(brick)
    array = loaded.array
    with traced() as most:
        reader.prepare(loaded)
        peak = most()
    mask = brick.support.size
    held = job.plan.brick_bytes(brick) - 4 * (brick.read.size + brick.support.size)
    assert held == mask
    bins = 8 << 16  # of the percentiles: a constant, in what the plan has for all else
    assert peak < brick.read.size * 2 + bins
    if spoilt:
        assert (loaded.invalid == ~np.isfinite(data)).all()
        assert np.isfinite(array).all()


def test_a_tiff_is_read_into_the_array_that_is_given(tmp_path) -> None:
    data = np.arange(8 * 200 * 300, dtype="uint16").reshape(8, 200, 300)
    tifffile.imwrite(tmp_path / "a.tif", data, metadata={"axes": "ZYX"}, tile=(64, 64),
                     compression="zlib")  # fmt: skip
    source = open_source(str(tmp_path / "a.tif"))
    assert type(source.array).__name__ == "TiffPages"
    source.read(Box.of((0, 0, 0, 0, 0), (1, 1, 1, 9, 9)))
    whole = np.zeros((1, 1, 10, 210, 320), "uint16")
    part = whole[:, :, 1:9, 5:205, 7:307]
    with traced() as most:
        source.read(source.domain, part)
        peak = most()
    assert (part[0, 0] == data).all()
    assert whole.astype("int64").sum() == data.astype("int64").sum()
    assert peak < data.nbytes / 2


@pytest.mark.parametrize(
    ("patch", "overlap", "has_z", "axes", "expected"),
    [
        ((64,), (10,), True, None, ((64, 64, 64), (10, 10, 10), 3)),  # one number, a volume
        ((64,), (10,), False, None, ((1, 64, 64), (0, 10, 10), 2)),  # one number, a plane
        ((64,), (10,), False, 3, ((64, 64, 64), (10, 10, 10), 3)),  # a 3-D net on a plane
        ((64,), (10,), True, 2, ((1, 64, 64), (0, 10, 10), 2)),  # a 2-D net on a volume
        ((32, 48), (8,), True, None, ((1, 32, 48), (0, 8, 8), 2)),  # two numbers: planes
        ((1, 32, 48), (4,), True, 3, ((1, 32, 48), (0, 4, 4), 3)),  # nothing to share along z
    ],
)
def test_patches(patch: Any, overlap: Any, has_z: bool, axes: int | None, expected: Any) -> None:
    shape = patch_shape(config(patch=patch, overlap=overlap), has_z, axes)
    assert (shape.patch, shape.overlap, shape.model_axes) == expected


@pytest.mark.parametrize(
    ("text", "chosen"),
    [(["all"], (2, 3, 4, 5)), (["3"], (3,)), (["2:4"], (2, 3)), ([3, "4:"], (3, 4, 5)),
     (["::2"], (2, 4)), (["5,2"], (5, 2))],
)  # fmt: skip
def test_selections(text: list[Any], chosen: tuple[int, ...]) -> None:
    assert select(text, 2, 6, "--t") == chosen


@pytest.mark.parametrize("text", [["6"], ["1"], ["a"], ["3:3"], ["2", "2"], ["1:2:3:4"], ["2:5:0"]])
def test_selections_that_name_nothing_or_too_much(text: list[str]) -> None:
    with pytest.raises(UsageError, match="--t"):
        select(text, 2, 6, "--t")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "layers", "knobs"),
    [
        # Pairs: of the dtypes, the seams and the ways to normalize each once. Fewer layers would be
        # fewer bricks than are there at once.
        ("uint16", 256, {"seam_mode": "blend"}),
        ("float32", 512, {"normalize": "percentile"}),
    ],
    ids=str,
)
def test_the_memory_ceiling_holds(dtype: str, layers: int, knobs: dict[str, str], tmp_path) -> None:
    """A real process over a real store: its peak is near the plan's."""
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{tmp_path}/in.zarr"}}
    chunks = ts.ChunkLayout(chunk_shape=(128,) * 3)
    shape = (layers, 512, 512)
    volume = ts.open(spec, create=True, dtype=dtype, shape=shape, chunk_layout=chunks).result()
    noise = np.random.default_rng(0).integers(60, 140, (128, 512, 512), "uint8")
    for z in range(0, layers, 128):
        volume[z : z + 128].write(np.roll(noise, z).astype(dtype)).result()
    words = (
        "-m penstock infer --in-spec in.zarr --out-spec out.zarr --model-type identity --patch 64 "
        "--overlap 10 --devices cpu --metrics-interval 0.05 --run-dir run"
    ).split()
    knobs = {"normalize": "global"} | knobs
    words += [f"--{name.replace('_', '-')}={value}" for name, value in knobs.items()]
    subprocess.run([sys.executable, *words], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    peak, planned = summary["peak_rss"], summary["planned_peak"]
    # How many bricks are there at once depends on what else the machine does; the most does not.
    assert 0.4 * planned < peak < 1.1 * planned


MIB = 2**20
GAPS = """
from penstock.base import one_heap
one_heap()
import numpy as np
from penstock.inference.planning.memory import resident_bytes
from penstock.inference.stages.pipeline import MemoryCeiling

pairs = [(np.ones(2**20, np.uint8), np.ones(2**12, np.uint8)) for _ in range(60)]
between = [small for _, small in pairs]  # the heap cannot shrink past them
most = resident_bytes()
del pairs
held = resident_bytes()
ceiling = MemoryCeiling(held, iter(range(100)).__next__)
ceiling.keep()
print(most >> 20, held >> 20, resident_bytes() >> 20, sum(map(len, between)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_gaps_between_what_is_held_are_given_back(tmp_path) -> None:
    started(tmp_path, code=GAPS).join()
    most, held, after, _ = map(int, (tmp_path / "said").read_text().split())
    assert held > most - 6, "without it the heap keeps what is freed"
    assert after < held - 45


def test_memory_that_is_in_use_is_not_trimmed_again_and_again(monkeypatch) -> None:
    holds, seconds, trims = [100], [0.0], []
    monkeypatch.setattr(pipeline, "resident_bytes", lambda: holds[0] * MIB)
    monkeypatch.setattr(pipeline, "trim_heap", lambda: trims.append(holds[0]))
    kept = MemoryCeiling(200 * MIB, lambda: seconds[0])
    for now, held, expected in [
        (0.0, 180, []),
        (1.0, 190, [190]),  # nothing came of it
        (2.0, 300, [190]),  # too soon
        (11.0, 200, [190]),  # little more than after the last trim
        (12.0, 207, [190, 207]),
        (30.0, 220, [190, 207]),
    ]:
        seconds[0], holds[0] = now, held
        kept.keep()
        assert trims == expected, (now, held)
