"""Hashes of what decides a run's voxels besides its settings. A resumed run compares them.

They cover the source files of the user's model with all that these import from their own folder,
the attributes of a module besides its weights, and the content of an array in memory. The maker is
the code of Penstock, the versions of libraries and the kind of machine. It may differ within a run
if the user allows that.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...base import UsageError, format_bytes, plural
from ...data import Sink, Source

CONTENT_BYTES = 256 * 2**20
"""Size of the largest array in memory that is hashed. A larger one takes too long at each start."""
VOXEL_CODE = (
    "data/box.py",
    "data/grid.py",
    "data/normalize.py",
    "data/stores",
    "models",
    "inference",
)
"""The files and folders of code that computes voxels."""
_PACKAGE = Path(__file__).parents[2]
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, np.dtype,
          np.generic, range, slice, Path)  # fmt: skip
_OF_TORCH = vars(nn.Module()).keys()

Feed = Callable[[bytes], None]


def maker(
    stores: Sequence[Source | Sink], devices: Sequence[torch.device], threads: int | None
) -> dict[str, Any]:
    """The code, versions and machine, which may change the last bits of voxels.

    ``stores`` are the input and the outputs. ``threads`` is the number of torch's threads in a
    forward, None for torch's own choice. On a CPU, sums over a whole patch depend on it.
    """
    # torch.__version__ is of a class of torch: a client that unpickled it would import torch.
    versions: dict[str, str | None] = {"torch": str(torch.__version__), "numpy": np.__version__}
    for store in {type(store).__module__.rpartition(".")[2] for store in stores}:
        for library in {"tensorstore": ["tensorstore"], "ometiff": ["tifffile", "imagecodecs"]}.get(
            store, []
        ):
            versions[library] = _version(library)
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
def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


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
    for index in np.ndindex(array.shape[:3]):
        digest.update(array[index].tobytes())
    return f"memory#{digest.hexdigest()[:16]}"


def attributes(module: nn.Module) -> str:
    """A hash of what a module holds besides its state dict: buffers that are not saved, plain
    attributes, hooks on its forward, and the source of classes that are not in a file."""
    digest = hashlib.sha256()
    _feed_module(module, digest.update, frozenset())
    return digest.hexdigest()[:16]


def weights(module: torch.nn.Module) -> str:
    """A hash of every weight, and of the extra state that modules keep with them."""
    digest = hashlib.sha256()
    state: dict[str, Any] = module.state_dict()
    for name, held in sorted(state.items()):
        if isinstance(held, torch.Tensor):
            digest.update(f"{name} {tuple(held.shape)} {held.dtype}".encode())
            raw = held.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            octets: Any = raw.numpy()
            digest.update(octets)
        else:  # by `get_extra_state`
            digest.update(f"{name} {held!r}".encode())
    return digest.hexdigest()[:16]


def sources(reference: Any, module: nn.Module) -> str:
    """A hash of the user's source files of a model, with what they import from their own folders.
    Empty for a model of Penstock or of a library."""
    digests: dict[str, str] = {}
    for file, root in sorted(_roots(reference, module)):
        files: dict[str, Path] = {}
        _close(file, root, files)
        digests |= {name: _hash(path.read_bytes()) for name, path in files.items()}
    return _hash(repr(sorted(digests.items())).encode()) if digests else ""


def _feed_module(module: nn.Module, feed: Feed, seen: frozenset[int]) -> None:
    saved = module.state_dict().keys()
    for name, buffer in module.named_buffers():
        if name not in saved:
            feed(name.encode())
            _feed(buffer, feed, seen)
    for name, part in module.named_modules():
        feed(f"{name} {type(part).__qualname__}".encode())
        if isinstance(part, torch.jit.ScriptModule | torch.fx.GraphModule):
            feed(str(getattr(part, "code", "")).encode())  # it has no plain attributes
            continue
        if _is_users(type(part).__module__) and _file_of(type(part).__module__) is None:
            feed(_source(type(part)).encode())
        held = {key: value for key, value in vars(part).items() if key not in _OF_TORCH}
        # Without their keys, which count the hooks of this process.
        held["hooks"] = [[*part._forward_pre_hooks.values()], [*part._forward_hooks.values()]]
        _feed(dict(sorted(held.items())), feed, seen)


def _feed(value: Any, feed: Feed, seen: frozenset[int]) -> None:
    """Feed bytes that identify a value, always in the same order."""
    feed(type(value).__qualname__.encode())
    if isinstance(value, _PLAIN):
        feed(repr(value).encode())
    elif id(value) not in seen:  # else it contains itself
        feeders = (feeder for kinds, feeder in _FEEDERS if isinstance(value, kinds))
        next(feeders, _feed_other)(value, feed, seen | {id(value)})


def _feed_tensor(value: Tensor, feed: Feed, seen: frozenset[int]) -> None:
    feed(f"{tuple(value.shape)} {value.dtype}".encode())
    if value.device.type != "meta" and value.layout == torch.strided:
        flat = value.detach().cpu().contiguous().reshape(-1)
        feed(flat.view(torch.uint8).numpy().tobytes())


def _feed_array(value: NDArray[Any], feed: Feed, seen: frozenset[int]) -> None:
    if value.dtype.kind == "O":
        _feed_other(value, feed, seen)
    else:
        feed(f"{value.shape} {value.dtype}".encode() + value.tobytes())


def _feed_unregistered(value: nn.Module, feed: Feed, seen: frozenset[int]) -> None:
    for tensor in value.state_dict().values():
        _feed(tensor, feed, seen)
    _feed_module(value, feed, seen)


def _feed_mapping(value: Mapping[Any, Any], feed: Feed, seen: frozenset[int]) -> None:
    for key, item in value.items():
        _feed(key if isinstance(key, _PLAIN) else repr(type(key)), feed, seen)
        _feed(item, feed, seen)


def _feed_set(value: Set[Any], feed: Feed, seen: frozenset[int]) -> None:
    feed(repr([word for word in sorted(map(repr, value)) if " at 0x" not in word]).encode())


def _feed_items(value: Iterable[Any], feed: Feed, seen: frozenset[int]) -> None:
    for item in value:
        _feed(item, feed, seen)


def _feed_function(value: types.FunctionType, feed: Feed, seen: frozenset[int]) -> None:
    feed(_source(value).encode())
    cells = [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
    _feed((value.__defaults__, value.__kwdefaults__, cells), feed, seen)


def _feed_named(value: Any, feed: Feed, seen: frozenset[int]) -> None:
    feed(f"{value.__module__ if isinstance(value, type) else ''} {value.__name__}".encode())


def _feed_other(value: Any, feed: Feed, seen: frozenset[int]) -> None:
    """Feed the attributes of an object of the user's class, or the repr of another object."""
    if _is_users(type(value).__module__):
        _feed(dict(sorted(getattr(value, "__dict__", {}).items())), feed, seen)
    elif " at 0x" not in (shown := repr(value)):
        feed(shown.encode())


_FEEDERS: tuple[tuple[Any, Callable[[Any, Feed, frozenset[int]], None]], ...] = (
    (Tensor, _feed_tensor),
    (np.ndarray, _feed_array),
    (nn.Module, _feed_unregistered),  # such as one in a list
    (Mapping, _feed_mapping),
    (set | frozenset, _feed_set),
    (Sequence, _feed_items),
    (functools.partial, lambda p, *to: _feed((p.func, p.args, p.keywords), *to)),
    (types.MethodType, lambda method, *to: _feed((method.__func__, method.__self__), *to)),
    (types.FunctionType, _feed_function),
    (type | types.BuiltinFunctionType | types.ModuleType, _feed_named),
)
"""Types of values, each with the function that feeds them. The first type that fits is used."""


def _filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


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


def _close(file: Path, root: Path, files: dict[str, Path]) -> None:
    """Collect a file and what it imports, at any depth, from the folder ``root``."""
    name = str(file.relative_to(root)) if file.is_relative_to(root) else file.name
    if name in files:
        return
    files[name] = file
    for wanted in _imports(file, root):
        if (other := _find(wanted, (root, file.parent))) is not None:
            _close(other, root, files)


def _find(module: str, folders: Sequence[Path]) -> Path | None:
    """The user's file of a module: in one of the folders, or from where it was loaded."""
    for folder in folders:
        place = f"{folder}/{module.replace('.', '/')}"
        for path in (Path(f"{place}.py"), Path(f"{place}/__init__.py")):
            if path.is_file():
                return path
    return _file_of(module) if module in sys.modules and _is_users(module) else None


def _imports(file: Path, root: Path) -> tuple[str, ...]:
    """The modules that a file may import, by their names below ``root``."""
    package = file.relative_to(root).parts[:-1] if file.is_relative_to(root) else ()
    return _imports_of(file.read_bytes(), package)


@functools.lru_cache(maxsize=64)
def _imports_of(code: bytes, package: tuple[str, ...]) -> tuple[str, ...]:
    """The modules that a file of a package may import. They are kept: each run of a process looks
    at the same files, and to parse one takes as long as a small run."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError):
        return ()
    return tuple(_imported(tree, package))


def _imported(tree: ast.Module, package: tuple[str, ...]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _with_parents(alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            yield from _with_parents(module)
            yield from (f"{module}.{alias.name}".lstrip(".") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            called = getattr(node.func, "attr", getattr(node.func, "id", None))
            first = node.args[0]
            if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
                yield from _with_parents(str(first.value))


def _with_parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    yield from (".".join(parts[: i + 1]) for i in range(len(parts)) if parts[i])


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


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
