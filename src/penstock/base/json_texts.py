"""Texts of JSON: what is written has no NaN, and what is read may be anything."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

from .groups import with_each


def json_text(document: Any, indent: int | None = 2) -> str:
    """A document as a text of JSON.

    Args:
        document: The document. JSON has no NaN: numbers that are not finite become null.
        indent: Spaces of each level; None writes one line.

    Returns:
        The text, with a newline.
    """
    return json.dumps(with_each(document, _finite), indent=indent, allow_nan=False) + "\n"


def parsed_json(text: str | bytes) -> Any:
    """The document in a text of JSON.

    Raises:
        ValueError: It is not JSON, it is nested deeper than Python reads, or it has a whole number
            that no float can hold.
    """
    try:
        return json.loads(text, parse_int=_whole)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _whole(digits: str) -> int:
    if len(digits) > sys.float_info.max_10_exp:
        raise ValueError(f"it has a number of {len(digits)} digits")
    return int(digits)


def json_object(text: str | bytes) -> dict[str, Any]:
    """The JSON object in a text that may be cut off, or hold something else; then it is empty."""
    try:
        document = parsed_json(text)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def canonical(value: Any) -> str:
    """JSON in one canonical spelling, for hashes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
