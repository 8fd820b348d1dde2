"""``penstock bench loader``: how fast batches come, by loader, threads and batch size, and why.

flags -> cases -> check, in a process of its own -> sweep of loaders and ladder -> CSV, tables
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base import (
    BenchLoaderConfig,
    PenstockError,
    UsageError,
    add_flags,
    format_seconds,
    from_flags,
)
from ..instruments import Record
from .bench import check_csv, check_ledger, make_way
from .progress import shown_progress

if TYPE_CHECKING:
    from ..instruments import Ledger

Case = dict[str, Any]
RUNGS = ("L0", "L1", "L2", "L3", "L4", "L5")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "data",
        metavar="DATA",
        help="a packed data set (a folder, or s3://...), or a Zarr, N5 or OME-Zarr array in a "
        "folder, whose axis 0 counts samples unless --patch cuts it",
    )
    parser.add_argument("--config", type=Path, metavar="FILE.yaml", help="settings; flags win")
    add_flags(parser, BenchLoaderConfig)


def run(args: argparse.Namespace) -> int:
    config = from_flags(BenchLoaderConfig, args, args.config)
    from ..instruments import Ledger
    from ..reports import LOADER_NEEDS, append_loader_csv, in_text, loader_sections

    if not config.output.name:
        raise UsageError(f"--output {config.output} cannot be written: it names no file")
    folder = config.ledger or config.output.with_suffix(".ledger")
    ledger = Ledger(folder)
    check_csv(config.output, config.replace, LOADER_NEEDS)
    check_ledger(ledger)
    cases = checked(cases_of(config, args.data), config)
    records = _sweep(config, cases, ledger)
    make_way(config.output, config.replace, LOADER_NEEDS)
    append_loader_csv(records, config.output)
    print("", *in_text(loader_sections(records)), sep="\n")
    print("", *(f"Written: {path}" for path in (config.output, ledger.path)), sep="\n")
    # A step without its GPU and a rival that is not installed are rows, and no failures.
    return int(any(record.status not in ("ok", "unsupported") for record in records))


def cases_of(config: BenchLoaderConfig, data: str) -> list[Case]:
    """Loaders x batch sizes x threads, each once."""
    from ..loading import CONTENDERS

    for name in config.loaders:
        if name not in CONTENDERS:
            raise UsageError(
                f"--loaders {name}: there is no such loader; known are {', '.join(CONTENDERS)}"
            )
    remote = "://" in data
    if config.endpoint and not data.startswith("s3://"):
        raise UsageError(f"--endpoint is of s3:// data, and DATA is {data}")
    if config.latency_ms and remote:
        raise UsageError(f"--latency-ms delays a local folder, and DATA is {data}")
    if config.patch and remote:
        raise UsageError(f"--patch is of a folder of this machine, and DATA is {data}")
    if config.cache == "cold" and remote:
        raise UsageError(f"--cache cold drops files of this machine, and DATA is {data}")
    common: Case = {
        "data": data if remote else str(Path(data).absolute()),
        "shuffle": config.shuffle,
        "window": config.window if config.shuffle == "block" else None,
        "seed": config.seed,
        "cache": "as-is" if remote else config.cache,
        "batches": config.batches,
        "warmup": config.warmup,
        "endpoint": config.endpoint,
        "latency_ms": config.latency_ms,
        **({"patch": list(config.patch)} if config.patch else {}),
    }
    points = itertools.product(
        dict.fromkeys(config.batch_sizes),
        dict.fromkeys(config.threads),
        dict.fromkeys(config.loaders),
    )
    return [
        {**common, "loader": loader, "batch": batch, "threads": threads}
        for batch, threads, loader in points
    ]


def checked(cases: Sequence[Case], config: BenchLoaderConfig) -> list[Case]:
    """The cases with the hash of their data set. A process is started for each batch size."""
    from ..bench import ask_worker

    answers: dict[int, Record] = {}
    for case in cases:
        if case["batch"] not in answers:
            answer = ask_worker("loader", case, config.timeout)
            if answer.error is not None:
                raise PenstockError(answer.error.message)
            answers[case["batch"]] = answer
            print(f"Batches of {case['batch']}, shuffle {case['shuffle']}: {answer.facts['price']}")
            _enough(case, answer.facts["samples"], config)
    return [{**case, "dataset": answers[case["batch"]].case["dataset"]} for case in cases]


def _enough(case: Case, samples: int, config: BenchLoaderConfig) -> None:
    need = (1 + config.warmup + config.batches) * case["batch"]
    if config.cache == "cold" and need > samples:
        most = samples // case["batch"] - 1 - config.warmup
        cure = f"lower --batches to {most}" if most > 0 else "lower --batch-sizes or --warmup"
        raise UsageError(
            f"--cache cold reads each sample once: the first batch, {config.warmup} to warm up and "
            f"--batches {config.batches} at --batch-sizes {case['batch']} are {need} samples, and "
            f"DATA has {samples}; {cure}"
        )


def ladder_of(cases: Sequence[Case]) -> list[Case]:
    """Every rung for every batch size and number of threads."""
    points = {(case["batch"], case["threads"]): case for case in cases}
    rungs = []
    for case, name in itertools.product(points.values(), RUNGS):
        rungs.append({knob: value for knob, value in case.items() if knob != "loader"})
        rungs[-1]["rung"] = name
    return rungs


def _sweep(config: BenchLoaderConfig, cases: Sequence[Case], ledger: Ledger) -> list[Record]:
    from ..bench import launches_of, run_sweep

    launches = launches_of(config.effort)
    records = []
    kinds = [("loader", list(cases))]
    if config.ladder:
        kinds.append(("ladder", ladder_of(cases)))
    for scenario, own in kinds:
        what = "case" if scenario == "loader" else "step"
        print(
            f"{len(own)} {what}{'s' * (len(own) != 1)} of the {scenario}, "
            f"{launches} launch{'es' * (launches != 1)} of each"
        )
        with shown_progress(named, outcome) as progress:
            records += run_sweep(
                scenario,
                own,
                launches,
                ledger,
                rules=rules(config),
                timeout_s=config.timeout,
                memory_limit=None,
                seed=config.seed,
                resume=config.resume,
                progress=progress,
            )
    return records


def rules(config: BenchLoaderConfig) -> dict[str, Any]:
    """Every wait is a sample, and for every loader there are equally many."""
    series = {"series": config.batches, "warmup_samples": config.warmup}
    return {"seconds": 0.0, "precision": 0.0, **series}


def named(case: Mapping[str, Any]) -> str:
    what = case.get("loader") or case["rung"]
    return f"{what}, batch {case['batch']}, {case['threads']} threads"


def outcome(record: Record) -> str:
    """A launch in a few words."""
    if not record.ok:
        return record.status + (f" ({record.error.message})" if record.error else "")
    seconds = statistics.mean(record.samples_s["step"])
    return f"{format_seconds(seconds)} a batch, {len(record.samples_s['step'])} batches"
