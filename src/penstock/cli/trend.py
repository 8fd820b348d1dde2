"""``penstock trend FOLDER``: cases over commits, and where each became slower or faster."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..base import Replacing, UsageError, add_flags

EXAMPLES = """
penstock trend logs                                      # all ledgers in a folder
penstock trend logs --output trend.svg                   # the figure, too: SVG or PNG
penstock trend bench.ledger --fail-if-slower 5% --since v1.2   # a gate: exit code 1
"""
EPILOG = (
    "exit codes: 0 shown; 2 wrong usage; 4 nothing to show; with --fail-if-slower, 1 a case became "
    "slower by more than that, 3 a case has too few commits to tell"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument(
        "places",
        type=Path,
        nargs="+",
        metavar="FOLDER|LEDGER|RUN",
        help="ledgers and runs, or folders that are searched for these",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="also draw the figure: .svg, .png or .pdf"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write it to this file")
    parser.add_argument(
        "--metric",
        default="step",
        metavar="NAME",
        help="time to watch: step, device, or a phase such as forward (default: step)",
    )
    parser.add_argument(
        "--false-alarms",
        default="5%",
        metavar="X",
        help="chance of showing a step in any series although nothing changed (default: 5%%)",
    )
    parser.add_argument(
        "--least", default="2%", metavar="X", help="least change that is a step (default: 2%%)"
    )
    parser.add_argument(
        "--repository",
        type=Path,
        metavar="PATH",
        help="the git repository of the commits, for their order (default: the current folder)",
    )
    parser.add_argument(
        "--fail-if-slower", metavar="X", help="a gate: the change that matters, 5%% or 0.05"
    )
    parser.add_argument(
        "--since", metavar="COMMIT", help="the gate considers only steps after this commit"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the random orders (default: 0)"
    )
    add_flags(parser, Replacing)


def run(args: argparse.Namespace) -> int:
    from ..base import NotComparable, check_outputs, from_flags, write_output
    from ..reports import (
        in_text,
        launches_of,
        places_of,
        plot_trend,
        save_figures,
        trend_document,
        trend_sections,
        trend_summary,
        watch,
    )

    limit = _share(args, "--fail-if-slower") if args.fail_if_slower else None
    rate, least = (_share(args, flag) for flag in ("--false-alarms", "--least"))
    if not rate < 0.5:
        raise UsageError(f"--false-alarms {args.false_alarms} must be below 50%")
    if args.since and limit is None:
        raise UsageError("--since needs the gate: add --fail-if-slower")
    replace = from_flags(Replacing, args).replace
    outputs = (("--output", args.output), ("--json", args.json))
    check_outputs(*outputs, replace=replace, inputs=args.places)
    records = launches_of([place for path in args.places for place in places_of(path)])
    watched = watch(
        records,
        metric=args.metric,
        rate=rate,
        least=max(least, limit or 0.0),
        seed=args.seed,
        folder=args.repository,
    )
    if not watched.trends:
        raise NotComparable("there is nothing to show: no launch ran")
    since = _since(args, [p.commit or "" for t in watched.trends for p in t.series.points])
    if args.output is not None:
        save_figures({args.output: plot_trend(watched)}, replace)
    if args.json is not None:
        text = json.dumps(trend_document(watched), indent=1) + "\n"
        write_output("--json", args.json, text, replace=replace)
    print(*in_text(trend_sections(watched)), "", trend_summary(watched), sep="\n")
    if limit is None:
        return 0
    slower = watched.slower(since)
    print(_gate(len(slower), len(watched.undecided), args.fail_if_slower))
    return 1 if slower else 3 if watched.undecided else 0


def _share(args: argparse.Namespace, flag: str) -> float:
    from .compare import share_of_text

    return share_of_text(flag, getattr(args, flag[2:].replace("-", "_")))


def _since(args: argparse.Namespace, commits: list[str]) -> str | None:
    """The beginning of the hash of ``--since``. Raises `UsageError` if no launch was made at it."""
    from ..instruments import commit_named, is_hash

    if args.since is None:
        return None
    for name in (args.since, commit_named(args.since, args.repository)):
        if name and is_hash(name) and any(commit.startswith(name) for commit in commits):
            return name
    raise UsageError(f"--since {args.since}: no launch was made at it")


def _gate(slower: int, undecided: int, limit: str) -> str:
    if slower:
        return f"The gate fails: at {slower} of the steps a case became slower by {limit} or more."
    if undecided:
        return f"The gate is undecided: {undecided} of the series are too short to show a step."
    return f"The gate holds: no case became slower by {limit} or more."
