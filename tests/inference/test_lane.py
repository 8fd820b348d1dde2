"""One lane: what it says of values that are not finite, what it keeps, and what it tells a GPU.

A GPU is played by streams and events that only note how they are used; the copies are the host's.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.base.config.infer import InferConfig
from penstock.base.config.knobs import build
from penstock.base.errors import StageError, UsageError
from penstock.data.stores.claim import Claims
from penstock.inference.lanes import equipment, transfers
from penstock.inference.lanes.blocks import Computed, Loaded
from penstock.inference.lanes.forward import Forward
from penstock.inference.lanes.lane import Lane
from penstock.inference.lanes.transfers import GpuClock, Transfers
from penstock.inference.opening import job
from penstock.inference.opening.job import Job
from penstock.inference.planning import cuts
from penstock.inference.run import run_job
from penstock.inference.run_folder.ending import EndRequest
from penstock.inference.run_folder.journal import Journal
from penstock.inference.sharing.worker import Worker
from penstock.inference.stages.pipeline import Pipeline
from penstock.inference.stages.queues import Queues
from penstock.inference.stages.reading import BlockReader, wanted_blocks
from penstock.inference.stages.statistics import find_scalings
from penstock.inference.stages.watch import Watch
from penstock.inference.tiling.traffic import read_range
from penstock.instruments.spans import Probe

from .kit import Array, arange, conv, run

CPU = torch.device("cpu")
FOUR = (20, 14, 8)
"""The shape of a volume of four blocks."""


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2 x 2 x 2 patches."""
    monkeypatch.setattr(cuts, "BLOCK_VOXELS", 14**3)


def started(source: Array, net: Any = "identity", **knobs: Any) -> Pipeline:
    """A pipeline that is all set up and whose threads are not."""
    config = {"in_spec": source, "out_spec": np.zeros_like(source), "model_type": net, "patch": 8,
              "overlap": 2, "block": 16, "devices": "cpu", "normalize": "none"}  # fmt: skip
    job, journal = Job(build(InferConfig, config | knobs)), Journal(None, {})
    queues = Queues(job)
    watch = Watch(job, journal, queues, EndRequest())
    scalings = find_scalings(job, journal, watch)
    reader = BlockReader(job, scalings, queues.equipment.read_pool, queues.flow, watch.retries)
    return Pipeline(job, journal, Claims(), queues, watch, reader, wanted_blocks(job, set()))


def lane_of(begun: Pipeline) -> Lane:
    return Lane(CPU, begun.job, begun.probe, begun.queues.equipment, lambda patches: None)


def blocks_of(begun: Pipeline) -> Iterator[Loaded]:
    return (begun.reader.prepare(block, begun.reader.fetch(block)) for block in begun.blocks)


def through(begun: Pipeline, one: Lane) -> Iterator[Computed]:
    with one.forward.autocast():
        for loaded in blocks_of(begun):
            yield from one.push(loaded)
        yield from one.flush()


# --- values that are not finite ------------------------------------------------------------------


class Overflows(nn.Module):
    """Where it is shown more than 100."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 100, x / 0, x)


def test_it_is_the_block_that_made_it_that_is_named() -> None:
    """Though all blocks share one batch, and the others are stitched before."""
    data = np.zeros((20, 20, 20), "float32")
    data[19, 19, 19] = 101
    begun = started(data, Overflows(), batch=64)
    assert begun.job.geometry.count_blocks() == 8
    last = list(begun.job.geometry.blocks())[-1]
    with pytest.raises(StageError, match=r"NaN or infinite values from finite ones$") as caught:
        run_job(begun.job)
    assert (caught.value.stage, caught.value.where) == ("forward", str(last))


def test_in_half_precision_the_cure_is_named() -> None:
    data = np.full((8, 8, 8), 101, "float32")
    with pytest.raises(StageError, match="in bfloat16; give amp='off', or clip_norm="):
        run(data, Overflows(), amp="bf16", normalize="none", patch=8, overlap=0)


# --- what it keeps -------------------------------------------------------------------------------


class Casts(TorchDispatchMode):
    """Counts copies of the tensors of one shape into another dtype."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.shape == self.shape and out.dtype != args[0].dtype:
            self.count += 1
        return out


def test_weights_are_cast_once_and_not_for_each_batch(one_thread: None) -> None:
    net = conv()
    begun = started(arange(FOUR, "float32"), net, amp="bf16")
    with Casts(net[0].weight.shape) as casts:  # type: ignore[union-attr,arg-type]
        assert list(through(begun, lane_of(begun)))
    assert begun.probe.totals()["forward"].count > 3
    assert casts.count == 1


@pytest.mark.filterwarnings("ignore")  # torch's own, of its compiler
@pytest.mark.parametrize(
    ("dynamic", "graphs"),
    [("false", 3), pytest.param("auto", 2, marks=pytest.mark.slow), ("true", 1)],
)
def test_a_net_is_compiled_for_one_shape_or_for_any(
    dynamic: str, graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_lanes_on_the_cpu_share_the_weights_of_the_job() -> None:
    given_net = nn.Sequential(nn.Conv3d(2, 8, 3, padding=1), nn.GroupNorm(1, 8), nn.Conv3d(8, 2, 1))
    strides = [tensor.stride() for tensor in given_net.parameters()]
    begun = started(np.zeros((2, 8, 8, 8), "float32"), given_net, batch=2)
    lanes = [lane_of(begun) for _ in range(2)]
    laid_out = begun.job.net.model.module
    for one in lanes:
        assert one.forward.module is laid_out
    assert [tensor.stride() for tensor in given_net.parameters()] == strides, (
        "the caller's is the same"
    )
    assert laid_out[0].weight.stride()[1] == 1  # type: ignore[index,union-attr,operator]
    assert laid_out[1].weight is given_net[1].weight  # type: ignore[index,union-attr]


# --- a net that channels last does not suit ------------------------------------------------------


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


# --- what a GPU is told --------------------------------------------------------------------------


def test_the_next_block_goes_up_before_the_net_is_at_work_on_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = started(arange(FOUR))
    queues = begun.queues
    for loaded in blocks_of(begun):
        queues.loaded[0].put(loaded)
    for _ in range(queues.readers):
        queues.loaded[0].close()
    blocks, order = list(begun.job.geometry.blocks()), []
    upload, run_batch = Transfers.upload, Lane._run_batch

    def up(self: Transfers, loaded: Loaded) -> None:
        if loaded.native is None:
            order.append(("up", loaded.block.number))
        upload(self, loaded)

    def work(self: Lane) -> None:
        order.append(("work", self._slots[0].owner.block.number))
        run_batch(self)

    monkeypatch.setattr(Transfers, "upload", up)
    monkeypatch.setattr(Lane, "_run_batch", work)
    begun._compute(0, CPU)
    assert [number for what, number in order if what == "up"] == list(range(len(blocks)))
    for number in range(len(blocks) - 1):
        assert order.index(("up", number + 1)) < order.index(("work", number))
    assert len(queues.computed) == len(blocks)


class Stream:
    """Notes what it is told to wait for."""

    def __init__(self, name: str) -> None:
        self.name, self.waits = name, []  # type: ignore[var-annotated]

    def wait_event(self, event: Event) -> None:
        self.waits.append(event.on)

    def wait_stream(self, other: Stream) -> None:
        self.waits.append(other.name)


class Event:
    """Reads a device's clock, on which 10 ms pass from one timed event to the next."""

    made: list[Event]

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

    def elapsed_time(self, other: Event) -> float:
        return other.at_ms - self.at_ms


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Stream]:
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


def test_copies_wait_for_no_more_than_they_must_and_nobody_spins(
    gpu: dict[str, Stream], one_thread: None
) -> None:
    begun = started(arange(FOUR), conv())
    one = lane_of(begun)
    one.transfers.streams = gpu["up"], gpu["down"]  # type: ignore[assignment]
    one.clock = GpuClock(CPU, begun.probe)
    done = list(through(begun, one))
    blocks = begun.job.geometry.count_blocks()
    assert gpu["up"].waits == []
    assert gpu["main"].waits == ["up"] * blocks
    assert gpu["down"].waits == ["main"] * blocks
    for finished in done:
        finished.wait()
        assert isinstance(finished.ready, Event) and finished.ready.waited_for
    assert all(event.blocking for event in Event.made if event.waited_for)
    alone = list(through(again := started(arange(FOUR), conv()), lane_of(again)))
    for here, there in zip(alone, done, strict=True):
        for head, other in zip(here.outputs, there.outputs, strict=True):
            assert torch.equal(head, other)


def test_a_trace_shows_copies_beside_what_is_computed(
    gpu: dict[str, Stream], one_thread: None, tmp_path: Path
) -> None:
    """Each by events of the stream that it runs on, and on a track of its own."""
    begun = started(arange(FOUR), conv())
    one, probe = lane_of(begun), Probe(tmp_path / "trace.json")
    one.clock = one.transfers.clock = GpuClock(CPU, probe)
    one.transfers.streams = gpu["up"], gpu["down"]  # type: ignore[assignment]
    list(through(begun, one))
    one.clock.report(wait=True)
    probe.close()
    blocks = begun.job.geometry.count_blocks()
    totals = probe.totals()
    assert totals["upload"].count == totals["download"].count == blocks
    timed = [event.on for event in Event.made if event.timed]
    assert timed.count("up") == timed.count("down") == 2 * blocks
    tracks: dict[str, set[int]] = {}
    for event in json.loads((tmp_path / "trace.json").read_text())[:-1]:
        tracks.setdefault(event["name"], set()).add(event["tid"])
    assert tracks["forward"] == tracks["stitch"]
    assert len(tracks["forward"] | tracks["upload"] | tracks["download"]) == 3


def test_an_array_is_not_read_into_again_before_its_upload_ends(
    gpu: dict[str, Stream], one_thread: None
) -> None:
    begun = started(arange(FOUR), conv())
    one = lane_of(begun)
    one.transfers.streams = gpu["up"], gpu["down"]  # type: ignore[assignment]
    one.clock = GpuClock(CPU, begun.probe)
    given, give = [], one.read_pool.give

    def noted(array: Array) -> None:
        given.append([event.waited_for for event in Event.made if event.on == "up"])
        give(array)

    one.read_pool.give = noted  # type: ignore[method-assign]
    assert list(through(begun, one))
    assert given == [[True] * (n + 1) for n in range(begun.job.geometry.count_blocks())]


def test_blocks_are_read_into_pinned_memory_of_a_pool_where_they_go_to_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = started(arange(FOUR))
    asked: list[int] = []
    monkeypatch.setattr(
        equipment, "pinned", lambda nbytes: asked.append(nbytes) or np.empty(nbytes, np.uint8)
    )
    assert Queues(begun.job).equipment.read_pool.take((8,), np.dtype("uint8")).base is not None
    assert asked == [], "not on a CPU"
    plan = begun.job.plan
    begun.job.plan = replace(plan, facts=replace(plan.facts, devices=("cuda",)))
    pool = Queues(begun.job).equipment.read_pool
    arrays = [pool.take((8,), np.dtype("uint8")) for _ in range(begun.job.plan.pinned_blocks + 3)]
    assert asked == [plan.read_buffer_bytes] * (plan.block_budget // plan.largest_block_bytes)
    assert len(arrays) > len(asked) > 1


@pytest.mark.parametrize("shape", [(9, 9, 9), (20, 9, 31), (2, 19, 8)])
def test_blocks_have_no_gaps_at_the_edges_either(shape: tuple[int, ...]) -> None:
    """A block that ends far outside is reflected from voxels that it does not see."""
    source = arange(shape)
    begun = started(source, patch=8, overlap=6)
    geometry, gaps = begun.job.geometry, 0
    padded = np.pad(source, [(32, 64)] * 3, mode="reflect")
    for block in begun.blocks:
        array = begun.reader.fetch(block)
        hull = block.read.hull(read_range(block.read, geometry.domain))
        gaps += hull.shape[1:] != block.read.shape[1:]
        assert array.flags.c_contiguous
        ends = zip(block.read.start, block.read.stop, strict=True)
        moved = tuple(slice(start + 32, stop + 32) for start, stop in ends)
        assert (array[0] == padded[moved]).all()
        begun.reader.pool.give(array)
    assert gaps


def test_a_gpus_stages_are_timed_by_its_own_events(
    gpu: dict[str, Stream], one_thread: None
) -> None:
    begun = started(arange(FOUR), conv())
    begun.probe.clock = lambda: 0.0  # the host's, on which nothing lasts
    one = lane_of(begun)
    one.transfers.streams = gpu["up"], gpu["down"]  # type: ignore[assignment]
    one.clock = GpuClock(CPU, begun.probe)
    list(through(begun, one))
    for name in ("normalise", "forward", "stitch"):
        stage = begun.probe.totals()[name]
        assert stage.busy == pytest.approx(0.01 * stage.count)
        assert stage.count > 3


# --- CUDA graphs in the threads of lanes ---------------------------------------------------------


class Reached(Exception):
    """There is no device to go on with."""


def reach(*args: Any, **knobs: Any) -> None:
    raise Reached(args[0])


@pytest.mark.parametrize(
    ("mode", "devices", "version", "said"),
    [
        ("reduce-overhead", ("cuda:0",), "2.12.1+cu130", "2.13 or later, and this is 2.12.1"),
        ("max-autotune", ("cuda:0",), "2.13.0.dev20260518", "needs torch 2.13 or later"),
        ("reduce-overhead", ("cuda:0", "cuda:1"), "2.13.0", "up between the 2 devices of one"),
        ("max-autotune", ("cuda:0", "cuda:1"), "2.14.0", "max-autotune-no-cudagraphs"),
        ("reduce-overhead", ("cuda:1",), "2.13.0+cu130", None),
        ("reduce-overhead", ("cpu",), "2.4.0", None),
        ("default", ("cuda:0", "cuda:1"), "2.4.0", None),
        ("max-autotune-no-cudagraphs", ("cuda:0", "cuda:1"), "2.4.0", None),
    ],
)
def test_graphs_that_torch_would_mix_up_are_refused(
    mode: str, devices: tuple[str, ...], version: str, said: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    lanes = [torch.device(name) for name in devices]
    monkeypatch.setattr(job, "find_devices", lambda names: lanes)
    monkeypatch.setattr(job, "load_model", functools.partial(reach, "not refused"))
    with pytest.raises((UsageError, Reached), match=said or "not refused"):
        started(arange((8, 8, 8)), compile=True, compile_mode=mode)


def test_a_part_takes_over_the_net_and_the_arrays_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[torch.device] = []

    class Counted(Forward):
        def __init__(self, device: torch.device, job: Job) -> None:
            made.append(device)
            super().__init__(device, job)

    monkeypatch.setattr(equipment, "Forward", Counted)
    begun = started(arange((32, 16, 16)), block=16, workers=2, parts=2)
    worker = Worker(begun.job, begun.journal, begun.writing.claims, EndRequest())
    first = worker.watch.queues.equipment
    with worker.at_work():
        for part in range(len(worker.parts)):
            worker.compute([part], begun.reader.scalings)
    assert len(worker.parts) == 2
    assert begun.journal.written == 2
    assert made == [CPU]
    assert worker.watch.queues.equipment is first


def test_a_net_that_records_graphs_is_made_anew_for_the_threads_of_each_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "compile", lambda module, **how: module)  # the real one is slow
    for mode, kept in (("default", True), ("reduce-overhead", False)):
        begun = started(arange((16, 16, 16)), compile=True, compile_mode=mode)
        tools = begun.queues.equipment
        assert (tools.forward_on(CPU) is tools.forward_on(CPU)) is kept
