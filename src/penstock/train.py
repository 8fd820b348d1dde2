"""Training: one loop of steps for every workload, each step timed, and a run that can be killed.

    Order ──▶ Feed ──▶ transfer ──▶ forward ──▶ backward ──▶ (sum over ranks) ──▶ optimizer
      ▲                                                                              │
      └───────────── step boundary: stop? checkpoint? progress ◀─────────────────────┘

Devices, precision, DDP and the environments that launch ranks are `lightning_fabric`'s. The order
of samples, the times, the checkpoints and what is reported are ours. Which samples a step sees
follows from (seed, epoch, batch) alone, so a run that goes on from a checkpoint, inside an epoch or
not, takes the steps that it would have taken: on a CPU to the last bit,
on a GPU as far as its kernels are deterministic.

    OUT/args.json               what was asked
    OUT/training_results.json   what became of it, rewritten at each epoch's end
    OUT/steps/rank0.csv         every step of a rank: its phases in seconds, its samples, its loss
    OUT/checkpoints/            see `checkpoint`
    OUT/best_model.pth

A signal (SIGTERM, SIGUSR1) sets a flag. The ranks agree on it at a step's boundary, save, and end.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from . import __version__
from .checkpoint import (
    LAST,
    Checkpoints,
    State,
    load_weights,
    random_state,
    read,
    read_file,
    set_random_state,
)
from .config import TrainConfig
from .errors import Incomplete, PenstockError, UsageError
from .feed import TorchFeed
from .laps import DeviceLaps, Laps
from .order import Order, Position
from .probe import Clock
from .ranks import Stop, launched, set_flags
from .steplog import STEPS, StepLog, mark_computed, memory, write_json
from .workloads import Answer, Batch, Feed, Samples, Workload, make

RESULTS, ARGS = "training_results.json", "args.json"


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands, at a step's boundary."""

    step: int
    """Steps done."""
    steps: int
    """Steps that the whole run has."""
    epoch: int
    loss: float
    """The newest that is known."""
    scores: Mapping[str, float]
    """Those of the last epoch that was validated."""
    validated: bool = False
    """Whether this is said because the epoch was validated just now."""


def train(
    workload: str,
    config: TrainConfig,
    *,
    progress: Callable[[Progress], None] = lambda now: None,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """Train a workload, by name or ``package.module:Class``; what `training_results.json` says,
    and ``rank``, that of the process which asks.

    Raises `UsageError` for what cannot be trained so, `Incomplete` where a signal ended the run
    after its checkpoint, and `PenstockError` where the loss is no longer a number.
    """
    with launched(config) as fabric, Stop() as stop:
        _check_output(config, fabric.is_global_zero)
        fabric.barrier()
        set_flags(config)
        run = _Run(fabric, make(workload, config), workload, config, stop, progress, clock)
        with contextlib.closing(run):
            return run.run()


# --- set up ------------------------------------------------------------------------------------


def _check_output(config: TrainConfig, is_first: bool) -> None:
    """Refuse to mix two runs; make way where that was asked for."""
    out = config.output_dir
    last = out / "checkpoints" / LAST
    if config.resume:
        if config.overwrite:
            raise UsageError("--resume goes on with what --overwrite would remove; give one")
        if not last.is_file():
            raise UsageError(f"--resume: there is no checkpoint {last}")
        return
    ours = [path for path in (out / RESULTS, out / "checkpoints", out / STEPS) if path.exists()]
    if not is_first or not ours:
        return
    if not config.overwrite:
        raise UsageError(f"--output-dir {out} holds a run; use --resume or --overwrite")
    for path in ours:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


# --- the loop ----------------------------------------------------------------------------------


@dataclass
class _Tally:
    """What a rank has of an epoch that is under way; small enough for every checkpoint."""

    steps: int = 0
    samples: int = 0
    """Of all ranks."""
    seconds: float = 0.0
    """By the clock on the wall: the steps, what lies between them, and checkpoints."""
    sums: dict[str, float] = field(default_factory=dict)
    """Of the loss and the workload's metrics, this rank's, one for each step."""


class _Run:
    """One training on one rank."""

    def __init__(
        self,
        fabric: Any,
        workload: Workload,
        name: str,
        config: TrainConfig,
        stop: Stop,
        progress: Callable[[Progress], None],
        clock: Clock,
    ) -> None:
        self.fabric, self.workload, self.name, self.config = fabric, workload, name, config
        self.stop, self.clock = stop, clock
        self.progress = progress if fabric.is_global_zero else lambda now: None
        self.device: torch.device = fabric.device
        ranks = {"rank": fabric.global_rank, "world_size": fabric.world_size}
        for split, samples in (("training", workload.train), ("validation", workload.val)):
            if len(samples) == 0:
                raise UsageError(f"{name}: there are no samples for {split}")
        self.order = Order(len(workload.train), config.batch_size, config.seed, "global", **ranks)
        self.val_order = Order(len(workload.val), config.batch_size, **ranks)

        torch.manual_seed(config.seed)
        module = workload.model()
        if config.weights is not None:
            load_weights(
                module, read_file(config.weights, "--weights"), f"--weights {config.weights}"
            )
        if config.channels_last:
            module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.module = module
        self.parameters = sum(p.numel() for p in module.parameters())
        optimizer = workload.optimizer(module)
        net = torch.compile(module) if config.compile else module
        self.model, self.optimizer = fabric.setup(net, optimizer)
        # Fabric moved the module; where its own layers went, the optimizer's parameters are.
        self.raw_optimizer: Optimizer = self.optimizer.optimizer
        self.steps_per_epoch = self.order.num_batches
        self.num_steps = config.epochs * self.steps_per_epoch
        if config.max_steps is not None:
            self.num_steps = min(self.num_steps, config.max_steps)
        self.scheduler = LambdaLR(self.raw_optimizer, self._rate)

        self.laps: Laps | DeviceLaps = Laps(clock)
        if self.device.type == "cuda":
            self.laps = DeviceLaps(clock, torch.cuda)
        self._sums = any(isinstance(m, DistributedDataParallel) for m in self.model.modules())

        self.checkpoints = Checkpoints(
            config.output_dir,
            fabric.save,
            writes=fabric.is_global_zero,
            keep=config.keep_top,
            judge=workload.judge,
            higher=workload.higher_is_better,
        )
        self.position, self.step = Position(0, 0), 0
        self.tally, self.history = _Tally(), list[dict[str, Any]]()
        self.resumed: list[int] = []
        self.pending: list[tuple[int, int, int, Tensor, Mapping[str, Tensor]]] = []
        self.loss = math.nan
        self._seed_rank()
        if config.resume:
            self._load(read(config.output_dir / "checkpoints" / LAST, name))
        self.log = StepLog(config.output_dir, fabric.global_rank, self.step)
        self.feed = self._feed("train", workload.train, self.order)
        self.val_feed = self._feed("val", workload.val, self.val_order)
        if fabric.is_global_zero:
            write_json(config.output_dir / ARGS, self._args())

    def _feed(self, split: str, samples: Samples, order: Order) -> Feed:
        own = getattr(self.workload, "feed", None)
        if own is not None:
            feed: Feed = own(split, order)
            return feed
        pin = self.device.type == "cuda"
        return TorchFeed(samples, order, self.workload, self.config, pin)

    def _seed_rank(self) -> None:
        """From here on each rank draws numbers of its own."""
        words = np.random.SeedSequence([self.config.seed, self.fabric.global_rank])
        seed = int(words.generate_state(1)[0])
        torch.manual_seed(seed)
        np.random.seed(seed)
        import random

        random.seed(seed)

    def _rate(self, step: int) -> float:
        """The learning rate at a step, as a share of --learning-rate."""
        config = self.config
        rise = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
        if config.schedule == "cosine":
            return rise * 0.5 * (1 + math.cos(math.pi * min(1.0, step / self.num_steps)))
        if config.schedule == "step":
            return rise * float(0.1 ** (step // (self.steps_per_epoch * config.decay_epochs)))
        return rise

    def run(self) -> dict[str, Any]:
        began = self.clock()
        for epoch in range(self.position.epoch, self.config.epochs):
            self.module.train()
            if not self._epoch(epoch):
                break
            scores = self._validate()
            self._epoch_done(epoch, scores)
            if self.step >= self.num_steps:
                break
        self.stop.forget()
        return self._results("complete", self.clock() - began)

    def close(self) -> None:
        self.log.close()
        self.feed.close()
        self.val_feed.close()

    def _epoch(self, epoch: int) -> bool:
        """The steps of an epoch from where the run stands; whether there was one to take."""
        laps, number = self.laps, self.position.batch
        self._since = self.clock()
        if number < self.steps_per_epoch:
            batches = iter(self.feed.epoch(epoch, number))
        while number < self.steps_per_epoch and self.step < self.num_steps:
            laps.begin()
            items, batch = next(batches)
            laps.lap("data_wait")
            self._step(batch)
            number += 1
            self._boundary(epoch, number, len(items))
        self._drain()
        return self.tally.steps > 0

    def _step(self, batch: Batch) -> None:
        laps, config = self.laps, self.config
        batch = self._to_device(batch)
        laps.lap("transfer")
        loss, metrics = self.workload.loss(self.model, batch)
        laps.lap("forward")
        if self._sums:
            mark_computed(loss, laps)
        self.fabric.backward(loss)
        laps.lap("communication" if self._sums else "backward")
        if config.clip_norm is not None:
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.scheduler.step()
        laps.lap("optimizer")
        laps.end()
        self._newest = loss.detach(), {name: value.detach() for name, value in metrics.items()}

    def _to_device(self, batch: Batch) -> Batch:
        batch = self.fabric.to_device(batch)
        return _channels_last(batch) if self.config.channels_last else batch

    def _boundary(self, epoch: int, done: int, samples: int) -> None:
        """A step has ended, and nothing of the next has begun."""
        self.step += 1
        self.position = Position(epoch, done)
        self.pending.append((self.step, epoch, samples, *self._newest))
        every = self.config.checkpoint_every
        save = every is not None and self.step % every == 0
        stop = self.stop.agreed()
        if save or stop or self.step % self.laps.drain_every == 0:
            self._drain()
        if done == self.steps_per_epoch or self.step == self.num_steps:
            # The epoch is whole; its scores come first, and then its checkpoint.
            if not stop:
                return
        elif not (save or stop):
            return
        self.checkpoints.save(self._state())
        if stop:
            self._results("stopped", None)
            raise Incomplete(
                f"stopped by {self.stop.raised or 'a signal to another rank'} after step "
                f"{self.step} of {self.num_steps}; --resume goes on from "
                f"{self.checkpoints.folder / LAST}"
            )

    def _drain(self) -> None:
        """Take the times and losses of the steps since the last time."""
        times = self.laps.drain()
        now = self.clock()
        self.tally.seconds += now - self._since
        self._since = now
        for row, (step, epoch, samples, loss, metrics) in zip(times, self.pending, strict=True):
            self.loss = float(loss)
            if not math.isfinite(self.loss):
                raise PenstockError(
                    f"the loss is {self.loss} at step {step}; lower --learning-rate "
                    f"{self.config.learning_rate} or set --clip-norm"
                )
            self.log.add(step, epoch, samples, self.loss, row)
            tally = self.tally
            tally.steps += 1
            tally.samples += samples * self.fabric.world_size  # equally many on every rank
            for name, value in {"train_loss": loss, **metrics}.items():
                tally.sums[name] = tally.sums.get(name, 0.0) + float(value)
        if self.pending:
            last = self.history[-1] if self.history else {}
            scores = {k: v for k, v in last.items() if k.startswith("val_")}
            step, epoch = self.pending[-1][:2]
            self.progress(Progress(step, self.num_steps, epoch, self.loss, scores))
        self.pending.clear()

    # --- validation -----------------------------------------------------------------------------

    def _validate(self) -> dict[str, float]:
        """The scores of all validation samples, each counted once; the same on every rank."""
        self.module.eval()
        began = self.clock()
        mine: dict[int, Answer] = {}
        with torch.no_grad():
            for items, batch in self.val_feed.epoch(0, 0):
                with self.fabric.autocast():
                    answers = self.workload.answers(self.module, self._to_device(batch))
                mine |= dict(zip(items.tolist(), answers, strict=True))
        every: list[Any] = [mine]
        if self.fabric.world_size > 1:
            every = [None] * self.fabric.world_size
            dist.all_gather_object(every, mine)
        scores = None
        if self.fabric.is_global_zero:
            # The last batches are filled up with samples that other ranks have answered too.
            answers_by_index = {i: answer for part in every for i, answer in part.items()}
            missing = len(self.workload.val) - len(answers_by_index)
            assert not missing, f"{missing} validation samples were not answered"
            scores = self.workload.scores(dict(sorted(answers_by_index.items())))
        found: dict[str, float] = self.fabric.broadcast(scores)
        self.val_seconds = self.clock() - began
        return found

    def _epoch_done(self, epoch: int, scores: dict[str, float]) -> None:
        tally = self.tally
        means = {name: total / max(1, tally.steps) for name, total in tally.sums.items()}
        seconds = tally.seconds
        if self.fabric.world_size > 1:
            names = sorted(means)
            summed = torch.tensor([means[n] for n in names], dtype=torch.float64)
            summed = self.fabric.all_reduce(summed.to(self.device), reduce_op="mean")
            means = dict(zip(names, summed.tolist(), strict=True))
            slowest = torch.tensor(seconds, dtype=torch.float64).to(self.device)
            seconds = float(self.fabric.all_reduce(slowest, reduce_op="max"))
        self.history.append(
            {
                "epoch": epoch,
                "step": self.step,
                "samples": tally.samples,
                "train_s": seconds,
                "val_s": self.val_seconds,
                "learning_rate": self.raw_optimizer.param_groups[0]["lr"],
                **means,
                **scores,
            }
        )
        self.tally = _Tally()
        self.position = Position(epoch + 1, 0)
        best = self.checkpoints.rank(epoch, scores)
        self.checkpoints.save(self._state())
        self.checkpoints.tidy()
        if best:
            self.checkpoints.save_weights(self.module.state_dict())
        self._results("running", None)
        self.progress(Progress(self.step, self.num_steps, epoch, self.loss, scores, True))

    # --- state ----------------------------------------------------------------------------------

    def _state(self) -> State:
        randoms = random_state(self.device)
        every: list[Any] = [randoms]
        if self.fabric.world_size > 1:
            every = [None] * self.fabric.world_size
            dist.all_gather_object(every, randoms)
        return {
            "workload": self.name,
            "model": self.module.state_dict(),
            "optimizer": self.raw_optimizer.state_dict(),
            "scheduler": {"last_epoch": self.scheduler.last_epoch},
            "scaler": self.fabric._precision.state_dict(),
            "order": self.order.state_dict(*self.position),
            "random": every,
            "step": self.step,
            "tally": vars(self.tally),
            "history": self.history,
            "best": self.checkpoints.best,
            "resumed": self.resumed,
        }

    def _load(self, state: State) -> None:
        where = f"--resume: {self.config.output_dir / 'checkpoints' / LAST}"
        load_weights(self.module, state["model"], where)
        self.position = self.order.from_state(state["order"])
        self.raw_optimizer.load_state_dict(state["optimizer"])
        self.fabric._precision.load_state_dict(state["scaler"])
        self.step = state["step"]
        self.scheduler.last_epoch = state["scheduler"]["last_epoch"]
        self.tally = _Tally(**state["tally"])
        if self.tally.steps and self.position.batch == 0:  # stopped before an epoch's validation
            self.position = Position(self.position.epoch - 1, self.steps_per_epoch)
        self.history = state["history"]
        self.checkpoints.best = state["best"]
        self.resumed = [*state["resumed"], self.step]
        if len(state["random"]) == self.fabric.world_size:
            set_random_state(state["random"][self.fabric.global_rank], self.device)

    # --- what is told ---------------------------------------------------------------------------

    def _args(self) -> dict[str, Any]:
        return {
            "workload": self.name,
            **self.config.model_dump(mode="json"),
            "penstock": __version__,
            "torch": torch.__version__,
        }

    def _results(self, status: str, seconds: float | None) -> dict[str, Any]:
        """Gather what every rank knows and write it; called on all of them."""
        mine = {
            "rank": self.fabric.global_rank,
            "phases": self.log.summary(),
            "memory": memory(self.device),
        }
        every: list[Any] = [mine]
        if self.fabric.world_size > 1:
            every = [None] * self.fabric.world_size
            dist.all_gather_object(every, mine)
        rows = self.history
        samples, trained = sum(r["samples"] for r in rows), sum(r["train_s"] for r in rows)
        best = self.checkpoints.best[0] if self.checkpoints.best else None
        results = {
            "workload": self.name,
            "status": status,
            "parameters": self.parameters,
            "device": _device_name(self.device),
            "world_size": self.fabric.world_size,
            "batch_size": self.config.batch_size,
            "global_batch_size": self.order.global_batch,
            "epochs": len(rows),
            "steps": self.step,
            "samples": samples,
            "training_s": trained,
            "validation_s": sum(r["val_s"] for r in rows),
            "session_s": seconds,
            "epoch_times_s": [r["train_s"] for r in rows],
            "samples_per_s": samples / trained if trained else None,
            "judge": self.workload.judge,
            "best": best,
            "final": {k: v for k, v in rows[-1].items() if k.startswith("val_")} if rows else None,
            "history": rows,
            "ranks": every,
            "resumed_at_steps": self.resumed,
        }
        if self.fabric.is_global_zero:
            write_json(self.config.output_dir / RESULTS, results)
        return {**results, "rank": self.fabric.global_rank}


def _channels_last(batch: Batch) -> Batch:
    """Every image batch in a batch, (sample, channel, row, column), with channels innermost."""
    if isinstance(batch, Tensor):
        return batch.contiguous(memory_format=torch.channels_last) if batch.ndim == 4 else batch
    if isinstance(batch, Mapping):
        return {key: _channels_last(value) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(_channels_last(value) for value in batch)
    return batch


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
