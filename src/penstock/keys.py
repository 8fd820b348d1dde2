"""Keys and logins: what holds one, and texts without them.

Whatever is written or told may be read by others, so no key stands in it. A variable that holds one
is known by its name; a library that has a key from a file of its own is asked, and `learn` is told.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

_NAMES = re.compile("KEY|TOKEN|PASSW|SECRET|CREDENTIAL", re.IGNORECASE)
_LOGIN = re.compile(r"://[^/@\s]*@")
_LEAST = 6
"""Characters. A shorter value of such a variable, ``true`` for example, is no secret."""
_learnt: set[str] = set()


def names_key(name: str) -> bool:
    """Whether a variable of that name holds a key.

    >>> names_key("DB_PASSWD"), names_key("OMP_NUM_THREADS")
    (True, False)
    """
    return _NAMES.search(name) is not None


def has_login(text: str) -> bool:
    """Whether there is a URL with a login in a text.

    >>> has_login("--data=https://me:word@host/path"), has_login("s3://bucket/a@b")
    (True, False)
    """
    return _LOGIN.search(text) is not None


def learn(key: str | None) -> None:
    """From now on `scrub` knows a key that stands in no variable."""
    if key is not None and len(key) >= _LEAST:
        _learnt.add(key)


def scrub(text: str) -> str:
    """A text without logins of URLs and without what is known as a key.

    >>> scrub("no answer from https://me:word@host/path")
    'no answer from https://host/path'
    """
    text = _LOGIN.sub("://", text)
    held = {value for name, value in os.environ.items() if names_key(name)}
    for key in sorted(held | _learnt, key=len, reverse=True):  # one may hold another
        if len(key) >= _LEAST:
            text = text.replace(key, "***")
    return text


def scrubbed(value: Any) -> Any:
    """The same of every text in a value."""
    if isinstance(value, str):
        return scrub(value)
    if isinstance(value, Mapping):
        return {key: scrubbed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [scrubbed(item) for item in value]
    return value
