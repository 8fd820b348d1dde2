"""``penstock bench queue DATA``: how long a queue between a loader and a step keeps the step fed.

workers x queue sizes -> cases, and for each number of workers one that only reads -> sweep
-> CSV, table with the prediction, figure
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from ..base import (
    BenchQueueConfig,
    add_flags,
    check_outputs,
    format_seconds,
    from_flags,
)
from ..bench import (
    ask_worker,
    case_namer,
    lacks_package,
    launches_of,
    queue_cases,
    series_rules,
)
from ..instruments import Record
from ..reports import (
    QUEUE_NEEDS,
    append_csv,
    first_empty,
    in_text,
    plot_records,
    queue_sections,
)
from .benchmarks import (
    launcher_of,
    launches_each,
    make_way,
    open_outputs,
    print_written,
    sweep,
)
from .drawing import figures_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", metavar="DATA", help="a packed data set, or an array")
    add_flags(parser, BenchQueueConfig, config_file=True)


def run(args: argparse.Namespace) -> int:
    config = from_flags(BenchQueueConfig, args, args.config)
    cases = queue_cases(args.data, config)
    read = [Path(args.data)]
    ledger = open_outputs(config, f"bench-queue-{Path(args.data).stem}", QUEUE_NEEDS, read)
    read.append(ledger.path)
    figure = config.output.with_suffix(".png")
    check_outputs(("the figure of --output", figure), replace=config.overwrite, inputs=read)
    launches, old = launches_of(config.effort), ledger if config.resume else None
    with launcher_of(config, [args.data], like=old) as launcher:
        ask_worker("queue", cases[0], config.timeout, launcher)
        counts = f"{launches_each(launches)}, {config.iterations} iterations in each"
        print(f"{len(cases)} cases, {counts}")
        records = sweep(
            "queue",
            cases,
            config,
            ledger,
            rules=series_rules(config.iterations),
            name=case_namer(cases, "workers", "queue"),
            outcome=outcome,
            launches=launches,
            launcher=launcher,
        )
    make_way(config.output, config.overwrite, QUEUE_NEEDS)
    append_csv("queue", records, config.output)
    print("", *in_text(queue_sections(records)), sep="\n")
    prefix = config.output.with_suffix("")
    figures = figures_of(lambda: plot_records("queue", records, prefix, config.overwrite))
    print_written([config.output, ledger.path, *figures])
    return int(any(not record.ok and not lacks_package(record) for record in records))


def outcome(record: Record) -> str:
    """The mean seconds of an iteration, and the iteration at which the queue was first empty."""
    mean = format_seconds(statistics.mean(record.samples_s["step"]))
    if record.case.get("compute", "none") == "none":
        return f"{mean} a batch"
    if not record.facts["left"]:
        return f"{mean} an iteration"
    at = first_empty(record.facts["left"])
    end = "never cleared" if at is None else f"cleared at {at}"
    return f"{mean} an iteration, queue {end}"
