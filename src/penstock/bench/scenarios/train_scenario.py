"""Scenario ``train``: one whole training, as `penstock.training.loop` runs it.

    first step    import libraries and open the data; no work is counted
    second step   the training with its validations and checkpoints; its samples are counted

A sample is the time of a run, and a launch has one. The training times its own steps. Their times,
the epochs, the scores and the memory are in the run's folder. The record has the results in its
fact ``training``, without the history of epochs. A `Sampler` runs beside the training and writes
``OUT/telemetry.jsonl``.

The case is the knobs of ``penstock train`` and

    workload       the workload to train
    world_size     the number of ranks; with ``distributed`` torchrun starts them, as children
    profile_gpu    whether the use of GPUs is sampled
    output_dir     the folder of the run; it differs between two launches of a case
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...base import (
    RESULTS,
    Deferred,
    TrainConfig,
    UsageError,
    build,
    death_signal,
    for_children,
    read_json,
)
from ...cluster import NOT_A_RANK
from ...instruments import Nvml, Sampler, read_rows
from ...training import Workload, make_workload
from . import Phase, Work

torch = Deferred("torch", "train")

TELEMETRY = "telemetry.jsonl"
EVERY_S = 0.5
_SENTENCE = "penstock train: "
"""The beginning of its one sentence of failure."""
_LAST_LINES = 200
_DIE_WITHIN_S = 30.0


class TrainScenario:
    """A training; the second step runs it."""

    def __init__(self, case: Mapping[str, Any]) -> None:
        from ...training import device_of

        self._case, self._config = case, config_of(case)
        cuda = device_of(self._config.device).type == "cuda"
        # Ranks in other processes are not read here; each keeps its own peaks.
        self.device = "cuda:0" if cuda and not self._config.distributed else "cpu"
        self._cuda, self._opened = cuda, False
        self.facts: dict[str, Any] = {}

    def step(self, phase: Phase) -> Work:
        if not self._opened:
            self._opened = True
            self.facts |= data_facts(self._case, self._config)
            return {}
        out = self._config.output_dir
        watched = self._case["world_size"] if self._cuda and self._case["profile_gpu"] else 0
        with Sampler(out / TELEMETRY, EVERY_S, dict, {}, gpus=_Used(watched)):
            if self._config.distributed:
                torchrun(self._case["workload"], self._config, self._case["world_size"])
            else:
                from ...training import train_workload

                train_workload(self._case["workload"], self._config)
        # As rank 0 wrote them, without NaN, which a record cannot hold.
        results = read_json(out / RESULTS)
        del results["history"]
        self.facts["training"] = results
        self.facts["utilisation"] = utilisation(read_rows(out / TELEMETRY)[1])
        return {"samples": results["samples"]}

    def close(self) -> None:
        pass


def check(case: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The case, and the facts of its data and of this machine, without training.

    Raises `UsageError` for data that cannot be trained on.
    """
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return dict(case), {**data_facts(case, config_of(case)), "gpus": gpus}


def config_of(case: Mapping[str, Any]) -> TrainConfig:
    """The settings of a case's training, which replaces the output of an earlier launch."""
    knobs = {name: value for name, value in case.items() if name in TrainConfig.model_fields}
    return build(TrainConfig, knobs, {"overwrite": True})


def data_facts(case: Mapping[str, Any], config: TrainConfig) -> dict[str, Any]:
    """The number of samples of each split, and the kind of torchvision's operators. Raises
    `UsageError` if a split has no samples."""
    workload: Workload = make_workload(case["workload"], config)
    for split, samples in (("train", workload.train), ("val", workload.val)):
        path = getattr(config, f"{split}_chips_path")
        if len(samples) == 0:
            where = f"--{split}-chips-path {path}" if path else case["workload"]
            raise UsageError(f"{where} holds no sample to train or validate on")
    facts: dict[str, Any] = {
        "train_samples": len(workload.train),
        "val_samples": len(workload.val),
    }
    if "torchvision" in sys.modules:
        from ...models import compiled_operators

        facts["torchvision_operators"] = "compiled" if compiled_operators() else "plain torch"
    return facts


def torchrun(workload: str, config: TrainConfig, ranks: int) -> None:
    """Train on this number of local ranks. Raises the error of the first rank that failed."""
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        settings = Path(folder) / "train.json"  # which is YAML too
        settings.write_text(config.model_dump_json(exclude_unset=True))
        command = [sys.executable, "-m", "torch.distributed.run"]
        command += ["--nproc-per-node", str(ranks), "--local-addr", "127.0.0.1"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
        command += ["-m", "penstock", "train", workload, "--config", str(settings)]
        _run(command)


def _run(command: Sequence[str]) -> None:
    """Run a command to its end, and copy its stderr to ours. None of its processes outlives us.

    Its ranks have their own sessions, so killing our group would leave them running. torchrun ends
    them at SIGTERM, which the kernel sends to it when this process ends.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=death_signal(signal.SIGTERM),
        env=for_children(),
    )
    said: deque[str] = deque(maxlen=_LAST_LINES)
    assert process.stderr is not None
    try:
        with process.stderr as lines:
            for line in lines:
                said.append(line.rstrip())
                sys.stderr.write(line)
        code = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(_DIE_WITHIN_S)
    if code:
        raise RuntimeError(f"torchrun ended with exit code {code}: {_fault(said)}")


def _fault(said: Iterable[str]) -> str:
    """The error of the rank that failed first, or the last line of output."""
    lines = [line for line in said if line]
    sentences = [line for line in lines if line.startswith(_SENTENCE)]
    sentences.sort(key=lambda line: line.endswith(NOT_A_RANK))
    return (sentences or lines[-1:] or ["it said nothing"])[0].removeprefix(_SENTENCE)


class _Used(Nvml):
    """The first ``count`` GPUs that torch sees, of all that NVML shows.

    Torch names a partition of a GPU (MIG) differently than NVML; such a one is not found.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        uuids = (torch.cuda.get_device_properties(i).uuid for i in range(count))
        self._uuids = {f"GPU-{uuid}" for uuid in uuids}

    def _find(self) -> list[tuple[int, str, Any]]:
        return [
            gpu for gpu in super()._find() if self._nvml.nvmlDeviceGetUUID(gpu[2]) in self._uuids
        ]


def utilisation(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Mean use in percent over a run: of the CPU by its process tree (100 is one busy core), and of
    its GPUs.

    >>> rows = [{"t": 0, "cpu_percent": None, "gpus": []}, {"t": 2, "cpu_percent": 150, "gpus": []}]
    >>> utilisation([*rows, {"t": 3, "cpu_percent": 90.0, "gpus": []}])
    {'cpu_percent': 130.0, 'gpu_percent': None}
    """
    spans = [
        (now["t"] - before["t"], now["cpu_percent"])
        for before, now in pairwise(rows)
        if now["cpu_percent"] is not None
    ]
    seconds = sum(span for span, _ in spans)
    busy = [gpu["util_percent"] for row in rows for gpu in row["gpus"] or ()]
    read = [percent for percent in busy if percent is not None]
    return {
        "cpu_percent": sum(span * used for span, used in spans) / seconds if seconds else None,
        "gpu_percent": sum(read) / len(read) if read else None,
    }
