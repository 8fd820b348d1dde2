"""The documents of a run: its arguments, its steps, its results, and what its trackers get.

OUT/args.json               written as the run begins
OUT/steps/rank0.csv         a row for each step of a rank, with its times
OUT/training_results.json   written at the end of each epoch and of the run
OUT/pictures.npz            outputs of the best model for some samples, if the workload shows any
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .. import __version__
from ..base import (
    ARGS,
    PICTURES,
    STEPS,
    Labels,
    TrainConfig,
    default_name,
    flattened,
    knobs_of_others,
    read_json,
    replacing,
    run_labels,
    scrubbed,
    write_json,
)
from ..instruments import PHASES, collect_environment, machine_and_commit, peak_rss, torch_flags
from .checkpoint import Checkpoints, RunState
from .ranks import device_name, gather, host_name, job_facts
from .step import Stepper
from .workloads import Workload


class RunReport:
    """Writes the documents of a run. Every rank makes the same calls; the first rank writes."""

    def __init__(
        self,
        fabric: Any,
        workload: Workload,
        name: str,
        config: TrainConfig,
        stepper: Stepper,
        state: RunState,
        checkpoints: Checkpoints,
        global_batch: int,
    ) -> None:
        """``global_batch`` is the number of samples of a step, of all ranks together."""
        self._fabric, self._workload, self._name, self._config = fabric, workload, name, config
        self._stepper, self._state, self._checkpoints = stepper, state, checkpoints
        self._global_batch = global_batch
        self._job = job_facts(gather(host_name(), fabric.world_size))
        before = config.output_dir / ARGS
        resumed = read_json(before) if config.resume and before.is_file() else None
        kind = kind_of_run(name, fabric.world_size, fabric.device.type)
        self.labels = fabric.broadcast(run_labels(config, default_name(*kind), resumed))
        """The name and the tags of the run, the same on every rank."""
        self._made_on = machine_and_commit() if fabric.is_global_zero else {}

    def write_args(self) -> None:
        """Write the arguments before all other files, to show which run those belong to."""
        args = {
            "workload": self._name,
            **self.labels,
            **self._config.model_dump(mode="json", exclude=set(Labels.model_fields)),
            "penstock": __version__,
            "torch": torch.__version__,
            "launch": self._job,
        }
        self.write(ARGS, args)
        self._fabric.barrier()

    def facts(self) -> dict[str, Any]:
        """What trackers log of the run as it begins."""
        device = self._fabric.device
        facts = {
            "global_batch_size": self._global_batch,
            "model_parameters": self._stepper.parameters,
            "launch": self._job,
            "device": device_name(device),
            "torch": torch_flags(),
            **collect_environment(),
        }
        ranks = self._fabric.world_size
        return run_facts(self._name, self._config, ranks, device.type, self.labels, facts)

    def results(self, status: str, seconds: float | None, log: StepLog) -> dict[str, Any]:
        """The results so far, with the times and memory of every rank.

        ``seconds`` is the length of this session; None while it goes on.
        """
        fabric, stepper, rows = self._fabric, self._stepper, self._state.history
        mine = {
            "rank": fabric.global_rank,
            "host": host_name(),
            "phases": log.summary(),
            "memory": memory(fabric.device),
        }
        samples, trained = sum(r["samples"] for r in rows), sum(r["train_s"] for r in rows)
        return {
            "workload": self._name,
            **self.labels,
            "status": status,
            "parameters": stepper.parameters,
            "trainable_parameters": stepper.trainable_parameters,
            "gradient_bytes": stepper.gradient_bytes,
            "facts": dict(getattr(self._workload, "facts", {})),
            "device": device_name(fabric.device),
            "world_size": fabric.world_size,
            "batch_size": self._config.batch_size,
            "global_batch_size": self._global_batch,
            "epochs": len(rows),
            "steps": self._state.step,
            "steps_per_epoch": -(-self._state.order.num_batches // self._config.grad_accum_steps),
            "samples": samples,
            "repeated_samples": self._state.order.num_repeated,
            "training_s": trained,
            "validation_s": sum(r["val_s"] for r in rows),
            "session_s": seconds,
            "epoch_times_s": [r["train_s"] for r in rows],
            "samples_per_s": samples / trained if trained else None,
            "judge": self._workload.judge,
            "best": self._checkpoints.best,
            "final": scores_of(rows[-1]) if rows else None,
            "history": rows,
            "ranks": gather(mine, fabric.world_size),
            "launch": self._job,
            **self._made_on,
            "resumed_at_steps": self._state.resumed,
        }

    def write_pictures(self, pictures: Callable[[], Mapping[str, NDArray[Any]]] | None) -> None:
        """Write outputs of the model for some samples, if the workload shows any."""
        if pictures is not None and self._fabric.is_global_zero:
            arrays: Mapping[str, Any] = pictures()
            with replacing(self._config.output_dir / PICTURES) as draft, draft.open("wb") as file:
                np.savez_compressed(file, **arrays)

    def write(self, name: str, document: Mapping[str, Any]) -> None:
        """Write a document of the run into its folder."""
        if self._fabric.is_global_zero:
            write_json(self._config.output_dir / name, scrubbed(document))


def scores_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The scores of the validation in a row of the history."""
    return {k: v for k, v in row.items() if k.startswith("val_") and k != "val_s"}


def kind_of_run(workload: str, world_size: int, device: str) -> tuple[str, str]:
    """A word for a workload, and one for its devices, such as ``spiral`` and ``4gpu``."""
    kind = "gpu" if device == "cuda" else device
    return re.sub(r"\W+", "_", workload.rpartition(":")[2]), f"{world_size}{kind}"


def run_facts(
    workload: str,
    config: TrainConfig,
    world_size: int,
    device: str,
    labels: Mapping[str, Any],
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """What trackers log of a run as it begins.

    Args:
        workload: Its name.
        config: Its settings. Those that change neither the weights nor the speed are left out.
        world_size: The number of ranks.
        device: The kind of their devices.
        labels: Its name and its tags.
        facts: What else describes it, such as its environment; nested.

    Returns:
        The project, the name, the words and tags by which runs are found, and the hyperparameters.
    """
    settings = config.model_dump(mode="json", exclude_none=True)
    silent = _SILENT | knobs_of_others(workload)
    chosen = {name: value for name, value in settings.items() if name not in silent}
    numbers = {name: value for name, value in chosen.items() if isinstance(value, int | float)}
    return {
        "project": config.project,
        "name": labels["name"],
        "words": [*kind_of_run(workload, world_size, device)],
        "tags": labels["tags"],
        "hyperparameters": {
            "workload": workload,
            "world_size": world_size,
            **flat(chosen),
            **numbers,
            **flat({"tag": labels["tags"], **facts}),
        },
    }


_SILENT = frozenset(
    "name tag output_dir resume overwrite track track_every project profile profile_steps".split()
)
"""The knobs that change neither the trained weights nor the speed."""


def flat(value: Mapping[str, Any]) -> dict[str, str]:
    """Nested settings as texts by dotted names, without those that are None.

    >>> flat({"launch": {"job_id": "7", "hosts": ["a", "b"]}, "git": None})
    {'launch.job_id': '7', 'launch.hosts': 'a b'}
    """
    return {
        name: " ".join(map(str, item)) if isinstance(item, list | tuple) else str(item)
        for name, item in flattened(value)
        if item is not None
    }


_COLUMNS = ("step", "epoch", "samples", "loss", "step_s", *(f"{phase}_s" for phase in PHASES))


class StepLog:
    """The CSV of a rank's steps, one row each. A resumed run drops the rows of steps that it
    repeats."""

    def __init__(self, out: Path, rank: int, done: int) -> None:
        self.path = out / STEPS / f"rank{rank}.csv"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [row for row in self._rows() if int(row["step"]) <= done] if done else []
        with replacing(self.path) as draft, draft.open("w", newline="") as file:
            writer = csv.DictWriter(file, _COLUMNS)
            writer.writeheader()
            writer.writerows(kept)
        self.loss = float(kept[-1]["loss"]) if kept else math.nan
        """The loss of the last step that an earlier session took; NaN where none did."""
        self._file = self.path.open("a", newline="")
        self._writer = csv.DictWriter(self._file, _COLUMNS)

    def add(
        self, step: int, epoch: int, samples: int, loss: float, seconds: Mapping[str, float]
    ) -> None:
        """Add the row of a step; ``seconds`` holds the times of ``step`` and of its phases."""
        times = {f"{name}_s": f"{value:.9f}" for name, value in seconds.items()}
        row = {"step": step, "epoch": epoch, "samples": samples, "loss": loss}
        self._writer.writerow({**row, **times})

    def flush(self) -> None:
        """Write the rows to the file, so that they are kept if the process is killed."""
        try:
            self._file.flush()
        except OSError as error:
            error.filename = str(self.path)
            raise

    def summary(self) -> dict[str, dict[str, float] | None]:
        """The total and median seconds of the step and of each phase; None for a phase without
        times."""
        self.flush()
        rows = self._rows()
        totals: dict[str, dict[str, float] | None] = {}
        for name in ("step", *PHASES):
            values = [float(row[f"{name}_s"]) for row in rows if row[f"{name}_s"]]
            totals[name] = {"total_s": sum(values), "median_s": median(values)} if values else None
        return totals

    def close(self) -> None:
        self._file.close()

    def _rows(self) -> list[dict[str, str]]:
        if not self.path.is_file():
            return []
        text = self.path.read_text()
        whole = text[: text.rfind("\n") + 1]  # a killed process may leave half a row
        return list(csv.DictReader(whole.splitlines()))


def memory(device: torch.device) -> dict[str, int | None]:
    """The peaks of memory of this process in bytes: on the host, and on a CUDA device."""
    on_cuda = device.type == "cuda"
    return {
        "host_peak": peak_rss(),
        "device_peak": torch.cuda.max_memory_allocated(device) if on_cuda else None,
        "device_reserved": torch.cuda.max_memory_reserved(device) if on_cuda else None,
    }
