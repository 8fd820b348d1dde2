"""``penstock compare A B``: a verdict on every case, and an exit code for a gate.

Cases that cannot be compared are named, and the others are compared. The exit code is 0 where no
case regressed, 1 where a case is slower or newly fails, 2 for wrong usage, 4 where no case can be
compared.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..base import (
    Replacing,
    UsageError,
    add_flags,
    check_outputs,
    for_terminal,
    format_seconds,
    from_flags,
    scrub,
    write_output,
)
from ..instruments import CONFIDENCE, read_ledger
from ..reports import Comparison, compare_records, ratio_words, select_records


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", type=Path, metavar="A", help="ledger (a folder or .jsonl): before")
    parser.add_argument("b", type=Path, metavar="B", help="ledger: after; may be A, see --set-a")
    parser.add_argument(
        "--threshold",
        type=float,
        metavar="X",
        help="change that matters, 0.05 for 5 %% (default: the noise within the launches, by A/A)",
    )
    parser.add_argument(
        "--confidence",
        type=float,
        default=CONFIDENCE,
        metavar="X",
        help=f"confidence of intervals and verdicts (default: {CONFIDENCE})",
    )
    parser.add_argument(
        "--metric",
        default="step",
        metavar="NAME",
        help="time to compare: step, device, forward, backward, optimizer (default: step)",
    )
    for side in "ab":
        parser.add_argument(
            f"--set-{side}",
            action="append",
            default=[],
            metavar="KNOB=VALUE",
            help=f"take only launches with this knob for {side.upper()}: --set-a amp=false --set-b "
            "amp=true",
        )
    parser.add_argument(
        "--anyway", action="store_true", help="also compare different machines, work or models"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the comparison to this file"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the resampling (default: 0)")
    add_flags(parser, Replacing)


def run(args: argparse.Namespace) -> int:
    if args.threshold is not None and not args.threshold > 0:
        raise UsageError(f"--threshold {args.threshold} must be more than 0, such as 0.05 for 5 %")
    if not 0.5 <= args.confidence < 1:
        raise UsageError(f"--confidence {args.confidence} must be from 0.5 to below 1")
    if args.seed < 0:
        raise UsageError(f"--seed {args.seed} must be 0 or more")
    settings = {f"--set-{side}": _settings(args, side) for side in "ab"}
    a_knobs, b_knobs = map(sorted, settings.values())
    if a_knobs != b_knobs:
        raise UsageError(f"--set-a {a_knobs} and --set-b {b_knobs} must name the same knobs")

    replace = from_flags(Replacing, args).replace
    if args.json is not None and not args.json.parent.is_dir():
        raise UsageError(f"--json {args.json}: No such file or directory")
    check_outputs(("--json", args.json), replace=replace, inputs=(args.a, args.b))

    sides = []
    for path, (flag, wanted) in zip((args.a, args.b), settings.items(), strict=True):
        records = select_records(read_ledger(path), wanted)
        if not records:
            knobs = " ".join(f"{knob}={value}" for knob, value in wanted.items())
            raise UsageError(f"{path} holds no launch{f' with {flag} {knobs}' if knobs else ''}")
        sides.append(records)
    comparison = compare_records(
        *sides,
        threshold=args.threshold,
        confidence=args.confidence,
        anyway=args.anyway,
        metric=args.metric,
        seed=args.seed,
    )
    if args.json is not None:
        text = json.dumps(comparison.as_dict(), indent=1) + "\n"
        write_output("--json", args.json, text, replace=replace)
    _print(comparison)
    return int(comparison.regressed)


def _settings(args: argparse.Namespace, side: str) -> dict[str, str]:
    settings = {}
    for text in getattr(args, f"set_{side}"):
        knob, equals, value = text.partition("=")
        if not (knob and equals and value):
            raise UsageError(f"--set-{side} {text} is not KNOB=VALUE")
        settings[knob] = value
    return settings


def _print(comparison: Comparison) -> None:
    """Print the table, the reason of every verdict but `same`, and the sentence."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("case", "A", "B", "B / A", "launches", "verdict", box=None, pad_edge=False)
    for row in comparison.rows:
        times = ("-" if s is None else format_seconds(s) for s in (row.a_seconds, row.b_seconds))
        ratio = "-" if row.ratio is None else ratio_words(row.ratio)
        launches = f"{row.a_launches} + {row.b_launches}"
        table.add_row(
            escape(for_terminal(scrub(row.label))), *times, escape(ratio), launches, row.verdict
        )
    console = Console()
    console.print(table)
    for row in comparison.rows:
        if row.verdict != "same":
            print(f"{row.label}: {row.verdict}: {row.reason}.")
    for reason in comparison.left_out:
        print(f"Not compared: {reason}; --anyway compares all the same.")
    for side, labels in (("A", comparison.only_a), ("B", comparison.only_b)):
        if labels:
            print(f"Only in {side}: {'; '.join(labels)}.")
    for caveat in comparison.caveats:
        print(f"Not comparable, and compared all the same: {caveat}.")
    if comparison.hosts:
        print(f"{comparison.hosts}.")
    print(comparison.sentence())
