"""The steps of a training. Each takes batches, changes weights, and has its phases timed.

batch ──▶ transfer ──▶ forward ──▶ backward ──┬──▶ (sum over ranks) ──▶ optimizer
  ▲                                           │
  └────── for --grad-accum-steps batches ─────┘
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._pytree import tree_leaves

from ..base import TrainConfig, UsageError, as_usage_error, plural
from ..instruments import Clock, DevicePhaseTimer, PhaseTimer
from ..loading import Items
from ..models import (
    channels_last,
    float32_default,
    load_weights,
    recompute_activations,
)
from .ranks import gather
from .workloads import Answer, Batch, Feed, Workload, optimizer_of

DECAY_EPOCHS = 3
"""The epochs between the falls of --schedule step, as in torchvision's recipe of detectors."""


@dataclass(frozen=True)
class Schedule:
    """The number of steps of a run, and the learning rate of each."""

    config: TrainConfig
    steps_per_epoch: int
    num_steps: int
    """The number of steps of the whole run."""

    @classmethod
    def of(cls, config: TrainConfig, num_batches: int) -> Schedule:
        """The schedule of a run in which an epoch has ``num_batches`` batches on each rank."""
        steps_per_epoch = -(-num_batches // config.grad_accum_steps)
        num_steps = config.epochs * steps_per_epoch
        return cls(config, steps_per_epoch, min(num_steps, config.max_steps or num_steps))

    def rate(self, step: int) -> float:
        """The learning rate at a step, as a fraction of --learning-rate."""
        config = self.config
        rise = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
        if config.schedule == "cosine":
            return rise * 0.5 * (1 + math.cos(math.pi * min(1.0, step / self.num_steps)))
        if config.schedule == "step":
            return rise * float(0.1 ** (step // (self.steps_per_epoch * DECAY_EPOCHS)))
        return rise


@dataclass(frozen=True, slots=True)
class StepTaken:
    """The results of one step. The tensors are on the device, and reading them waits for it."""

    samples: int
    loss: Tensor
    metrics: Mapping[str, Tensor]


class Stepper:
    """A model on its device with its optimiser: takes timed steps, and validates."""

    def __init__(
        self,
        fabric: Any,
        workload: Workload,
        name: str,
        config: TrainConfig,
        rate: Callable[[int], float],
        clock: Clock,
    ) -> None:
        """``rate(step)`` is the learning rate at a step, as a fraction of --learning-rate."""
        self.fabric, self.workload, self.config = fabric, workload, config
        self._name = name
        # Weights that are drawn depend on the seed alone; later each rank gets numbers of its own.
        torch.manual_seed(config.seed)
        with float32_default():
            module = workload.model()
        if not isinstance(module, torch.nn.Module):
            raise self._unfit("its model is no torch.nn.Module")
        if config.weights is not None:
            load_weights(module, name, config.weights)
            check_finite(module, f"--weights {config.weights}")
        if config.checkpointing:
            recompute_activations(module, name)
        if config.channels_last:
            for parameter in module.parameters():
                parameter.data = channels_last(parameter.data)
        self.module = module
        own_optimizer = getattr(workload, "optimizer", None)
        optimizer = own_optimizer(module) if own_optimizer else optimizer_of(module, config)
        net = torch.compile(module) if config.compile else module
        self._model, self._optimizer = fabric.setup(net, optimizer)
        self.parameters = sum(p.numel() for p in module.parameters())
        trained = [p for p in module.parameters() if p.requires_grad]  # in the dtype of the run
        self.trainable_parameters = sum(p.numel() for p in trained)
        self.gradient_bytes = sum(p.numel() * p.element_size() for p in trained)
        # Fabric moved the module to its device, and with it the optimizer's parameters.
        self.optimizer: Optimizer = self._optimizer.optimizer
        self.scheduler = LambdaLR(self.optimizer, rate)
        self._sums = any(isinstance(m, DistributedDataParallel) for m in self._model.modules())
        on_cuda = fabric.device.type == "cuda"
        self.timer = DevicePhaseTimer(torch.cuda) if on_cuda else PhaseTimer(clock)
        self.pictures: Callable[[], Mapping[str, NDArray[Any]]] | None = None
        """Returns pictures of the last validation; None on other ranks than the first, or if the
        workload has none."""

    def take(self, batches: Iterator[tuple[Items, Batch]], share: int) -> StepTaken:
        """Take a step on the mean gradient of ``share`` batches, the next ones of ``batches``."""
        timer, config = self.timer, self.config
        timer.begin()
        samples, losses, metrics_of = 0, list[Tensor](), list[Mapping[str, Tensor]]()
        for number in range(1, share + 1):
            items, batch = next(batches)
            timer.end_phase("data_wait")
            batch = self.to_device(batch)
            timer.end_phase("transfer")
            # Ranks sum once for each step, as its last gradients are computed.
            sums = self._sums and number == share
            with self.fabric.no_backward_sync(self._model, self._sums and not sums):
                loss, metrics = self._loss(batch)
                timer.end_phase("forward")
                if sums:
                    mark_computed(loss, timer)
                self.fabric.backward(loss / share)
            timer.end_phase("communication" if sums else "backward")
            samples += len(items)
            losses.append(loss.detach())
            metrics_of.append({n: torch.as_tensor(value).detach() for n, value in metrics.items()})
        if config.clip_norm is not None:
            # The scaler skips a step with a gradient that is not finite; without a scaler the loss
            # becomes NaN, which ends the run.
            self.fabric.clip_gradients(
                self._model, self._optimizer, max_norm=config.clip_norm, error_if_nonfinite=False
            )
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.scheduler.step()
        timer.end_phase("optimizer")
        timer.end()
        means = {name: torch.stack([m[name] for m in metrics_of]).mean() for name in metrics_of[0]}
        return StepTaken(samples, torch.stack(losses).mean(), means)

    @torch.no_grad()
    def validate(self, feed: Feed, at_batch: Callable[[], None]) -> dict[str, float]:
        """Score all validation samples, each answered once, on any rank.

        Args:
            feed: The batches of validation samples of this rank.
            at_batch: Called after each batch; it may end the run.

        Returns:
            The scores by name, the same on every rank.
        """
        self.module.eval()
        mine: dict[int, Answer] = {}
        for items, batch in feed.epoch(0, 0):
            with self.fabric.autocast():
                answers = self.workload.answers(self.module, self.to_device(batch))
            if len(answers) != len(items):
                raise self._unfit(
                    f"it has {plural(len(answers), 'answer')} to {plural(len(items), 'sample')}"
                )
            mine |= dict(zip(items.tolist(), answers, strict=True))
            at_batch()
        every = gather(mine, self.fabric.world_size)
        scores = None
        if self.fabric.is_global_zero:
            # The last batches are padded with samples that other ranks have answered too.
            answered = {index: answer for part in every for index, answer in part.items()}
            assert len(answered) == len(self.workload.val), "a validation sample was not answered"
            answered = dict(sorted(answered.items()))
            scores = self._scores(answered)
            if show := getattr(self.workload, "pictures", None):
                self.pictures = partial(show, answered)
        return self.fabric.broadcast(scores)

    def _loss(self, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        match self.workload.loss(self._model, batch):
            case (Tensor() as loss, Mapping() as metrics) if loss.numel() == 1:
                return loss, metrics
        raise self._unfit("its loss is not a pair of a scalar and a mapping of metrics")

    def _scores(self, answers: Mapping[int, Answer]) -> dict[str, float]:
        """The scores as Python's numbers, the judge's among them."""
        given, judge = self.workload.scores(answers), self.workload.judge
        kinds = (TypeError, ValueError, RuntimeError, AttributeError)
        with as_usage_error(f"workload {self._name}: its scores are no numbers", *kinds):
            # Of numpy's and torch's numbers, which JSON does not take.
            scores = {n: s if isinstance(s, int | float) else float(s) for n, s in given.items()}
        if judge not in scores:
            raise self._unfit(
                f"it scores {', '.join(scores)} and is judged by {judge}, which is none of them"
            )
        return scores

    def _unfit(self, why: str) -> UsageError:
        """The error of a workload that does not do what the protocol says."""
        return UsageError(f"workload {self._name}: {why}")

    def to_device(self, batch: Batch) -> Batch:
        batch = self.fabric.to_device(batch)
        if not self.config.channels_last:
            return batch
        from lightning_utilities.core.apply_func import apply_to_collection

        return apply_to_collection(batch, Tensor, channels_last)


def check_finite(module: torch.nn.Module, source: str) -> None:
    """Refuse weights of which no loss can be finite."""
    for name, weight in module.state_dict().items():
        if isinstance(weight, Tensor) and not weight.isfinite().all():
            raise UsageError(f"{source}: {name} has values that are not finite")


def why_not_finite(
    batches: Iterable[tuple[Items, Batch]], workload: Workload, config: TrainConfig
) -> str:
    """Why the loss of a step is not finite, as far as its samples tell.

    Args:
        batches: The indices of the samples of each of its batches, and the batch.
        workload: The workload, whose ``name_of`` names a sample.
        config: The settings of the training.

    Returns:
        A sentence: which sample has values that are not finite, or which settings may help.
    """
    for items, batch in batches if not getattr(workload, "leaves_out_not_finite", False) else ():
        tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        # A list with a tensor for each sample has rows of another kind.
        alike = [tensor for tensor in tensors if tensor.ndim and len(tensor) == len(items)]
        for row, item in enumerate(items.tolist()):
            if not all(torch.isfinite(tensor[row]).all() for tensor in alike):
                place = f" ({workload.name_of(item)})" if hasattr(workload, "name_of") else ""
                return f"sample {item}{place} has values that are not finite"
        if not all(torch.isfinite(tensor).all() for tensor in tensors):
            return f"a sample among {', '.join(map(str, items))} has values that are not finite"
    return f"lower --learning-rate {config.learning_rate} or set --clip-norm"


def mark_computed(loss: Tensor, timer: PhaseTimer) -> None:
    """End the backward phase when all gradients are computed, before DDP waits for sums.

    Autograd runs callbacks at its end in the order in which they were queued. DDP queues its own
    when its last gradient is computed; ours is queued when the first gradient is.
    """
    engine = torch.autograd.Variable._execution_engine

    def ask(gradient: Tensor) -> None:
        engine.queue_callback(lambda: timer.end_phase("backward"))

    loss.register_hook(ask)
