"""Hashes of what decides a run's voxels besides its settings. A resumed run compares them.

They cover the source files of the user's model, with all that these import from their own folder.
They cover the attributes of a module besides its weights, too, and an array in memory. The maker is
the code of Penstock, the versions of libraries and the kind of machine. It may differ within a run
if the user allows that.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import inspect
import re
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...base import UsageError, format_bytes, installed_version, plural
from ...data import Sink, Source

CONTENT_BYTES = 256 * 2**20
"""Size of the largest array in memory that is hashed. A larger one takes too long at each start."""
VOXEL_CODE = (
    "data/box.py",
    "data/within_mask.py",
    "data/levels.py",
    "data/moments.py",
    "data/normalize.py",
    "data/resampling.py",
    "data/stores",
    "models",
    "inference",
)
"""The files and folders of code that computes voxels."""
_PACKAGE = Path(__file__).parents[2]
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, np.dtype,
          np.generic, range, slice, Path)  # fmt: skip
_OF_TORCH = vars(nn.Module()).keys()


def maker(
    stores: Sequence[Source | Sink], devices: Sequence[torch.device], threads: int | None
) -> dict[str, Any]:
    """The code, versions and machine, which may change the last bits of voxels.

    ``stores`` are the input and the outputs. ``threads`` is the number of torch's threads in a
    forward, None for torch's own choice. On a CPU, sums over a whole patch depend on it.
    """
    # torch.__version__ is of a class of torch: a client that unpickled it would import torch.
    versions: dict[str, str | None] = {"torch": str(torch.__version__), "numpy": np.__version__}
    # A source of files is of one class, and its array of one for each format.
    kinds = {type(getattr(store, "array", store)).__module__ for store in stores}
    for kind in {kind.rpartition(".")[2] for kind in kinds}:
        for library in {"tensorstore": ["tensorstore"], "ometiff": ["tifffile", "imagecodecs"]}.get(
            kind, []
        ):
            versions[library] = installed_version(library)
    gpus = {torch.cuda.get_device_name(device) for device in devices if device.type == "cuda"}
    on_host = any(device.type == "cpu" for device in devices)
    return {
        "code": code_of_voxels(),
        **versions,
        "threads": threads or torch.get_num_threads() if on_host else None,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "gpus": sorted(gpus),
    }


def arithmetic_of(made_by: Mapping[str, Any]) -> str:
    """The part of a maker that decides the last bits of sums, in words for the plan."""
    threads = made_by["threads"]
    each = [] if threads is None else [f"{plural(threads, 'thread')} for each forward"]
    words = [f"torch {made_by['torch']}", made_by["instructions"], *each, *made_by["gpus"]]
    return ", ".join(words)


@functools.cache
def code_of_voxels() -> str:
    """A hash of the modules that compute voxels. It changes more often than the version number."""
    places = [_PACKAGE / name for name in VOXEL_CODE]
    files = [file for place in places for file in [*place.rglob("*.py")] or [place]]
    named = [(str(file.relative_to(_PACKAGE)), _hash(file.read_bytes())) for file in files]
    return _hash(repr(sorted(named)).encode())


def of_input(source: Source, *, resumes: bool) -> str:
    """The fingerprint of an input. For an array in memory it is a hash of the content.

    Raises `UsageError` if ``resumes`` and the array is too large to be hashed.
    """
    if not source.address.startswith("memory:"):
        return source.fingerprint
    num_bytes = int(np.prod(source.domain.shape)) * source.dtype.itemsize
    if num_bytes > CONTENT_BYTES:
        if resumes:
            raise UsageError(
                f"--resume: the input is an array in memory of {format_bytes(num_bytes)}, and only "
                f"arrays up to {format_bytes(CONTENT_BYTES)} are compared with the input of the "
                "earlier run; give it as a .npy file or a Zarr array, or --overwrite"
            )
        return f"memory: {num_bytes} bytes"
    array = source.array  # type: ignore[attr-defined]
    digest = hashlib.sha256(f"{array.shape} {array.dtype}".encode())
    for index in np.ndindex(array.shape[:-2]):  # whole planes, whatever the rank
        digest.update(array[index].tobytes())
    return f"memory#{digest.hexdigest()[:16]}"


def attributes(module: nn.Module) -> str:
    """A hash of what a module holds besides its state dict: buffers that are not saved, plain
    attributes, hooks on its forward, and the source of classes that are not in a file."""
    return _hash(repr(_held_by(module, frozenset())).encode())


def weights(module: nn.Module) -> str:
    """A hash of every weight, and of the extra state that modules keep with them."""
    state = sorted(module.state_dict().items())
    return _hash(repr(_plain(state, frozenset())).encode())


def sources(reference: Any, module: nn.Module) -> str:
    """A hash of the user's source files of a model, with what they import from their own folders.
    Empty for a model of Penstock or of a library."""
    return hash_of_files(_roots(reference, module))


def hash_of_files(roots: Iterable[tuple[Path, Path]]) -> str:
    """A hash of source files, each given with the folder that it imports from, and of what they
    import from there. Empty if there is none."""
    digests: dict[str, str] = {}
    for file, root in sorted(roots):
        files = {file}
        _add_imports(file, root, files)
        for each in files:
            name = each.relative_to(root) if each.is_relative_to(root) else each.name
            digests[str(name)] = _hash(each.read_bytes())
    return _hash(repr(sorted(digests.items())).encode()) if digests else ""


def _held_by(module: nn.Module, seen: frozenset[int]) -> list[object]:
    """What a module and its parts hold besides their state dict, in plain lists and texts."""
    saved = module.state_dict().keys()
    held: list[object] = [
        [name, _plain(buffer, seen)] for name, buffer in module.named_buffers() if name not in saved
    ]
    for name, part in module.named_modules():
        kind = type(part)
        held.append([name, kind.__qualname__])
        if isinstance(part, torch.jit.ScriptModule | torch.fx.GraphModule):
            held.append(str(getattr(part, "code", "")))  # it has no plain attributes
            continue
        if _is_users(kind.__module__) and _file_of(kind.__module__) is None:
            held.append(_source(kind))
        attribute_values = {key: value for key, value in vars(part).items() if key not in _OF_TORCH}
        # Without their keys, which count the hooks of this process.
        attribute_values["hooks"] = [
            [*part._forward_pre_hooks.values()],
            [*part._forward_hooks.values()],
        ]
        held.append(_plain(dict(sorted(attribute_values.items())), seen))
    return held


def _plain(value: Any, seen: frozenset[int]) -> object:
    """What identifies a value, in plain lists and texts that are the same in each process."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if id(value) in seen:  # it contains itself
        return "itself"
    seen = seen | {id(value)}
    if isinstance(value, Tensor) and value.device.type != "meta" and value.layout == torch.strided:
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return [tuple(value.shape), str(value.dtype), _hash(flat.numpy())]
    if isinstance(value, np.ndarray) and value.dtype.kind != "O":
        return [value.shape, str(value.dtype), _hash(value.tobytes())]
    if isinstance(value, Mapping):
        return [[_plain(key, seen), _plain(item, seen)] for key, item in value.items()]
    if isinstance(value, Set):  # its order changes from process to process
        return sorted(repr(_plain(item, seen)) for item in value)
    if isinstance(value, Sequence):
        return [_plain(item, seen) for item in value]
    return _object(value, seen)


def _object(value: Any, seen: frozenset[int]) -> object:
    """The same of a module in an attribute, of a function, or of another object."""
    if isinstance(value, nn.Module):  # such as one in a list
        return [_plain(dict(value.state_dict()), seen), _held_by(value, seen)]
    if isinstance(value, types.FunctionType):
        # One that is still empty equals a new one.
        filled = filter(types.CellType().__ne__, value.__closure__ or ())
        cells = [cell.cell_contents for cell in filled]
        held = (value.__defaults__, value.__kwdefaults__, cells)
        return [_source(value), _plain(held, seen)]
    if isinstance(name := getattr(value, "__name__", None), str):  # a class, a library's function
        return [getattr(value, "__module__", ""), name]
    if _is_users(type(value).__module__):
        attributes = getattr(value, "__dict__", {})
        return [type(value).__qualname__, _plain(dict(sorted(attributes.items())), seen)]
    return re.sub(" at 0x[0-9a-f]+", "", repr(value))


def _source(thing: Any) -> str:
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):  # typed into an interpreter
        code = getattr(thing, "__code__", None)
        return f"{code.co_code.hex()} {code.co_names}" if code else str(thing.__qualname__)


def _roots(reference: Any, module: nn.Module) -> set[tuple[Path, Path]]:
    """The user's files of a model's code, each with the folder that it imports from."""
    names = {type(part).__module__ for part in module.modules()}
    roots: set[tuple[Path, Path]] = set()
    if isinstance(reference, str) and ":" in reference:
        place = reference.rpartition(":")[0]
        if place.endswith(".py"):
            file = Path(place).resolve()
            roots.add((file, file.parent))
        else:
            names.add(place)
    for name in filter(_is_users, names):
        if (loaded := _file_of(name)) is not None:
            depth = name.count(".") + (loaded.name == "__init__.py")
            roots.add((loaded, loaded.parents[depth]))
    return roots


def _add_imports(file: Path, root: Path, files: set[Path]) -> None:
    """Add to ``files`` what a file imports, at any depth, from its own folder or ``root``."""
    for level, name in _imports(file.read_bytes()):
        folders = [file.parents[level - 1]] if level else [root, file.parent]
        for other in (other for folder in folders for other in _files_of(name, folder)):
            if other not in files:
                files.add(other)
                _add_imports(other, root, files)


@functools.lru_cache(maxsize=64)
def _imports(code: bytes) -> tuple[tuple[int, str], ...]:
    """The level and the name of each module that code may import. They are kept: each run of a
    process looks at the same files, and to parse one takes as long as a small run."""
    imports: list[tuple[int, str]] = []
    with contextlib.suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Import):
                imports += [(0, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                words = [f"{node.module or ''}.{alias.name}" for alias in node.names]
                imports += [(node.level, word.strip(".")) for word in words]
    return tuple(imports)


def _files_of(name: str, folder: Path) -> Iterator[Path]:
    """The files of a module and of the packages that it is in, as far as a folder has them."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        place = folder.joinpath(*parts[:end])
        files = place.with_name(f"{place.name}.py"), place / "__init__.py"
        yield from filter(Path.is_file, files)
        if not place.is_dir():  # as with most: a library's
            return


def _file_of(module: str) -> Path | None:
    """The file of a loaded module. None for the script that was started, as other code in it may
    change before a run is resumed."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return Path(file).resolve() if file and module != "__main__" else None


def _is_users(module: str) -> bool:
    """Whether a module belongs neither to Python, nor to an installed library, nor to Penstock."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names and top != "__main__":
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return top == "__main__" or module not in sys.modules
    return not _is_installed(file)


@functools.lru_cache(maxsize=1024)
def _is_installed(file: str) -> bool:
    """Whether a file belongs to Python, to an installed library or to Penstock."""
    path = Path(file).resolve()
    return any(path.is_relative_to(folder) for folder in _installed())


@functools.cache
def _installed() -> tuple[Path, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = {Path(sysconfig.get_path(name)).resolve() for name in names}
    return (*folders, Path(torch.__file__).parent.parent.resolve(), _PACKAGE)


def _hash(content: Any) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
