"""``penstock suite``: benchmark a machine by trainings of the xView3 detector.

``run_benchmark.sh`` takes the same arguments. Each flag of the seed (the tools that Penstock
replaces) has two spellings: ``--train-labels`` is ``--train-label-file``, ``--train-chips`` is
``--train-chips-path``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..base import (
    SUITE_LEDGER,
    Refused,
    SuiteConfig,
    UsageError,
    add_flags,
    add_kinds,
    format_seconds,
    from_flags,
    held_alone,
    plural,
    significant,
)
from ..bench import (
    DATA_KNOBS,
    LAUNCHES,
    PRESET_DEFAULTS,
    ROOTS,
    SUITE_REPORT,
    SUITE_SYSTEM,
    Case,
    SuitePreset,
    ask_worker,
    check_resumed_suite,
    check_suite_output,
    doubts_of_data,
    fit_preset,
    named_preset,
    prepare_suite,
    read_preset,
    roots_of,
    run_suite,
    suite_case_name,
    suite_cases,
    with_roots,
)
from ..instruments import Ledger, Record
from ..reports import in_text, plot_records, suite_sections, write_suite_report
from . import preprocess, train
from .benchmarks import (
    labelled,
    launcher_of,
    launches_each,
    print_written,
    shown_launches,
)
from .progress import figures_of, say

KINDS = {
    "preprocess": "cut scenes into chips, like penstock preprocess",
    "train": "train the detector once, like penstock train",
    "benchmark": "run the preset in a file, or the seed's presets that fit this machine",
    "laptop": "preset laptop-rtx3080ti: batches of 4 to 16, 2 to 8 workers, 1 GPU",
    "gb200": "preset gb200: batches of 8 to 64, 4 to 16 workers, 1 GPU",
    "dgx-a100": "preset dgx-a100: batches of 16 to 128, 8 to 32 workers, 8 GPUs",
    "quick": "preset quick: batches of 1 and 2, a small backbone, on any machine",
}
OTHER_NAMES = {"laptop": ["laptop-rtx3080ti"]}
SPELLINGS = {
    "--train-labels": "train_label_file",
    "--val-labels": "val_label_file",
    "--train-chips": "train_chips_path",
    "--val-chips": "val_chips_path",
}
"""Flags of the seed's run_benchmark.sh, by knob. Its Python scripts use the names of the knobs."""


EXAMPLES = r"""
penstock suite preprocess --data-root scenes --train-labels scenes/labels/train.csv \
    --val-labels scenes/labels/validation.csv --output-dir chips
penstock suite train --train-chips chips/train --val-chips chips/val --output-dir run
penstock suite benchmark --config mine.json --train-chips chips/train \
    --val-chips chips/val --output-dir suite   # a preset of your own
penstock suite laptop --train-chips chips/train --val-chips chips/val --output-dir suite
penstock suite gb200 --train-chips chips/train --val-chips chips/val --output-dir suite
penstock suite dgx-a100 --train-chips chips/train --val-chips chips/val --output-dir suite
penstock suite quick --train-chips chips/train --val-chips chips/val --output-dir suite
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = add_kinds(parser, KINDS, aliases=OTHER_NAMES)
    cut = kinds.pop("preprocess")
    preprocess.add_arguments(cut)
    _spell(cut, list(SPELLINGS)[:2])
    for kind, parser in kinds.items():
        if kind == "train":
            train.add_arguments(parser)
            parser.add_argument(
                "--data-root", type=Path, metavar="PATH", help="folder of train/ and validation/"
            )
        else:
            add_flags(parser, SuiteConfig)
        if kind == "benchmark":
            which = parser.add_mutually_exclusive_group(required=True)
            which.add_argument("--config", type=Path, metavar="FILE.json", help="a preset to run")
            which.add_argument(
                "--use-default-configs",
                action="store_true",
                help="run the presets laptop, gb200 and dgx-a100 that fit this machine",
            )
        _spell(parser, SPELLINGS)


def _spell(parser: argparse.ArgumentParser, flags: Iterable[str]) -> None:
    for flag in flags:
        knob = SPELLINGS[flag]
        same = f"same as --{knob.replace('_', '-')}"
        parser.add_argument(flag, dest=knob, default=argparse.SUPPRESS, metavar="PATH", help=same)


def run(args: argparse.Namespace) -> int:
    if args.kind == "preprocess":
        return preprocess.run(args)
    if args.kind == "train":
        return train.run(_with_roots(args))
    return _benchmark(args)


def _with_roots(args: argparse.Namespace) -> argparse.Namespace:
    """Fill missing folders of chips from ``--data-root``."""
    if args.data_root is None:
        return args
    given = {knob: getattr(args, knob, None) for knob in ROOTS}
    return argparse.Namespace(**{**vars(args), **roots_of(args.data_root, given)})


def _benchmark(args: argparse.Namespace) -> int:
    asked = _presets(args)
    config = with_roots(from_flags(SuiteConfig, args), asked)
    check_suite_output(config)
    if config.cluster is not None and not config.anyway:
        _check_one_device(asked, all)
    out = config.output_dir
    ledger = Ledger(out / SUITE_LEDGER)
    inputs = [path for name in DATA_KNOBS if isinstance(path := getattr(config, name), Path)]
    device = "cpu" if all(preset.device == "cpu" for preset in asked) else "auto"
    with launcher_of(config, inputs, ledger, device) as launcher:
        case = suite_cases(asked[0], config)[0]
        checked = ask_worker("train", case, config.timeout, launcher)
        gpus = checked.facts["gpus"]
        presets, notes = _fitted(asked, gpus, config.anyway)
        if config.cluster is not None:
            _check_one_device(presets, any)
        notes += doubts_of_data(config)
        labelled(ledger, config, f"suite-{presets[0].name}")
        cases = [case for preset in presets for case in suite_cases(preset, config)]
        if config.resume:
            check_resumed_suite(config, cases, checked.environment["machine_key"])
        system = {**checked.environment, "devices": gpus}
        samples = checked.facts["train_samples"]
        notes += [few for preset in presets if (few := _few_samples(preset, samples))]
        print(*_plan(cases, config, checked.facts, notes), sep="\n", flush=True)
        with held_alone(out / "suite.lock", "runs a suite"):
            prepare_suite(config, system)
            with shown_launches(suite_case_name, _outcome) as progress:
                records = run_suite(cases, config, ledger, progress, launcher)
    figures = figures_of(
        lambda: plot_records("train", records, out / SUITE_REPORT, config.overwrite)
    )
    presets_asked = [preset.model_dump(mode="json") for preset in asked]
    written = write_suite_report(
        out, records, presets_asked, system, notes, figures, config.overwrite
    )
    print("", *in_text(suite_sections(records, notes)), sep="\n")
    print_written([*written, *figures, out / SUITE_SYSTEM, out / SUITE_LEDGER])
    crashed = any(record.status == "crash" for record in records)
    return int(crashed or not any(record.status == "ok" for record in records))


def _check_one_device(presets: Sequence[SuitePreset], which: Callable[..., bool]) -> None:
    """Raise `UsageError` if ``which`` (all or any) of the presets train on several devices."""
    several = [preset for preset in presets if preset.world_size > 1]
    if several and which(preset.world_size > 1 for preset in presets):
        raise UsageError(
            f"preset {several[0].name} trains on {plural(several[0].world_size, 'device')} at "
            "once, and a worker of --cluster has one; leave --cluster out, or give a preset of one "
            "device"
        )


def _presets(args: argparse.Namespace) -> list[SuitePreset]:
    """The presets that the flags ask for."""
    if args.kind != "benchmark":
        return [named_preset(args.kind)]
    if args.use_default_configs:
        return [named_preset(name) for name in PRESET_DEFAULTS]
    preset = read_preset(args.config)
    if not args.config.exists():
        say(f"--config {args.config} is not here: this is Penstock's own {preset.name}")
    return [preset]


def _fitted(
    asked: Iterable[SuitePreset], gpus: list[str], anyway: bool
) -> tuple[list[SuitePreset], list[str]]:
    """The presets that fit this machine, and notes on the others.

    Raises the first `Refused` if no preset fits.
    """
    presets, notes, refused = [], [], list[Refused]()
    for one in asked:
        try:
            preset, note = fit_preset(one, gpus, anyway)
        except Refused as error:
            refused.append(error)
            continue
        presets.append(preset)
        notes += [note] * bool(note)
    if not presets:
        raise refused[0]
    return presets, notes + [f"left out: {str(error).partition(';')[0]}" for error in refused]


def _few_samples(preset: SuitePreset, samples: int) -> str:
    """A warning if the batches of a preset are larger than all that there is to train on."""
    most = max(preset.batch_sizes) * preset.world_size
    if most <= samples:
        return ""
    return (
        f"preset {preset.name} has batches of up to {most} and there is only "
        f"{plural(samples, 'sample')} to train on: larger batches are not full"
    )


def _plan(
    cases: list[Case], config: SuiteConfig, facts: Mapping[str, Any], notes: list[str]
) -> list[str]:
    launches, devices = LAUNCHES[config.effort], ", ".join(facts["gpus"]) or "no GPU"
    samples = f"{plural(facts['train_samples'], 'sample')} to train on"
    samples += f" and {facts['val_samples']} to validate on"
    return [f"{plural(len(cases), 'run')}, {launches_each(launches)}; {samples}; {devices}", *notes]


def _outcome(record: Record) -> str:
    training: dict[str, Any] = record.facts["training"]
    seconds = format_seconds(record.samples_s["step"][0])
    return f"{significant(training['samples_per_s'])} samples/s, {seconds} in all"
