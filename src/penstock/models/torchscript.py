"""Checks that a TorchScript archive (.pt, .ts) can do no harm, before torch reads it.

TorchScript is a language of its own: no Python of the file runs, and its pickles name no Python.
But its code runs as soon as it is loaded, and some of its operators write a file (`torch.save`) or
map one, start remote work, or load compiled classes. So its code may only call operators that
compute (`pt2.OPERATORS`), the language's own functions on lists, dicts and texts, and functions of
the archive. `Unchecked` is raised for everything else.
"""

from __future__ import annotations

import ast
import io
import pickletools
import zipfile
from pathlib import Path

import torch
from torch import nn

from .pt2 import Unchecked, check_names, is_operator

_CODE_BYTES = 2**28
"""Most bytes of code and pickles in an archive, unpacked."""

_LANGUAGE = frozenset(
    """
    Bool Complex ComplexImplicit Delete Float FloatImplicit Int IntImplicit ScalarImplicit Size
    __contains__ __derive_index __getitem__ __interpolate __is__ __isnot__ __not__ __range_length
    __round_to_zero_floordiv __upsample __upsample_bilinear __upsample_nearest _infer_size
    _get_tracing_state _grad_sum_to_size _list_to_tensor _set_item _size_if_not_equal
    _tensor_to_list _unwrap_optional append as_tensor broadcast_shapes clear count cpu cuda device
    dict divmod element_size endswith extend fabs find floordiv format get get_autocast_dtype
    grad_mode has_torch_function insert is_autocast_cpu_enabled is_autocast_enabled is_grad_enabled
    is_scripting items join keys len list lower lstrip mathremainder modf percentFormat pop popitem
    remove replace reverse rstrip set_grad_enabled setdefault sorted split splitlines startswith str
    strip tensor update upper values warn zfill data grad is_contiguous is_quantized is_sparse
    index_put_ dequantize numpy_T
    """.split()
)
_PRIM = frozenset(
    """
    RaiseException NumToTensor TupleIndex TupleUnpack Print Uninitialized abs data device dtype grad
    id index is_cpu is_cuda is_mps is_meta is_nested is_quantized is_sparse itemsize layout max min
    name nbytes rangelist requires_grad tolist type unchecked_cast unchecked_unwrap_optional
    ModuleContainerIndex EnumName EnumValue StringIndex VarConcat VarStack BroadcastSizes
    ConstantChunk
    """.split()
)


def load(path: Path) -> nn.Module:
    """The module in an archive that does no more than compute, on the CPU.

    Raises `Unchecked`, and errors of many types for a file that is none or is damaged.
    """
    archive = io.BytesIO()
    with zipfile.ZipFile(path) as file, zipfile.ZipFile(archive, "w") as checked:
        check_names(path, file)
        described = [e for e in file.infolist() if e.filename.endswith((".py", "pkl"))]
        if sum(entry.file_size for entry in described) > _CODE_BYTES:
            raise ValueError(f"its code and pickles take more than {_CODE_BYTES:,} bytes")
        if not any(entry.filename.endswith("/data.pkl") for entry in described):
            raise ValueError("it holds no module")
        for entry in file.infolist():
            if entry not in described and entry.compress_type != zipfile.ZIP_STORED:
                raise Unchecked(path, f"keeps {entry.filename!r} compressed")
            content = file.read(entry)
            if entry.filename.endswith(".py"):
                _check_code(path, content.decode())
            elif entry.filename.endswith("pkl"):
                _check_pickle(path, content)
            checked.writestr(entry.filename, content)
    archive.seek(0)  # torch reads the bytes that were checked, not the file
    return torch.jit.load(archive, map_location="cpu")


def _check_code(path: Path, code: str) -> None:
    tree = ast.parse(code)
    heads = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in ("torch", "ops") and id(node) not in heads:
            raise Unchecked(path, f"hands {node.id} itself on")
        if isinstance(node, ast.Attribute):
            chain = _chain(node)
            if not _may_be_named(chain, id(node) in heads):
                raise Unchecked(path, f"calls {'.'.join(chain)}")


def _chain(node: ast.expr) -> list[str]:
    """``a.b.c`` as its names; an empty name stands for a computed value."""
    if isinstance(node, ast.Attribute):
        return [*_chain(node.value), node.attr]
    return [node.id if isinstance(node, ast.Name) else ""]


def _may_be_named(chain: list[str], goes_on: bool) -> bool:
    head, last = chain[0], chain[-1]
    if head == "torch":
        return len(chain) == 2 and _computes(last)
    if head == "ops":
        if len(chain) == 2:
            return goes_on and last in ("aten", "prim")
        return len(chain) == 3 and (last in _PRIM if chain[1] == "prim" else _computes(last))
    if head == "__torch__":  # functions and classes of the archive, but not those of libraries
        return chain[1:3] != ["torch", "classes"]
    # A field or a method of a value. If the value is a tensor or a text, it is an operator.
    return _computes(last) or not hasattr(torch.ops.aten, last)


def _computes(name: str) -> bool:
    return is_operator(name) or name in _LANGUAGE


def _check_pickle(path: Path, content: bytes) -> None:
    """Refuse objects of a library's classes. The archive's own classes and tensors may be there."""
    for _, argument, _ in pickletools.genops(content):
        if isinstance(argument, str) and "torch.classes" in argument:
            raise Unchecked(path, f"holds an object of {argument.split()[0]}")
