"""A ledger as a report: one chapter for each kind of benchmark that it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ..base import UsageError, format_bytes, group_by, plural
from ..instruments import LEDGER_FILE, Record
from .change import change_section
from .content import Chapter, Picture, Raw, Report
from .headlines import (
    ladder_headlines,
    loader_headlines,
    model_headlines,
    queue_headlines,
    suite_headlines,
)
from .ledger_changes import explain_records
from .loader.ladder import ladder_sections
from .loader.report import loader_sections
from .model.report import model_sections
from .pictures import (
    ladder_pictures,
    loader_pictures,
    model_pictures,
    queue_pictures,
    suite_pictures,
)
from .queue.report import queue_sections
from .suite.report import suite_sections
from .table import Section
from .timed import TIMED, timed_headlines, timed_sections
from .words import hosts_of, listed, machine_words


class Kind(NamedTuple):
    """The chapter of a report that shows the records of one scenario."""

    title: str
    headlines: Callable[[Iterable[Record]], list[str]]
    sections: Callable[[Iterable[Record]], list[Section]]
    pictures: Callable[[Iterable[Record]], list[Picture]]


KINDS = {
    "model": Kind(
        "Memory and throughput of a model", model_headlines, model_sections, model_pictures
    ),
    "loader": Kind("Loading of batches", loader_headlines, loader_sections, loader_pictures),
    "ladder": Kind(
        "Cost of a batch, step by step",
        ladder_headlines,
        ladder_sections,
        ladder_pictures,
    ),
    "queue": Kind(
        "The queue between reading and computing", queue_headlines, queue_sections, queue_pictures
    ),
    "train": Kind(
        "Training", suite_headlines, lambda r: suite_sections(r, ()), suite_pictures
    ),
    **dict.fromkeys(TIMED, Kind("Times", timed_headlines, timed_sections, lambda records: [])),
}  # fmt: skip


def kinds_of(records: Sequence[Record], source: str) -> dict[str, Kind]:
    """The kinds of benchmark among records, by scenario.

    Raises `UsageError` if no record can be shown.
    """
    held = {record.scenario for record in records}
    kinds = {name: kind for name, kind in KINDS.items() if name in held}
    # One chapter covers both: the loader's chapter includes its ladder.
    for first, *others in (("loader", "ladder"), [name for name in TIMED if name in kinds] or [""]):
        for other in others if first in kinds else ():
            kinds.pop(other, None)
    if not kinds:
        scenarios = ", ".join(sorted(held)) or "no records"
        raise UsageError(f"{source} holds {scenarios}; a report needs {', '.join(KINDS)}")
    return kinds


def report_of_records(
    records: Sequence[Record], source: str, places: Sequence[Path] = ()
) -> Report:
    """The report of records.

    Args:
        records: The launches of one or more ledgers.
        source: The name of the ledgers, for the title.
        places: The ledgers, which the report names.

    Returns:
        The report, with a chapter for each kind of benchmark.

    Raises:
        UsageError: No record can be shown.
    """
    chapters, verdict = [], []
    for kind in kinds_of(records, source).values():
        verdict += kind.headlines(records)
        chapters.append(Chapter(kind.title, kind.sections(records), kind.pictures(records)))
    changes, held, _ = explain_records(records)
    advice = change_section(changes, [each.sentence() for each in held])
    chapters[-1] = replace(chapters[-1], sections=[*chapters[-1].sections, *advice])
    return Report(
        source,
        verdict or ["Nothing here supports a verdict."],
        of_machines(records),
        chapters,
        [raw_of_ledger(place, records if len(places) == 1 else None) for place in places],
    )


def raw_of_ledger(place: Path, records: Sequence[Record] | None = None) -> Raw:
    """The place of a ledger's records, and their size."""
    file = place / LEDGER_FILE if place.is_dir() else place
    size = format_bytes(file.stat().st_size)
    count = f"{plural(len(records), 'launch')}, " if records is not None else ""
    return Raw(place.name, str(file), f"{count}{size}")


def of_machines(records: Sequence[Record]) -> list[str]:
    """A line for each machine and commit of the launches, with its hosts if they are known."""
    machines = group_by(records, _machine).items()
    return [
        f"{len(launches)} launches, {_days(launches)}: {where}{_hosts(launches)}"
        for where, launches in machines
    ]


def _hosts(records: Sequence[Record]) -> str:
    """The hosts of launches on a cluster, which are of one kind."""
    hosts = hosts_of(records)
    counts = [f"{number} on {host}" for host, number in sorted(hosts.items())]
    return f"; launches by host: {listed(counts)}" if counts else ""


def _machine(record: Record) -> str:
    block = record.environment
    gpus = (gpu["name"] for gpu in block.get("gpus") or ())
    return machine_words(block, *gpus, (block.get("machine") or {}).get("system"))


def _days(records: Sequence[Record]) -> str:
    days = sorted({record.time[:10] for record in records})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
