"""Find keys and logins in texts and settings, and hide them.

Others may read whatever is written or printed, so no key may stand in it. Four things are found by
their form: a login in a URL, a signature behind it, a header of HTTP, and a field of a spec that
holds a key. A variable that holds a key is found by its name. A key that a library reads from a
file is passed to `learn_secret`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

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
    return not (value[0] in "/~" and Path(value).expanduser().exists())


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
