"""Errors name flags on a command line, and parameters in Python.

Messages are written for the command line. `speaks_python` wraps a public function and rewrites the
flags in its errors as parameters of the call. A command line runs within `errors.speaking_flags`,
so that errors of the same functions keep their flags there.

    --batch-size 0: input should be greater   ──▶   batch_size=0: input should be greater
    no chunk 3; --missing fill fills it       ──▶   no chunk 3; missing='fill' fills it
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar, get_args

from ..errors import PenstockError, flags_are_spoken
from .knobs import Knobs

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")

_PROSE = frozenset(
    "a and are at but by for goes has holds in is it itself lies may must names needs of on or "
    "says takes tells than that the to unless where which with would".split()
)
"""Words that may follow a flag in a sentence and are not its value."""
_NUMBERS = r"-?\d[\d.]*(?: -?\d[\d.]*)+\b"
_WORD = r"[\w.'\"/-](?:[^\s;,:)]*[^\s;,:).])?"
_FLAG = re.compile(rf"(?<![\w-])--([a-z][a-z0-9]*(?:-[a-z0-9]+)*)(?: ({_NUMBERS}|{_WORD}))?")


def speaks_python(
    model: type[Knobs], **parameters: str
) -> Callable[[Callable[_Given, _Result]], Callable[_Given, _Result]]:
    """Make a function's errors name its parameters.

    Args:
        model: The class of knobs that are its parameters.
        parameters: Parameters that have another name than their knob: ``model_type="model"``.

    Returns:
        A decorator.
    """

    def around(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
        @functools.wraps(function)
        def speaking(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
            try:
                return function(*args, **kwargs)
            except PenstockError as error:
                if not flags_are_spoken():
                    error.args = (in_python(str(error), model, parameters), *error.args[1:])
                raise

        return speaking

    return around


def in_python(message: str, model: type[Knobs], parameters: Mapping[str, str]) -> str:
    """A message with its flags as parameters of a call. Flags without a knob in ``model`` stay."""

    def renamed(match: re.Match[str]) -> str:
        name, value = match[1].replace("-", "_"), match[2]
        rest = "" if value is None else f" {value}"
        if (alias := _aliases(model).get(match[1])) is not None:
            knob, constant = alias
            return f"{parameters.get(knob, knob)}={constant!r}{rest}"
        knob = name if name in model.model_fields else name.removeprefix("no_")
        if knob not in model.model_fields:
            return match[0]
        called, kind = parameters.get(knob, knob), model.model_fields[knob].annotation
        if kind is bool:
            return f"{called}={knob == name}{rest}"
        if value is None:
            return f"{called}="
        if value in _choices(kind) or ("str" in str(kind) and _is_text(value)):
            return f"{called}={value!r}"
        if " " in value:  # several numbers
            return f"{called}=({', '.join(value.split())})"
        # A word goes on with the sentence; anything else is a value.
        return f"{called}={rest if value[0].isalpha() else value}"

    return _FLAG.sub(renamed, message)


def _is_text(word: str) -> bool:
    """Whether a word after a flag that takes text is its value and not part of the sentence."""
    return word[0].isalpha() and word not in _PROSE


def _choices(annotation: Any) -> set[Any]:
    """The words of a Literal, at any depth of a type."""
    if isinstance(annotation, str):
        return {annotation}
    return set().union(*map(_choices, get_args(annotation)))


def _aliases(model: type[Knobs]) -> dict[str, tuple[str, Any]]:
    """Further flags without their dashes, with the knob and the value that each sets."""
    extras = {name: info.json_schema_extra for name, info in model.model_fields.items()}
    return {
        str(extra["alias"]).removeprefix("--"): (name, extra["const"])
        for name, extra in extras.items()
        if isinstance(extra, dict) and "alias" in extra
    }
