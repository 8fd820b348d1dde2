"""A module of a file of torch.export (.pt2), made of its operators alone.

The file is read by `pt2`, and torch's own reader never sees it. What it says becomes a graph of
`torch.fx` of the same operators in the same order, so the results are the same to the bit. Names,
metadata, sample inputs and the expressions behind sizes stay behind; what must hold of the sizes of
an input is checked at every call.
"""

from __future__ import annotations

import io
import json
import keyword
import math
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..base import UsageError
from . import pt2
from .pt2 import Archive, Unchecked

_DTYPES = {
    1: torch.uint8, 2: torch.int8, 3: torch.int16, 4: torch.int32, 5: torch.int64,
    6: torch.float16, 7: torch.float32, 8: torch.float64, 9: torch.complex32, 10: torch.complex64,
    11: torch.complex128, 12: torch.bool, 13: torch.bfloat16, 28: torch.uint16,
    29: torch.float8_e4m3fn, 30: torch.float8_e5m2, 34: torch.uint32, 35: torch.uint64,
}  # fmt: skip
_FORMATS = {
    1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d,
    4: torch.preserve_format,
}  # fmt: skip
_STRIDED = 7

_ON_NUMBERS = {
    f"_operator.{name}": getattr(operator, name)
    for name in (
        "add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "pos", "eq", "ne", "lt", "le",
        "gt", "ge", "and_", "or_", "getitem",
    )
} | {f"math.{name}": getattr(math, name) for name in ("trunc", "ceil", "floor", "sqrt")} | {
    f"torch.sym_{name}": getattr(torch, f"sym_{name}")
    for name in ("not", "int", "float", "ite", "max", "min")
}  # fmt: skip
"""What may be done with sizes."""


def load(path: Path) -> nn.Module:
    """The program in a file, as a module that is made of aten's operators alone.

    Raises `Unchecked` for a program that holds more than those, and errors of many types for a file
    that is damaged.
    """
    archive = pt2.open_archive(path)
    version = archive.program["schema_version"]["major"]
    if version != pt2.MAJOR:
        raise Unchecked(path, f"has version {version} of the format, and {pt2.MAJOR} is known")
    return _Program(archive).module()


class _Program:
    """One graph module, and the values that its parts make, by the file's names."""

    def __init__(self, archive: Archive, described: Mapping[str, Any] | None = None) -> None:
        self.archive, self.path = archive, archive.path
        self.top = archive.program["graph_module"]
        self.described = described or self.top["graph"]
        self.root, self.graph = nn.Module(), fx.Graph()
        self.values: dict[str, Any] = {}
        self.passing: list[str] = []
        """Buffers and constants that are no part of the state."""

    # --- the whole ------------------------------------------------------------------------------

    def module(self) -> fx.GraphModule:
        signature = self.top["signature"]
        tensors = _states(self.archive)
        given = [spec for spec in signature["input_specs"] if "user_input" in spec]
        if len(given) != 1 or "as_tensor" not in given[0]["user_input"]["arg"]:
            raise UsageError(
                f"--model-type {self.path} was exported with {len(given)} inputs; a model takes one"
            )
        name = given[0]["user_input"]["arg"]["as_tensor"]["name"]
        x = self.graph.placeholder("x")
        self.values[name] = self.graph.call_function(pt2.fits, (x, *self._wanted(name)))
        for spec in signature["input_specs"]:
            self._hold(spec, tensors)
        for node in self.described["nodes"]:
            self._call(node)
        heads = [self._output(spec, x) for spec in signature["output_specs"]]
        told = self.top["module_call_graph"][0]["signature"]["out_spec"]
        self.graph.output(
            _shaped(self.path, told, [head for head in heads if head is not _NO_HEAD])
        )
        made = fx.GraphModule(self.root, self.graph)
        for name in self.passing:  # which torch.fx takes no note of
            owner, _, last = name.rpartition(".")
            made.get_submodule(owner)._non_persistent_buffers_set.add(last)
        return made

    def submodule(self) -> fx.GraphModule:
        """A graph within another: it takes tensors, and returns a tuple."""
        for number, argument in enumerate(self.described["inputs"]):
            ((kind, value),) = argument.items()
            name = value["name"] if kind == "as_tensor" else value["as_name"]
            self.values[name] = self.graph.placeholder(f"x{number}")
        for node in self.described["nodes"]:
            self._call(node)
        outputs = tuple(self._argument(output) for output in self.described["outputs"])
        self.graph.output(outputs)
        return fx.GraphModule(self.root, self.graph)

    def _wanted(self, name: str) -> tuple[Any, ...]:
        """What must hold of the sizes of the input."""
        sizes = self.described["tensor_values"][name]["sizes"]
        try:
            wanted = tuple(
                (0, "", int(size["as_int"]))
                if "as_int" in size
                else pt2.linear(size["as_expr"]["expr_str"])
                for size in sizes
            )
            guards = tuple(str(text) for text in self.archive.program.get("guards_code", ()))
            for text in guards:
                pt2.condition(text)
        except (ValueError, SyntaxError) as error:
            raise Unchecked(
                self.path, f"asks of its input what cannot be checked: {error}"
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
        ((kind, told),) = spec.items()
        if kind == "user_input":
            return
        field = {"parameter": "parameter_name", "buffer": "buffer_name"}.get(kind)
        if kind == "tensor_constant":
            field = "tensor_constant_name"
        if field is None:
            raise Unchecked(self.path, f"takes a {kind.replace('_', ' ')}")
        name = told[field]
        if not pt2.NAME.fullmatch(name) or any(keyword.iskeyword(p) for p in name.split(".")):
            raise Unchecked(self.path, f"calls a tensor {name!r}")
        *folders, last = name.split(".")
        owner = self.root
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
            if kind != "buffer" or not told["persistent"]:
                self.passing.append(name)
        self.values[told["arg"]["name"]] = self.graph.get_attr(name)

    def _output(self, spec: Mapping[str, Any], x: fx.Node) -> Any:
        """A head, or a buffer that is written."""
        ((kind, told),) = spec.items()
        if kind == "user_output":
            return self._argument(told["arg"])
        if kind == "buffer_mutation":
            own = next(
                held["buffer"]["arg"]["name"]
                for held in self.top["signature"]["input_specs"]
                if "buffer" in held and held["buffer"]["buffer_name"] == told["buffer_name"]
            )
            target = self.values[own]
        elif kind == "user_input_mutation":
            target = x
        else:
            raise Unchecked(self.path, f"returns a {kind.replace('_', ' ')}")
        copy = torch.ops.aten.copy_.default
        self.graph.call_function(copy, (target, self._argument({"as_tensor": told["arg"]})))
        return _NO_HEAD

    # --- operators ------------------------------------------------------------------------------

    def _call(self, node: Mapping[str, Any]) -> None:
        target = node["target"]
        if target in _CONTEXTS:
            made = self._enter(node)
        else:
            function = self._function(target)
            arguments, named = self._arguments(node, function)
            made = self.graph.call_function(function, arguments, named)
        self._name(node, made)

    def _function(self, target: str) -> Any:
        if target in _ON_NUMBERS:
            return _ON_NUMBERS[target]
        found = pt2.OPERATOR.fullmatch(target)
        if found is None or not pt2.is_operator(found[1]):
            raise Unchecked(self.path, f"calls {target!r}, which is none of the known operators")
        packet = getattr(torch.ops.aten, found[1], None)
        function = getattr(packet, found[2], None)
        if not isinstance(function, torch._ops.OpOverload):
            raise ValueError(f"this torch has no operator {target}")
        return function

    def _arguments(
        self, node: Mapping[str, Any], function: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """By place or by name, as the file says; files of before 2.6 do not."""
        schema = getattr(function, "_schema", None)
        by_name = {
            argument.name: argument.kwarg_only or argument.has_default_value()
            for argument in (schema.arguments if schema else ())
        }
        places: list[Any] = []
        named: dict[str, Any] = {}
        for told in node["inputs"]:
            name, value = told["name"], self._argument(told["arg"])
            kind = told.get("kind")
            if kind == _BY_PLACE or (kind is None and not by_name.get(name, False)):
                places.append(value)
            elif name in by_name and name not in named:
                named[name] = value
            else:
                raise ValueError(f"{node['target']} takes no {name!r}")
        return tuple(places), named

    def _enter(self, node: Mapping[str, Any]) -> fx.Node:
        """A part that runs without gradients, or in half precision."""
        function, settings = _CONTEXTS[node["target"]]
        if any(told["name"] for told in node["inputs"]):
            raise Unchecked(self.path, f"gives {node['target']} a keyword")
        arguments = [told["arg"] for told in node["inputs"]]
        ((kind, inner),) = arguments[settings].items()
        if kind != "as_graph":
            raise ValueError(f"{node['target']} has no graph")
        module = _Program(self.archive, inner["graph"]).submodule()
        name = f"graph_{len(self.root._modules)}"
        while hasattr(self.root, name):
            name += "_"
        self.root.add_module(name, module)
        told = tuple(self._argument(argument) for argument in arguments[:settings])
        rest = tuple(self._argument(argument) for argument in arguments[settings + 1 :])
        return self.graph.call_function(function, (*told, self.graph.get_attr(name), *rest))

    def _name(self, node: Mapping[str, Any], made: fx.Node) -> None:
        """Keep what an operator makes under the names that the file has for its outputs."""
        outputs = node["outputs"]
        if len(outputs) == 1 and not (
            node["target"] in _CONTEXTS and node.get("is_hop_single_tensor_return") is False
        ):
            ((kind, value),) = outputs[0].items()
            if isinstance(value, list):
                self._keep_each(made, [{kind.removesuffix("s"): item} for item in value])
            else:
                self._keep(made, kind, value)
        else:
            self._keep_each(made, outputs)

    def _keep_each(self, made: fx.Node, outputs: Sequence[Mapping[str, Any]]) -> None:
        for place, output in enumerate(outputs):
            ((kind, value),) = output.items()
            if kind == "as_none":
                continue
            item = self.graph.call_function(operator.getitem, (made, place))
            if isinstance(value, list):
                self._keep_each(item, [{kind.removesuffix("s"): inner} for inner in value])
            else:
                self._keep(item, kind, value)

    def _keep(self, made: fx.Node, kind: str, value: Any) -> None:
        if kind == "as_tensor":
            self.values[value["name"]] = made
        elif kind in ("as_sym_int", "as_sym_float", "as_sym_bool"):
            self.values[value["as_name"]] = made
        elif kind != "as_none":
            raise Unchecked(self.path, f"returns {kind.removeprefix('as_')}")

    def _argument(self, argument: Mapping[str, Any]) -> Any:
        """What is given to an operator: values made before, numbers, short words."""
        ((kind, value),) = argument.items()
        if kind == "as_none":
            return None
        if kind == "as_tensor":
            return self.values[value["name"]]
        if kind in ("as_tensors", "as_optional_tensors"):
            return [
                self._argument(item if _is_union(item) else {"as_tensor": item}) for item in value
            ]
        if kind in ("as_sym_int", "as_sym_float", "as_sym_bool"):
            ((inner, known),) = value.items()
            return self.values[known] if inner == "as_name" else _number(known)
        if kind in ("as_sym_ints", "as_sym_floats", "as_sym_bools"):
            return [self._argument({kind.removesuffix("s"): item}) for item in value]
        if kind in ("as_int", "as_float", "as_bool"):
            return _number(value)
        if kind in ("as_ints", "as_floats", "as_bools"):
            return [_number(item) for item in value]
        if kind in ("as_string", "as_strings"):
            for word in [value] if kind == "as_string" else value:
                if not pt2.TEXT.fullmatch(word):
                    raise Unchecked(self.path, f"has a text {word[:40]!r}")
            return value
        if kind == "as_complex":
            return complex(_number(value["real"]), _number(value["imag"]))
        if kind == "as_scalar_type":
            return _DTYPES[value]
        if kind == "as_memory_format":
            return _FORMATS[value]
        if kind == "as_layout" and value == _STRIDED:
            return torch.strided
        if kind == "as_device":  # wherever it was exported: a module is moved to where it is to run
            return torch.device("cpu")
        raise Unchecked(self.path, f"is given {kind.removeprefix('as_')} {str(value)[:40]!r}")


_BY_PLACE = 1
_NO_HEAD = object()


def _is_union(item: Mapping[str, Any]) -> bool:
    return "as_tensor" in item or "as_none" in item


def _number(value: Any) -> Any:
    """JSON has no infinities: they are words."""
    if isinstance(value, bool | int | float):
        return value
    return {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}[value]


def _states(archive: Archive) -> dict[str, Tensor]:
    """Every tensor of a file, by its name; on the CPU, wherever it was exported."""
    found = {name: _tensor(archive, name) for name in archive.tensors}
    for state in archive.states:
        found |= torch.load(io.BytesIO(state), map_location="cpu", weights_only=True)
    return found


def _tensor(archive: Archive, name: str) -> Tensor:
    told = archive.tensors[name]["tensor_meta"]
    dtype, shape = _DTYPES[told["dtype"]], [int(size["as_int"]) for size in told["sizes"]]
    if told["layout"] != _STRIDED:
        raise Unchecked(archive.path, f"keeps {name!r} in a layout that is not strided")
    raw = bytearray(archive.read(name))
    flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    if min(shape, default=0) < 0 or math.prod(shape) > flat.numel():
        raise ValueError(f"{name} of shape {tuple(shape)} has {flat.numel()} elements")
    strides = [int(stride["as_int"]) for stride in told["strides"]]
    tensor = flat.as_strided(shape, strides, int(told["storage_offset"]["as_int"]))
    return tensor.requires_grad_(bool(told["requires_grad"]) and dtype.is_floating_point)


def _shaped(path: Path, spec: str, heads: Sequence[Any]) -> Any:
    """Heads as the net returns them: one, or in tuples, lists and dicts."""
    _version, told = json.loads(spec)
    rest = iter(heads)

    def shaped(part: Mapping[str, Any]) -> Any:
        kind, children = part["type"], part["children_spec"]
        if kind is None:
            return next(rest)
        if kind in ("builtins.dict", "collections.OrderedDict"):
            names = json.loads(part["context"])
            if not all(isinstance(name, str) for name in names):
                raise Unchecked(path, "names a head by what is no text")
            return {name: shaped(child) for name, child in zip(names, children, strict=True)}
        if kind in ("builtins.tuple", "builtins.list", "collections.namedtuple"):
            return tuple(shaped(child) for child in children)
        raise Unchecked(path, f"returns a {str(kind)[:80]}")

    return shaped(told)


def with_grad(enabled: bool, module: nn.Module, *inputs: Any) -> Any:
    with torch.set_grad_enabled(enabled and torch.is_grad_enabled()):
        return module(*inputs)


def with_autocast(
    device: str,
    dtype: torch.dtype | None,
    enabled: bool,
    cached: bool,
    module: nn.Module,
    *inputs: Any,
) -> Any:
    kind = next((x.device.type for x in inputs if isinstance(x, Tensor)), device)
    with torch.autocast(kind, dtype, enabled, cached):
        return module(*inputs)


_CONTEXTS: dict[str, tuple[Any, int]] = {
    "torch.ops.higher_order.wrap_with_set_grad_enabled": (with_grad, 1),
    "torch.ops.higher_order.wrap_with_autocast": (with_autocast, 4),
}
"""What runs a graph within the graph, and how many settings stand before that."""
