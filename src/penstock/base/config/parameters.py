"""Errors of a function of Python name its parameters, where a command line names flags.

A message spells a knob as its flag. `names_parameters` gives the error the knobs that it may be
about, and `str` of the error spells these as parameters:

    --overlap 8 must be less than --patch 4   ──▶   `overlap` 8 must be less than `patch` 4
    use --resume or --overwrite               ──▶   use `resume=True` or `overwrite=True`
    give --no-amp                             ──▶   give `amp='off'`
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ..errors import PenstockError
from .knobs import Knobs

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def names_parameters(
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
        def naming(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
            try:
                return function(*args, **kwargs)
            except PenstockError as error:
                error.parameters = _parameters(model, parameters)
                raise

        return naming

    return around


def _parameters(model: type[Knobs], renamed: dict[str, str]) -> dict[str, str]:
    """The parameter, or the argument, that stands for each flag."""
    spelled: dict[str, str] = {}
    for knob, info in model.model_fields.items():
        parameter, dashed = renamed.get(knob, knob), knob.replace("_", "-")
        if info.annotation is bool:
            spelled |= {f"--{dashed}": f"{parameter}=True", f"--no-{dashed}": f"{parameter}=False"}
        else:
            spelled[f"--{dashed}"] = parameter
        extra = info.json_schema_extra
        if isinstance(extra, dict) and "alias" in extra:
            spelled[str(extra["alias"])] = f"{parameter}={extra['const']!r}"
    return spelled
