"""``penstock compare A B``: is B faster or slower than A, by how much, and how certain is that?"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from ..base import (
    CompareConfig,
    add_flags,
    check_outputs,
    from_flags,
    json_text,
    write_output,
)
from ..reports import (
    RUN_SCENARIOS,
    cases_of_sides,
    clipped,
    compare_records,
    gate_sentence,
    html_page,
    in_text,
    launches_named,
    markdown_page,
    page_of_sides,
    report_of_comparison,
)

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
        "--json", type=Path, metavar="FILE", help="also write the comparison to this file"
    )
    add_flags(parser, CompareConfig)


def run(args: argparse.Namespace) -> int:
    config = from_flags(CompareConfig, args)
    replace, gated = config.overwrite, config.fail_if_slower is not None
    inputs = [path for path in (Path(args.a), Path(args.b)) if path.exists()]
    outputs = (("--json", args.json), ("--markdown", config.markdown), ("--html", config.html))
    check_outputs(*outputs, replace=replace, inputs=inputs)

    sides = cases_of_sides(*map(launches_named, (args.a, args.b)))
    scenarios = {record.scenario for side in sides for record in side}
    comparison = compare_records(
        *sides,
        threshold=config.fail_if_slower,
        anyway=config.anyway,
        metric=config.metric or ("sample" if scenarios == {"training"} else "step"),
        detailed=not scenarios.isdisjoint(RUN_SCENARIOS),
    )
    undecided = comparison.undecided if gated else []
    gate = gate_sentence(comparison, undecided) if gated else ""
    report = report_of_comparison(comparison, f"{args.a} to {args.b}", gate)
    texts: dict[str, Callable[[], str]] = {
        "--json": lambda: json_text(comparison.as_dict() | {"gate": gate}, 1),
        "--markdown": lambda: markdown_page(report, [()] * len(report.chapters)),
        "--html": lambda: html_page(report, page_of_sides((args.a, args.b))),
    }
    for flag, path in outputs:
        if path is not None:
            write_output(flag, path, texts[flag](), replace=replace)
    sections = (clipped(each) for chapter in report.chapters for each in chapter.sections)
    print(*in_text(sections), "", *report.about, *report.verdict[::-1], sep="\n")
    return 1 if comparison.regressed else 3 if undecided else 0
