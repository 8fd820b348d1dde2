"""Model files that are written to attack: each way in runs where torch opens the file, and is
refused here, unless it is trusted."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import penstock
from penstock.base.errors import UsageError
from penstock.cli import main
from penstock.models import exported, input_sizes, torchscript
from penstock.models import load as model
from penstock.models.registry import PROGRAMS

from ..places import ROOT
from .kit import Scripted, X

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of files and of its compiler
# The attacks change such a file, and show that torch itself falls for them.
of_today = pytest.mark.skipif(
    torch.__version__ < "2.8", reason="torch before 2.8 writes and reads another layout of .pt2"
)

Entries = dict[str, bytes]
Program = dict[str, Any]


def rewritten(little: Path, path: Path, change: Callable[[Entries, Program], None]) -> str:
    """A copy of a program in which the entries, or the description, are others."""
    with zipfile.ZipFile(little) as file:
        entries = {name.partition("/")[2]: file.read(name) for name in file.namelist()}
    program = json.loads(entries["models/model.json"])
    change(entries, program)
    if "models/model.json" in entries:
        entries["models/model.json"] = json.dumps(program).encode()
    with zipfile.ZipFile(path, "w") as file:
        for name, content in entries.items():
            file.writestr(f"net/{name}", content)
    return str(path)


# --- what is no attack ---------------------------------------------------------------------------


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    return len(one) == len(other) and all(map(same, one, other))


def test_an_ordinary_program_gives_what_torch_gives(plain: Path) -> None:
    ours, theirs = exported.load(plain), torch.export.load(plain).module()
    for batch in (1, 2, 5):
        x = torch.randn(batch, 1, 8, 8, 8)
        assert same(ours(x), theirs(x))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert all(p.requires_grad for p in ours.parameters())
    for shape in ((2, 1, 8, 8, 9), (2, 1, 8, 8), (65, 1, 8, 8, 8)):
        with pytest.raises(ValueError, match="the program"):
            ours(torch.zeros(shape))


class Ways(nn.Module):
    """Takes another way where a side is a multiple of 8."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[2] % 8 == 0 else x


class Halves(Ways):
    """The same, and something in half precision."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            product = x.flatten(1) @ torch.ones(x[0].numel(), 1)
        y = super().forward(x)
        return y + product.float().view(-1, 1, 1, 1) + torch.zeros(x.shape, device=x.device)


@of_today
def test_what_a_program_asks_of_its_input_is_checked(tmp_path: Path) -> None:
    auto, twice = torch.export.Dim.AUTO, 2 * torch.export.Dim("half", min=2, max=50)
    for name, net, sizes in (
        ("guard", Halves(), {0: auto, 2: auto}),
        ("twice", Ways(), {2: auto, 3: twice}),
    ):
        program = torch.export.export(net, (torch.ones(2, 1, 8, 8),), dynamic_shapes=(sizes,))
        torch.export.save(program, tmp_path / f"{name}.pt2")
        ours = exported.load(tmp_path / f"{name}.pt2")
        theirs = torch.export.load(tmp_path / f"{name}.pt2").module()
        for rows, columns in ((8, 8), (16, 8), (16, 12), (12, 8), (8, 9), (8, 102)):
            x = torch.rand(2, 1, rows, columns)
            fits = rows % 8 == 0 and (
                columns % 2 == 0 < columns < 102 if name == "twice" else columns == 8
            )
            if fits:
                assert same(ours(x), theirs(x))
            else:
                with pytest.raises(ValueError, match="the program"):
                    ours(x)


def test_a_program_runs_over_a_volume_with_its_own_and_with_other_weights(
    plain: Path, tmp_path: Path
) -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Conv3d(1, 1, 3, padding=1), nn.BatchNorm3d(1))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.net(x)
            return out

    net, volume = One().eval(), np.random.default_rng(0).random((10, 12, 14), np.float32)
    path, weights = tmp_path / "one.pt2", tmp_path / "one.pth"
    torch.export.save(torch.export.export(One().eval(), (torch.zeros(2, 1, 8, 8, 8),)), path)
    torch.save(net.state_dict(), weights)
    knobs: dict[str, Any] = {"patch": 8, "overlap": 4, "normalize": "none"}
    out, want = np.zeros_like(volume), np.zeros_like(volume)
    penstock.run_inference(volume, out, model=path, weights=weights, **knobs)
    penstock.run_inference(volume, want, model=net, **knobs)
    np.testing.assert_array_equal(out, want)


def test_a_program_as_torch_wrote_it_up_to_2_7(plain: Path, tmp_path: Path) -> None:
    from torch._export.serde.serialize import serialize

    artifact = serialize(torch.export.load(plain))
    path = tmp_path / "old.pt2"

    def write(state: bytes) -> None:
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("version", "8.8")
            file.writestr("serialized_exported_program.json", artifact.exported_program)
            file.writestr("serialized_state_dict.pt", state)
            file.writestr("serialized_constants.pt", artifact.constants)
            file.writestr("serialized_example_inputs.pt", artifact.example_inputs)

    write(artifact.state_dict)
    assert same(model.load_model(str(path)).module(X), exported.load(plain)(X))
    marker = tmp_path / "ran"
    write(pickled(marker))
    with pytest.raises(UsageError):
        model.load_model(str(path))
    assert not marker.exists()


# --- attacks -------------------------------------------------------------------------------------


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def pickled(marker: Path) -> bytes:
    held = io.BytesIO()
    torch.save(Evil(marker), held)
    return held.getvalue()


def config_of(entries: Entries, kind: str) -> Any:
    return json.loads(entries[f"data/{kind}/model_{kind}_config.json"])


def with_payload(entries: Entries, kind: str, file: str, content: bytes, name: str) -> None:
    config = config_of(entries, kind)
    config["config"][name] = {
        "path_name": file,
        "is_param": False,
        "use_pickle": True,
        "tensor_meta": None,
    }
    entries[f"data/{kind}/model_{kind}_config.json"] = json.dumps(config).encode()
    entries[f"data/{kind}/{file}"] = content


def first_call(program: Program, target: str, **arguments: Any) -> None:
    """Put a call of something else before all others."""
    kind = 2 if "higher_order" in target else 1
    node = {
        "target": target,
        "inputs": [{"name": n, "arg": value, "kind": kind} for n, value in arguments.items()],
        "outputs": [{"as_none": True}],
        "metadata": {},
        "name": "evil",
    }
    program["graph_module"]["graph"]["nodes"].insert(0, node)


def size_of_input(program: Program) -> Any:
    return program["graph_module"]["graph"]["tensor_values"]["x"]["sizes"]


def code(marker: Path) -> str:
    return f"__import__('os').system('touch {marker}')"


ATTACKS: dict[str, Callable[[Entries, Program, Path], None]] = {
    "sample inputs are a pickle": lambda entries, program, marker: entries.update(
        {"data/sample_inputs/model.pt": pickled(marker)}
    ),
    "a weight is a pickle": lambda entries, program, marker: with_payload(
        entries, "weights", "weight_99", pickled(marker), "evil"
    ),
    "a constant is a pickle": lambda entries, program, marker: with_payload(
        entries, "constants", "tensor_99", pickled(marker), "evil"
    ),
    "an opaque object": lambda entries, program, marker: with_payload(
        entries, "constants", "opaque_obj_0", pickle.dumps(Evil(marker)), "evil"
    ),
    "weights of an older form": lambda entries, program, marker: entries.update(
        {"data/weights/model.pt": pickled(marker)}
    ),
    "constants of an older form": lambda entries, program, marker: entries.update(
        {"data/constants/model.pt": pickled(marker)}
    ),
    "a size is an expression": lambda entries, program, marker: size_of_input(program).__setitem__(
        0, {"as_expr": {"expr_str": code(marker), "hint": {"as_int": 2}}}
    ),
    "a condition on the input": lambda entries, program, marker: program.update(
        guards_code=[f"{code(marker)} == 0"]
    ),
    "a keyword with code in it": lambda entries, program, marker: first_call(
        program,
        "torch.ops.higher_order.wrap_with_set_grad_enabled",
        **{f"enabled=1, wrapped={code(marker)}, rest": {"as_int": 1}},
    ),
    "a parameter with code in its name": lambda entries, program, marker: renamed(
        entries,
        program,
        f'x" + str(getattr(__import__("os"), "system")("touch {marker}")) + "',
    ),
    "an operator that maps a file": lambda entries, program, marker: first_call(
        program,
        "torch.ops.aten.from_file.default",
        filename={"as_string": str(marker)},
        shared={"as_bool": True},
        size={"as_int": 4},
    ),
}
REFUSED: dict[str, Callable[[Entries, Program, Path], None]] = {
    "an operator of another module": lambda entries, program, marker: first_call(
        program, "torch.serialization.os.system", command={"as_string": f"touch {marker}"}
    ),
    "an operator of operator": lambda entries, program, marker: first_call(
        program, "_operator.methodcaller", name={"as_string": "save"}
    ),
    "an operator as an argument": lambda entries, program, marker: first_call(
        program,
        "torch.ops.aten.relu.default",
        self={"as_operator": "torch.serialization.os.system"},
    ),
    "an operator of a library": lambda entries, program, marker: first_call(
        program, "torch.ops.inductor.accumulate_grad_.default", variable={"as_int": 1}
    ),
    "an operator of an extension": lambda entries, program, marker: first_call(
        program, "#evil:run", x={"as_int": 1}
    ),
    "another operator of a higher order": lambda entries, program, marker: first_call(
        program, "torch.ops.higher_order.run_const_graph", x={"as_int": 1}
    ),
    "a path": lambda entries, program, marker: first_call(
        program, "torch.ops.aten.einsum.default", equation={"as_string": f"/{marker}"}
    ),
    "a custom object": lambda entries, program, marker: with_payload(
        entries, "constants", "custom_obj_0", b"", "evil"
    ),
    "a custom object as an input": lambda entries, program, marker: program["graph_module"][
        "signature"
    ]["input_specs"].append(
        {"custom_obj": {"arg": {"name": "o", "class_fqn": "o"}, "custom_obj_name": "o"}}
    ),
    "machine code": lambda entries, program, marker: entries.update(
        {"data/aotinductor/model/evil.so": b""}
    ),
    "a class as an output": lambda entries, program, marker: program["graph_module"][
        "module_call_graph"
    ][0]["signature"].update(
        out_spec=json.dumps([1, {"type": "os.system", "context": "null", "children_spec": []}])
    ),
    "a name that is a way out": lambda entries, program, marker: entries.update(
        {"../../evil": b""}
    ),
}
"""What torch 2.13 refuses as well, or cannot run on this machine."""


def renamed(entries: Entries, program: Program, evil: str) -> None:
    """Torch writes Python in which the names of parameters stand between quotes."""
    weights = config_of(entries, "weights")
    weights["config"][evil] = weights["config"].pop("conv.bias")
    entries["data/weights/model_weights_config.json"] = json.dumps(weights).encode()
    for spec in program["graph_module"]["signature"]["input_specs"]:
        if spec.get("parameter", {}).get("parameter_name") == "conv.bias":
            spec["parameter"]["parameter_name"] = evil


@of_today
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_runs_in_torch_and_not_here(name: str, little: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    path = rewritten(little, tmp_path / "evil.pt2", lambda e, p: ATTACKS[name](e, p, marker))
    try:
        loaded = model.load_model(path)
        assert name.startswith("sample inputs"), "what is never read need not be refused"
        assert same(loaded.module(X), exported.load(little)(X))
    except UsageError as error:
        assert "--trust-model" in str(error)
    assert not marker.exists()
    with contextlib.suppress(Exception):
        model.load_model(path, trust=True).module(X)
    assert marker.exists(), "the attack is none"


@of_today
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_checked_is_refused(name: str, little: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    path = rewritten(little, tmp_path / "evil.pt2", lambda e, p: REFUSED[name](e, p, marker))
    with pytest.raises(UsageError, match="only read with --trust-model"):
        model.load_model(path)
    assert not marker.exists()


@of_today
def test_plan_runs_nothing_of_a_program(
    little: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a user says it; with the switch the attack runs."""
    marker = tmp_path / "ran"
    attack = ATTACKS["a size is an expression"]
    path = rewritten(little, tmp_path / "evil.pt2", lambda e, p: attack(e, p, marker))
    np.save(tmp_path / "in.npy", np.zeros((8, 8, 8), "float32"))
    words = ["plan", "--in-spec", f"{tmp_path}/in.npy", "--out-spec", f"{tmp_path}/o.zarr",
             "--model-type", path, "--patch", "8", "--overlap", "0"]  # fmt: skip
    assert main(words) == 2
    assert "only read with --trust-model" in capsys.readouterr().err
    assert not marker.exists()
    with contextlib.suppress(SystemExit):
        main([*words, "--trust-model"])
    assert marker.exists()


def test_the_page_has_a_row_for_every_format() -> None:
    page = (ROOT / "docs" / "background" / "trust.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    for name in (*PROGRAMS, ".pth", ".safetensors", "file.py:function", "--trust-model"):
        assert any(name in row for row in rows), name


def test_tricks_of_archives_are_refused(little: Path, tmp_path: Path) -> None:
    path = tmp_path / "evil.pt2"
    with zipfile.ZipFile(little) as file:
        entries = {name: file.read(name) for name in file.namelist()}
    name = min(entries)
    tricks: dict[str, list[tuple[str, bytes, int]]] = {
        "two entries": [(name, b"other", zipfile.ZIP_STORED)],
        "outside of itself": [("/etc/evil", b"", zipfile.ZIP_STORED)],
        "compressed": [("net/data/weights/weight_99", bytes(2**12), zipfile.ZIP_DEFLATED)],
    }
    for said, more in tricks.items():
        with zipfile.ZipFile(path, "w") as file:
            for entry, content in entries.items():
                file.writestr(entry, content)
            for entry, content, how in more:
                file.writestr(entry, content, how)
        with pytest.raises(UsageError, match=said):
            model.load_model(str(path))


@of_today
def test_a_tensor_is_no_larger_than_its_bytes(little: Path, tmp_path: Path) -> None:
    def grow(entries: Entries, program: Program, size: int, stride: int) -> None:
        config = config_of(entries, "weights")
        meta = config["config"]["conv.bias"]["tensor_meta"]
        meta["sizes"], meta["strides"] = [{"as_int": size}], [{"as_int": stride}]
        entries["data/weights/model_weights_config.json"] = json.dumps(config).encode()

    for size, stride in ((2**40, 0), (4, 2**40), (-1, 1)):
        change = functools.partial(grow, size=size, stride=stride)
        path = rewritten(little, tmp_path / "evil.pt2", change)
        with pytest.raises(UsageError, match="neither a torch"):
            model.load_model(path)


# --- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "Symbol(__import__('os'))",
        "Mul(Symbol('a'), Symbol('b'))",
        "Pow(Integer(9), Integer(9))",
        "(lambda: 1)()",
        "'s0'",
        "Symbol('s0\\n')",
        "2 ** 9",
    ],
)
def test_a_size_is_linear_in_one_symbol_or_refused(text: str) -> None:
    with pytest.raises((ValueError, SyntaxError)):
        input_sizes.linear(text)


@given(st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 99))
def test_a_size_is_what_it_evaluates_to(a: int, b: int, s: int) -> None:
    text = f"Add(Mul(Integer({a}), Symbol('s7', positive=True, integer=True)), Integer({b}))"
    found_a, symbol, found_b = input_sizes.linear(text)
    assert found_a * s + found_b == a * s + b
    assert symbol == ("s7" if a else "")


@given(st.integers(1, 40), st.integers(1, 40))
def test_a_condition_is_what_it_evaluates_to(rows: int, columns: int) -> None:
    size = "L['x'].size()"
    for text in (
        f"({size}[2] % 8) == 0",
        f"{size}[3] + {size}[2] > 12 and not {size}[2] // 3 == 1 or -{size}[2] < -20",
        f"2 <= {size}[2] * 2 - 1 != {size}[3]",
    ):
        want = eval(text.replace(size, "shape"), {"shape": (0, 0, rows, columns)})
        assert bool(input_sizes.condition(text)[0]((0, 0, rows, columns))) is bool(want)


@pytest.mark.parametrize(
    "text", ["__import__('os')", "L['x'].numel()", "open('x')", "L['x'].size()[__import__('os')]"]
)
def test_a_condition_is_of_sizes_or_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a condition"):
        input_sizes.condition(text)


# --- TorchScript ---------------------------------------------------------------------------------


def script(path: Path, frozen: bool = False) -> str:
    module = torch.jit.script(Scripted().eval())
    (torch.jit.freeze(module) if frozen else module).save(str(path))
    return str(path)


@pytest.mark.parametrize("frozen", [False, True])
def test_ordinary_torchscript_is_read(frozen: bool, tmp_path: Path) -> None:
    path = script(tmp_path / "net.ts", frozen)
    assert same(model.load_model(path).module(X), torch.jit.load(path)(X))


@pytest.mark.parametrize("way", ["torch.save", "t = torch", "ops.aten.from_file", "x.save"])
def test_torchscript_that_writes_a_file_is_refused(way: str, tmp_path: Path) -> None:
    """`__setstate__` of a class of the file runs as soon as it is loaded."""
    marker, path = tmp_path / "ran", tmp_path / "evil.ts"
    script(tmp_path / "net.ts")
    write = {
        "torch.save": f'torch.save(x, "{marker}")',
        "t = torch": f"t = torch\n    _0 = t.save(x, '{marker}')",
        "ops.aten.from_file": f"_0 = ops.aten.from_file('{marker}', True, 4)",
        "x.save": f"_0 = x.save('{marker}')",
    }[way]
    with zipfile.ZipFile(tmp_path / "net.ts") as old, zipfile.ZipFile(path, "w") as new:
        for entry in old.namelist():
            content = old.read(entry).decode("latin1")
            if entry.endswith(".py"):
                content = content.replace("    heads = ", f"    {write}\n    heads = ")
            new.writestr(entry, content.encode("latin1"))
    with pytest.raises(UsageError, match="only read with --trust-model"):
        model.load_model(str(path))
    assert not marker.exists()
    with contextlib.suppress(Exception):
        model.load_model(str(path), trust=True).module(X)
    if way == "torch.save":  # of the others the language makes nothing, in this version
        assert marker.exists(), "the attack is none"


def test_torchscript_of_a_librarys_class_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "evil.ts"
    script(tmp_path / "net.ts")
    with zipfile.ZipFile(tmp_path / "net.ts") as old, zipfile.ZipFile(path, "w") as new:
        for entry in old.namelist():
            content = old.read(entry)
            if entry.endswith("/constants.pkl"):
                content = b"\x80\x02c__torch__.torch.classes.evil\nThing\n)\x81."
            new.writestr(entry, content)
    with pytest.raises(UsageError, match="an object of __torch__"):
        model.load_model(str(path))


def test_an_archive_without_a_module_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.ts"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("net/version", "3")
    with pytest.raises(UsageError, match=r"empty\.ts"):
        model.load_model(str(path))
    with pytest.raises(ValueError, match="it holds no module"):
        torchscript.load(path)


# --- the switch ----------------------------------------------------------------------------------


@of_today
def test_the_switch_is_wherever_a_model_file_is_read(little: Path, tmp_path: Path) -> None:
    from penstock.base.config.bench import BenchModelConfig, BenchQueueConfig
    from penstock.base.config.infer import InferConfig
    from penstock.base.config.train import TrainConfig

    for knobs in (InferConfig, BenchModelConfig, BenchQueueConfig, TrainConfig):
        assert knobs.model_fields["trust_model"].default is False
    evil = rewritten(
        little,
        tmp_path / "evil.pt2",
        lambda e, p: first_call(p, "torch.ops.aten.linalg_pinv.default", self={"as_int": 1}),
    )
    with pytest.raises(UsageError, match="only read with trust_model=True"):
        penstock.plan_inference(np.zeros((8, 8, 8)), np.zeros((8, 8, 8)), model=evil)
