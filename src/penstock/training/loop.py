"""The training loop, the same for every workload. Each step is timed, and a run can be killed at
any time and resumed.

    Order ──▶ Feed ──▶ transfer ──▶ forward ──▶ backward ──▶ (sum over ranks) ──▶ optimizer
      ▲                                                                              │
      └───────────── step boundary: stop? checkpoint? progress ◀─────────────────────┘

`lightning_fabric` provides devices, precision, DDP and the environments of ranks. The order of
samples, the times, the checkpoints and the results are ours. The samples of a step depend only on
(seed, epoch, batch). So a run that resumes from a checkpoint, also inside an epoch, takes the same
steps as a run that was not stopped: to the last bit on a CPU, and on a GPU as far as its kernels
are deterministic.

    OUT/train.lock              the process that trains; removed at the end
    OUT/args.json               the arguments and the job; the first file that a run writes
    OUT/training_results.json   the results, rewritten at the end of each epoch
    OUT/steps/rank0.csv         every step of a rank: its phases in seconds, its samples, its loss
    OUT/checkpoints/            see `checkpoint`
    OUT/best_model.pth          the weights of the best epoch
    OUT/track/                  files of trackers, and metrics of the machine; only with --track
    OUT/profile/                see `profiling`; only with --profile

A signal (SIGTERM, SIGUSR1) sets a flag. All ranks read it at the end of a step, save, and end.
"""

from __future__ import annotations

import contextlib
import errno
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from ..base import (
    CHECKPOINTS,
    RESULTS,
    TRAIN_DEFAULTS,
    Incomplete,
    PenstockError,
    TrainConfig,
    UsageError,
    build,
    caller_kept,
    check_apart,
    check_folder,
    held_alone,
    keep_traceback_in,
    names_parameters,
    torch_threads,
)
from ..instruments import Clock
from ..loading import Order, Position
from ..models import set_cuda_flags
from .checkpoint import LAST, Checkpoints, RunState, Tally, seed_rank
from .feed import feed_of
from .log_lines import TRAIN_LOCK, TRAINS
from .profiling import StepProfiler
from .ranks import Stop, gather, ranks_of
from .results import RunReport, StepLog, scores_of
from .run_folder import data_folders, take_folder
from .step import Schedule, Stepper, StepTaken, why_not_finite
from .tracking import Tracking, check_trackers
from .workloads import Workload, make_workload


@dataclass(frozen=True, slots=True)
class TrainProgress:
    """The progress of a run, at the end of a step."""

    step: int
    """The number of steps done."""
    steps: int
    """The number of steps of the whole run."""
    epoch: int
    """The epoch that the step is of, from 1."""
    epochs: int
    """The number of epochs of the whole run."""
    loss: float
    """The newest loss that was read from the device."""
    scores: Mapping[str, float]
    """The scores of the last epoch that was validated."""
    validated: bool = False
    """True right after the validation of an epoch."""


def train_workload(
    workload: str,
    config: TrainConfig,
    *,
    progress: Callable[[TrainProgress], None] = lambda now: None,
    say: Callable[[str], None] = lambda sentence: None,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """Train a workload.

    Args:
        workload: Its name, ``package.module:Class`` or ``file.py:Class``.
        config: The settings of the training.
        progress: Called on the first rank after steps and validations.
        say: Called with sentences for the user, such as notes on a slow setting.
        clock: Seconds, for the times of steps.

    Returns:
        The document `training_results.json`, and ``rank``, the rank of this process.

    Raises:
        UsageError: The settings or the data cannot be trained on.
        Incomplete: A signal ended the run after it had saved a checkpoint.
        PenstockError: The loss is not finite, or there is too little memory.
    """
    check_trackers(config.track)
    with (
        contextlib.ExitStack() as held,
        caller_kept(),
        torch_threads(config.threads),
        ranks_of(config) as fabric,
        Stop() as stop,
    ):
        check_folder(config.output_dir, "--output-dir")
        check_apart(config.output_dir, "--output-dir", data_folders(config))
        if fabric.is_global_zero:
            held.enter_context(held_alone(config.output_dir / TRAIN_LOCK, TRAINS))
        goes_on = fabric.broadcast(take_folder(config, fabric.is_global_zero))
        if config.resume and not goes_on:
            config = config.model_copy(update={"resume": False})
            if fabric.is_global_zero:
                say(f"--resume: {config.output_dir} holds no checkpoint yet; the run begins anew")
        set_cuda_flags(config.tf32, config.cudnn_benchmark)
        made = make_workload(workload, config)
        held.enter_context(_full_disk(config.output_dir))
        run = _Training(fabric, made, workload, config, stop, progress, say, clock)
        with contextlib.closing(run), keep_traceback_in(config.output_dir):
            return run.run()


@contextlib.contextmanager
def _full_disk(out: Path) -> Iterator[None]:
    """Say of a full disk or quota which file could not be written."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
            raise
        more = "nothing was saved before; make room, and --overwrite begins anew"
        if (out / CHECKPOINTS / LAST).is_file():
            more = "what was saved before is whole, and --resume goes on from it"
        why = str(error.strerror).lower()
        raise PenstockError(f"{error.filename or out} could not be saved: {why}; {more}") from error


@names_parameters(TrainConfig)
def run_training(workload: str, **knobs: Any) -> dict[str, Any]:
    """Train a workload, as ``penstock train`` does.

    Args:
        workload: Its name, ``package.module:Class`` or ``file.py:Class``.
        knobs: Fields of `TrainConfig`, which are the flags of ``penstock train``.

    Returns:
        The document ``training_results.json``, and ``rank``, the rank of this process.

    Raises:
        UsageError: The settings or the data cannot be trained on.
        Incomplete: A signal ended the run after it had saved a checkpoint.
        PenstockError: The loss is not finite, or there is too little memory.
    """
    return train_workload(workload, build(TrainConfig, TRAIN_DEFAULTS.get(workload, {}), knobs))


class _Training:
    """The steps of one training on one rank."""

    def __init__(
        self,
        fabric: Any,
        workload: Workload,
        name: str,
        config: TrainConfig,
        stop: Stop,
        progress: Callable[[TrainProgress], None],
        say: Callable[[str], None],
        clock: Clock,
    ) -> None:
        self.fabric, self.workload, self.config = fabric, workload, config
        self.stop, self.clock = stop, clock
        first, on_cuda = fabric.is_global_zero, fabric.device.type == "cuda"
        self.progress = progress if first else lambda now: None
        self.say = say if first else lambda sentence: None
        ranks = {"rank": fabric.global_rank, "world_size": fabric.world_size}
        for split, samples in (("training", workload.train), ("validation", workload.val)):
            if len(samples) == 0:
                raise UsageError(f"{name}: there are no samples for {split}")
        self.order = Order(len(workload.train), config.batch_size, config.seed, "global", **ranks)
        self.schedule = Schedule.of(config, self.order.num_batches)
        self.stepper = Stepper(fabric, workload, name, config, self.schedule.rate, clock)
        self.checkpoints = Checkpoints(
            config.output_dir,
            fabric.save,
            writes=first,
            judge=workload.judge,
            higher=workload.higher_is_better,
        )
        self.state = RunState(fabric, self.stepper, self.order, self.checkpoints, name, config)
        self.pending: list[tuple[Position, int, StepTaken]] = []
        """Steps whose losses were not read yet: each with its epoch and first batch, and number."""
        seed_rank(config.seed, fabric.global_rank)
        if config.resume:
            self.state.resume()
        self.profiler: StepProfiler | None = None
        if config.profile:
            self.profiler = StepProfiler(
                config.output_dir, fabric.global_rank, config.profile_steps,
                self.schedule.num_steps - self.state.step, on_cuda,
            )  # fmt: skip
        self.report = RunReport(
            fabric, workload, name, config, self.stepper, self.state, self.checkpoints,
            self.order.global_batch * config.grad_accum_steps,
        )  # fmt: skip
        self.report.write_args()
        self.log = StepLog(config.output_dir, fabric.global_rank, self.state.step)
        self.loss = self.log.loss
        val_order = Order(len(workload.val), config.batch_size, **ranks)
        self.feed = feed_of("train", workload, self.order, config, pin=on_cuda)
        self.val_feed = feed_of("val", workload, val_order, config, pin=on_cuda)
        self.tracking = Tracking(config, self.report.facts() if config.track and first else None)

    def run(self) -> dict[str, Any]:
        for sentence in (*getattr(self.workload, "notes", ()), getattr(self.feed, "note", "")):
            if sentence:
                self.say(sentence)
        began = self.clock()
        for epoch in range(self.state.position.epoch, self.config.epochs):
            self.stepper.module.train()
            if not self._epoch(epoch):
                break
            began_val = self.clock()
            scores = self.stepper.validate(self.val_feed, self._leave_if_asked)
            self._epoch_done(epoch, scores, self.clock() - began_val)
            if self.state.step >= self.schedule.num_steps:
                break
        self.stop.forget()
        return self._results("complete", self.clock() - began)

    def close(self) -> None:
        self.tracking.finish("failed", {})  # without effect if the run has ended
        if self.profiler is not None:
            self.profiler.close()
        self.log.close()
        self.feed.close()
        self.val_feed.close()

    def _epoch(self, epoch: int) -> bool:
        """Take the remaining steps of an epoch. Returns whether there were any."""
        number, last = self.state.position.batch, self.order.num_batches
        self._since = self.clock()
        # A run that is resumed at the end of an epoch reads nothing, and only validates.
        if number < last:
            batches = iter(self.feed.epoch(epoch, number))
        while number < last and self.state.step < self.schedule.num_steps:
            share = min(self.config.grad_accum_steps, last - number)
            taken = self.stepper.take(batches, share)
            if self.profiler is not None:
                self.profiler.step()
            self.pending.append((Position(epoch, number), self.state.step + 1, taken))
            number += share
            self._boundary(epoch, number)
        self._drain()
        return self.state.tally.steps > 0

    def _boundary(self, epoch: int, done: int) -> None:
        """Account for a step that has ended; save or end the run if it is time."""
        self.state.step += 1
        step = self.state.step
        self.state.position = Position(epoch, done)
        every = self.config.checkpoint_every
        # The end of an epoch is saved, too, because its validation may take long.
        ends = done == self.order.num_batches or step == self.schedule.num_steps
        save = ends or (every is not None and step % every == 0)
        # After every step, as a vote takes all ranks.
        stop = self.stop.agreed()
        if save or stop or step % self.stepper.timer.drain_every == 0:
            self._drain()
        if save or stop:
            self._save()
        if stop:
            self._leave()

    def _leave_if_asked(self) -> None:
        if self.stop.agreed():
            self._leave()

    def _leave(self) -> NoReturn:
        """End the run after a signal; the last checkpoint holds all steps."""
        self._results("stopped", None)
        raise Incomplete(
            f"stopped by {self.stop.raised or 'a signal to another rank'} after step "
            f"{self.state.step} of {self.schedule.num_steps}; --resume goes on from "
            f"{self.checkpoints.last}"
        )

    def _drain(self) -> None:
        """Read the times and losses of the steps since the last call, and write them."""
        times = self.stepper.timer.drain()
        now = self.clock()
        tally, history = self.state.tally, self.state.history
        tally.seconds += now - self._since
        self._since = now
        for row, (place, step, taken) in zip(times, self.pending, strict=True):
            self.loss, epoch = float(taken.loss), place.epoch
            if not math.isfinite(self.loss):
                share = min(self.config.grad_accum_steps, self.order.num_batches - place.batch)
                again = islice(self.feed.epoch(*place), share)
                why = why_not_finite(again, self.workload, self.config)
                raise PenstockError(f"the loss is {self.loss} at step {step}: {why}")
            self.log.add(step, epoch, taken.samples, self.loss, row)
            rate = float(self.stepper.scheduler.base_lrs[0]) * self.schedule.rate(step - 1)
            self.tracking.step(step, epoch, self.loss, rate, row)
            tally.add(taken, self.fabric.world_size)
        if self.pending:
            place, *_ = self.pending[-1]
            self._tell(place.epoch, scores_of(history[-1]) if history else {})
        self.pending.clear()

    def _tell(self, epoch: int, scores: Mapping[str, float], validated: bool = False) -> None:
        steps, epochs = self.schedule.num_steps, self.config.epochs
        self.progress(
            TrainProgress(self.state.step, steps, epoch + 1, epochs, self.loss, scores, validated)
        )

    def _epoch_done(self, epoch: int, scores: dict[str, float], val_s: float) -> None:
        state = self.state
        parts = gather((state.tally.means(), state.tally.seconds), self.fabric.world_size)
        row = {
            "epoch": epoch,
            "step": state.step,
            "samples": state.tally.samples,
            "train_s": max(seconds for _, seconds in parts),
            "val_s": val_s,
            "learning_rate": self.stepper.optimizer.param_groups[0]["lr"],
            **{name: sum(mean[name] for mean, _ in parts) / len(parts) for name in parts[0][0]},
            **scores,
        }
        state.history.append(row)
        self.tracking.epoch(row)
        # --max-steps may end a run inside an epoch; a resumed run finishes that epoch.
        if state.position.batch == self.order.num_batches:
            state.tally, state.position = Tally(), Position(epoch + 1, 0)
        best = self.checkpoints.rank(epoch, scores)
        # The state first: a run that is killed in between makes up for the weights as it resumes.
        self._save()
        if best:
            self.checkpoints.save_weights(self.stepper.module.state_dict())
            self.report.write_pictures(self.stepper.pictures)
        self._results("running", None)
        self._tell(epoch, scores, validated=True)

    def _save(self) -> None:
        self.log.flush()
        self.state.save()

    def _results(self, status: str, seconds: float | None) -> dict[str, Any]:
        """Write the results and return them; every rank calls this."""
        results = self.report.results(status, seconds, self.log)
        if status != "running":
            results["trackers"] = self.tracking.finish(
                status, results, lambda: self.stop.raised is not None, self.say
            )
        self.report.write(RESULTS, results)
        return {**results, "rank": self.fabric.global_rank}
