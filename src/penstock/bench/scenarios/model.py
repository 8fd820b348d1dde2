"""Scenario ``model``: a real network at one tile and batch size, one forward or one training step.

    inference   | forward |
    train       | forward | backward | optimizer |

The input is made on the host from a seed and copied to the device before the first step: other
scenarios measure the cost of feeding a network. Everything else is part of the step. Its outputs
are freed at its end, so they take no memory in the next step.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...base import UsageError, as_usage_error, canonical, describe, plural
from ...instruments import Gpu
from ...models import (
    Model,
    channels_last,
    find_devices,
    load_model,
    placed,
    recompute_activations,
    set_cuda_flags,
)
from ...training import epsilon_of
from . import Phase, Work, WrongResult, flags_of_bench

_LEARNING_RATE = 1e-5


class ModelScenario:
    """A network on its device with its input, ready to step."""

    def __init__(self, case: Mapping[str, Any]) -> None:
        self._case, device = case, _device(case)
        self.device = str(device)
        # Read before this process uses the GPU: its context and libraries count as the launch's.
        self.driver_before = Gpu(device).used() if device.type == "cuda" else None
        _try_dtype(case, device)
        set_cuda_flags(case.get("tf32", False))
        if device.type == "cuda":
            torch.cuda.set_device(device)
            if case["budget"]:
                # For torch's allocator alone: the context and the libraries come on top.
                total = torch.cuda.get_device_properties(device).total_memory
                torch.cuda.set_per_process_memory_fraction(min(1.0, case["budget"] / total), device)
        if case["threads"]:
            torch.set_num_threads(case["threads"])
        model = _load(case)
        shape = _shape(case, model)
        self.facts = _facts(model, shape, device)
        _prepare(case, model)
        self._train = case["mode"] == "train"
        self.work: Work = {
            "samples": shape[0],
            "pixels": shape[0] * math.prod(shape[2:]),
            "useful_pixels": shape[0] * math.prod(n - 2 * case["halo"] for n in shape[2:]),
        }

        self._model, module = model, model.module.to(device)
        self._input = _data(shape, case["seed"]).to(device, _dtype(case))
        if case["channels_last"]:
            for parameter in module.parameters():  # a net of images may hold weights of volumes
                parameter.data = channels_last(parameter.data)
            self._input = channels_last(self._input)
        self._net = torch.compile(module) if case["compile"] else module
        self._amp = torch.float16 if device.type == "cuda" else torch.bfloat16
        self._targets: dict[str, Tensor] = {}
        self._heads: dict[str, torch.Size] = {}
        if self._train:
            self._optimizer = _optimizer(module, _dtype(case))
            scaled = case["amp"] and self._amp == torch.float16
            self._scaler = torch.amp.GradScaler(device.type, enabled=scaled)

    @property
    def compile_s(self) -> float | None:
        """The seconds that torch.compile has taken so far; None if nothing is compiled."""
        if not self._case["compile"]:
            return None
        from torch._dynamo.utils import calculate_time_spent

        return calculate_time_spent().get("total_wall_time")

    def step(self, phase: Phase) -> Work:
        first = not self._heads
        result = self._train_step(phase) if self._train else self._infer_step()
        # One number, which is not finite if any output is not. Reading it in every step would make
        # the device wait.
        if first and not math.isfinite(float(result)):
            raise WrongResult(f"model {self._model.name} returns values that are not finite")
        return self.work

    def close(self) -> None:
        del self._net, self._model, self._input, self._targets
        if self._train:
            del self._optimizer

    def _infer_step(self) -> Tensor | float:
        with torch.inference_mode(), self._autocast():
            heads = self._forward()
            if self._heads:
                return 0.0
            self._heads = {name: head.shape for name, head in heads.items()}
            return sum((_finite(head) for head in heads.values()), torch.zeros(()))

    def _train_step(self, phase: Phase) -> Tensor:
        with self._autocast():
            heads = self._forward()
            if not self._heads:
                self._heads = {name: head.shape for name, head in heads.items()}
                self._targets = {
                    name: _data(head.shape, seed).to(head.device)
                    for seed, (name, head) in enumerate(heads.items())
                }
            loss = _loss(heads, self._targets)
            del heads
        phase("forward")
        self._scaler.scale(loss).backward()
        phase("backward")
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        phase("optimizer")
        return loss.detach()

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._input.device.type, self._amp, self._case["amp"])

    def _forward(self) -> dict[str, Tensor]:
        """The heads, with the shapes of the first step."""
        heads = self._model.heads(self._net(self._input))
        shapes = {name: head.shape for name, head in heads.items()}
        if self._heads and shapes != self._heads:
            raise WrongResult(
                f"model {self._model.name} returned {_shown(self._heads)} at the first step and "
                f"now {_shown(shapes)}"
            )
        return heads


def check(case: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The case with its device and channels filled in, and the facts of its model; nothing is
    measured.

    The step is tried on shapes here and not in the measured process: that makes torch import its
    compiler, 70 MB that would count as memory of the model.

    Raises `UsageError` for a model, weights, a device, a dtype or a tile that cannot be measured.
    """
    device = _device(case)
    _try_dtype(case, device)
    model = _load(case)
    shape = _shape(case, model)
    facts = _facts(model, shape, device)
    _prepare(case, model)
    try:
        _try_on_shapes(model, shape, case)
    except UsageError:
        raise
    except Exception as error:
        _try_for_real(model, (1, *shape[1:]), case, error)
    return {**case, "device": str(device), "channels": shape[1]}, facts


def _try_on_shapes(model: Model, shape: tuple[int, ...], case: Mapping[str, Any]) -> None:
    """Run a step without its optimizer on shapes alone (torch's meta device), which takes no memory
    and hardly any time."""
    meta, train = torch.device("meta"), case["mode"] == "train"
    net = placed(model.module, meta, False)
    with torch.set_grad_enabled(train):
        heads = model.heads(net(torch.empty(shape, dtype=_dtype(case), device=meta)))
        if train:
            targets = {name: torch.empty_like(head.float()) for name, head in heads.items()}
            _loss(heads, targets).backward()


def _try_for_real(
    model: Model, shape: tuple[int, ...], case: Mapping[str, Any], error: Exception
) -> None:
    """Run a network once that cannot run on shapes (TorchScript, a branch on values)."""
    try:
        if isinstance(error, ValueError):  # the network itself refuses the shape
            raise error
        with torch.inference_mode():
            model.module(torch.zeros(shape, dtype=_dtype(case)))
    except Exception as error:
        raise UsageError(
            f"--tile-sizes {case['tile']}: model {model.name} does not take a batch of shape "
            f"{shape} (batch, channels, sides): {describe(error)}"
        ) from error


def _device(case: Mapping[str, Any]) -> torch.device:
    with flags_of_bench():
        return find_devices([case["device"]])[0]


def _try_dtype(case: Mapping[str, Any], device: torch.device) -> None:
    """Raise `UsageError` if the device has no arithmetic of the case's dtype.

    An error that float32 has too, such as on a full GPU, is raised unchanged.
    """
    _multiply(torch.float32, device)
    with as_usage_error(
        f"--dtype {case['dtype']} is not supported on {device}", RuntimeError, TypeError
    ):
        _multiply(_dtype(case), device)


def _multiply(dtype: torch.dtype, device: torch.device) -> None:
    ones = torch.ones(2, 2, dtype=dtype, device=device)
    ones.mm(ones)


def _dtype(case: Mapping[str, Any]) -> torch.dtype:
    return getattr(torch, case["dtype"])


def _load(case: Mapping[str, Any]) -> Model:
    torch.manual_seed(case["seed"])  # for weights that are not loaded, and for dropout
    with flags_of_bench():
        # An untrained model takes the same memory and time.
        return load_model(
            case["model"],
            case["weights"],
            case["channels"],
            untrained=True,
            trust=case.get("trust_model", False),
        )


def _shape(case: Mapping[str, Any], model: Model) -> tuple[int, ...]:
    """The shape of the input: batch, channels, sides."""
    sides = tuple(int(side) for side in case["tile"].split("x"))
    if len(sides) == 1:
        sides *= model.spatial_axes or 2
    if model.spatial_axes not in (None, len(sides)):
        raise UsageError(
            f"--tile-sizes {case['tile']} has {plural(len(sides), 'axis')}; model {model.name} "
            f"takes {model.spatial_axes}"
        )
    return (case["batch"], model.in_channels, *sides)


def _prepare(case: Mapping[str, Any], model: Model) -> None:
    """Put the module into the mode and the dtype of the case, on the host."""
    train = case["mode"] == "train"
    if train and not any(p.requires_grad for p in model.module.parameters()):
        raise UsageError(f"--mode train: model {model.name} has no parameters to train")
    if case["dtype"] != "float32":
        model.module.to(_dtype(case))
    if train:  # torch.export programs are in eval mode for good
        model.module.train()
    if case["checkpointing"]:
        recompute_activations(model.module, model.name)


def _optimizer(module: nn.Module, dtype: torch.dtype) -> torch.optim.Optimizer:
    trained = [p for p in module.parameters() if p.requires_grad]
    options: dict[str, Any] = {"lr": _LEARNING_RATE, "eps": epsilon_of(dtype)}
    try:
        return torch.optim.AdamW(trained, **options, fused=True)
    except RuntimeError:  # not on this device
        return torch.optim.AdamW(trained, **options)


def _data(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _loss(heads: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> Tensor:
    for name, head in heads.items():
        if not head.requires_grad:
            raise UsageError(f"--mode train: there is no gradient of the model's head {name!r}")
    losses = [F.mse_loss(head.float(), targets[name]) for name, head in heads.items()]
    return torch.stack(losses).sum()


def _finite(head: Tensor) -> Tensor:
    """0, or NaN if any value is not finite; nothing of the size of ``head`` is allocated."""
    if not head.is_floating_point() or not head.numel():
        return torch.zeros(())
    low, high = torch.aminmax(head)  # a NaN anywhere makes both NaN
    return (low * 0 + high * 0).float().cpu()


def _shown(shapes: Mapping[str, torch.Size]) -> str:
    return ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())


def _facts(model: Model, shape: tuple[int, ...], device: torch.device) -> dict[str, Any]:
    parameters = list(model.module.parameters())
    on_cuda = device.type == "cuda"
    return {
        "model": model.name,
        "code": model.code,
        "parameters": model.parameters,
        "trainable": sum(p.numel() for p in parameters if p.requires_grad),
        "model_bytes": model.weight_bytes,
        "structure": structure(model.module),
        "tile_shape": list(shape[2:]),
        "channels": shape[1],
        # The memory of the device that torch uses, which may be a slice of a GPU (MIG).
        "device_memory": torch.cuda.get_device_properties(device).total_memory if on_cuda else None,
    }


def structure(module: nn.Module) -> str:
    """A hash of a network's structure: the names, shapes, dtypes and classes of its parts."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    shapes = sorted([name, list(t.shape), str(t.dtype)] for name, t in tensors)
    classes = sorted([name, type(m).__qualname__] for name, m in module.named_modules())
    return hashlib.sha256(canonical([shapes, classes]).encode()).hexdigest()[:16]
