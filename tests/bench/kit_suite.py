"""Presets, command lines and records of suites."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.base import SuiteConfig, build, from_flags
from penstock.bench import named_preset, suite_cases
from penstock.cli import dashed
from penstock.cli import suite as verb
from penstock.instruments.record import Failure, Record

from .records import made_record

CUSTOM = """{
  "name": "custom_benchmark",
  "batch_sizes": [8, 16, 32],
  "num_workers_list": [4, 8, 12],
  "epochs": 5,
  "channels": "vh,vv,bathymetry",
  "learning_rate": 0.005,
  "distributed": false,
  "world_size": 1,
  "save_checkpoints": false,
  "profile_memory": true,
  "profile_gpu": true
}"""
"""The seed's own, to the letter."""


H100 = "NVIDIA H100 80GB HBM3"


DATA = """--data-root /path/to/xview3/data --train-labels /path/to/train.csv
    --val-labels /path/to/validation.csv --train-chips ./preprocessed_data/train
    --val-chips ./preprocessed_data/val"""


def parsed(line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    return parser.parse_args([dashed(word) for word in line.replace("\\\n", " ").split()])


def flags(data: Path, out: Path) -> list[str]:
    return [
        "--data-root", str(data / "scenes"),
        "--train-labels", str(data / "scenes/labels/train.csv"),
        "--val-labels", str(data / "scenes/labels/validation.csv"),
        "--train-chips", str(data / "chips/train"),
        "--val-chips", str(data / "chips/val"),
        "--output-dir", str(out),
    ]  # fmt: skip


def config_for(data: Path, out: Path, **changes: Any) -> SuiteConfig:
    words = " ".join(["quick", *flags(data, out)])
    return from_flags(SuiteConfig, parsed(words)).model_copy(update=changes)


def made_up(
    case: Mapping[str, Any],
    launch: int,
    rate: float,
    *,
    data_wait: float = 1.0,
    peak: int | None = None,
    status: str = "ok",
) -> Record:
    """A launch of a training of 10 s in two epochs."""
    phases: dict[str, Any] = dict.fromkeys(
        ("step", "data_wait", "transfer", "forward", "backward", "communication", "optimizer")
    )
    phases["data_wait"] = {"total_s": data_wait, "median_s": 0.1}
    phases["forward"] = {"total_s": 4.0, "median_s": 0.1}
    training = {
        "samples_per_s": rate, "training_s": 10.0, "validation_s": 2.0, "samples": 10 * rate,
        "epoch_times_s": [6.0, 4.0], "final": {"val_AP": 0.25, "val_loc_fscore": 0.5},
        "parameters": 1000, "world_size": 1, "device": "cpu",
        "ranks": [{"phases": phases, "memory": {"host_peak": 1, "device_peak": peak,
                                                "device_reserved": peak}}],
    }  # fmt: skip
    fields: dict[str, Any] = {"error": Failure(stage="measure", message="no room")}
    if status == "ok":
        busy = {"cpu_percent": 150.0, "gpu_percent": None}
        facts = {"training": training, "train_samples": 20, "utilisation": busy}
        seconds = {"step": (13.0,)}
        fields = {"work": {"samples": 10 * rate}, "samples_s": seconds, "facts": facts}
    fields |= {"memory": {"host_peak": 3 * 2**30}, "environment": {"machine_key": "another"}}
    return made_record("train", case, launch, status, **fields)


def cases(tmp_path, **changes: Any) -> list[dict[str, Any]]:
    one = named_preset("quick").model_copy(update=changes)
    return suite_cases(one, build(SuiteConfig, {"output_dir": tmp_path}))
