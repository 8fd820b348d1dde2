"""One lane: what it says of values that are not finite, what it keeps, and what it tells a GPU.

A GPU is played by streams and events that only note how they are used; the copies are the host's.
"""

import contextlib
import functools
import json
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.base import InferConfig, StageError, build
from penstock.data.stores.lock import OutputLock
from penstock.inference import Job, run_job
from penstock.inference.lanes import bricks as bricks_room
from penstock.inference.lanes import lane as lane_room
from penstock.inference.lanes import transfers
from penstock.inference.lanes.bricks import Computed, Loaded, PatchScatter
from penstock.inference.lanes.lane import Forward, Lane
from penstock.inference.lanes.transfers import GpuClock, Transfers
from penstock.inference.planning import cuts
from penstock.inference.run_folder.journal import Journal
from penstock.inference.stages.pipeline import Pipeline, compute
from penstock.inference.stages.reading import BrickReader, wanted_bricks
from penstock.inference.stages.run import Queues, Run
from penstock.inference.stages.statistics import find_scalings
from penstock.inference.stages.writing import Writing
from penstock.instruments.spans import Probe

from ..parameters import mainly, paired
from .kit import Array, arange, conv, run

CPU = torch.device("cpu")
FOUR = (20, 14, 8)
"""The shape of a volume of four bricks."""


@pytest.fixture(autouse=True)
def _small_bricks(monkeypatch) -> None:
    """Of 2 x 2 x 2 patches."""
    monkeypatch.setattr(cuts, "BRICK_VOXELS", 14**3)


def started(source: Array, net: Any = "identity", **knobs: Any) -> Pipeline:
    """A pipeline that is all set up and whose threads are not."""
    config = {"in_spec": source, "out_spec": np.zeros_like(source), "model_type": net, "patch": 8,
              "overlap": 2, "block": 16, "devices": "cpu", "normalize": "none"}  # fmt: skip
    run = Run(Job(build(InferConfig, config | knobs)), Journal(None, {}), OutputLock())
    return Pipeline(run, BrickReader(run, find_scalings(run)), wanted_bricks(run.job, set()))


def lane_of(begun: Pipeline) -> Lane:
    return Lane(CPU, begun.job, begun.probe, begun.queues.equipment, lambda patches: None)


def bricks_of(begun: Pipeline) -> Iterator[Loaded]:
    for brick in begun.bricks:
        loaded = begun.reader.fetch(brick)
        begun.reader.prepare(loaded)
        yield loaded


def through(begun: Pipeline, one: Lane) -> Iterator[Computed]:
    with one.forward.autocast():
        for loaded in bricks_of(begun):
            yield from one.push(loaded)
        yield from one.flush()


class Overflows(nn.Module):
    """Where it is shown more than 100."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 100, x / 0, x)


def test_it_is_the_brick_that_made_it_that_is_named() -> None:
    """Though all bricks share one batch, and the others are stitched before."""
    data = np.zeros((20, 20, 20), "float32")
    data[19, 19, 19] = 101
    begun = started(data, Overflows(), batch=64)
    assert begun.job.geometry.count_bricks() == 16
    last = list(begun.job.plan.parts.bricks())[-1]
    with pytest.raises(StageError, match=r"NaN or infinite values from finite ones$") as caught:
        run_job(begun.job)
    assert (caught.value.stage, caught.value.where) == ("forward", str(last))


def test_in_half_precision_the_cure_is_named() -> None:
    data = np.full((8, 8, 8), 101, "float32")
    with pytest.raises(StageError, match="in bfloat16; give `amp='off'`, or `clip_norm`"):
        run(data, Overflows(), amp="bf16", normalize="none", patch=8, overlap=0)


class Seen(TorchDispatchMode):
    """Sees operators without torch's compiler, whose import takes two seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Casts(Seen):
    """Counts copies of the tensors of one shape into another dtype."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.shape == self.shape and out.dtype != args[0].dtype:
            self.count += 1
        return out


def test_weights_are_cast_once_and_not_for_each_batch(one_thread) -> None:
    net = conv()
    begun = started(arange(FOUR, "float32"), net, amp="bf16")
    with Casts(net[0].weight.shape) as casts:  # type: ignore[union-attr,arg-type]
        assert list(through(begun, lane_of(begun)))
    assert begun.probe.totals()["forward"].count > 3
    assert casts.count == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, of its compiler
@pytest.mark.parametrize(("dynamic", "graphs"), [("false", 3), ("true", 1)])
def test_a_net_is_compiled_for_one_shape_or_for_any(dynamic: str, graphs: int, monkeypatch) -> None:
    """As aind_torch_utils means it. Three lengths of batch are three shapes."""
    # It writes no C++; and by a name, such as "eager", torch would import all that have one.
    traced = functools.partial(torch.compile, backend=lambda graph, _: graph.forward)
    monkeypatch.setattr(torch, "compile", traced)
    torch._dynamo.reset()  # what imports it takes a second of each worker that collects
    counters = torch._dynamo.utils.counters
    counters["stats"].clear()
    net, knobs = nn.ReLU(), {"compile": True, "compile_dynamic": dynamic, "batch": 5}
    begun = started(np.zeros((8, 8, 8), "float32"), net, **knobs)
    forward = Forward(CPU, begun.job)
    forward.run(torch.zeros(5, 1, 8, 8, 8))
    for length in (3, 2):
        forward.run(torch.zeros(length, 1, 8, 8, 8))
    assert counters["stats"]["unique_graphs"] == graphs
    torch._dynamo.reset()


class Views(nn.Module):
    """Takes each channel of its first layer for a sample, by a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.each = nn.Conv3d(1, 4, 3, padding=1), nn.Conv3d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.each(y.view(-1, 1, *y.shape[2:])).view(y.shape)[:, :1]


def test_a_net_that_fails_on_channels_last_is_run_without_and_the_plan_says_so() -> None:
    volume = np.random.default_rng(0).normal(size=(10, 12, 14)).astype("float32")
    net = Views()
    out = run(volume, net, patch=16, overlap=4, normalize="none")
    padded = np.pad(volume, 8, mode="reflect")
    with torch.inference_mode():
        whole = net(torch.from_numpy(padded)[None, None])[0, 0, 8:-8, 8:-8, 8:-8].numpy()
    np.testing.assert_allclose(out, whole, atol=1e-5)
    job = started(volume, net).job
    assert job.plan.facts.forward_bytes is not None, "it is played on shapes all the same"
    notes = [text for name, text in job.plan.lines() if name == "note"]
    assert any("channels last" in text for text in notes)


def test_the_next_brick_goes_up_before_the_net_is_at_work_on_this_one(monkeypatch) -> None:
    begun = started(arange(FOUR))
    queues = begun.queues
    for loaded in bricks_of(begun):
        queues.loaded[0].put(loaded)
    for _ in range(queues.readers):
        queues.loaded[0].close()
    bricks, order = list(begun.job.plan.parts.bricks()), []
    upload, run_batch = Transfers.upload, Lane._run_batch

    def up(self: Transfers, loaded: Loaded) -> None:
        if loaded.native is None:
            order.append(("up", loaded.brick.number))
        upload(self, loaded)

    def work(self: Lane) -> None:
        order.append(("work", self._slots[0].owner.brick.number))
        run_batch(self)

    monkeypatch.setattr(Transfers, "upload", up)
    monkeypatch.setattr(Lane, "_run_batch", work)
    begun._compute(0, CPU)
    assert [number for what, number in order if what == "up"] == list(range(len(bricks)))
    for number in range(len(bricks) - 1):
        assert order.index(("up", number + 1)) < order.index(("work", number))
    assert len(queues.computed) == len(bricks)


class Stream:
    """Notes what it is told to wait for."""

    def __init__(self, name: str) -> None:
        self.name, self.waits = name, []  # type: ignore[var-annotated]

    def wait_event(self, event: "Event") -> None:
        self.waits.append(event.on)

    def wait_stream(self, other: "Stream") -> None:
        self.waits.append(other.name)


class Event:
    """Reads a device's clock, on which 10 ms pass from one timed event to the next."""

    made: list["Event"]

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.timed, self.blocking, self.on, self.waited_for = enable_timing, blocking, "", False
        self.made.append(self)

    def record(self, stream: Stream) -> None:
        self.on = stream.name
        self.at_ms = 10 * sum(event.timed for event in self.made)

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.waited_for = True

    def elapsed_time(self, other: "Event") -> float:
        return other.at_ms - self.at_ms


@pytest.fixture
def gpu(monkeypatch) -> dict[str, Stream]:
    streams = {name: Stream(name) for name in ("main", "up", "down")}
    Event.made = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    inside = [streams["main"]]

    @contextlib.contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        inside.append(stream)
        yield
        inside.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: inside[-1])
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: None)
    monkeypatch.setattr(transfers, "_to_pinned", Tensor.clone)
    return streams


def on_streams(gpu: dict[str, Stream]) -> Any:
    """A job that has begun, and a lane of it on these streams, timed by their device."""
    begun = started(arange(FOUR), conv())
    one = lane_of(begun)
    one.transfers.streams = gpu["up"], gpu["down"]
    one.clock = GpuClock(CPU, begun.probe)
    return begun, one


def test_copies_wait_for_no_more_than_they_must_and_nobody_spins(gpu, one_thread) -> None:
    begun, one = on_streams(gpu)
    done = list(through(begun, one))
    bricks = begun.job.geometry.count_bricks()
    assert gpu["up"].waits == []
    assert gpu["main"].waits == ["up"] * bricks
    assert gpu["down"].waits == ["main"] * bricks
    for finished in done:
        finished.wait()
        assert isinstance(finished.ready, Event) and finished.ready.waited_for
    assert all(event.blocking for event in Event.made if event.waited_for)
    alone = list(through(again := started(arange(FOUR), conv()), lane_of(again)))
    for here, there in zip(alone, done, strict=True):
        for head, other in zip(here.outputs, there.outputs, strict=True):
            assert torch.equal(head, other)


def test_a_trace_shows_copies_beside_what_is_computed(gpu, one_thread, tmp_path) -> None:
    """Each by events of the stream that it runs on, and on a track of its own. The clock of the
    host, on which nothing lasts here, times none of them."""
    begun = started(arange(FOUR), conv())
    one, probe = lane_of(begun), Probe(tmp_path / "trace.json")
    probe.clock = lambda: 0.0
    one.clock = one.transfers.clock = GpuClock(CPU, probe)
    one.transfers.streams = gpu["up"], gpu["down"]  # type: ignore[assignment]
    list(through(begun, one))
    one.clock.report(wait=True)
    probe.close()
    bricks = begun.job.geometry.count_bricks()
    totals = probe.totals()
    assert totals["upload"].count == totals["download"].count == bricks
    for name in ("upload", "normalise", "forward", "stitch", "download"):
        assert totals[name].busy == pytest.approx(0.01 * totals[name].count)
    timed = [event.on for event in Event.made if event.timed]
    assert timed.count("up") == timed.count("down") == 2 * bricks
    tracks: dict[str, set[int]] = {}
    for event in json.loads((tmp_path / "trace.json").read_text())[:-1]:
        tracks.setdefault(event["name"], set()).add(event["tid"])
    assert tracks["forward"] == tracks["stitch"]
    assert len(tracks["forward"] | tracks["upload"] | tracks["download"]) == 3


def test_an_array_is_not_read_into_again_before_its_upload_ends(gpu, one_thread) -> None:
    begun, one = on_streams(gpu)
    given, give = [], one.read_pool.give

    def noted(array: Array) -> None:
        given.append([event.waited_for for event in Event.made if event.on == "up"])
        give(array)

    one.read_pool.give = noted  # type: ignore[method-assign]
    assert list(through(begun, one))
    assert given == [[True] * (n + 1) for n in range(begun.job.geometry.count_bricks())]


def test_bricks_are_read_into_pinned_memory_of_a_pool_where_they_go_to_a_gpu(monkeypatch) -> None:
    begun = started(arange(FOUR))
    asked: list[int] = []
    monkeypatch.setattr(
        lane_room, "pinned", lambda nbytes: asked.append(nbytes) or np.empty(nbytes, np.uint8)
    )
    assert Queues(begun.job).equipment.read_pool.take((8,), np.dtype("uint8")).base is not None
    assert asked == [], "not on a CPU"
    plan = begun.job.plan
    begun.job.plan = replace(plan, facts=replace(plan.facts, devices=("cuda",)))
    pool = Queues(begun.job).equipment.read_pool
    arrays = [pool.take((8,), np.dtype("uint8")) for _ in range(begun.job.plan.pinned_bricks + 3)]
    assert asked == [plan.read_buffer_bytes] * (plan.brick_budget // plan.largest_brick_bytes)
    assert len(arrays) > len(asked) > 1


def test_a_part_takes_over_the_net_and_the_arrays_of_the_one_before(monkeypatch) -> None:
    made: list[torch.device] = []

    class Counted(Forward):
        def __init__(self, device: torch.device, job: Job) -> None:
            made.append(device)
            super().__init__(device, job)

    monkeypatch.setattr(lane_room, "Forward", Counted)
    begun = started(arange((32, 16, 16)), block=16, workers=2, parts=2)
    run = Run(begun.job, begun.journal, OutputLock())
    first = run.queues.equipment
    with run.at_work():
        for part in range(len(run.parts)):
            compute(run, [part], begun.reader.scalings)
    assert len(run.parts) == 2
    assert begun.journal.written == 2
    assert made == [CPU]
    assert run.queues.equipment is first


@pytest.mark.parametrize("overlap, made", [(0, 0), (2, 8)])
def test_a_block_that_is_a_brick_takes_over_its_arrays(
    overlap: int, made: int, monkeypatch
) -> None:
    taken: list[tuple[int, ...]] = []
    empty = Writing.empty_block

    def counted(self: Writing, head: int, shape: tuple[int, ...]) -> Array:
        taken.append(shape)
        return empty(self, head, shape)

    monkeypatch.setattr(Writing, "empty_block", counted)
    monkeypatch.setattr(cuts, "BRICK_VOXELS", 16**3)  # room for all
    source = arange((16, 16, 16)).astype("float32")
    source[3, 4, 5] = np.nan
    result = run(source, patch=8, overlap=overlap, block=8, normalize="none")
    np.testing.assert_array_equal(result, source)
    assert len(taken) == made


class Keeps(nn.Module):
    """Its output is a view of what it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = nn.Buffer(torch.full((1, 1, 8, 8, 8), 0.25))

    def forward(self, x: Tensor) -> Tensor:
        return self.kept[:, :, : x.shape[2], : x.shape[3], : x.shape[4]].expand(
            len(x), -1, -1, -1, -1
        )


@pytest.mark.parametrize("seam", ["trim", "blend"])
def test_what_a_net_keeps_is_not_scaled_with_its_output(seam: str) -> None:
    source = np.zeros((20, 20, 20), "float32")
    scaled = {"normalize": "fixed", "norm_lower": 0, "norm_upper": 1000}
    knobs = {"patch": 8, "overlap": 2, "head_kind": "intensity", "seam_mode": seam}
    result = run(source, Keeps(), **scaled, **knobs)
    np.testing.assert_allclose(result, 250, rtol=1e-5)


class Heads(nn.Module):
    """Values that a dtype of 8 bits clips, and labels as floats and as integers."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        labels = (x * 7).round()
        return {"values": x * 2.5 - 9, "labels": labels, "counts": labels.to(torch.int64)}


def computed(one: Lane, begun: Any) -> tuple[list[list[Tensor]], list[Tensor]]:
    done = list(through(begun, one))
    for each in done:
        each.wait()
    return [each.outputs for each in done], [each.tally for each in done]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seam", "normalize"), mainly(paired(["trim", "blend"], ["none", "percentile"]), 1)
)
def test_alike_patches_at_once_give_the_bits_of_each_alone(seam, normalize, one_thread) -> None:
    data = np.random.default_rng(3).integers(0, 250, (22, 12, 19)).astype("uint8")
    outs = [np.zeros(data.shape, dtype) for dtype in ("uint8", "int32", "int64")]
    knobs: dict[str, Any] = {
        "out_spec": outs, "head_kind": ("values=intensity", "labels=labels", "counts=labels"),
        "seam_mode": seam, "normalize": normalize, "batch": 12, "overlap": 3,
    }  # fmt: skip
    results = []
    for together in (False, True):
        begun = started(data, Heads(), **knobs)
        begun.job.net = replace(begun.job.net, forward=begun.job.net.batch)  # as on a GPU
        one = lane_of(begun)
        one.scatter = PatchScatter(CPU, begun.job, together=together)
        results.append(computed(one, begun))
    (alone, tallies), (at_once, others) = results
    assert len(alone) > 3
    for heads, same in zip(alone, at_once, strict=True):
        assert all(map(torch.equal, heads, same))
    assert all(map(torch.equal, tallies, others))


def test_weights_go_to_a_device_once_and_with_their_lane(monkeypatch) -> None:
    made: list[weakref.ref[Tensor]] = []
    weights_on = bricks_room._weights_on

    def noted(*args: Any) -> Tensor:
        weights = weights_on(*args)
        made.append(weakref.ref(weights))
        return weights

    monkeypatch.setattr(bricks_room, "_weights_on", noted)
    begun = started(np.zeros((26, 26, 26), "float32"), seam_mode="blend")
    one = lane_of(begun)
    assert list(through(begun, one))
    assert len(made) == 9, "for each axis those at either edge and in between"
    assert all(ref() is not None for ref in made)
    del one
    assert all(ref() is None for ref in made)
