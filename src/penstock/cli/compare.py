"""``penstock compare A B``: is B faster or slower than A, by how much, and how certain is that?"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ..base import Overwriting, UsageError, add_flags

if TYPE_CHECKING:  # heavy imports wait until the verb runs
    from ..instruments import Record

EXAMPLES = """
penstock compare logs/stage2_bench.ledger after.ledger   # a verdict on every case
penstock compare denoised.ome.zarr other-denoised.ome.zarr   # two runs of infer, phase by phase
penstock compare outputs/1 outputs/2 --html page.html    # two trainings, in a browser
penstock compare before.ledger after.ledger --fail-if-slower 5% --markdown summary.md
"""
EPILOG = (
    "exit codes: 0 no case regressed; 1 a case is slower or newly fails; 2 wrong usage; 3 with "
    "--fail-if-slower, a case may be slower by more than that, so run more launches; 4 no case "
    "can be compared"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    sides = "a ledger (a folder or .jsonl), a run, or a folder of these"
    parser.add_argument("a", metavar="A", help=f"before: {sides}")
    parser.add_argument("b", metavar="B", help="after")
    parser.add_argument(
        "--fail-if-slower",
        metavar="X",
        help="a gate: the change that matters, 5%% or 0.05 (default: the noise within the "
        "launches, by A/A); exit code 3 if it stays uncertain",
    )
    parser.add_argument(
        "--metric",
        metavar="NAME",
        help="time to compare: step, device, or a phase such as forward or read (default: step; "
        "for trainings sample, the seconds of a step over its samples)",
    )
    parser.add_argument(
        "--anyway", action="store_true", help="also compare different machines, work or models"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the comparison to this file"
    )
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="also write a summary for a pull request"
    )
    parser.add_argument(
        "--html", type=Path, metavar="PAGE", help="also write a page that compares the runs"
    )
    add_flags(parser, Overwriting)


def run(args: argparse.Namespace) -> int:
    from ..base import check_outputs, from_flags, write_output
    from ..reports import (
        RUN_SCENARIOS,
        cases_of_sides,
        clipped,
        compare_records,
        gate_sentence,
        html_page,
        in_text,
        markdown_page,
        page_of_sides,
        report_of_comparison,
    )

    limit = args.fail_if_slower
    threshold = None if limit is None else share_of_text("--fail-if-slower", limit)
    replace = from_flags(Overwriting, args).overwrite
    inputs = [path for path in (Path(args.a), Path(args.b)) if path.exists()]
    outputs = [(flag, getattr(args, flag[2:])) for flag in ("--json", "--markdown", "--html")]
    for flag, path in outputs:
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"{flag} {path}: No such file or directory")
    check_outputs(*outputs, replace=replace, inputs=inputs)

    named = _named(args)
    sides = cases_of_sides(*named)
    scenarios = {record.scenario for side in sides for record in side}
    comparison = compare_records(
        *sides,
        threshold=threshold,
        anyway=args.anyway,
        metric=args.metric or ("sample" if scenarios == {"training"} else "step"),
        detailed=not scenarios.isdisjoint(RUN_SCENARIOS),
    )
    undecided = comparison.undecided if args.fail_if_slower else []
    gate = gate_sentence(comparison, undecided) if args.fail_if_slower else ""
    report = report_of_comparison(comparison, f"{args.a} to {args.b}", gate)
    if args.json is not None:
        text = json.dumps(comparison.as_dict() | {"gate": gate}, indent=1) + "\n"
        write_output("--json", args.json, text, replace=replace)
    if args.markdown is not None:
        text = markdown_page(report, [()] * len(report.chapters))
        write_output("--markdown", args.markdown, text, replace=replace)
    if args.html is not None:
        text = html_page(report, page_of_sides((args.a, args.b)))
        write_output("--html", args.html, text, replace=replace)
    sections = (clipped(each) for chapter in report.chapters for each in chapter.sections)
    print(*in_text(sections), "", *report.about, *report.verdict[::-1], sep="\n")
    return 1 if comparison.regressed else 3 if undecided else 0


def share_of_text(flag: str, text: str) -> float:
    """Parse a share such as ``5%`` or ``0.05``.

    Raises `UsageError` if the text is no share, or if the share is not above 0.
    """
    number, percent, _ = text.strip().partition("%")
    try:
        value = float(number) / (100 if percent else 1)
    except ValueError:
        value = 0.0
    if not 0 < value < 10:
        raise UsageError(f"{flag} {text} is no share such as 5% or 0.05")
    return value


def _named(args: argparse.Namespace) -> list[list[Record]]:
    """The launches of both sides, as they are."""
    from ..reports import launches_named

    sides = [launches_named(name) for name in (args.a, args.b)]
    for name, records in zip((args.a, args.b), sides, strict=True):
        if not records:
            raise UsageError(f"{name} holds no launch")
    return sides
