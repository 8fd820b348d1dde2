"""Make untrusted text safe for a terminal, a page, a table or a figure.

Names of files, dtypes and models and the messages of libraries come from others. On a terminal
they could move the cursor and hide lines. On a page they could load pictures and run scripts. In a
table they could be formulas.

Others may read whatever is written or printed, so no key may stand in it. Four things are found by
their form: a login in a URL, a signature behind it, a header of HTTP, and a field of a spec that
holds a key. A variable that holds a key is found by its name. A key that a library reads from a
file is passed to `learn_secret`.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TextIO

from .errors import PenstockError
from .files import at_home

_NAMES = re.compile(
    "KEY(?!BOARD|MAP|WORD|FRAME)|TOKEN(?!I[SZ])|PASSW|SECRET|CREDENTIAL", re.IGNORECASE
)
_CHOSEN = re.compile("PASSW|SECRET", re.IGNORECASE)
"""Names of variables whose value a person may have chosen, as a word or a number."""
_PLACE = re.compile(r"(?!https?:)[\w.+-]+://|[^?]*/[^?]*\.[A-Za-z]\w{0,4}/*$")
"""The address or path of a file that holds a key. It is no key itself."""
_LOGIN = re.compile(r"(?<=\w\w:)//?[^/\s\"']*@")
"""A login in a URL. `Path` leaves one slash of two."""
_BUCKET_LOGIN = re.compile(r"\b(s3|gs)://?[^/\s\"'@]*:[^\s\"'@]*@", re.IGNORECASE)
"""A login before the name of a bucket, whose keys often hold a slash."""
_BARE_LOGIN = re.compile(r"(?<![\w/.@:%+-])[\w.%+-]+:(?!/|\d+/)[^\s\"':@|]+@(?=[\w-]*[A-Za-z.])")
"""A login without its URL, as libraries quote one that they take for the name of a host."""
_QUERY = re.compile(r"(?<=\?)[^\s\"'<>|#)\]}]+")
_SIGNATURE = re.compile(
    r"(x-(amz|goog)-(signature|credential|security-token)|sig|signature|awsaccesskeyid|googleaccessid"
    r"|([\w-]*[_-])?(token|key|secret|password|passwd|auth)|apikey)$",
    re.IGNORECASE,
)
"""Parameters of a URL that hold a key."""
_BESIDE = re.compile(r"(x-(amz|goog)-[\w-]+|expires|se|st|ske|skt|sktid|skoid|spr)$", re.IGNORECASE)
"""Parameters of a URL that change with each signature and do not name what the URL points to."""
_HEADER = re.compile(
    r"\b((?:proxy-)?authorization|(?:set-)?cookie|x-[\w-]*(?:key|token|auth)[\w-]*)(\s*[:=]\s*)"
    r"(?:(?:basic|bearer|token|digest)\s+)?[^\s\"',;\]}]+",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\bBearer\s+[\w.~+/=-]{8,}", re.IGNORECASE)
_FIELD = (
    r"(?:[\w-]*[_-])?(?:authorization|cookie|passw(?:or)?d|secret|token|sas|access_?key(?:_?id)?"
    r"|(?:secret|api|account|private)[_-]?key|credentials?)"
)
_FIELDS = re.compile(_FIELD, re.IGNORECASE)
"""Names of fields of a mapping that hold a key."""
_MAY_HIDE = re.compile(r"[?:=\s\"']")
"""The characters of which a text has one if it has anything that `redact` looks for."""
_IN_JSON = re.compile(
    rf"""(?P<field>["']{_FIELD}["']\s*:\s*)(?P<q>["'])[^"']*(?P=q)""", re.IGNORECASE
)
_HEADERS_IN_JSON = re.compile(
    r"""(["']headers["']\s*:\s*)(?:\[[^\]]*\]|\{[^}]*\})""", re.IGNORECASE
)
HIDDEN = "***"
_LEAST, _LONG = 6, 12
"""Characters. A value shorter than `_LEAST`, such as ``true``, is no secret. One shorter than
`_LONG` may stand inside another word by chance, and is hidden only where it stands alone."""
_learnt: set[str] = set()


@lru_cache(maxsize=1024)
def names_key(name: str) -> bool:
    """Whether a variable of this name holds a key.

    >>> names_key("DB_PASSWD"), names_key("OMP_NUM_THREADS"), names_key("TOKENIZER")
    (True, False, False)
    """
    return _NAMES.search(name) is not None


def has_login(text: str) -> bool:
    """Whether a text has a URL with a login or a signature, or a header that holds a key.

    >>> has_login("--data=https://me:word@host/path"), has_login("s3://bucket/a@b")
    (True, False)
    """
    return redact(text) != text


def learn_secret(key: str | None) -> None:
    """Make `scrub` hide a key that is in no environment variable."""
    if key is not None and len(key) >= _LEAST:
        _learnt.add(key)


def redact(text: str) -> str:
    """A text without the keys that are found by their form: the same on every machine.

    >>> redact("no answer from https://me:word@host/path?part=2&sig=abc")
    'no answer from https://host/path?part=2&sig=***'
    >>> redact('Invalid bucket name: "me:word@bucket"')
    'Invalid bucket name: "***@bucket"'
    >>> redact('{"headers": ["Authorization: Bearer abc"]}')
    '{"headers": "***"}'
    """
    if _MAY_HIDE.search(text) is None:
        return text
    text = _LOGIN.sub("//", _BUCKET_LOGIN.sub(r"\1://", text))
    text = _BARE_LOGIN.sub(f"{HIDDEN}@", text)
    text = _QUERY.sub(lambda match: _unsigned(match.group()), text)
    text = _HEADERS_IN_JSON.sub(rf'\1"{HIDDEN}"', text)
    text = _IN_JSON.sub(rf"\g<field>\g<q>{HIDDEN}\g<q>", text)
    text = _HEADER.sub(rf"\1\2{HIDDEN}", text)
    return _BEARER.sub(f"Bearer {HIDDEN}", text)


def _unsigned(query: str) -> str:
    """The query of a URL without its signature."""
    parts = [part.partition("=") for part in query.split("&")]
    if not any(_SIGNATURE.match(name) and value for name, _, value in parts):
        return query
    hidden = [
        name + equals + (HIDDEN if _SIGNATURE.match(name) or _BESIDE.match(name) else value)
        for name, equals, value in parts
    ]
    return "&".join(hidden)


def redacted(value: Any) -> Any:
    """A value with every text redacted, and the fields that hold keys hidden; see `redact`."""
    return _each(value, redact)


def scrub(text: str) -> str:
    """A text without keys: those that `redact` finds, and those that this machine holds.

    >>> scrub("no answer from https://me:word@host/path")
    'no answer from https://host/path'
    """
    return _without(_held_keys() if len(text) >= _LEAST else (), text)


def _held_keys() -> list[str]:
    """The keys that this machine holds, the longest first: one may hold another."""
    variables = ((name, os.environ.get(name, "")) for name in os.environ if names_key(name))
    held = {value for name, value in variables if _holds_key(name, value)}
    return sorted(held | _learnt, key=len, reverse=True)


def _without(keys: Iterable[str], text: str) -> str:
    text = redact(text)
    for key in keys:
        if len(key) >= _LONG:
            text = text.replace(key, HIDDEN)
        elif key in text:
            text = re.sub(rf"(?<!\w){re.escape(key)}(?!\w)", HIDDEN, text)
    return text


def _holds_key(name: str, value: str) -> bool:
    """Whether the value of a variable that is named like a key is a key: no setting, number or
    path."""
    if len(value) < _LEAST or _PLACE.match(value):
        return False
    if len(value) < _LONG and (value.isalpha() or value.isdecimal()):
        return _CHOSEN.search(name) is not None
    return not (value[0] in "/~" and at_home(value).exists())


def scrubbed(value: Any) -> Any:
    """A value with every text scrubbed, and the fields that hold keys hidden; see `scrub`."""
    return _each(value, partial(_without, _held_keys()))


def _each(value: Any, clean: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        return {key: _field(str(key), item, clean) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_each(item, clean) for item in value]
    return value


def _field(name: str, value: Any, clean: Callable[[str], str]) -> Any:
    if name.lower() == "headers" and value:
        return HIDDEN
    if isinstance(value, str) and value and _FIELDS.fullmatch(name):
        return HIDDEN
    return _each(value, clean)


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
