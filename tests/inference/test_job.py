"""What a job finds out before it starts, and what it leaves for a later one.

Chunks, memory, devices, the run folder, the size of a net, the position of an output, the log of
what is done, the trace.
"""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tensorstore as ts
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import penstock
from penstock.base.errors import UsageError
from penstock.data.stores.open import open_source
from penstock.inference.opening import job as opening_job
from penstock.inference.opening import net, outputs
from penstock.inference.opening.net import with_peak_on
from penstock.inference.run_folder.journal import Journal
from penstock.instruments import Probe, environment
from penstock.models import devices as models_devices
from penstock.models import footprint
from penstock.models import load as model
from penstock.models.footprint import _Peak

from .kit import opened


def array_spec(kvstore: Any, path: str, shape: tuple[int, ...] = (20, 20, 20)) -> dict[str, Any]:
    """An array at a path of a key-value store, as the seed's output is."""
    metadata = {"shape": shape, "chunks": (8, 8, 8), "dtype": "|u1"}
    return {"driver": "zarr", "kvstore": kvstore, "path": path, "metadata": metadata,
            "create": True}  # fmt: skip


@given(st.integers(1, 10_000))
def test_a_chunk_divides_its_block_and_is_neither_dust_nor_a_mountain(block: int) -> None:
    side = outputs.chunk_side(block)
    assert not side or (block % side == 0 and min(block, 32) <= side <= 512)


def test_a_prime_block_is_a_chunk_or_refused_by_a_number_that_works(tmp_path) -> None:
    out, shape = tmp_path / "out.zarr", (1, 600, 600)
    fits = opened(out, shape, patch=(16, 16), block=(131, 131))
    assert fits.sinks[0].write_grid == (1, 1, 1, 131, 131)
    with pytest.raises(UsageError, match=r"--block 521 521: a block is whole .* give --block 1024"):
        opened(out, shape, patch=(16, 16), block=(521, 521))
    array = np.zeros(shape, "uint8")  # an output that has chunks of its own takes any block
    assert opened(array, shape, patch=(16, 16), block=(521, 521)).geometry.block == (1, 521, 521)


def group(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name.replace("memory_", "memory.")).write_text(f"{text}\n")
    return folder


def test_memory_is_what_the_tightest_control_group_has_left(tmp_path, monkeypatch) -> None:
    stat = "anon 100\nfile 700\ninactive_file 600\nactive_file 100"
    free = group(tmp_path / "free", memory_max="max", memory_current="5000", memory_stat=stat)
    cached = group(tmp_path / "cached", memory_max="1000", memory_current="990", memory_stat=stat)
    old = group(tmp_path / "old", memory_limit_in_bytes="900", memory_usage_in_bytes="890",
                memory_stat="inactive_file 1\ntotal_inactive_file 300")  # fmt: skip
    bare = group(tmp_path / "bare", memory_max="800", memory_current="100")
    endless = group(tmp_path / "endless", memory_limit_in_bytes="9223372036854771712",
                    memory_usage_in_bytes="10", memory_stat="")  # fmt: skip
    machine = psutil.virtual_memory().total
    for folders, left in (
        ([cached, free], 610),
        ([free, cached], 610),
        ([old, endless], 310),
        ([bare], 700),
        ([cached, old, bare], 310),
    ):
        monkeypatch.setattr(environment, "cgroup_folders", {"memory": folders}.__getitem__)
        assert environment.available_memory() == left
    for folders in ([], [free], [endless], [tmp_path / "nothing"]):
        monkeypatch.setattr(environment, "cgroup_folders", {"memory": folders}.__getitem__)
        assert 1000 < environment.available_memory() <= machine


def test_what_a_gpus_context_takes_is_in_the_base(monkeypatch) -> None:
    order: list[str] = []
    real = psutil.Process.memory_info

    def memory_info(self: psutil.Process) -> Any:
        order.append("base")
        return real(self)

    monkeypatch.setattr(psutil.Process, "memory_info", memory_info)
    monkeypatch.setattr(opening_job, "_free_device_memory", lambda devices: order.append("device"))
    opened(np.zeros((20, 20, 20), "uint8"))
    assert order == ["device", "base"]


def test_a_device_without_an_index_is_the_first(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert models_devices.find_devices(["cuda"]) == [torch.device("cuda:0")]
    assert models_devices.find_devices(["cuda", "cuda:1"]) == models_devices.find_devices(["auto"])
    for names in (["cuda", "cuda:0"], ["cuda:1", "cuda:1"]):
        with pytest.raises(UsageError, match="names one device twice"):
            models_devices.find_devices(names)
    with pytest.raises(UsageError, match="--devices cuda:2: this machine has cpu, cuda:0, cuda:1"):
        models_devices.find_devices(["cuda:2"])


@pytest.mark.parametrize(
    ("knobs", "dtype", "chosen"),
    [
        ({}, torch.float32, torch.float16),  # percentiles of each block
        ({"normalize": "global"}, torch.float32, torch.float16),
        ({"normalize": "fixed", "clip_norm": ()}, torch.float32, torch.float16),
        ({"normalize": "fixed"}, torch.float32, None),  # no voxel is held to the range
        ({"normalize": "none"}, torch.float32, None),
        ({"normalize": "none", "amp": "fp16"}, torch.float32, torch.float16),  # as told
        ({"amp": "off"}, torch.float32, None),
        ({}, torch.bfloat16, None),  # the net is of half precision itself
    ],
)
def test_half_precision_is_for_values_that_are_brought_to_a_range(knobs, dtype, chosen) -> None:
    config = opened(np.zeros((20, 20, 20), "uint8"), **knobs).config
    assert net.choose_amp(config, [torch.device("cuda:0")], dtype) == chosen
    if config.amp == "auto":
        assert net.choose_amp(config, [torch.device("cpu")], dtype) is None


def test_outputs_of_one_name_have_run_folders_of_their_own(tmp_path) -> None:
    memory = {name: {"driver": "memory", "path": f"{name}.zarr/"} for name in "ab"}
    folders = [opened(array_spec(memory[name], path)).run_dir for name in "ab" for path in "01"]
    assert len(set(folders)) == 4
    for folder in folders:
        assert folder is not None and len(folder.parts) == 1
        assert folder.name[:2] in ("0-", "1-") and folder.suffix == ".penstock"
    assert opened(array_spec(memory["a"], "0")).run_dir == folders[0]
    assert opened(tmp_path / "out.zarr").run_dir == tmp_path / "out.zarr.penstock"
    plain = array_spec({"driver": "file", "path": str(tmp_path / "out.zarr")}, "")
    assert opened(plain).run_dir == tmp_path / "out.zarr.penstock"
    assert opened(np.zeros((20, 20, 20), "uint8")).run_dir is None


@pytest.mark.parametrize(
    ("kvstore", "path", "beside"),
    [
        ("out.zarr", "0", "out.zarr"),
        ("out.zarr/", "images/raw/0/", "out.zarr"),
        ("group", "0", "group"),
        ("", "out.zarr/0", "out.zarr"),
        ("shelf", "out.n5/0", "shelf/out.n5"),
    ],
)
def test_a_run_folder_lies_beside_the_group(kvstore: str, path: str, beside: str, tmp_path) -> None:
    spec = array_spec({"driver": "file", "path": f"{tmp_path}/{kvstore}"}, path)
    cast = {"driver": "cast", "base": {**spec, "dtype": "uint8"}, "dtype": "uint8"}
    group = tmp_path / beside
    folder = opened(spec).run_dir
    assert folder is not None and folder.parent == group.parent
    assert folder.name.startswith(f"{group.name}-") and folder.suffix == ".penstock"
    assert opened(cast).run_dir == folder


@pytest.mark.parametrize("inside", ["out.zarr", "out.zarr/run", "out.zarr/0/run", "link/run"])
def test_a_run_folder_inside_the_output_is_refused(inside: str, tmp_path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "out.zarr")
    with pytest.raises(UsageError, match=rf"^--run-dir .*{inside} lies inside the output$"):
        opened(tmp_path / "out.zarr", run_dir=tmp_path / inside)
    opened(tmp_path / "out.zarr", run_dir=tmp_path / "out.zarr2/run")


class Choosy(nn.Module):
    """Chooses by value, so that it cannot be played on shapes; keeps the batches that it saw."""

    def __init__(self, returned: int | None = None) -> None:
        super().__init__()
        self.returned, self.seen = returned, list[int]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + 1 if x.sum() > 0 else x
        self.seen.append(len(x))
        return y[: self.returned]


def test_a_net_that_must_be_run_is_run_on_two_of_a_batch() -> None:
    for batch, ran in ((16, [2]), (2, [2]), (1, [1])):
        net = Choosy()
        measured = footprint.measure_footprint(model.load_model(net), (batch, 1, 4, 4, 4))
        assert net.seen == ran
        assert measured == footprint.Footprint((model.Head("out", 1),), None)
    with pytest.raises(UsageError, match="turns a batch of 2 into one of 1"):
        footprint.measure_footprint(model.load_model(Choosy(returned=1)), (16, 1, 4, 4, 4))


def test_weights_are_no_part_of_a_forward() -> None:
    """Linear layers take theirs as a view, which was counted as new memory."""
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(9)))
    measured = footprint.measure_footprint(model.load_model(net), (1, 1, 4, 4, 64))
    assert measured.peak_bytes == 3 * 4 * (4 * 4 * 64)  # the input of all, that of one, its output


def test_a_source_that_starts_off_zero_gives_its_output_its_position(tmp_path) -> None:
    """A precomputed volume with a voxel offset, of voxels of 40 x 4 x 8 nm."""
    data = np.arange(5 * 6 * 7, dtype="uint8").reshape(5, 6, 7)
    kvstore = f"file://{tmp_path}/in/"
    spec = {
        "driver": "neuroglancer_precomputed",
        "kvstore": kvstore,
        "multiscale_metadata": {"data_type": "uint8", "num_channels": 1, "type": "image"},
        "scale_metadata": {"size": [7, 6, 5], "chunk_size": [4, 4, 4], "encoding": "raw",
                           "key": "s", "resolution": [8, 4, 40], "voxel_offset": [3, 2, 10]},
    }  # fmt: skip
    ts.open(spec, create=True).result().write(data.T[..., None]).result()
    source, out = {"driver": spec["driver"], "kvstore": kvstore}, tmp_path / "out.zarr"
    assert open_source(source).domain.start[2:] == (10, 2, 3)
    penstock.run_inference(
        source, out, model="identity", patch=4, overlap=2, devices="cpu", normalize="none"
    )
    written = open_source(out)
    assert written.translation == (0, 0, 400, 8, 24)
    assert written.scale == (1, 1, 40, 4, 8)
    assert (written.read(written.domain)[0, 0] == data).all()


def begun(folder: Path, *, resume: bool) -> Journal:
    journal = Journal.open(folder, {"a": 1}, resume=resume)
    journal.begin({"settings": {}, "blocks": 0})
    return journal


@pytest.mark.parametrize("torn", ["", "0 1", "0 1 1 1", "0 1 1 1?", "\n"])
def test_a_resume_that_is_killed_as_it_begins_loses_nothing(torn: str, tmp_path) -> None:
    log, done = tmp_path / "done.log", {(0, 0, 0, 0), (0, 0, 0, 12)}
    with_blocks = begun(tmp_path, resume=False)
    for key in sorted(done):
        with_blocks.note(key, 1)
    with_blocks.close()
    with log.open("a") as file:
        file.write(torn)  # of a block 0 1 1 12, which is not there
    for _ in range(3):
        before = log.read_bytes()
        again = begun(tmp_path, resume=True)
        assert {*again.done} == done
        assert log.read_bytes().startswith(before)
        again.close()  # as a kill does
    last = begun(tmp_path, resume=True)
    last.note((0, 1, 1, 12), 1)
    last.close()
    assert {*Journal.open(tmp_path, {"a": 1}, resume=True).done} == {*done, (0, 1, 1, 12)}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("spans", [1, 1000])
def test_a_full_disk_costs_the_trace_and_not_the_job(spans: int) -> None:
    """It is met as the trace is closed, or before where more is written than a buffer holds."""
    probe = Probe(Path("/dev/full"))
    with pytest.warns(
        RuntimeWarning, match="--trace ends early: No space left on device"
    ) as warned:
        for _ in range(spans):
            with probe.span("read"):
                pass
        probe.close()
        probe.close()
    assert len(warned) == 1
    assert probe.totals()["read"].count == spans


CPU = torch.device("cpu")
WORKSPACE = 5 << 20


class Allocator:
    """The CPU's twin of `torch.cuda`: it counts the tensors that are alive."""

    def __init__(self) -> None:
        self.before, self.emptied, self.counting = 1000, False, contextlib.ExitStack()

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.counter = self.counting.enter_context(_Peak())

    def memory_allocated(self, device: torch.device) -> int:
        return self.before

    def synchronize(self, device: torch.device) -> None:
        self.counting.close()

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.before + self.counter.peak

    def empty_cache(self) -> None:
        self.counting.close()
        self.emptied = True


OUT = np.zeros((20, 20, 20), "uint8")


class Works(nn.Module):
    """Takes a workspace on a real device alone, as a library does, and may have no room for it."""

    def __init__(self, room: bool = True) -> None:
        super().__init__()
        self.net, self.room = nn.Conv3d(1, 1, 3, padding=1), room

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_meta and not self.room:
            raise torch.OutOfMemoryError("there is none")
        workspace = torch.empty(0 if x.is_meta else WORKSPACE, dtype=torch.uint8)
        out: Tensor = self.net(x)
        del workspace
        return out


def test_what_a_library_takes_is_counted_with_the_tensors() -> None:
    net, allocator = opened(OUT, model_type=Works()).net, Allocator()
    by_shapes = net.footprint.peak_bytes
    measured = with_peak_on(net, CPU, allocator).footprint.peak_bytes
    assert by_shapes is not None and measured is not None and allocator.emptied
    assert max(WORKSPACE, by_shapes) < measured < WORKSPACE + by_shapes + 1000


def test_a_device_without_room_leaves_the_plan_as_it_is() -> None:
    model = Works(room=False)
    net, allocator = opened(OUT, model_type=model, head_kind="intensity").net, Allocator()
    assert with_peak_on(net, CPU, allocator) == net and allocator.emptied


@pytest.mark.parametrize(
    "asked", [{"cluster": "local:2"}, {"prepare": True, "workers": 2}, {"part": "1/2"}]
)
def test_python_refuses_what_takes_several_processes(tmp_path, asked: dict[str, Any]) -> None:
    (name, *_) = asked
    with pytest.raises(UsageError, match=rf"^`{name}.*does a whole job in this process"):
        penstock.run_inference(np.zeros((8, 8, 8)), tmp_path / "out", model="identity", **asked)
    assert not list(tmp_path.iterdir())
