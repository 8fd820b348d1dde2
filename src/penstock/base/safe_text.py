"""Make untrusted text safe for a terminal, a page, a table or a figure.

Names of files, dtypes and models and the messages of libraries come from others. On a terminal
they could move the cursor and hide lines. On a page they could load pictures and run scripts. In a
table they could be formulas.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from .errors import PenstockError
from .secrets import scrub

_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters except tabs and line ends, marks that turn the direction of writing, and
single surrogates, which no file can hold."""
_FORMULA = re.compile(r"[=+\-@\t\r]")


def for_terminal(text: str) -> str:
    r"""A text with its control characters spelled as in a string of Python.

    >>> print(for_terminal("a\x1b[2Jb"))
    a\x1b[2Jb
    """
    return _CONTROL.sub(lambda match: match.group().encode("unicode_escape").decode(), text)


def for_markdown(text: str) -> str:
    r"""A text as a line or a cell of a table: without tags, links, pictures and further cells.

    >>> print(for_markdown("a|b <img src=x> ![c](d)"))
    a\|b &lt;img src=x> ![c]\(d)
    """
    text = for_terminal(text).replace("\n", " ").replace("<", "&lt;")
    return text.replace("|", r"\|").replace("](", r"]\(")


def to_cell(value: Any) -> Any:
    """A cell of a CSV that no spreadsheet takes for a formula; `from_cell` gives back the text.

    >>> to_cell("=HYPERLINK(1)"), to_cell("-1.5"), to_cell(-2), to_cell("--flag")
    ("'=HYPERLINK(1)", '-1.5', -2, "'--flag")
    """
    if not isinstance(value, str):
        return value
    text = for_terminal(value)
    return f"'{text}" if _FORMULA.match(text) and not _is_number(text) else text


def csv_text(names: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """A table as CSV.

    Args:
        names: The columns.
        rows: The cells of each row by column; a column that a row lacks stays empty.

    Returns:
        The text, with a header.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def from_cell(text: str) -> str:
    """The text that `to_cell` was given.

    >>> from_cell("'=a"), from_cell("'tis")
    ('=a', "'tis")
    """
    return text[1:] if text[:1] == "'" and _FORMULA.match(text[1:]) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


class SafeStream:
    """Standard output or error without control characters and keys.

    If its reader (``head``, ``less``) ends, later output is dropped, and the work goes on to its
    own exit code. If it is a file on a full disk, `PenstockError` is raised. Rich
    finds the wrapped stream by the name ``rich_proxied_file``.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.rich_proxied_file = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text without its control characters and keys; returns the length of ``text``."""
        begin = "\r" * text.startswith("\r")  # so a progress bar of a user's model stays one line
        with self._whoever_reads():
            self._stream.write(begin + for_terminal(scrub(text[len(begin) :])))
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        with self._whoever_reads():
            self._stream.flush()

    @contextlib.contextmanager
    def _whoever_reads(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # What the stream still holds must go somewhere when Python ends.
            with Path(os.devnull).open("w") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
            if not isinstance(error, BrokenPipeError):
                raise PenstockError(f"{self._stream.name}: {error.strerror}") from error

    def writelines(self, lines: Any) -> None:
        """Write each line as `write` does."""
        for line in lines:
            self.write(line)
