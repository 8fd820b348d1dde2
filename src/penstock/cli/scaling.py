"""``penstock scaling``: how runs scale with devices, and a prediction for more of them.

logs | results | ledger | tracker -> runs -> studies, by kind -> tables, sentences, figures
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..base import (
    NotComparable,
    ScalingConfig,
    SimulateConfig,
    UsageError,
    add_flags,
    check_belongs,
    check_folder,
    check_outputs,
    from_flags,
    plural,
    write_output,
)
from ..reports import Section, in_text, markdown_page
from ..scaling import (
    A_GPU,
    DeviceStep,
    Network,
    Study,
    TrainingRun,
    assumptions_of,
    device_of_run,
    metrics_table,
    notes,
    plot_scaling,
    points_to_csv,
    predict_step,
    prediction_table,
    read_runs,
    report_of_studies,
    results_table,
    runs_to_csv,
    same_settings,
    scaling_sections,
    speedup_table,
    studies,
    summary_table,
    with_several,
)
from .progress import figures_of, say

SIMULATE = "simulate"
KNOBS = {
    "penstock scaling": ScalingConfig.model_fields.keys(),
    "penstock scaling simulate": SimulateConfig.model_fields.keys(),
}
INSIDE_LATENCY_S, BETWEEN_LATENCY_S = 3e-6, 10e-6
"""Seconds of a message within a node and between nodes, as NCCL takes them for a turn."""


EXAMPLES = """
penstock scaling outputs/                       # SLURM output, run folders, ledgers, trackers
penstock scaling slurm-*.out --output reports   # a page, CSVs and figures too
penstock scaling outputs/ --metrics             # total time, best validation loss, GPU-Util
penstock scaling simulate outputs/1             # 8 to 4,096 devices, from a run of one
penstock scaling simulate outputs/1 outputs/4   # likewise, fitted to a run of several
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "penstock scaling (PATH ... | simulate RUN [RUN_OF_SEVERAL]) [flags]"
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="output of SLURM jobs, folders of runs, ledgers, a CSV with a row for each run, what "
        "Comet or MLflow kept; a folder is searched for all but CSVs (logs: *.out, *.log, or "
        "those with .gz)",
    )
    add_flags(parser, ScalingConfig)
    about = "predict steps of many devices from a RUN of one"
    add_flags(parser.add_argument_group(SIMULATE, about), SimulateConfig)


def run(args: argparse.Namespace) -> int:
    """Run the verb. Returns exit code 0 with a study, 3 if no run is complete."""
    simulated = args.paths[0] == SIMULATE  # a folder of that name is ./simulate
    kind = f"penstock scaling {SIMULATE}" if simulated else "penstock scaling"
    check_belongs(vars(args), KNOBS, kind)
    paths = [Path(path) for path in (args.paths[1:] if simulated else args.paths)]
    if simulated:
        return _simulate(paths, args)
    config = from_flags(ScalingConfig, args)
    _check_output(config.output, config.overwrite, paths)
    runs = read_runs(paths, _say)
    if config.metrics:
        print(*in_text([metrics_table(runs)]), sep="\n")
        return 0
    compared = _compared(runs, config.anyway)
    devices = (one.device for one in runs if one.device not in (None, A_GPU) and not one.on_cpu)
    machine = config.machine or next(devices, None) or "an unnamed machine"
    if config.csv:
        print(points_to_csv(compared, runs) if compared else runs_to_csv(runs), end="")
        for note in notes(runs, compared):
            _say(note.removeprefix("* "))
    else:
        print(*summary_table(runs, compared), sep="\n")
        for study in compared:
            blocks = [speedup_table(study), in_text(scaling_sections(study))]
            if len(compared) > 1:  # put the title before the table, which does not name its kind
                blocks.reverse()
            for block in (*blocks, results_table(study, machine)):
                print("", *block, sep="\n")
    if config.output is not None:
        written = _write(config.output, runs, compared, machine, config.overwrite)
        print(*(f"Written: {path}" for path in written), sep="\n", file=sys.stderr)
    if not compared:
        _say("no run is complete and has a training time, so nothing is compared")
        return 3
    return 0


def _compared(runs: list[TrainingRun], anyway: bool) -> list[Study]:
    try:
        return studies(runs, anyway)
    except NotComparable as error:
        raise NotComparable(f"{error}, or --anyway") from None


def _say(sentence: str) -> None:
    say(f"penstock scaling: {sentence}")


def _check_output(folder: Path | None, replace: bool, read: list[Path]) -> None:
    """Refuse a folder in which a file of the user's would be replaced."""
    if folder is not None:
        check_folder(folder, "--output")
        named = [folder / name for name in ("scaling.md", "scaling.csv", "runs.csv")]
        files = [path for path in read if path.is_file()]  # the folder itself may hold the runs
        check_outputs(*(("--output", path) for path in named), replace=replace, inputs=files)


def _write(
    folder: Path,
    runs: list[TrainingRun],
    compared: list[Study],
    machine: str,
    replace: bool,
) -> list[Path]:
    figures = figures_of(lambda: plot_scaling(compared, folder, replace))
    report = report_of_studies(runs, compared, f"Training Results on {machine}")
    names = [[figure.name for figure in figures], *[[]] * len(report.chapters[1:])]
    files = {
        folder / "scaling.md": markdown_page(report, names),
        folder / "scaling.csv": points_to_csv(compared, runs),
        folder / "runs.csv": runs_to_csv(runs),
    }
    for path, text in files.items():
        write_output("--output", path, text, replace=replace)
    return [*files, *figures]


def _simulate(paths: list[Path], args: argparse.Namespace) -> int:
    config = from_flags(SimulateConfig, args)
    device = _device(paths)
    network = Network(
        per_node=config.gpus_per_node,
        inside=config.inside,
        between=config.between,
        inside_latency=INSIDE_LATENCY_S,
        between_latency=BETWEEN_LATENCY_S,
        overlap=config.overlap,
    )
    predictions = [predict_step(device, network, n) for n in config.devices]
    title = "Predicted, against one device with the same batch"
    section = Section(title, prediction_table(predictions), assumptions_of(device, network))
    print(*in_text([section]), sep="\n")
    return 0


def _device(paths: list[Path]) -> DeviceStep:
    """The step of one device, from a run of one device and perhaps one of several."""
    if not 1 <= len(paths) <= 2:
        raise UsageError(
            f"simulate takes a RUN of one device, and perhaps one of several; it got {len(paths)}"
        )
    runs = [_run(path) for path in paths]
    same_settings(runs)
    measured = device_of_run(runs[0])
    return with_several(measured, runs[1]) if runs[1:] else measured


def _run(path: Path) -> TrainingRun:
    runs = read_runs([path], _say)
    if len(runs) > 1:
        raise UsageError(f"{path} holds {plural(len(runs), 'run')}; simulate takes one")
    return runs[0]
