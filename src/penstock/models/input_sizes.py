"""The conditions on the sizes of an exported program's input, read without evaluating the text.

Sizes are linear in one symbol, conditions compare sizes by arithmetic. All else is a `ValueError`.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

_SYMBOL = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Linear = tuple[int, str, int]
"""``(a, s, b)`` is the size ``a * s + b``; ``s`` is empty where it is ``b``."""


def linear(text: str) -> Linear:
    """A size as torch writes it, such as ``Mul(Integer(2), Symbol('s0', integer=True))``.

    Raises `ValueError` for anything else.

    >>> linear("Add(Mul(Integer(2), Symbol('s0', integer=True)), Integer(1))")
    (2, 's0', 1)
    """
    return _linear(ast.parse(text, mode="eval").body)


def _linear(node: ast.expr) -> Linear:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return 0, "", number
        case ast.Name(id=symbol):
            return 1, symbol, 0
        case ast.BinOp(left=left, op=ast.Add() | ast.Mult() as op, right=right):
            return _joined(isinstance(op, ast.Add), [left, right])
        case ast.Call(func=ast.Name(id="Add" | "Mul" as name), args=parts, keywords=[]):
            return _joined(name == "Add", parts)
        case ast.Call(
            func=ast.Name(id="Integer"), args=[ast.Constant() | ast.UnaryOp() as sign, *_]
        ):
            return 0, "", int(ast.literal_eval(sign))
        case ast.Call(func=ast.Name(id="Symbol"), args=[ast.Constant(value=str(symbol)), *_]) if (
            _SYMBOL.fullmatch(symbol)
        ):
            return 1, symbol, 0
    raise ValueError(f"{ast.unparse(node)!r} is not a size")


def _joined(added: bool, parts: Sequence[ast.expr]) -> Linear:
    a, symbol, b = (0, "", 0) if added else (0, "", 1)
    for part in parts:
        c, other, d = _linear(part)
        if symbol and other and (not added or symbol != other):
            raise ValueError("a size of two symbols")
        a, b = (a + c, b + d) if added else (a * d + c * b, b * d)
        symbol = symbol or other
    return a, symbol if a else "", b


_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv, ast.Eq: operator.eq, ast.NotEq: operator.ne,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip
_UNARY: dict[type, Callable[[Any], Any]] = {ast.USub: operator.neg, ast.Not: operator.not_}
_SIZE = re.compile(r"L\[[^\]]*\](\[\d+\])*\.size\(\)\[(\d+)\]")
"""An extent of the input, whatever name torch gives the input."""


Condition = Callable[[Sequence[int]], Any]
"""A function from the shape of an input to the value of a condition, or of a part of one."""


@lru_cache(maxsize=256)
def condition(text: str) -> tuple[Condition, str]:
    """A condition on the sizes of the input, such as ``L['x'].size()[2] % 8 == 0``, and its text
    for a reader.

    Raises `ValueError` for any other text.
    """
    plain = _SIZE.sub(r"SIZE[\2]", text)
    return _read(ast.parse(plain, mode="eval").body), re.sub(r"SIZE\[(\d+)\]", r"extent \1", plain)


def _read(node: ast.expr) -> Condition:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return lambda shape: number
        case ast.Subscript(value=ast.Name(id="SIZE"), slice=index):
            axis = _read(index)
            return lambda shape: shape[axis(shape)]
        case ast.BinOp() if type(node.op) in _BINARY:
            binary, left, right = _BINARY[type(node.op)], _read(node.left), _read(node.right)
            return lambda shape: binary(left(shape), right(shape))
        case ast.UnaryOp() if type(node.op) in _UNARY:
            unary, operand = _UNARY[type(node.op)], _read(node.operand)
            return lambda shape: unary(operand(shape))
        case ast.Compare() if all(type(op) in _BINARY for op in node.ops):
            sides = [_read(part) for part in (node.left, *node.comparators)]
            compare = (_BINARY[type(op)] for op in node.ops)
            steps = list(zip(compare, sides, sides[1:], strict=False))
            return lambda shape: all(op(one(shape), other(shape)) for op, one, other in steps)
        case ast.BoolOp():
            every = all if isinstance(node.op, ast.And) else any
            parts = [_read(part) for part in node.values]
            return lambda shape: every(part(shape) for part in parts)
    raise ValueError(f"{ast.unparse(node)!r} is not a condition on sizes")


def fits(
    x: Any,
    wanted: Sequence[Linear],
    limits: Sequence[tuple[str, int | None, int | None]],
    conditions: Sequence[str],
) -> Any:
    """Return the input tensor, if the program was exported for its sizes; else `ValueError`."""
    if len(x.shape) != len(wanted):
        raise ValueError(f"the program was exported for {len(wanted)} axes, not {len(x.shape)}")
    symbols: dict[str, int] = {}
    for axis, ((a, symbol, b), size) in enumerate(zip(wanted, x.shape, strict=True)):
        if not symbol:
            if size != b:
                raise ValueError(f"the program was exported for {b} along axis {axis}, not {size}")
            continue
        whole, rest = divmod(size - b, a)
        if rest or symbols.setdefault(symbol, whole) != whole:
            raise ValueError(f"the program was not exported for {size} along axis {axis}")
    for symbol, least, most in limits:
        # Torch says "at least 2" of every size that may vary, and takes 0 and 1 as well.
        low = least if least is not None and least > 2 else 0
        if symbols[symbol] < low or (most is not None and symbols[symbol] > most):
            raise ValueError(
                f"the program takes {low} to {most} as {symbol}, not {symbols[symbol]}"
            )
    for text in conditions:
        holds, shown = condition(text)
        if not holds(x.shape):
            raise ValueError(f"the program was exported for inputs with {shown}")
    return x
