"""Name and tags of a run: the knobs ``--name`` and ``--tag`` of every verb that leaves a record.

They help people to find a run among others. They do not change the work, so they are no part of a
case's key or of a run's fingerprint.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from ..safe_text import for_terminal, scrubbed
from .knobs import Knobs, flag, many

MOST_NAME, MOST_KEY, MOST_VALUE, MOST_TAGS = 120, 60, 200, 50
"""Most characters of a name, of a tag's key and of its value, and most tags. Every tracker accepts
these."""
_KEY = re.compile(r"\w[\w.:/ -]*")
"""A key that trackers take as it is."""


def _line(text: str, most: int) -> str:
    """A text of one line, without blanks around it. Raises `ValueError` for any other."""
    shown = repr(text if len(text) <= 40 else f"{text[:40]}...")
    text = text.strip()
    if not text:
        raise ValueError(f"{shown} is empty")
    if len(text) > most:
        raise ValueError(f"{shown} has {len(text)} characters, and {most} are the most")
    if any(char in text for char in "\t\n") or for_terminal(text) != text:
        raise ValueError(f"{shown} holds control characters")
    return text


def _tags(value: object) -> dict[str, str]:
    """The tags of a mapping or of words KEY=VALUE."""
    tags = {}
    for key, text in pairs_of(value).items():
        key = _line(str(key), MOST_KEY)
        if not _KEY.fullmatch(key):
            raise ValueError(
                f"the key {key!r} begins with a letter or a digit, and has no others than letters, "
                "digits, blanks and _ . : / -"
            )
        spelled = str(text).lower() if isinstance(text, bool) else str(text)
        tags[key] = _line(spelled, MOST_VALUE)
    if len(tags) > MOST_TAGS:
        raise ValueError(f"{len(tags)} tags are given, and {MOST_TAGS} are the most")
    return tags


def pairs_of(value: object) -> Mapping[Any, Any]:
    """A mapping, as in YAML and in Python, or that of words KEY=VALUE."""
    if isinstance(value, Mapping):
        return value
    pairs = {}
    words: Any = many(value)
    for word in words:
        key, equals, pairs[key] = str(word).partition("=")
        if not equals or not key.strip():
            raise ValueError(f"{str(word)[:60]!r} is not KEY=VALUE")
    return pairs


class Labels(Knobs):
    """The name and the tags that the user gives a run."""

    name: Annotated[str, AfterValidator(partial(_line, most=MOST_NAME))] | None = flag(
        None,
        help="name of the run, for its records and trackers (default: what it is, its devices, the "
        "time and four random digits)",
        group="name of the run",
    )
    tag: Annotated[Mapping[str, str], BeforeValidator(_tags)] = flag(
        {},
        help="KEY=VALUE, a tag of the run, by which it is found and grouped; give it once for each "
        "tag. Put no key into it: records hold tags as they are",
        group="name of the run",
    )


def default_name(what: str, devices: str = "") -> str:
    """A name by which a person tells runs apart in a list.

    Args:
        what: The workload, model or benchmark that runs.
        devices: The devices, such as ``4gpu``.

    Returns:
        ``what``, the devices, the local time to the second, and four random digits.
    """
    plain = re.sub(r"[^\w.]+", "-", what).strip("-.")[:60] or "run"
    parts = [plain, devices, time.strftime("%Y%m%d-%H%M%S"), secrets.token_hex(2)]
    return "-".join(filter(None, parts))


def run_labels(
    config: Labels, default: str, before: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The name and the tags of a run.

    Args:
        config: The knobs.
        default: The name if the user gives none; see `default_name`.
        before: The document of an earlier run that this one resumes. The run keeps its name,
            unless it is given another, and its tags beside the new ones.

    Returns:
        ``name`` and ``tags``, as records hold them.
    """
    before = before or {}
    tags = {**(before.get("tags") or {}), **config.tag}
    labels: dict[str, Any] = {"name": config.name or before.get("name") or default, "tags": tags}
    return scrubbed(labels)
