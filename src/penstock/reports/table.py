"""Building blocks of every table and sentence: rows and sections as text, Markdown and CSV; and
texts of lists, numbers, intervals and machines."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..base import (
    UsageError,
    as_usage_error,
    csv_text,
    for_markdown,
    format_bytes,
    format_seconds,
    plural,
    replacing,
    significant,
    system_errors,
    to_cell,
)
from ..instruments import Interval, Record, commit_of

MB = 2**20


Row = dict[str, str]
"""The fields of a line of a CSV, by column."""


def scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def csv_field(value: Any) -> str:
    if value is None or (isinstance(value, float) and not np.isfinite(value)):
        return ""
    return f"{value:.9g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Columns:
    """The columns of one kind of CSV, with which a case becomes a row."""

    names: tuple[str, ...]
    """All columns, in the order of a new file."""
    place: tuple[str, ...]
    """The columns in which cases of one table or figure differ; a file of this kind has them."""
    apart: tuple[str, ...]
    """Columns of which no two cases in one comparison or figure may differ."""

    def row(self, values: Mapping[str, Any]) -> Row:
        return {name: csv_field(values.get(name)) for name in self.names}


def read_csv(path: Path, needs: Iterable[str]) -> tuple[list[str], list[Row]]:
    """Read a benchmark's CSV, ours or the seed's.

    Args:
        path: The CSV.
        needs: The columns without which a file is no such CSV.

    Returns:
        The header and the rows, all of text; without a last line that was cut off.

    Raises:
        UsageError: The file cannot be read, is no such CSV, or a line does not fit its header.
    """
    with (
        as_usage_error(f"{path} is not a CSV", UnicodeDecodeError, csv.Error),
        system_errors(f"{path} cannot be read"),
    ):
        text = path.read_text(encoding="utf-8-sig")
        lines = [line for line in csv.reader(io.StringIO(text, newline="")) if line]
    header = lines[0] if lines else []
    if not set(needs) <= set(header) or len(set(header)) < len(header):
        begin = text[:60].partition("\n")[0].strip()
        raise UsageError(f"{path} is not the CSV of a benchmark: it begins with {begin!r}")
    # It was cut off while it was written.
    torn = not text.endswith("\n") and len(lines) > 1 and len(lines[-1]) < len(header)
    rows = []
    for number, line in enumerate(lines[1 : -1 if torn else None], 2):
        if len(line) != len(header):
            raise UsageError(
                f"{path}, line {number}: {plural(len(line), 'field')} under a header of "
                f"{len(header)}; mend or move the file"
            )
        rows.append(dict(zip(header, line, strict=True)))
    return header, rows


def append_rows(rows: Sequence[Row], path: Path, columns: Columns) -> None:
    """Add rows to a benchmark's CSV.

    The file is replaced by one with our columns first, then its own, and all its rows. Raises
    `UsageError` if ``path`` is another file, which is left as it is.
    """
    path = path.resolve()  # a link stays: the file behind it is replaced
    with system_errors(f"{path} cannot be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        header, old = list[str](), list[Row]()
        if path.exists() and path.stat().st_size:
            header, old = read_csv(path, columns.place)
        names = dict.fromkeys([*columns.names, *header])
        new = [{name: to_cell(value) for name, value in row.items()} for row in rows]
        with replacing(path) as draft:
            draft.write_bytes(csv_text(names, [*old, *new]).encode())


class Section(NamedTuple):
    """A part of a report: a title, a table whose first line is its header, and sentences."""

    title: str
    table: Sequence[Sequence[str]] = ()
    sentences: Sequence[str] = ()


def without_empty(table: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The table without the columns that hold only dashes under their heads."""
    kept = [c for c in zip(*table, strict=True) if any(text != "-" for text in c[1:])]
    return list(zip(*kept, strict=True))


def settings_table(settings: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A line for each setting, by the name of its flag; without those that are not set, and those
    that are no settings but labels. It is empty if none is set."""
    lines = [
        (name.replace("_", "-"), " ".join(map(str, v)) if isinstance(v, list) else str(v))
        for name, v in settings.items()
        if v not in (None, False, "", []) and name not in ("name", "tags")
    ]
    return [("setting", "value"), *lines] if lines else []


def in_text(sections: Iterable[Section]) -> list[str]:
    """Sections as lines for a terminal."""
    lines: list[str] = []
    for title, table, sentences in sections:
        lines += [title, ""]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for line in table:
            fields = [text.rjust(width) for text, width in zip(line, widths, strict=True)]
            lines.append("  " + "  ".join(fields).rstrip())
        lines += [""] * bool(table) + [f"- {line}" for line in sentences] + [""] * bool(sentences)
    return lines[:-1]


def in_markdown(sections: Iterable[Section]) -> str:
    """Sections as Markdown for a page."""
    blocks = []
    for title, table, sentences in sections:
        blocks.append(f"**{for_markdown(title)}**")
        if table:
            head, *body = (f"| {' | '.join(map(for_markdown, line))} |" for line in table)
            blocks.append("\n".join([head, "|" + "---:|" * len(table[0]), *body]))
        if sentences:
            blocks.append("\n".join(f"- {for_markdown(line)}" for line in sentences))
    return "\n\n".join(blocks) + "\n"


Form = Callable[[float], str]


def listed(words: Sequence[str]) -> str:
    """Words with commas and an "and" between them.

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def labels_line(document: Mapping[str, Any]) -> list[str]:
    """A line on the name and the tags of a run; none if its document has neither.

    >>> labels_line({"name": "mine", "tags": {"study": "a"}}), labels_line({})
    (['mine, tagged study=a'], [])
    """
    tags = document.get("tags")
    words = [f"{key}={text}" for key, text in tags.items()] if isinstance(tags, Mapping) else []
    tagged = f"tagged {listed(words)}" if words else ""
    line = ", ".join(filter(None, [str(document.get("name") or ""), tagged]))
    return [line] if line else []


def or_dash(value: float | None, form: Form = significant) -> str:
    """A field of a table.

    Args:
        value: The number; None if it is not known.
        form: A function that writes it.

    Returns:
        The text; ``-`` if the value is not known.
    """
    return "-" if value is None else form(value)


def spread(interval: Interval | None, form: Form = significant) -> str:
    """Both ends of an interval, ``1.2 - 1.4``; ``-`` if one of them is not known."""
    if interval is None or interval.low is None or interval.high is None:
        return "-"
    return f"{form(interval.low)} - {form(interval.high)}"


def bracket(interval: Interval, count: str, form: Form = format_seconds) -> str:
    """An interval and the count behind it, ``[1.2 s - 1.4 s, 5 launches]``.

    Args:
        interval: The interval.
        count: Words for the number of measurements behind it.
        form: A function that writes an end.

    Returns:
        The text: the count alone if an end is not known, or if a single value is behind both.
    """
    ends = spread(interval, form) if interval.n > 1 else "-"
    return f"[{count}]" if ends == "-" else f"[{ends}, {count}]"


def of_launches(values: Sequence[float], form: Form) -> str:
    """The least and the most over launches, ``1.2 - 1.4, 5 launches``."""
    launches = plural(len(values), "launch")
    return (
        launches if len(values) == 1 else f"{form(min(values))} - {form(max(values))}, {launches}"
    )


def times_bracket(ratio: Interval, launches: str) -> str:
    """The interval of a factor and the launches behind it, ``[1.42-1.47, 5 launches each]``."""
    low, high = ("?" if end is None else f"{end:.2f}" for end in (ratio.low, ratio.high))
    return f"[{low}-{high}, {launches}]"


def hosts_of(records: Iterable[Record]) -> Counter[str]:
    """Number of launches by host. Only the records of a cluster's workers name a host."""
    workers = (record.environment.get("worker") or {} for record in records)
    return Counter(str(worker["host"]) for worker in workers if worker.get("host"))


def machine_words(environment: Mapping[str, Any], *devices: str | None) -> str:
    """A machine in a line: processor, cores, memory, ``devices``, libraries and commit."""
    machine, libraries = environment.get("machine") or {}, environment.get("libraries") or {}
    cores, memory = machine.get("cores"), machine.get("memory_bytes")
    commit = commit_of(environment.get("git"))
    words = [
        machine.get("processor"),
        cores and f"{cores} cores",
        memory and format_bytes(memory),
        *devices,
        *(f"{name} {libraries[name]}" for name in ("python", "torch") if libraries.get(name)),
        commit and f"commit {commit}",
    ]
    return ", ".join(word for word in words if word)


def nothing_measured(records: Iterable[Record]) -> str:
    """Say that no launch was ok."""
    status = [record.status for record in records]
    counts = ", ".join(f"{status.count(each)} {each}" for each in dict.fromkeys(status))
    return (
        f"Nothing was measured: of {plural(len(status), 'launch')} none was ok ({counts}), so "
        "the speed is not known."
    )
