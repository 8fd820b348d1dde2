"""``penstock plot FILE``: draw what a file holds."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="what to draw; its content decides")
    parser.add_argument("--mean", action="store_true", help="draw the mean of every line")
    parser.add_argument(
        "--smooth",
        type=int,
        default=1,
        metavar="N",
        help="draw a rolling mean of N samples over the raw ones (default: raw alone)",
    )
    out = parser.add_mutually_exclusive_group()
    out.add_argument(
        "--out",
        type=Path,
        metavar="PREFIX",
        help="figures are PREFIX_cpu.png and so on (default: FILE without its suffix)",
    )
    out.add_argument(
        "--output", type=Path, metavar="FILE", help="the same, FILE less its suffix as the prefix"
    )


def run(args: argparse.Namespace) -> int:
    from .. import plots

    if args.smooth < 0:
        raise UsageError(f"--smooth {args.smooth} is not a number of samples")
    draw = {"metrics": plots.plot_metrics, "gpu": plots.plot_gpu_metrics}[kind_of(args.file)]
    prefix = args.out or (args.output or args.file).with_suffix("")
    for path in draw(args.file, prefix, mean=args.mean, smooth=args.smooth):
        print(path)
    return 0


def kind_of(path: Path) -> str:
    """What a file holds, by its first line.

    ``metrics``: the rows of a run, or ``metrics.json``; ``gpu``: what nvidia-smi logged.
    """
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            first = file.readline(65536).strip()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if first.startswith("{"):
        return "metrics"
    if first.startswith("timestamp") and "," in first:
        return "gpu"
    raise UsageError(
        f"{path} begins with {first[:60]!r}; plot knows metrics (.jsonl rows, metrics.json) and "
        "gpu (the CSV of nvidia-smi --query-gpu=timestamp,...)"
    )
