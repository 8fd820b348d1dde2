"""``penstock plot FILE``: draw the figures of a file."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..base import (
    BenchModelConfig,
    Overwriting,
    UsageError,
    add_flags,
    check_ends,
    from_flags,
    system_errors,
)
from ..reports import bench_figures, metrics_figures, save_under

EXAMPLES = """
penstock plot metrics.json --mean --smooth 50 --out results/sys_plot
penstock plot logs/stage2_bench.csv --output reports/stage2_bench.png
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    files = parser.add_mutually_exclusive_group()
    files.add_argument(
        "file",
        type=Path,
        nargs="?",
        metavar="FILE",
        help=f"file to draw; its content decides which figures (default: {_usual()})",
    )
    files.add_argument("--input", type=Path, metavar="FILE", help="same as FILE")
    parser.add_argument("--mean", action="store_true", help="draw the mean of every line")
    parser.add_argument(
        "--smooth",
        type=int,
        default=1,
        metavar="N",
        help="draw a rolling mean of N samples over the raw lines (default: only the raw lines)",
    )
    out = parser.add_mutually_exclusive_group()
    out.add_argument(
        "--out",
        type=Path,
        metavar="PREFIX",
        help="prefix of the figures: PREFIX_cpu.png and so on, or PREFIX.png for a benchmark "
        "(default: FILE without its suffix)",
    )
    out.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="same as --out, with FILE less its suffix as the prefix",
    )

    add_flags(parser, Overwriting)


def run(args: argparse.Namespace) -> int:
    if args.smooth < 0:
        raise UsageError(f"--smooth {args.smooth} is not a number of samples")
    file: Path = args.file or args.input or _usual()
    prefix = args.out or args.output or file
    if not prefix.name:
        raise UsageError(f"{prefix} has no name, with which those of figures would begin")
    prefix = args.out or prefix.with_suffix("")
    replace = from_flags(Overwriting, args).overwrite
    is_bench = holds_benchmark(file)
    if is_bench and (args.mean or args.smooth != 1):
        raise UsageError(f"--mean and --smooth are for metrics, and {file} is a benchmark")
    figures = bench_figures(file) if is_bench else metrics_figures(file, args.mean, args.smooth)
    with system_errors(f"{prefix} cannot be written"):
        print(*save_under(prefix, figures, replace), sep="\n")
    return 0


def holds_benchmark(path: Path) -> bool:
    """Whether a file is the CSV of a benchmark of models, or else metrics, by its first line.

    Raises `UsageError` if it is neither.
    """
    check_ends(path, str(path))
    with (
        system_errors(f"{path} cannot be read"),
        path.open(encoding="utf-8-sig", errors="replace") as file,
    ):
        first = file.readline(65536).strip()
    names = {name.strip('"') for name in first.split(",")}
    if {"tile_size", "batch_size"} <= names:
        return True
    if first.startswith("{") or (first.startswith("timestamp") and "," in first):
        return False
    raise UsageError(
        f"{path} begins with {first[:60]!r}; plot knows metrics (.jsonl rows, metrics.json), "
        "the CSV of bench model (tile_size, batch_size, ...), and gpu (the CSV of nvidia-smi "
        "--query-gpu=timestamp,...); penstock report draws what a ledger holds"
    )


def _usual() -> Path:
    return BenchModelConfig.model_fields["output"].default
