"""The floating-point operations of a training, counted once, at its first batch.

They are counted while the batch is computed, so any workload can be counted and nothing is computed
twice. Compiled code hides its operators. So the network of ``--compile`` is run once more, before
the batch, on shapes alone (torch's meta device); so is every network on a torch that cannot count
without disturbing what is compiled.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..base import describe
from ..models import FlopCounter, placed
from .checkpoint import random_state, set_random_state
from .workloads import Batch, Workload

_LEAVES_COMPILED = hasattr(TorchDispatchMode, "ignore_compile_internals")


class _StepCounter(FlopCounter):
    """Counts the operations of a step, which an error in counting does not end."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.fault = ""
        """The reason why the count is not right, empty if it is."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets code that a model compiles run compiled, so that its results stay the same."""
        return True

    def add(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        try:
            super().add(func, args, kwargs, out)
        except Exception as error:  # a formula that does not hold must not end the training
            self.fault = f"the operations of {func} were not counted: {describe(error)}"


class FlopCount:
    """The operations of a sample: of its forward and its backward, on one rank."""

    def __init__(self, workload: Workload, module: nn.Module, compiled: bool, wanted: bool) -> None:
        """``module`` is the network as it is before it is compiled."""
        self._workload, self._module, self._compiled = workload, module, compiled
        self._wanted = wanted
        self.per_sample: float | None = None
        """The number of operations; None if it is not known."""
        self.note = "no step was taken"
        """The reason why it is not known, empty if it is."""

    @contextlib.contextmanager
    def at(self, batch: Batch, samples: int, device: torch.device) -> Iterator[None]:
        """Count within this context, in which a batch is computed, if it is the first."""
        if not self._wanted:
            yield
            return
        self._wanted, counter = False, _StepCounter()
        if self._compiled or not _LEAVES_COMPILED:
            self._on_shapes(counter, batch, device)
            yield
        else:
            with counter:
                yield
            if _compiles():
                counter.fault = "the workload compiles code, whose operations are not seen"
        if not counter.fault and not counter.flops:
            counter.fault = "no product, convolution or attention was seen"
        self.note = counter.fault
        self.per_sample = None if counter.fault else counter.flops / samples

    def _on_shapes(self, counter: _StepCounter, batch: Batch, device: torch.device) -> None:
        """Compute a batch on shapes alone, and leave the random numbers as they are."""
        from lightning_utilities.core.apply_func import apply_to_collection

        state, meta = random_state(device), torch.device("meta")
        try:
            copied = placed(self._module, meta, False)
            shapes = apply_to_collection(batch, Tensor, lambda tensor: tensor.to(meta))
            with counter:
                loss, _ = self._workload.loss(copied, shapes)
                loss.backward()
        except Exception as error:
            counter.fault = f"the step cannot be run on shapes alone: {describe(error)}"
        finally:
            set_random_state(state, device)


def _compiles() -> bool:
    """Whether this process has compiled anything with torch's compiler."""
    compiler = sys.modules.get("torch._dynamo.utils")
    return compiler is not None and bool(compiler.counters["frames"])
