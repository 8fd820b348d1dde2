"""A graph of aten's operators, as a file of torch.export describes it, made of nodes of torch.fx.

Each node is an operator of the list in `pt2`, with arguments that are values made before, numbers
or short words. A part that runs without gradients, or in half precision, is a graph within it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from . import pt2
from .pt2 import Unchecked

DTYPES = {
    1: torch.uint8, 2: torch.int8, 3: torch.int16, 4: torch.int32, 5: torch.int64,
    6: torch.float16, 7: torch.float32, 8: torch.float64, 9: torch.complex32, 10: torch.complex64,
    11: torch.complex128, 12: torch.bool, 13: torch.bfloat16, 28: torch.uint16,
    29: torch.float8_e4m3fn, 30: torch.float8_e5m2, 34: torch.uint32, 35: torch.uint64,
}  # fmt: skip
_FORMATS = {
    1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d,
    4: torch.preserve_format,
}  # fmt: skip
STRIDED = 7

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
"""Functions that a program may apply to sizes."""


class AtenGraph:
    """A graph that is being built, and the values of its nodes by their names in the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.root, self.graph = nn.Module(), fx.Graph()
        self.values: dict[str, Any] = {}

    def add(self, nodes: Sequence[Mapping[str, Any]]) -> None:
        """Add the operators of a description, in order."""
        for node in nodes:
            if node["target"] in _CONTEXTS:
                made = self._enter(node)
            else:
                function = self._function(node["target"])
                arguments, named = self._arguments(node, function)
                made = self.graph.call_function(function, arguments, named)
            self._name(node, made)

    def module(self) -> fx.GraphModule:
        """The module that runs the graph, once its output was added."""
        return fx.GraphModule(self.root, self.graph)

    def _function(self, target: str) -> Any:
        if target in _ON_NUMBERS:
            return _ON_NUMBERS[target]
        name = pt2.OPERATOR.fullmatch(target)
        if name is None or not pt2.is_operator(name[1]):
            raise Unchecked(self.path, f"calls {target!r}, which is none of the known operators")
        packet = getattr(torch.ops.aten, name[1], None)
        function = getattr(packet, name[2], None)
        if not isinstance(function, torch._ops.OpOverload):
            raise ValueError(f"this torch has no operator {target}")
        return function

    def _arguments(
        self, node: Mapping[str, Any], function: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments by position and by name. Before torch 2.6 files do not say which is which."""
        schema = getattr(function, "_schema", None)
        by_name = {
            argument.name: argument.kwarg_only or argument.has_default_value()
            for argument in (schema.arguments if schema else ())
        }
        places: list[Any] = []
        named: dict[str, Any] = {}
        for given in node["inputs"]:
            name, value = given["name"], self.argument(given["arg"])
            kind = given.get("kind")
            if kind == _BY_PLACE or (kind is None and not by_name.get(name, False)):
                places.append(value)
            elif name in by_name and name not in named:
                named[name] = value
            else:
                raise ValueError(f"{node['target']} takes no {name!r}")
        return tuple(places), named

    def _enter(self, node: Mapping[str, Any]) -> fx.Node:
        """Add a part that runs without gradients, or in half precision."""
        function, settings = _CONTEXTS[node["target"]]
        if any(given["name"] for given in node["inputs"]):
            raise Unchecked(self.path, f"gives {node['target']} a keyword")
        arguments = [given["arg"] for given in node["inputs"]]
        ((kind, inner),) = arguments[settings].items()
        if kind != "as_graph":
            raise ValueError(f"{node['target']} has no graph")
        name = f"graph_{len(self.root._modules)}"
        while hasattr(self.root, name):
            name += "_"
        self.root.add_module(name, _within(self.path, inner["graph"]))
        before = [self.argument(argument) for argument in arguments[:settings]]
        after = [self.argument(argument) for argument in arguments[settings + 1 :]]
        return self.graph.call_function(function, (*before, self.graph.get_attr(name), *after))

    def _name(self, node: Mapping[str, Any], made: fx.Node) -> None:
        """Keep the results of an operator under the names of its outputs in the file."""
        outputs = node["outputs"]
        in_tuple = node["target"] in _CONTEXTS and node.get("is_hop_single_tensor_return") is False
        if len(outputs) == 1 and not in_tuple:
            self._keep(made, outputs[0])
        else:
            self._keep_each(made, outputs)

    def _keep_each(self, made: fx.Node, outputs: Sequence[Mapping[str, Any]]) -> None:
        for place, output in enumerate(outputs):
            if "as_none" not in output:
                self._keep(self.graph.call_function(operator.getitem, (made, place)), output)

    def _keep(self, made: fx.Node, output: Mapping[str, Any]) -> None:
        ((kind, value),) = output.items()
        if isinstance(value, list):
            self._keep_each(made, [{kind.removesuffix("s"): item} for item in value])
        elif kind == "as_tensor":
            self.values[value["name"]] = made
        elif kind in _SYMBOLIC:
            self.values[value["as_name"]] = made
        elif kind != "as_none":
            raise Unchecked(self.path, f"returns {kind.removeprefix('as_')}")

    def argument(self, argument: Mapping[str, Any]) -> Any:
        """The value of an argument: one made before, a number or a short text."""
        ((kind, value),) = argument.items()
        if kind in _LISTS:
            return [
                self.argument(item if _is_union(item) else {_LISTS[kind]: item}) for item in value
            ]
        if kind in _LITERALS:
            return _LITERALS[kind](value)
        if kind == "as_tensor":
            return self.values[value["name"]]
        if kind in _SYMBOLIC:
            ((form, name),) = value.items()
            return self.values[name] if form == "as_name" else _number(name)
        if kind == "as_string" and pt2.TEXT.fullmatch(value):
            return value
        if kind == "as_string":
            raise Unchecked(self.path, f"has a text {value[:40]!r}")
        if kind == "as_layout" and value == STRIDED:
            return torch.strided
        raise Unchecked(self.path, f"is given {kind.removeprefix('as_')} {str(value)[:40]!r}")


def _within(path: Path, described: Mapping[str, Any]) -> fx.GraphModule:
    """The module of a graph within another: it takes tensors and returns a tuple."""
    part = AtenGraph(path)
    for number, argument in enumerate(described["inputs"]):
        ((kind, value),) = argument.items()
        name = value["name"] if kind == "as_tensor" else value["as_name"]
        part.values[name] = part.graph.placeholder(f"x{number}")
    part.add(described["nodes"])
    part.graph.output(tuple(part.argument(output) for output in described["outputs"]))
    return part.module()


_BY_PLACE = 1


def _is_union(item: Any) -> bool:
    return isinstance(item, Mapping) and ("as_tensor" in item or "as_none" in item)


def _number(value: Any) -> Any:
    """A number of a JSON file, in which infinities and NaN are words."""
    if isinstance(value, bool | int | float):
        return value
    return {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}[value]


_SYMBOLIC = ("as_sym_int", "as_sym_float", "as_sym_bool")
_LISTS = {"as_tensors": "as_tensor", "as_optional_tensors": "as_tensor"} | {
    f"{kind}s": kind for kind in (*_SYMBOLIC, "as_int", "as_float", "as_bool", "as_string")
}
"""Kinds of arguments that are lists, and the kind of their items."""
_LITERALS: dict[str, Callable[[Any], Any]] = {
    "as_none": lambda _: None,
    "as_int": _number,
    "as_float": _number,
    "as_bool": _number,
    "as_complex": lambda parts: complex(_number(parts["real"]), _number(parts["imag"])),
    "as_scalar_type": DTYPES.__getitem__,
    "as_memory_format": _FORMATS.__getitem__,
    # Whatever device it was exported on: the module is moved to its device later.
    "as_device": lambda _: torch.device("cpu"),
}


def with_grad(enabled: bool, module: nn.Module, *inputs: Any) -> Any:
    """Run a module without gradients, or with them where the caller has them on."""
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
    """Run a module under autocast, on the device of its first tensor."""
    kind = next((x.device.type for x in inputs if isinstance(x, Tensor)), device)
    with torch.autocast(kind, dtype, enabled, cached):
        return module(*inputs)


_CONTEXTS: dict[str, tuple[Any, int]] = {
    "torch.ops.higher_order.wrap_with_set_grad_enabled": (with_grad, 1),
    "torch.ops.higher_order.wrap_with_autocast": (with_autocast, 4),
}
"""Operators that run a graph within the graph, each with the number of settings before it."""
