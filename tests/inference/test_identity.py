"""What decides voxels is what resume compares: the model's sources, what it holds, the input, the
maker."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.base import InferConfig, UsageError, build
from penstock.data import open_source
from penstock.inference import Job, run_step
from penstock.inference import run as infer_run
from penstock.inference.opening import identity

from ..parameters import mainly, paired

DATA = np.arange(8 * 8 * 24, dtype="uint16").reshape(8, 8, 24)
KNOBS: dict[str, Any] = {
    "patch": 8, "overlap": 0, "block": 8, "normalize": "none", "devices": "cpu"
}  # fmt: skip


def infer(out: Path, model: Any = "identity", data: Any = DATA, **knobs: Any) -> Any:
    return penstock.run_inference(data, out, model=model, **KNOBS | knobs)


@pytest.fixture
def files(tmp_path) -> Path:
    """A model whose parts are in files beside it, found by each way in which files are imported."""
    (tmp_path / "parts").mkdir()
    (tmp_path / "net.py").write_text(
        "import sys, pathlib; sys.path.insert(0, str(pathlib.Path(__file__).parent))\n"
        "import torch, near_by\nfrom parts import deep\n"
        "class Net(torch.nn.Module):\n"
        "    def forward(self, x): return x * near_by.one() * deep.one\n"
    )
    (tmp_path / "near_by.py").write_text("def one():\n    import inner\n    return inner.one\n")
    (tmp_path / "inner.py").write_text("one = 1\n")
    (tmp_path / "parts" / "__init__.py").write_text("from . import other\n")
    (tmp_path / "parts" / "deep.py").write_text("from .other import one\n")
    (tmp_path / "parts" / "other.py").write_text("one = 1\n")
    (tmp_path / "unused.py").write_text("def net(x): return x\ndef never():\n    import inner\n")
    return tmp_path


PARTS = ("net.py", "near_by.py", "inner.py", "parts/__init__.py", "parts/other.py")


def test_every_file_that_a_model_imports_from_its_folder_counts(files: Path) -> None:
    def found() -> str:
        return identity.sources(f"{files / 'net.py'}:Net", nn.Identity())

    seen = [found()]
    for name in PARTS:
        with (files / name).open("a") as file:
            file.write("# another\n")
        seen.append(found())
    assert len(set(seen)) == len(PARTS) + 1
    (files / "unused.py").write_text("two = 2\n")
    (files / "broken.py").write_text("def (")
    assert found() == seen[-1]


def test_the_files_of_classes_count_and_those_of_libraries_do_not() -> None:
    class Own(nn.Module):
        """Of this file."""

    assert identity.sources(Own(), Own())
    assert identity.sources("identity", nn.Identity()) == ""
    assert identity.sources("torch.nn:Identity", nn.Conv2d(1, 1, 1)) == ""


def double(x: Tensor) -> Tensor:
    return x * 2


def triple(x: Tensor) -> Tensor:
    return x * 3


class Holds(nn.Module):
    def __init__(self, **held: Any) -> None:
        super().__init__()
        self.conv = nn.Conv3d(1, 1, 1)
        self.register_buffer("table", torch.arange(3), persistent=False)
        vars(self).update(held)


class Settings:
    def __init__(self, gain: float) -> None:
        self.gain, self.itself = gain, self


CHANGES: dict[str, tuple[Any, Any]] = {
    "a number": (1.0, 2.0),
    "a text": ("a", "b"),
    "a list": ([1, [2]], [1, [3]]),
    "a dict": ({"a": 1}, {"a": 2}),
    "an array": (np.arange(3), np.arange(1, 4)),
    "a tensor": (torch.arange(3), torch.arange(1, 4)),
    "a function": (double, triple),
    "an object": (Settings(1.0), Settings(2.0)),
    "a hidden module": ([nn.Linear(1, 1)], [nn.Linear(1, 1)]),
    "a stride": (nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 1, stride=2)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_plain_attribute_counts(what: str) -> None:
    torch.manual_seed(0)
    first, second = CHANGES[what]
    net = Holds(held=first)
    assert identity.attributes(net) == identity.attributes(net)
    assert identity.attributes(net) != identity.attributes(Holds(held=second))


def test_a_buffer_that_is_not_saved_and_a_hook_count() -> None:
    """Torch numbers the hooks of a process from its start: a net that is made again is the same."""

    def hooked(table: int) -> str:
        net = Holds()
        net.table += table  # type: ignore[operator]
        net.register_forward_hook(lambda module, args, out: out * 2)
        return identity.attributes(net)

    assert hooked(0) == hooked(0)
    assert len({identity.attributes(Holds()), hooked(0), hooked(1)}) == 3


def test_a_set_counts_and_where_its_objects_lie_in_memory_does_not() -> None:
    names = [identity.attributes(Holds(held={"a", name})) for name in ("b", "b", "c")]
    assert names[0] == names[1] != names[2]
    first, second = {object()}, {object()}
    assert identity.attributes(Holds(held=first)) == identity.attributes(Holds(held=second))


@pytest.mark.slow
def test_from_wherever_said_a_file_is_one_model_until_it_changes(files: Path, monkeypatch) -> None:
    monkeypatch.chdir(files)
    infer(Path("out.zarr"), "unused.py:net")
    (files / "sub").mkdir()
    monkeypatch.chdir(files / "sub")
    for model in ("../unused.py:net", f"{files}/unused.py:net"):
        assert infer(Path("../out.zarr"), model, resume=True).blocks_written == 0
    (files / "inner.py").write_text("one = 2\n")
    with pytest.raises(UsageError, match="had sources"):
        infer(Path("../out.zarr"), "../unused.py:net", resume=True)


def test_an_array_is_known_by_its_content(tmp_path) -> None:
    out, data = tmp_path / "out.zarr", DATA.copy()
    infer(out, data=data)
    assert infer(out, data=DATA.copy(), resume=True).blocks_written == 0
    data[0, 0, 0] += 1  # in place: its address is what it was
    with pytest.raises(UsageError, match="had input"):
        infer(out, data=data, resume=True)


def test_an_array_of_any_rank_is_hashed_by_planes() -> None:
    """Voxel by voxel, one of 256 MiB took minutes."""
    hashed = list[tuple[int, ...]]()

    class Counted(np.ndarray[Any, Any]):
        def tobytes(self, order: Any = "C") -> bytes:
            hashed.append(self.shape)
            return super().tobytes(order)

    for array in (DATA[0], DATA, DATA[None], DATA[None, None]):
        source: Any = open_source(array)
        source.array = array.view(Counted)
        content = identity.of_input(source, resumes=False)
        assert {*hashed} == {array.shape[-2:]}
        said = f"{array.shape} {array.dtype}".encode() + array.tobytes()
        assert content == f"memory#{hashlib.sha256(said).hexdigest()[:16]}"
        hashed.clear()


def test_an_array_too_large_to_compare_is_not_resumed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(identity, "CONTENT_BYTES", DATA.nbytes - 1)
    infer(tmp_path / "out.zarr")
    with pytest.raises(
        UsageError, match=r"^`resume=True`: the input is an array in memory of 3.00 KiB"
    ):
        infer(tmp_path / "out.zarr", resume=True)


def test_a_changed_line_of_the_code_is_another_maker(tmp_path, monkeypatch) -> None:
    """In a copy of the package, for the hash is made of the files."""
    digest = identity.code_of_voxels.__wrapped__
    before = digest()
    assert before == identity.code_of_voxels()
    left_out = shutil.ignore_patterns("__pycache__", "reports", "training", "bench")
    copy = shutil.copytree(identity._PACKAGE, tmp_path / "penstock", ignore=left_out)
    monkeypatch.setattr(identity, "_PACKAGE", copy)
    assert digest() == before
    with (copy / "cli" / "infer.py").open("a") as file:
        file.write("# computes no voxel\n")
    assert digest() == before
    for place in ("inference/tiling/stitch.py", "data/stores/tensorstore.py"):
        with (copy / place).open("a") as file:
            file.write("# another line\n")
        before, other = digest(), before
        assert before != other


def test_another_maker_does_not_go_on(tmp_path) -> None:
    out, noted = tmp_path / "out.zarr", tmp_path / "out.zarr.penstock" / "run.json"
    infer(out)
    content = json.loads(noted.read_text())
    content["maker"]["code"] = "older"
    noted.write_text(json.dumps(content))
    said = r"had code 'older', and here it is .* `overwrite=True` to begin anew"
    with pytest.raises(UsageError, match=said):
        infer(out, resume=True)


@pytest.mark.parametrize(
    ("goes_on", "folder"),
    mainly(
        paired([{"resume": True}, {"part": "1/1"}, {"finish": True}], ["elsewhere", None]), 0, 1
    ),
)
def test_a_run_goes_on_with_the_threads_that_it_began_with(goes_on, folder, tmp_path) -> None:
    """As every process of a job must, for it to write the same bits."""
    source, out = tmp_path / "in.npy", tmp_path / "out.zarr"
    np.save(source, DATA)
    noted = {"run_dir": tmp_path / folder} if folder else {}
    begin = {} if "resume" in goes_on else {"prepare": True, "workers": 1}
    named = {"in_spec": source, "out_spec": out, "model_type": "identity"} | KNOBS | noted
    first = Job(build(InferConfig, named, begin | {"threads": 3}))
    run_step(first) if begin else infer_run.run_job(first)
    assert Job(build(InferConfig, named, goes_on)).maker["threads"] == 3
    assert Job(build(InferConfig, named, goes_on | {"threads": 2})).maker["threads"] == 2
    alone = Job(build(InferConfig, named, {"overwrite": True}))
    assert alone.maker["threads"] == torch.get_num_threads()


@pytest.mark.parametrize(("threads", "said"), [(1, "1 thread"), (3, "3 threads")])
def test_the_plan_states_the_arithmetic_of_its_job(threads: int, said: str) -> None:
    plan = penstock.plan_inference(DATA, np.zeros_like(DATA), model="identity", threads=threads,
                                   **KNOBS)  # fmt: skip
    instructions = torch.backends.cpu.get_cpu_capability()
    line = f"torch {torch.__version__}, {instructions}, {said} for each forward"
    assert dict(plan.lines())["arithmetic"] == line
    gpu = {"torch": "2.9", "instructions": "AVX2", "threads": None, "gpus": ["NVIDIA H100"]}
    assert identity.arithmetic_of(gpu) == "torch 2.9, AVX2, NVIDIA H100"
