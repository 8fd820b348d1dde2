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

from . import exported, torchscript
from .config.infer import HeadKind
from .errors import UsageError, describe, require
from .store import is_file

_HERE = Path(__file__).parent / "models"


@dataclass(frozen=True)
class Entry:
    """A model of the registry."""

    factory: str
    summary: str
    weights: Path | None = None
    needs_weights: bool = False
    kind: HeadKind = "intensity"
    """What its heads are."""


REGISTRY = {
    "denoise-net": Entry(
        "penstock.models.unet3d:denoise_net",
        "3-D UNet of the exaSPIM denoiser, width 32 to 512; give its --weights",
        needs_weights=True,
    ),
    "denoise-tiny": Entry(
        "penstock.models.unet3d:denoise_tiny",
        "small 3-D UNet with weights for fluorescence microscopy",
        _HERE / "denoise_tiny.safetensors",
    ),
    "identity": Entry("penstock.model:Identity", "returns its input: measures the pipeline alone"),
    "prithvi-refiner-tiny": Entry(
        "penstock.models.prithvi:tiny",
        "2-D, 6 bands: Prithvi-EO encoder with LoRA, ConvNeXt head; untrained without --weights",
    ),
    "prithvi-refiner-100m": Entry("penstock.models.prithvi:m100", "the same, of 89 M parameters"),
    "prithvi-refiner-300m": Entry("penstock.models.prithvi:m300", "the same, of 307 M parameters"),
    "prithvi-refiner-600m": Entry(
        "penstock.models.prithvi:m600", "the same, of 637 M parameters and a patch of 14"
    ),
}


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


def _code_hash(reference: str) -> str:
    """A hash of the file behind a model that is no part of Penstock."""
    if reference in REGISTRY:
        return ""
    place = reference.rpartition(":")[0] or reference
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
    if model.endswith((".pt2", ".pt", ".ts", ".torchscript")):
        return _load_program(Path(model), trust), weights
    if ":" in model:
        return _call(model, in_channels), weights
    raise UsageError(
        f"--model-type {model!r} is unknown; it is one of {', '.join(sorted(REGISTRY))}, "
        "package.module:function, file.py:function, or a .pt2 / TorchScript file"
    )


def _call(reference: str, in_channels: int | None) -> nn.Module:
    """Import ``module:function`` or ``file.py:function`` and call it.

    A factory with a parameter ``in_channels`` is told how many there are to be.
    """
    place, _, attribute = reference.rpartition(":")
    try:
        if place.endswith(".py"):
            if not is_file(Path(place), f"--model-type {reference}"):
                raise UsageError(f"--model-type {reference}: there is no file {place}")
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            assert spec is not None and spec.loader is not None
            source = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(source)
        else:
            source = importlib.import_module(place)
        made = getattr(source, attribute)
        if isinstance(made, nn.Module):
            return made
        takes_channels = in_channels and "in_channels" in inspect.signature(made).parameters
        made = made(in_channels=in_channels) if takes_channels else made()
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"--model-type {reference} could not be made: {type(error).__name__}: {describe(error)}"
        ) from error
    if isinstance(made, nn.Module):
        return made
    if callable(made):
        return _Wrapped(made)
    raise UsageError(f"--model-type {reference} returned a {type(made).__name__}, not a module")


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


def load_weights(module: nn.Module, name: str, path: Path) -> None:
    """Put the tensors of a file into a module that has exactly those, by name and shape."""
    state = read_state(path)
    from_public = getattr(module, "from_public", None)
    if from_public is not None:
        state = from_public(state)
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        own = module.state_dict()
        missing, extra = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        wrong = [
            f"{k} is {tuple(state[k].shape)}, not {tuple(own[k].shape)}"
            for k in own.keys() & state.keys()
            if own[k].shape != state[k].shape
        ]
        shown = [f"lacks {k}" for k in missing] + [f"has an unknown {k}" for k in extra] + wrong
        raise UsageError(
            f"--weights {path} belongs to another model than {name}: {len(missing)} tensors "
            f"missing, {len(extra)} unknown, {len(wrong)} of another shape; it {shown[0]}"
        ) from error


def read_state(path: Path) -> dict[str, Tensor]:
    """A state dict from a safetensors file, or from a torch file of tensors only."""
    if not is_file(path, f"--weights {path}"):
        raise UsageError(f"--weights {path}: there is no such file")
    tensorfile = require("safetensors.torch", "infer") if path.suffix == ".safetensors" else None
    try:
        if tensorfile is not None:
            tensors: dict[str, Tensor] = tensorfile.load_file(path)
            return tensors
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UsageError(
            f"--weights {path} is no file of tensors only (nothing else is read: unpickling a file "
            "runs its code)"
        ) from error
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    if not isinstance(state, Mapping) or not all(isinstance(v, Tensor) for v in state.values()):
        raise UsageError(f"--weights {path} holds no state dict of tensors")
    # Wrappers (DataParallel, torch.compile) leave their names in front of every key.
    return {k.removeprefix("module.").removeprefix("_orig_mod."): v for k, v in state.items()}


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
    copied = copy.deepcopy(module, memo).to(device)  # a TorchScript module knows nothing of memos
    for part in copied.modules():
        if isinstance(part, torch.fx.GraphModule):
            _move_literals(part, device)
    return copied


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
            meta = _tensors(model.module, "meta", channels_last)
            with torch.no_grad(), counter:
                x = _zeros(model, shape, channels_last, "meta")
                outputs = torch.func.functional_call(model.module, meta, (x,))
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
    with torch.inference_mode():
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
        f"(batch, channels, spatial; see --batch, --patch and --in-channels): {describe(failed)}"
    ) from failed
