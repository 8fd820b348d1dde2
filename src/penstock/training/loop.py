"""Training: one loop of steps for every workload, each step timed, and a run that can be killed.

    Order ──▶ Feed ──▶ transfer ──▶ forward ──▶ backward ──▶ (sum over ranks) ──▶ optimizer
      ▲                                                                              │
      └───────────── step boundary: stop? checkpoint? progress ◀─────────────────────┘

Devices, precision, DDP and the environments that launch ranks are `lightning_fabric`'s. The order
of samples, the times, the checkpoints and what is reported are ours. Which samples a step sees
follows from (seed, epoch, batch) alone, so a run that goes on from a checkpoint, inside an epoch or
not, takes the steps that it would have taken: on a CPU to the last bit,
on a GPU as far as its kernels are deterministic.

    OUT/train.lock              who trains; gone at its end
    OUT/args.json               what was asked, and of which job; the first that a run writes
    OUT/training_results.json   what became of it, rewritten at each epoch's end
    OUT/steps/rank0.csv         every step of a rank: its phases in seconds, its samples, its loss
    OUT/checkpoints/            see `checkpoint`
    OUT/best_model.pth
    OUT/events.jsonl            what trackers hear of the run, see `events`; only with --track
    OUT/profile/                see `profiling`; only with --profile

A signal (SIGTERM, SIGUSR1) sets a flag. The ranks agree on it at a step's boundary, save, and end.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .. import __version__
from ..base import (
    ARGS,
    RESULTS,
    STEPS,
    TRAIN_DEFAULTS,
    TRAIN_FIXED,
    Incomplete,
    PenstockError,
    TrainConfig,
    UsageError,
    build,
    caller_kept,
    check_apart,
    check_folder,
    describe,
    held_alone,
    keep_traceback_in,
    read_json,
    scrubbed,
    speaks_python,
    torch_threads,
    write_json,
)
from ..base import TRACEBACK_FILE as ERROR
from ..data import DOCUMENT
from ..instruments import Clock, collect_environment, torch_flags
from ..loading import Order, Position
from ..models import set_cuda_flags
from . import profiling
from .checkpoint import (
    BEST,
    LAST,
    Checkpoints,
    State,
    load_state,
    random_state,
    read,
    set_random_state,
)
from .feed import ThreadFeed, TorchFeed
from .log_lines import TRAIN_LOCK, TRAINS
from .ranks import Stop, device_name, host_name, launch_of, launched
from .step import Stepper, Taken, rate_of
from .step_log import StepLog, memory
from .tracking import follow
from .tracking.events import EVENTS
from .tracking.protocol import TRACKING_FOLDER
from .tracking.trackers import check_trackers
from .workloads import Answer, Feed, Samples, Workload, make_workload

OURS = (
    RESULTS,
    BEST,
    "checkpoints",
    STEPS,
    EVENTS,
    TRACKING_FOLDER,
    profiling.PROFILE_FOLDER,
    ERROR,
)
"""What one run leaves in its folder and another must not find there."""


@dataclass(frozen=True, slots=True)
class TrainProgress:
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


def train_workload(
    workload: str,
    config: TrainConfig,
    *,
    progress: Callable[[TrainProgress], None] = lambda now: None,
    say: Callable[[str], None] = lambda sentence: None,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """Train a workload, by name or ``package.module:Class``; what `training_results.json` says,
    and ``rank``, that of the process which asks.

    Raises `UsageError` for what cannot be trained so, `Incomplete` where a signal ended the run
    after its checkpoint, and `PenstockError` where the loss is no longer a number. ``say`` is told
    what of this machine makes the run slower than it could be, and that a tracker is waited for.
    """
    check_trackers(config.track)
    with (
        contextlib.ExitStack() as held,
        caller_kept(),
        torch_threads(config.threads),
        launched(config) as fabric,
        Stop() as stop,
    ):
        check_folder(config.output_dir, "--output-dir")
        check_apart(config.output_dir, "--output-dir", _data(config))
        if fabric.is_global_zero:
            held.enter_context(held_alone(config.output_dir / TRAIN_LOCK, TRAINS))
        goes_on = fabric.broadcast(_check_output(config, fabric.is_global_zero))
        if config.resume and not goes_on:
            config = config.model_copy(update={"resume": False})
            if fabric.is_global_zero:
                say(f"--resume: {config.output_dir} holds no checkpoint yet; the run begins anew")
        set_cuda_flags(config.tf32, config.cudnn_benchmark)
        run = _Training(
            fabric, make_workload(workload, config), workload, config, stop, progress, clock
        )
        with contextlib.closing(run), keep_traceback_in(config.output_dir):
            for sentence in run.notes:
                say(sentence)
            run.say = say
            return run.run()


@speaks_python(TrainConfig)
def run_training(workload: str, **knobs: Any) -> dict[str, Any]:
    """Train a workload, by name or ``package.module:Class``; ``knobs`` are the fields of
    `TrainConfig`, which are the flags of ``penstock train``.

    Returns what ``training_results.json`` says. Raises as `train_workload` does.
    """
    return train_workload(workload, build(TrainConfig, TRAIN_DEFAULTS.get(workload, {}), knobs))


def _data(config: TrainConfig) -> dict[str, Path | None]:
    """Folders that hold nothing but data, by flag: chips and packed data sets. Scenes lie in
    folders of their own, beside which there is room."""
    roots = {
        "--train-data-root": config.train_data_root,
        "--val-data-root": config.val_data_root,
    }
    packed = {flag: root for flag, root in roots.items() if root and (root / DOCUMENT).is_file()}
    chips = {
        "--train-chips-path": config.train_chips_path,
        "--val-chips-path": config.val_chips_path,
    }
    return {**packed, **chips}


def _check_output(config: TrainConfig, is_first: bool) -> bool:
    """Refuse to mix two runs; make way where that was asked for. Whether the run goes on with one
    that is there, as the first rank sees it.

    A run that was stopped before its first checkpoint has nothing to go on from, so to resume it is
    to begin anew.
    """
    out = config.output_dir
    if config.resume and config.overwrite:
        raise UsageError("--resume goes on with what --overwrite would remove; give one")
    if not is_first:
        return False
    if config.resume and (out / "checkpoints" / LAST).is_file():
        return True
    had = [out / RESULTS, out / BEST, *(out / "checkpoints").glob("*.pt")]
    if config.resume and (left := [path for path in had if path.exists()]):
        raise UsageError(
            f"--resume: there is no checkpoint {out / 'checkpoints' / LAST}, and {left[0]} is of a "
            "run that had one; --overwrite begins anew"
        )
    ours = [out / name for name in OURS if (out / name).exists()]
    args = read_json(out / ARGS) if (out / ARGS).exists() else {"workload": None}
    if not (isinstance(args, dict) and "workload" in args):
        raise UsageError(f"--output-dir {out}: its {ARGS} is none of ours; give another folder")
    if not ours:
        return False
    if not (config.overwrite or config.resume):
        raise UsageError(f"--output-dir {out} holds a run; use --resume or --overwrite")
    if not (out / ARGS).is_file():
        raise UsageError(
            f"--output-dir {out} holds {ours[0].name} and no {ARGS}, which every run leaves: it "
            "may be somebody else's, and nothing was removed"
        )
    for path in ours:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    return False


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


class _Training:
    """One training on one rank."""

    def __init__(
        self,
        fabric: Any,
        workload: Workload,
        name: str,
        config: TrainConfig,
        stop: Stop,
        progress: Callable[[TrainProgress], None],
        clock: Clock,
    ) -> None:
        self.fabric, self.workload, self.name, self.config = fabric, workload, name, config
        self.stop, self.clock = stop, clock
        self.progress = progress if fabric.is_global_zero else lambda now: None
        self.say: Callable[[str], None] = lambda sentence: None
        self.device: torch.device = fabric.device
        ranks = {"rank": fabric.global_rank, "world_size": fabric.world_size}
        for split, samples in (("training", workload.train), ("validation", workload.val)):
            if len(samples) == 0:
                raise UsageError(f"{name}: there are no samples for {split}")
        self.order = Order(len(workload.train), config.batch_size, config.seed, "global", **ranks)
        self.val_order = Order(len(workload.val), config.batch_size, **ranks)

        self.steps_per_epoch = -(-self.order.num_batches // config.grad_accum_steps)
        self.num_steps = config.epochs * self.steps_per_epoch
        if config.max_steps is not None:
            self.num_steps = min(self.num_steps, config.max_steps)
        self.rate = partial(rate_of, config, self.num_steps, self.steps_per_epoch)
        self.stepper = Stepper(fabric, workload, name, config, self.rate, clock)
        self.module, self.parameters = self.stepper.module, self.stepper.parameters

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
        self.pending: list[tuple[int, int, Taken]] = []
        self.loss = math.nan
        self._seed_rank()
        if config.resume:
            self._resume(read(config.output_dir / "checkpoints" / LAST, name))
        if config.profile:
            profiling.check_profiling(config.profile_steps, self.num_steps - self.step)
            self.stepper.laps = profiling.ProfiledLaps(
                self.stepper.laps,
                config.output_dir,
                fabric.global_rank,
                config.profile_steps,
                self.device.type == "cuda",
                clock,
            )
        self.launch = launch_of(self._gather(host_name()))
        if fabric.is_global_zero:  # the first that a run leaves: whose all the rest is
            write_json(config.output_dir / ARGS, scrubbed(self._args()))
        fabric.barrier()
        self.log = StepLog(config.output_dir, fabric.global_rank, self.step)
        self.feed = self._feed("train", workload.train, self.order)
        self.val_feed = self._feed("val", workload.val, self.val_order)
        self.notes: list[str] = []
        if fabric.is_global_zero:
            self.notes = [*getattr(workload, "notes", ()), getattr(self.feed, "note", "")]
            self.notes = [sentence for sentence in self.notes if sentence]
        self.tracking = follow.Untracked()
        if config.track and fabric.is_global_zero:
            self.tracking = follow.Tracking(config, self.step, self._facts())

    def _feed(self, split: str, samples: Samples, order: Order) -> Feed:
        own = getattr(self.workload, "feed", None)
        if own is not None:
            feed: Feed = own(split, order)
            return feed
        by_threads = getattr(self.workload, "feeds_by_threads", False)
        pin = self.device.type == "cuda"
        return (ThreadFeed if by_threads else TorchFeed)(
            samples, order, self.workload, self.config, pin
        )

    def _seed_rank(self) -> None:
        """From here on each rank draws numbers of its own."""
        words = np.random.SeedSequence([self.config.seed, self.fabric.global_rank])
        seed = int(words.generate_state(1)[0])
        torch.manual_seed(seed)
        np.random.seed(seed)
        import random

        random.seed(seed)

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
        self.tracking.finish("failed", {})  # a run that has ended otherwise has said so
        if isinstance(self.stepper.laps, profiling.ProfiledLaps):
            self.stepper.laps.close()
        self.log.close()
        self.feed.close()
        self.val_feed.close()

    def _epoch(self, epoch: int) -> bool:
        """The steps of an epoch from where the run stands; whether there was one to take."""
        number, last = self.position.batch, self.order.num_batches
        self._since = self.clock()
        if number < last:
            batches = iter(self.feed.epoch(epoch, number))
        while number < last and self.step < self.num_steps:
            share = min(self.config.grad_accum_steps, last - number)
            taken = self.stepper.take(batches, share)
            number += share
            self._boundary(epoch, number, taken)
        self._drain()
        return self.tally.steps > 0

    def _boundary(self, epoch: int, done: int, taken: Taken) -> None:
        """A step has ended, and nothing of the next has begun."""
        self.step += 1
        self.position = Position(epoch, done)
        self.pending.append((self.step, epoch, taken))
        every = self.config.checkpoint_every
        # At an epoch's end, too: it may be long until all of it is validated.
        ends = done == self.order.num_batches or self.step == self.num_steps
        save = ends or (every is not None and self.step % every == 0)
        stop = self.stop.agreed()
        if save or stop or self.step % self.stepper.laps.drain_every == 0:
            self._drain()
        if save or stop:
            self._save()
        if stop:
            self._leave()

    def _leave(self) -> None:
        """A signal was heard, and the last checkpoint holds all that was done."""
        self._results("stopped", None)
        raise Incomplete(
            f"stopped by {self.stop.raised or 'a signal to another rank'} after step "
            f"{self.step} of {self.num_steps}; --resume goes on from "
            f"{self.checkpoints.folder / LAST}"
        )

    def _drain(self) -> None:
        """Take the times and losses of the steps since the last time."""
        times = self.stepper.laps.drain()
        now = self.clock()
        self.tally.seconds += now - self._since
        self._since = now
        for row, (step, epoch, taken) in zip(times, self.pending, strict=True):
            self.loss = float(taken.loss)
            if not math.isfinite(self.loss):
                raise PenstockError(
                    f"the loss is {self.loss} at step {step}; lower --learning-rate "
                    f"{self.config.learning_rate} or set --clip-norm"
                )
            self.log.add(step, epoch, taken.samples, self.loss, row)
            rate = float(self.stepper.scheduler.base_lrs[0]) * self.rate(step - 1)
            self.tracking.step(step, epoch, self.loss, rate, row)
            tally = self.tally
            tally.steps += 1
            tally.samples += taken.samples * self.fabric.world_size  # equally many on every rank
            for name, value in {"train_loss": taken.loss, **taken.metrics}.items():
                tally.sums[name] = tally.sums.get(name, 0.0) + float(value)
        if self.pending:
            scores = _scores(self.history[-1]) if self.history else {}
            step, epoch = self.pending[-1][:2]
            self.progress(TrainProgress(step, self.num_steps, epoch, self.loss, scores))
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
                    answers = self.workload.answers(self.module, self.stepper.to_device(batch))
                mine |= dict(zip(items.tolist(), answers, strict=True))
                if self.stop.agreed():
                    self._leave()
        every = self._gather(mine)
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
                "learning_rate": self.stepper.optimizer.param_groups[0]["lr"],
                **means,
                **scores,
            }
        )
        self.tracking.epoch(self.history[-1])
        if self.position.batch == self.order.num_batches:  # and not ended inside it, by --max-steps
            self.tally = _Tally()
            self.position = Position(epoch + 1, 0)
        best = self.checkpoints.rank(epoch, scores)
        self._save()
        self.checkpoints.tidy(epoch)
        if best:
            self.checkpoints.save_weights(self.module.state_dict())
        self._results("running", None)
        self.progress(TrainProgress(self.step, self.num_steps, epoch, self.loss, scores, True))

    # --- state ----------------------------------------------------------------------------------

    def _save(self) -> None:
        self.log.flush()
        self.checkpoints.save(self._state())

    def _state(self) -> State:
        return {
            "workload": self.name,
            "settings": self._settings(),
            "model": self.module.state_dict(),
            "optimizer": self.stepper.optimizer.state_dict(),
            "scheduler": {"last_epoch": self.stepper.scheduler.last_epoch},
            "scaler": self.fabric._precision.state_dict(),
            "order": self.order.state_dict(*self.position),
            "random": self._gather(random_state(self.device)),
            "step": self.step,
            "tallies": self._gather(vars(self.tally)),
            "history": self.history,
            "best": self.checkpoints.best,
            "resumed": self.resumed,
        }

    def _settings(self) -> dict[str, Any]:
        """What must be as it was for a run to go on as the same."""
        settings = self.config.model_dump(mode="json", include=set(TRAIN_FIXED))
        return {**settings, "world_size": self.fabric.world_size}

    def _resume(self, state: State) -> None:
        try:
            self._load(state)
        except PenstockError:
            raise
        except Exception as error:  # what is in a damaged file may be anything
            path = self.config.output_dir / "checkpoints" / LAST
            kind = f"{type(error).__name__}: {describe(error)}"
            raise UsageError(f"--resume: {path} is damaged ({kind})") from error

    def _load(self, state: State) -> None:
        where = f"--resume: {self.config.output_dir / 'checkpoints' / LAST}"
        was, now = state["settings"], self._settings()
        for name in now:
            if was.get(name) != now[name]:
                raise UsageError(
                    f"{where} is of a run with {name} {was.get(name)}, and this has {now[name]}; a "
                    "run goes on as it began, or begins anew with --weights"
                )
        load_state(self.module, state["model"], where)
        self.position = self.order.from_state(state["order"])
        self.stepper.optimizer.load_state_dict(state["optimizer"])
        self.fabric._precision.load_state_dict(state["scaler"])
        self.step = state["step"]
        self.stepper.scheduler.last_epoch = state["scheduler"]["last_epoch"]
        self.tally = _Tally(**state["tallies"][self.fabric.global_rank])
        if self.tally.steps and self.position.batch == 0:  # stopped before an epoch's validation
            self.position = Position(self.position.epoch - 1, self.order.num_batches)
        self.history = state["history"]
        self.checkpoints.best = state["best"]
        self.resumed = [*state["resumed"], self.step]
        set_random_state(state["random"][self.fabric.global_rank], self.device)
        last = self.history[-1]["epoch"] if self.history else None
        if last == self.position.epoch:  # --max-steps ended inside an epoch that now goes on
            self.history.pop()
        elif last == self.position.epoch - 1 and not self.tally.steps:
            # It may have been killed between this checkpoint and what follows one.
            self.checkpoints.tidy(last)
            if self.checkpoints.best[0]["epoch"] == last:
                self.checkpoints.save_weights(self.module.state_dict())

    # --- what is told ---------------------------------------------------------------------------

    def _gather(self, mine: Any) -> list[Any]:
        """What each rank has, on all of them."""
        every: list[Any] = [mine]
        if self.fabric.world_size > 1:
            every = [None] * self.fabric.world_size
            dist.all_gather_object(every, mine)
        return every

    def _facts(self) -> dict[str, Any]:
        """What trackers are told that a run is."""
        facts = follow.run_facts(self.name, self.config, self.fabric.world_size, self.device.type)
        return {
            **facts,
            "parameters": {
                **facts["parameters"],
                "global_batch_size": self.order.global_batch * self.config.grad_accum_steps,
                "model_parameters": self.parameters,
            },
            "environment": {
                "launch": self.launch,
                "device": device_name(self.device),
                "torch": torch_flags(),
                **collect_environment(),
            },
        }

    def _args(self) -> dict[str, Any]:
        return {
            "workload": self.name,
            **self.config.model_dump(mode="json"),
            "penstock": __version__,
            "torch": torch.__version__,
            "launch": self.launch,
        }

    def _results(self, status: str, seconds: float | None) -> dict[str, Any]:
        """Gather what every rank knows and write it; called on all of them."""
        mine = {
            "rank": self.fabric.global_rank,
            "host": host_name(),
            "phases": self.log.summary(),
            "memory": memory(self.device),
        }
        every = self._gather(mine)
        rows = self.history
        samples, trained = sum(r["samples"] for r in rows), sum(r["train_s"] for r in rows)
        best = self.checkpoints.best[0] if self.checkpoints.best else None
        results = {
            "workload": self.name,
            "status": status,
            "parameters": self.parameters,
            "trainable_parameters": self.stepper.trainable_parameters,
            "gradient_bytes": self.stepper.gradient_bytes,
            "facts": dict(getattr(self.workload, "facts", {})),
            "device": device_name(self.device),
            "world_size": self.fabric.world_size,
            "batch_size": self.config.batch_size,
            "global_batch_size": self.order.global_batch * self.config.grad_accum_steps,
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
            "final": _scores(rows[-1]) if rows else None,
            "history": rows,
            "ranks": every,
            "launch": self.launch,
            "resumed_at_steps": self.resumed,
        }
        if isinstance(self.stepper.laps, profiling.ProfiledLaps):
            results["profile"] = self.stepper.laps.told
        if status != "running":
            results["trackers"] = self.tracking.finish(
                status, results, lambda: self.stop.raised is not None, self.say
            )
        if self.fabric.is_global_zero:
            write_json(self.config.output_dir / RESULTS, scrubbed(results))
        return {**results, "rank": self.fabric.global_rank}


def _scores(row: Mapping[str, Any]) -> dict[str, float]:
    """Of an epoch of the history."""
    return {k: v for k, v in row.items() if k.startswith("val_") and k != "val_s"}
