"""The suite: a preset's batch sizes and numbers of workers, each a training in a fresh process.

    preset ── batch sizes × workers ──▶ cases ── check ──▶ launches ──▶ ledger ──▶ `suite_report`

    OUT/suite.ledger/records.jsonl          a line for each launch
    OUT/system_info.json                    the machine that it ran on
    OUT/benchmark_NAME_batch8_workers4/     the folder of a training, as `train` makes it, and
                                            telemetry.jsonl; a second launch has _launch1 behind it

Data, labels and devices are checked in a process of their own before anything is created.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...base import (
    ARGS,
    MOST_NAME,
    SUITE_LEDGER,
    TRAIN_DEFAULTS,
    Labels,
    SuiteConfig,
    TrainConfig,
    UsageError,
    build,
    check_alone,
    check_apart,
    check_folder,
    check_replaceable,
    json_text,
    knobs_of_others,
    plural,
    remove,
    write_output,
)
from ...data import Chips, Split, channels_of, seen_again, split_folder
from ...instruments import (
    LEDGER_FILE,
    Ledger,
    Record,
    case_key,
    peak_of_ranks,
    phases_of_ranks,
)
from ...training import TRAIN_LOCK, TRAINS
from ..launch.request import Launch, series_rules
from ..launch.sweep import LAUNCHES, Launcher, SweepStep, in_turn, run_sweep
from .preset import SuitePreset

SUITE_SYSTEM, SUITE_REPORT = "system_info.json", "benchmark_report"
FOLDERS = "benchmark_*_batch*_workers*"
_LEFT = (ARGS, "telemetry.jsonl", LEDGER_FILE)
"""Every folder of a suite has at least one of these files."""
WORKLOAD = "detector"
DATA_KNOBS = (
    "train_data_root val_data_root train_label_file val_label_file train_chips_path val_chips_path "
    "seed"
).split()
"""Knobs of a training that the suite has too."""
KEPT = ("world_size", "save_checkpoints", "profile_memory", "profile_gpu")
"""Keys of a preset that are copied into its cases, beside the knobs of the training."""
ROOTS: dict[str, Split] = {"train_data_root": "train", "val_data_root": "validation"}
"""Knobs of a training, and the splits whose folders they name."""
_CUTS = "penstock suite preprocess makes train and val in its --output-dir"
Case = dict[str, Any]


def with_roots(config: SuiteConfig, presets: Iterable[SuitePreset]) -> SuiteConfig:
    """Fill in the folder of each split, and check that all folders and files exist.

    Args:
        config: the knobs of the suite.
        presets: the presets, whose channels the chips must have.

    Returns:
        The config with a folder for each split.

    Raises:
        UsageError: a folder, labels or chips do not exist.
    """
    if config.data_root is not None:
        given = {knob: getattr(config, knob) for knob in ROOTS}
        config = config.model_copy(update=roots_of(config.data_root, given))
    for knob in ROOTS:
        root = getattr(config, knob)
        if root is not None and not root.is_dir():
            raise UsageError(f"--{knob.replace('_', '-')} {root}: there is no such folder")
    for split in ("train", "val"):
        labels = getattr(config, f"{split}_label_file")
        if labels is not None and not labels.is_file():
            raise UsageError(f"--{split}-labels {labels}: there is no such file")
        path = getattr(config, f"{split}_chips_path")
        if path is None:
            raise UsageError(f"--{split}-chips is required; {_CUTS}")
        try:
            have = Chips(path).channels
        except UsageError as error:
            raise UsageError(f"--{split}-chips {error}; {_CUTS}") from error
        for one in presets:
            if channels_of(one.channels) != have:
                raise UsageError(
                    f"preset {one.name} is for channels {one.channels} and --{split}-chips {path} "
                    f"has {','.join(have)}"
                )
    return config


def doubts_of_data(config: SuiteConfig) -> list[str]:
    """Warnings about the data, for example that training and validation share scenes."""
    assert config.train_chips_path is not None and config.val_chips_path is not None
    note = seen_again(Chips(config.train_chips_path), Chips(config.val_chips_path))
    return [note] if note else []


def roots_of(data_root: Path, given: Mapping[str, Path | None]) -> dict[str, Path]:
    """The folder of each split.

    Args:
        data_root: the folder that holds the splits.
        given: for each knob of `ROOTS`, the folder that the user gave, or None.

    Returns:
        For each knob the folder that was given, or the one in ``data_root``.
    """
    return {knob: given[knob] or split_folder(data_root, split) for knob, split in ROOTS.items()}


def suite_cases(preset: SuitePreset, config: SuiteConfig) -> list[Case]:
    """The cases: a preset's batch sizes by its numbers of workers.

    Args:
        preset: the settings of the suite.
        config: the data and the seed.

    Returns:
        Cases of scenario ``train``.
    """
    left_out = {
        *knobs_of_others(WORKLOAD),
        *Labels.model_fields,
        "output_dir",
        "resume",
        "overwrite",
    }
    about = {"workload": WORKLOAD, "preset": preset.name}
    about |= {name: getattr(preset, name) for name in KEPT}
    cases = []
    for batch, workers in itertools.product(
        dict.fromkeys(preset.batch_sizes), dict.fromkeys(preset.num_workers_list)
    ):
        knobs = build(
            TrainConfig,
            TRAIN_DEFAULTS[WORKLOAD],
            preset.train or {},
            {name: getattr(config, name) for name in DATA_KNOBS},
            {"epochs": preset.epochs, "learning_rate": preset.learning_rate},
            {"batch_size": batch, "num_workers": workers, "distributed": preset.distributed},
        )
        cases.append({**knobs.model_dump(mode="json", exclude=left_out), **about})
    return cases


def check_suite_output(config: SuiteConfig) -> None:
    """Check the folder of a suite before it is used.

    Raises:
        UsageError: ``--output-dir`` holds a suite, and neither ``--resume`` nor ``--overwrite`` is
            given; or it holds foreign files.
    """
    out = config.output_dir
    check_folder(out, "--output-dir")
    chips = {"--train-chips": config.train_chips_path, "--val-chips": config.val_chips_path}
    check_apart(out, "--output-dir", chips)
    if config.resume and config.overwrite:
        raise UsageError("--resume goes on with what --overwrite would remove; give one")
    if _parts(out) and not (config.resume or config.overwrite):
        raise UsageError(
            f"--output-dir {out} holds a suite; --resume runs what it lacks, --overwrite "
            "replaces it"
        )
    for path in _parts(out):
        if path.is_file():
            if not config.overwrite:
                check_replaceable(path, "--output-dir")
        elif any(path.iterdir()) and not any((path / name).is_file() for name in _LEFT):
            raise UsageError(
                f"--output-dir: {path} is in the way and is not part of a suite; move it, "
                "or give another folder"
            )


def check_resumed_suite(config: SuiteConfig, cases: Iterable[Case], here: str) -> None:
    """Check that a suite can be resumed from its ledger.

    Args:
        config: its ``output_dir`` holds the ledger.
        cases: the cases of this suite.
        here: the key of this machine.

    Raises:
        UsageError: the ledger holds other runs, or runs of another machine.
    """
    ours = {case_key("train", case) for case in cases}
    for record in Ledger(config.output_dir / SUITE_LEDGER).records():
        if record.key not in ours:
            raise UsageError(
                f"--resume: --output-dir {config.output_dir} holds another suite, with a run of "
                f"{suite_case_name(record.case)} that is none of these; give another folder"
            )
        machine = record.environment.get("machine_key")
        if machine and machine != here:
            raise UsageError(
                f"--resume: --output-dir {config.output_dir} was measured on another machine "
                f"({machine}, not {here}); give another folder"
            )


def _parts(out: Path) -> list[Path]:
    """The parts of a suite in a folder. A suite that was killed may have no ledger yet."""
    names = (SUITE_LEDGER, SUITE_SYSTEM, f"{SUITE_REPORT}.*", f"{SUITE_REPORT}_*.png", FOLDERS)
    return [path for name in names for path in out.glob(name)]


def prepare_suite(config: SuiteConfig, system: Mapping[str, Any]) -> None:
    """Make the folder, remove what ``--overwrite`` replaces, and write the machine's facts.

    Args:
        config: the knobs of the suite.
        system: the facts of the machine.
    """
    out = config.output_dir
    for path in out.glob(FOLDERS):
        check_alone(path / TRAIN_LOCK, TRAINS)
    remove(_parts(out) if config.overwrite else ())
    write_output("--output-dir", out / SUITE_SYSTEM, json_text(system), replace=config.overwrite)


def run_suite(
    cases: Sequence[Case],
    config: SuiteConfig,
    ledger: Ledger,
    progress: Callable[[SweepStep], None],
    launcher: Launcher = in_turn,
) -> list[Record]:
    """Run the launches that are missing.

    Args:
        cases: the cases, as `suite_cases` made them.
        config: the knobs of the suite.
        ledger: takes the records, and labels them; trainings are named after it.
        progress: is called before and after each launch.
        launcher: runs the launches.

    Returns:
        The records of all cases, the resumed ones among them.
    """
    out = config.output_dir
    of_launch = ("output_dir", *Labels.model_fields)

    def placed(launch: Launch) -> Launch:
        part = launch_folder(launch.case, launch.number)
        folder = out / part
        check_alone(folder / TRAIN_LOCK, TRAINS)
        shutil.rmtree(folder, ignore_errors=True)  # of a launch that was interrupted
        name = f"{ledger.labels['name']} {part}"[:MOST_NAME]
        of_run = {"name": name, "tag": ledger.labels["tags"], "output_dir": str(folder)}
        return replace(launch, case={**launch.case, **of_run})

    def run(launches: Iterable[Launch]) -> Iterator[tuple[Launch, Record]]:
        for launch, record in launcher(map(placed, launches)):
            folder = Path(launch.case["output_dir"])
            case = {name: value for name, value in launch.case.items() if name not in of_launch}
            if not case["save_checkpoints"]:
                shutil.rmtree(folder / "checkpoints", ignore_errors=True)
            yield replace(launch, case=case), finished(record, case)

    return run_sweep(
        "train",
        cases,
        LAUNCHES[config.effort],
        ledger,
        rules=series_rules(1),
        timeout_s=config.timeout,
        memory_limit=None,
        seed=config.seed,
        resume=config.resume,
        launcher=run,
        progress=progress,
    )


def launch_folder(case: Mapping[str, Any], launch: int) -> str:
    """The name of a launch's folder.

    Args:
        case: a case of a suite.
        launch: the number of the launch.

    Returns:
        The name, without its parent folder.
    """
    name = f"benchmark_{case['preset']}_batch{case['batch_size']}_workers{case['num_workers']}"
    return f"{name}_launch{launch}" if launch else name


def suite_case_name(case: Mapping[str, Any]) -> str:
    """The name of a case in progress lines and tables."""
    return f"{case['preset']}, batch {case['batch_size']}, {plural(case['num_workers'], 'worker')}"


def finished(record: Record, case: Mapping[str, Any]) -> Record:
    """The record of a launch with the case without its folder, the seconds of training, validation
    and phases, and the peak memory of the ranks.
    """
    fields: dict[str, Any] = {"case": dict(case), "key": case_key(record.scenario, case)}
    training = record.facts.get("training")
    if training is not None:
        seconds = {"training": training["training_s"], "validation": training["validation_s"]}
        seconds |= phases_of_ranks(training)
        fields["samples_s"] = {**record.samples_s, **{name: (s,) for name, s in seconds.items()}}
        peaks = {name: peak_of_ranks(training, name) for name in ("device_peak", "device_reserved")}
        fields["memory"] = record.memory.model_copy(update=peaks)
    return record.model_copy(update=fields)
