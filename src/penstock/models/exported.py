"""Makes a module of a torch.export file (.pt2) from the operators that it lists.

`pt2` reads the file; torch's own reader never does. The operators become a graph of `torch.fx` in
the same order, so the results are the same to the bit. Names, metadata, sample inputs and the
expressions of sizes are left out. The conditions on the sizes of an input are checked at every
call.
"""

from __future__ import annotations

import io
import json
import keyword
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..base import UsageError
from . import pt2
from .aten_graph import DTYPES, STRIDED, AtenGraph
from .input_sizes import condition, fits, linear
from .pt2 import Archive, Unchecked

_KEPT = {
    "parameter": "parameter_name",
    "buffer": "buffer_name",
    "tensor_constant": "tensor_constant_name",
}
"""The kinds of tensors that a program holds, each with the field that names the tensor."""


def load(path: Path) -> nn.Module:
    """The program in a file, as a module of aten's operators alone.

    Raises `Unchecked` for a program that holds anything else, and errors of many types for a file
    that is damaged.
    """
    archive = pt2.open_archive(path)
    version = archive.program["schema_version"]["major"]
    if version != pt2.MAJOR:
        raise Unchecked(path, f"has version {version} of the format, not {pt2.MAJOR}")
    return _Program(archive).module()


class _Program:
    """The module of a file: its input, the tensors that it holds, its graph and its heads."""

    def __init__(self, archive: Archive) -> None:
        self.archive, self.path = archive, archive.path
        self.top = archive.program["graph_module"]
        self.graph = AtenGraph(archive.path)
        self.passing: list[str] = []
        """Names of buffers and constants that are not saved with the state."""

    def module(self) -> fx.GraphModule:
        signature, nodes = self.top["signature"], self.graph.graph
        tensors = _states(self.archive)
        given = [spec for spec in signature["input_specs"] if "user_input" in spec]
        if len(given) != 1 or "as_tensor" not in given[0]["user_input"]["arg"]:
            raise UsageError(
                f"--model-type {self.path} was exported with {len(given)} inputs; a model takes one"
            )
        name = given[0]["user_input"]["arg"]["as_tensor"]["name"]
        x = nodes.placeholder("x")
        self.graph.values[name] = nodes.call_function(fits, (x, *self._wanted(name)))
        for spec in signature["input_specs"]:
            self._hold(spec, tensors)
        self.graph.add(self.top["graph"]["nodes"])
        outputs = [self._output(spec, x) for spec in signature["output_specs"]]
        heads = [head for head in outputs if head is not _NO_HEAD]
        described = self.top["module_call_graph"][0]["signature"]["out_spec"]
        nodes.output(_shaped(self.path, described, heads))
        made = self.graph.module()
        for name in self.passing:  # torch.fx does not keep this
            owner, _, last = name.rpartition(".")
            made.get_submodule(owner)._non_persistent_buffers_set.add(last)
        return made

    def _wanted(self, name: str) -> tuple[Any, ...]:
        """The conditions on the input's shape: sizes, limits of symbols, comparisons."""
        sizes = self.top["graph"]["tensor_values"][name]["sizes"]
        try:
            wanted = tuple(
                (0, "", int(size["as_int"]))
                if "as_int" in size
                else linear(size["as_expr"]["expr_str"])
                for size in sizes
            )
            guards = tuple(str(text) for text in self.archive.program.get("guards_code", ()))
            for text in guards:
                condition(text)
        except (ValueError, SyntaxError) as error:
            raise Unchecked(
                self.path, f"has a condition on its input that cannot be checked: {error}"
            ) from error
        symbols = {symbol for _, symbol, _ in wanted}
        limits = {
            symbol: (limit["min_val"], limit["max_val"])
            for symbol, limit in self.archive.program["range_constraints"].items()
            if symbol in symbols
        }
        return wanted, tuple((symbol, *limits[symbol]) for symbol in sorted(limits)), guards

    def _hold(self, spec: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Register a parameter, a buffer or a constant of the program."""
        ((kind, held),) = spec.items()
        if kind == "user_input":
            return
        if kind not in _KEPT:
            raise Unchecked(self.path, f"takes a {kind.replace('_', ' ')}")
        name = held[_KEPT[kind]]
        if not pt2.NAME.fullmatch(name) or any(keyword.iskeyword(p) for p in name.split(".")):
            raise Unchecked(self.path, f"calls a tensor {name!r}")
        *folders, last = name.split(".")
        owner = self.graph.root
        for folder in folders:
            if folder not in owner._modules:
                owner.add_module(folder, nn.Module())
            owner = owner.get_submodule(folder)
        if kind == "parameter":
            parameter = tensors[name]
            if not isinstance(parameter, nn.Parameter):
                parameter = nn.Parameter(parameter, parameter.requires_grad)
            owner.register_parameter(last, parameter)
        else:
            owner.register_buffer(last, tensors[name])
            if kind != "buffer" or not held["persistent"]:
                self.passing.append(name)
        self.graph.values[held["arg"]["name"]] = self.graph.graph.get_attr(name)

    def _output(self, spec: Mapping[str, Any], x: fx.Node) -> Any:
        """The value of a head. A buffer or input that the program writes is no head."""
        ((kind, output),) = spec.items()
        if kind == "user_output":
            return self.graph.argument(output["arg"])
        if kind == "buffer_mutation":
            buffer = next(
                held["buffer"]["arg"]["name"]
                for held in self.top["signature"]["input_specs"]
                if "buffer" in held and held["buffer"]["buffer_name"] == output["buffer_name"]
            )
            target = self.graph.values[buffer]
        elif kind == "user_input_mutation":
            target = x
        else:
            raise Unchecked(self.path, f"returns a {kind.replace('_', ' ')}")
        copy = torch.ops.aten.copy_.default
        value = self.graph.argument({"as_tensor": output["arg"]})
        self.graph.graph.call_function(copy, (target, value))
        return _NO_HEAD


_NO_HEAD = object()


def _states(archive: Archive) -> dict[str, Tensor]:
    """Every tensor of a file, by its name; on the CPU, wherever it was exported."""
    tensors = {name: _tensor(archive, name) for name in archive.tensors}
    for state in archive.states:
        tensors |= torch.load(io.BytesIO(state), map_location="cpu", weights_only=True)
    return tensors


def _tensor(archive: Archive, name: str) -> Tensor:
    described = archive.tensors[name]["tensor_meta"]
    dtype = DTYPES[described["dtype"]]
    shape = [int(size["as_int"]) for size in described["sizes"]]
    if described["layout"] != STRIDED:
        raise Unchecked(archive.path, f"keeps {name!r} in a layout that is not strided")
    raw = bytearray(archive.read(name))
    flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    if min(shape, default=0) < 0 or math.prod(shape) > flat.numel():
        raise ValueError(f"{name} of shape {tuple(shape)} has {flat.numel()} elements")
    strides = [int(stride["as_int"]) for stride in described["strides"]]
    tensor = flat.as_strided(shape, strides, int(described["storage_offset"]["as_int"]))
    return tensor.requires_grad_(bool(described["requires_grad"]) and dtype.is_floating_point)


def _shaped(path: Path, spec: str, heads: Sequence[Any]) -> Any:
    """Heads in the form in which the net returns them: one, or in tuples and dicts."""
    _version, tree = json.loads(spec)
    rest = iter(heads)

    def shaped(part: Mapping[str, Any]) -> Any:
        kind, children = part["type"], part["children_spec"]
        if kind is None:
            return next(rest)
        if kind in ("builtins.dict", "collections.OrderedDict"):
            names = json.loads(part["context"])
            if not all(isinstance(name, str) for name in names):
                raise Unchecked(path, "has a head whose name is no text")
            return {name: shaped(child) for name, child in zip(names, children, strict=True)}
        if kind in ("builtins.tuple", "builtins.list", "collections.namedtuple"):
            return tuple(shaped(child) for child in children)
        raise Unchecked(path, f"returns a {str(kind)[:80]}")

    return shaped(tree)
