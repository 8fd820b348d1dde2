"""Models: found by name, by ``package.module:function``, by ``file.py:function`` or in a file.

A `Model` is a module ready to run plus what a plan must know of it: channels, spatial axes, what
its heads return, and how many bytes one batch of it holds at its peak. That peak is found without
running the net: its operators are played on shapes alone. Files are read with safetensors or with
``weights_only=True``, programs by `exported` and `torchscript`; nothing is unpickled. A ``.py``
that the user names is code, and is run.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import importlib.util
import inspect
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from . import exported, reference, torchscript
from .config.infer import HeadKind
from .errors import MissingDependency, UsageError, describe
from .registry import PROGRAMS, REGISTRY, check
from .store import is_file
from .weights import load_weights


class Identity(nn.Module):
    """Returns its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class _Wrapped(nn.Module):
    """A plain function as a module."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


@dataclass(frozen=True)
class Head:
    """One output of a model."""

    name: str
    channels: int
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Model:
    """A module in eval mode and the facts that a plan needs."""

    name: str
    module: nn.Module
    in_channels: int
    spatial_axes: int | None
    """2 or 3 where the net is made of such convolutions, None where it takes any."""
    parameters: int
    weight_bytes: int
    code: str
    """A hash of the file that the user named; empty for a model of the registry or a module."""
    kind: HeadKind | None = None
    """What its heads are, where the registry knows."""
    weightless_dtype: torch.dtype = torch.float32
    """What it takes where it has no weights."""

    @property
    def dtype(self) -> torch.dtype:
        """What it takes: the dtype of its first weights."""
        weights = (p.dtype for p in self.module.parameters() if p.is_floating_point())
        return next(weights, self.weightless_dtype)

    def heads(self, outputs: Any) -> dict[str, Tensor]:
        """A forward's result, whatever its form, as named tensors (batch, channels, z, y, x)."""
        if isinstance(outputs, Tensor):
            return {"out": outputs}
        if isinstance(outputs, Mapping):
            heads = {str(name): head for name, head in outputs.items()}
        elif isinstance(outputs, list | tuple):
            heads = {f"out{i}": head for i, head in enumerate(outputs)}
        else:
            heads = {"out": outputs}
        for name, head in heads.items():
            if not isinstance(head, Tensor):
                raise UsageError(
                    f"model {self.name} returns a {type(head).__name__} as {name}, not a tensor"
                )
        return heads


def load(
    model: str | nn.Module,
    weights: str | Path | None = None,
    in_channels: int | None = None,
    *,
    untrained: bool = False,
    trust: bool = False,
) -> Model:
    """Find a model and put its weights in; one that has none of its own may be left `untrained`.

    `in_channels` is how many channels it takes; by default what the module says of itself in an
    attribute of that name, else what its first convolution takes; a factory that has a parameter of
    that name is given it. A module may also say how many
    `spatial_axes` it has, and turn a public checkpoint into its own state dict (`from_public`).
    A model file is read as operators and tensors and no more, unless `trust` gives it to torch.

    Raises `UsageError` for an unknown name, a factory that fails, or weights of another model.
    """
    name = model if isinstance(model, str) else type(model).__name__
    module, weights = _find(model, weights, in_channels, trust)
    entry = REGISTRY.get(model) if isinstance(model, str) else None
    if entry is not None and entry.needs_weights and weights is None and not untrained:
        raise UsageError(f"--model-type {model} has no weights of its own; give --weights")
    if weights is not None:
        load_weights(module, name, Path(weights))
    if not isinstance(module, torch.fx.GraphModule):  # an exported program is what it is
        module.eval()
    first = next((m for m in module.modules() if isinstance(m, nn.Conv2d | nn.Conv3d)), None)
    channels = in_channels or getattr(module, "in_channels", None)
    if channels is None:
        channels = first.in_channels if first is not None else 1
    axes = getattr(module, "spatial_axes", None)
    if axes is None and first is not None:
        axes = 2 if isinstance(first, nn.Conv2d) else 3
    tensors = [*module.parameters(), *module.buffers()]
    return Model(
        name=name,
        module=module,
        in_channels=int(channels),
        spatial_axes=axes,
        parameters=sum(p.numel() for p in module.parameters()),
        weight_bytes=sum(t.numel() * t.element_size() for t in tensors),
        code=_code_hash(model) if isinstance(model, str) else "",
        kind=entry.kind if entry is not None else None,
    )


@contextlib.contextmanager
def float32_default() -> Iterator[None]:
    """Weights and buffers of ours are made in float32, whatever the caller's default is."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _code_hash(text: str) -> str:
    """A hash of the file behind a model that is no part of Penstock."""
    if text in REGISTRY:
        return ""
    place = text.rpartition(":")[0] or text
    path = Path(place)
    if not path.is_file():
        path = Path(getattr(importlib.import_module(place), "__file__", None) or "")
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else ""


def _find(
    model: str | nn.Module,
    weights: str | Path | None,
    in_channels: int | None,
    trust: bool,
) -> tuple[nn.Module, str | Path | None]:
    if isinstance(model, nn.Module):
        return model, weights
    if model in REGISTRY:
        entry = REGISTRY[model]
        with float32_default():
            return _call(entry.factory, in_channels), weights or entry.weights
    if model.endswith(PROGRAMS):
        return _load_program(Path(model), trust), weights
    if ":" in model:
        return _call(model, in_channels), weights
    check(model, "--model-type")
    raise UsageError(f"--model-type {model!r} is unknown")


def _call(text: str, in_channels: int | None) -> nn.Module:
    """Import ``module:function`` or ``file.py:function``: a module, what makes one, or a function
    that is the model itself.

    A factory with a parameter ``in_channels`` is told how many there are to be.
    """
    try:
        with reference.found(text) as named:
            made = named if isinstance(named, nn.Module) else _made(named, in_channels)
    except MissingDependency:
        raise
    except UsageError as error:
        raise UsageError(f"--model-type {error}") from error.__cause__
    except Exception as error:
        raise UsageError(
            f"--model-type {text} could not be made: {reference.told(error)}"
        ) from error
    if isinstance(made, nn.Module):
        return made
    if callable(made):
        return _Wrapped(made)
    raise UsageError(f"--model-type {text} returned a {type(made).__name__}, not a module")


def _made(named: Any, in_channels: int | None) -> Any:
    """What a factory makes; a function that must be given something else than ``in_channels`` is
    no factory but the model."""
    try:
        parameters = inspect.signature(named).parameters
    except ValueError:  # one of a library in C, such as torch.sigmoid
        return named
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p.name for p in parameters.values() if p.default is p.empty and p.kind in kinds]
    if not inspect.isclass(named) and needed not in ([], ["in_channels"]):
        return named
    if in_channels and "in_channels" in parameters:
        return named(in_channels=in_channels)
    return named()


def _load_program(path: Path, trust: bool) -> nn.Module:
    """A torch.export program (.pt2) or a TorchScript archive; torch's own readers, which run code
    of the file, are given one that is trusted."""
    if not is_file(path, f"--model-type {path}"):
        raise UsageError(f"--model-type {path}: there is no such file")
    try:
        if path.suffix == ".pt2":
            return torch.export.load(path).module() if trust else exported.load(path)
        if not trust:
            return torchscript.load(path)
        module: nn.Module = torch.jit.load(str(path), map_location="cpu")
        return module
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"--model-type {path} is neither a torch.export program nor TorchScript: "
            f"{describe(error)}"
        ) from error


# --- devices ---------------------------------------------------------------------------------


def placed(module: nn.Module, device: torch.device, channels_last: bool) -> nn.Module:
    """A module on a device, its convolutions laid out channels last where that is asked for: what
    tensor cores take, and a third to a half faster on a CPU as well.

    The module given stays as it is. What of it lies there as it should is shared and not copied.
    """
    there = _tensors(module, device, channels_last)
    memo: dict[int, Any] = {id(tensor): there[name] for name, tensor in _own_tensors(module)}
    if device.type == "cpu" and all(key == id(tensor) for key, tensor in memo.items()):
        return module
    memo |= {id(tensor): tensor.detach().to(device) for tensor in _computed(module)}
    copied = copy.deepcopy(module, memo).to(device)  # a TorchScript module knows nothing of memos
    for part in copied.modules():
        if isinstance(part, torch.fx.GraphModule):
            _move_literals(part, device)
    return copied


def _computed(module: nn.Module) -> Iterator[Tensor]:
    """Plain attributes that were computed of weights, as `torch.nn.utils.weight_norm` leaves them:
    torch copies none of these."""
    held: list[Any] = [vars(part) for part in module.modules()]
    while held:
        value = held.pop()
        if isinstance(value, Tensor):
            if not value.is_leaf:
                yield value
        elif isinstance(value, Mapping):
            held += value.values()
        elif isinstance(value, list | tuple):
            held += value


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _tensors(
    module: nn.Module, device: torch.device | str, channels_last: bool
) -> dict[str, Tensor]:
    """Parameters and buffers by name as they are to lie on a device; the module's own where they
    do."""
    layouts: dict[int, torch.memory_format] = {}
    for part in module.modules():
        if channels_last and isinstance(part, nn.Conv2d | nn.Conv3d):
            kernels = (t for t in part.parameters() if t.ndim in CHANNELS_LAST)
            layouts |= {id(kernel): CHANNELS_LAST[kernel.ndim] for kernel in kernels}
    found: dict[str, Tensor] = {}
    for name, tensor in _own_tensors(module):
        with torch.no_grad():
            there = tensor.to(device, memory_format=layouts.get(id(tensor), torch.preserve_format))
        if there is not tensor and isinstance(tensor, nn.Parameter):
            there = nn.Parameter(there, tensor.requires_grad)
        found[name] = there
    return found


def _move_literals(program: torch.fx.GraphModule, device: torch.device) -> None:
    """Have what an exported program makes itself made on a device: its graph names another."""
    for node in program.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": device}
        elif node.target is torch.ops.aten.to.device:
            node.args = (node.args[0], device, *node.args[2:])
    program.recompile()


def devices(names: Sequence[str]) -> list[torch.device]:
    """Devices by name, each checked to be there; ``auto`` is every CUDA device, or the best left.

    Raises `UsageError` that says what is there instead.
    """
    found = []
    for name in names:
        if name == "auto":
            return _all_devices()
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise UsageError(f"--devices {name!r} is no device; try cpu, cuda:0 or mps") from error
        count = torch.cuda.device_count()
        if device.type == "cuda" and (device.index or 0) >= count:
            raise UsageError(f"--devices {name}: this machine has {count} CUDA devices; try cpu")
        if device.type == "mps" and not torch.backends.mps.is_available():
            raise UsageError("--devices mps: this machine has no MPS device; try cpu")
        if device.type not in ("cpu", "cuda", "mps"):
            raise UsageError(f"--devices {name!r} is not supported; try cpu, cuda:0 or mps")
        if device.type == "cuda":  # without an index it is the first, and equal to it
            device = torch.device("cuda", device.index or 0)
        found.append(device)
    if not found:
        raise UsageError("--devices names no device")
    if len(set(found)) < len(found):
        raise UsageError(f"--devices {' '.join(names)} names one device twice")
    return found


def _all_devices() -> list[torch.device]:
    if torch.cuda.is_available():
        return [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return [torch.device("mps" if torch.backends.mps.is_available() else "cpu")]


def set_cuda_flags(tf32: bool, cudnn_benchmark: bool = False) -> None:
    """How CUDA computes in float32: in TF32 or not, for products and convolutions alike.

    Left to itself, torch does so in convolutions alone. What cuDNN finds fastest, where it is let
    to time its algorithms, may differ from run to run, and with it the last bits of a result.
    """
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = cudnn_benchmark


CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By the axes of a tensor: (sample, channel, [plane,] row, column)."""


def channels_last(tensor: Tensor) -> Tensor:
    """The tensor with its channels innermost, where it has the axes of images or of volumes."""
    form = CHANNELS_LAST.get(tensor.ndim)
    return tensor if form is None else tensor.contiguous(memory_format=form)


# --- what one batch costs --------------------------------------------------------------------


@dataclass(frozen=True)
class Footprint:
    """What one forward returns and holds."""

    heads: tuple[Head, ...]
    peak_bytes: int | None
    """Most bytes alive at once in one forward, input and output included and weights not;
    None where the net could not be played on shapes."""
    channels_last: bool = True
    """False for a net that fails where its input and its convolutions are laid out so."""


class _Peak(TorchDispatchMode):
    """Adds up the storages that are alive while operators run."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keeps torch from importing its compiler, a second of work, for a mode that has no use
        for it. Where torch no longer asks, it is only slower."""
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        convolves = func is torch.ops.aten.convolution.default
        if convolves and any(_is_last(tensor) for tensor in args[:2]):
            out = out.to(memory_format=CHANNELS_LAST[out.ndim])  # on shapes alone it forgets to
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.track(tensor)
        if convolves:
            # The libraries below may lay input and output out anew while they work.
            self.peak = max(self.peak, self.alive + args[0].nbytes + out.nbytes)
        return out

    def track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known.add(key)
            self.alive += storage.nbytes()
            self.peak = max(self.peak, self.alive)
            weakref.finalize(storage, self._release, key, storage.nbytes())

    def _release(self, key: int, count: int) -> None:
        self._known.discard(key)
        self.alive -= count


def _is_last(tensor: Tensor) -> bool:
    axes = tensor.ndim
    return axes in CHANNELS_LAST and tensor.stride(1) == 1 and math.prod(tensor.shape[2:]) > 1


def _zeros(
    model: Model, shape: Sequence[int], channels_last: bool, device: str | None = None
) -> Tensor:
    """An input laid out as a lane lays it out."""
    layout = CHANNELS_LAST[len(shape)] if channels_last else torch.contiguous_format
    empty = torch.empty(tuple(shape), dtype=model.dtype, device=device, memory_format=layout)
    return empty.zero_()


def footprint(model: Model, shape: Sequence[int]) -> Footprint:
    """Play a forward of the input ``shape`` (batch, channels, spatial...) on shapes alone.

    A net that does not allow it (TorchScript, or a choice by value) is run once on zeros on the
    CPU instead, on two of the batch at most, and its peak is then unknown.

    Raises `UsageError` where the net does not take the shape or returns another one.
    """
    peak: int | None
    for channels_last in (True, False):
        counter = _Peak()
        try:
            if isinstance(model.module, torch.jit.ScriptModule):
                raise TypeError("its operators are not seen")
            # A copy without its weights: those of the module are not touched.
            there = placed(model.module, torch.device("meta"), channels_last)
            with torch.no_grad(), counter:
                x = _zeros(model, shape, channels_last, "meta")
                outputs = there(x)
            peak = counter.peak
            break
        except UsageError:
            raise
        except Exception:
            continue
    else:
        outputs, shape, channels_last = _run_once(model, shape)
        peak = None
    heads = model.heads(outputs)
    for name, tensor in heads.items():
        if tensor.ndim == len(shape) and tensor.shape[0] != shape[0]:
            raise UsageError(
                f"model {model.name} turns a batch of {shape[0]} into one of {tensor.shape[0]}"
            )
        if tensor.ndim != len(shape) or tuple(tensor.shape[2:]) != tuple(shape[2:]):
            raise UsageError(
                f"model {model.name} turns a patch of {tuple(shape[2:])} into "
                f"{tuple(tensor.shape[2:])} (head {name}); the two must be equal"
            )
        if tensor.is_complex():
            raise UsageError(f"model {model.name} returns complex numbers (head {name})")
    found = tuple(Head(name, tensor.shape[1], tensor.dtype) for name, tensor in heads.items())
    return Footprint(found, peak, channels_last)


def _run_once(model: Model, shape: Sequence[int]) -> tuple[Any, Sequence[int], bool]:
    """What the net returns on the CPU, for which input, and whether laid out channels last.

    Two of a batch show what becomes of the batch axis, and a batch for a GPU takes a CPU long; only
    a net that was exported for one size of batch is given all of it.
    """
    few = (min(2, shape[0]), *shape[1:])
    sizes = [tuple(shape)]
    if few != sizes[0] and not isinstance(model.module, torch.fx.GraphModule):
        sizes = [few, *sizes]
    failed: Exception | None = None
    with torch.no_grad():  # what the net keeps of a forward stays of use for a training
        for channels_last in (True, False):
            module = placed(model.module, torch.device("cpu"), channels_last)
            for size in sizes:
                try:
                    return module(_zeros(model, size, channels_last)), size, channels_last
                except Exception as error:
                    failed = error
    assert failed is not None
    raise UsageError(
        f"model {model.name} does not take a batch of shape {tuple(shape)} "
        f"(batch, channels, spatial; see --batch, --patch and --in-channels): "
        f"{reference.told(failed)}"
    ) from failed
