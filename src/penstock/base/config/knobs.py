"""Sets of knobs, and how YAML and Python arguments fill them.

Errors of a function of Python name its parameters, where a command line names flags. A message
spells a knob as its flag. `names_parameters` gives the error the knobs that it may be about, and
`str` of the error spells these as parameters:

    --overlap 8 must be less than --patch 4   ──▶   `overlap` 8 must be less than `patch` 4
    use --resume or --overwrite               ──▶   use `resume=True` or `overwrite=True`
    give --no-amp                             ──▶   give `amp='off'`
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec, TypeVar
from urllib.parse import unquote

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ..errors import PenstockError, UsageError
from ..files import check_ends
from ..groups import with_each
from ..units import parse_bytes, parse_seconds, parse_share

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

Positive = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]


def many(value: object) -> object:
    """A tuple of one for a single value where several may stand."""
    return value if isinstance(value, list | tuple) else (value,)


def folder_place(value: object) -> object:
    """A folder of this machine as a path; the URL of any other place stays text."""
    if not isinstance(value, str):
        return value
    if value.startswith("file://"):
        return Path(unquote(value[7:]))
    return value if "://" in value else Path(value)


PerAxis = Annotated[tuple[Natural, ...], BeforeValidator(many), Field(min_length=1, max_length=3)]
"""One number for every spatial axis, or one for each of z y x (y x in two dimensions)."""


def as_number(value: object) -> object:
    """The number in a word of a command line; other values as they are."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


Shape = Annotated[tuple[Positive, ...], BeforeValidator(many), Field(min_length=1, max_length=3)]
Selection = Annotated[tuple[str | int, ...], BeforeValidator(many)]
"""``all``, indices, or ranges such as ``0:5`` (half-open)."""
Place = Annotated[Path | str, BeforeValidator(folder_place)]
"""A folder of this machine as a path, or the URL of a prefix in a bucket as text."""
Names = Annotated[tuple[str, ...], BeforeValidator(many), Field(min_length=1)]
Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Seconds = Annotated[float, BeforeValidator(parse_seconds)]
Fraction = Annotated[float, BeforeValidator(parse_share)]
"""``1%`` or ``0.01``: above 0."""
ON_OR_OFF = (bool, bool | None)
"""The annotations of a knob whose flag takes no value; with ``--no-`` before its name it is off."""


def _switch(value: object) -> object:
    """A flag without a value is on; ``off on`` measures both."""
    return (True,) if value in ((), []) else many(value)


Switches = Annotated[tuple[bool, ...], BeforeValidator(_switch)]
"""``--amp`` is on, ``--amp off on`` is an axis of a sweep."""


def listed(value: object) -> object:
    """The names in ``comet,mlflow`` or ``comet mlflow``."""
    words = many(value)
    assert isinstance(words, list | tuple)
    names = dict.fromkeys(name for word in words for name in str(word).split(",") if name)
    if words and not names:
        raise ValueError("it is empty")
    return tuple(names)


TrackerName = Literal["comet", "mlflow", "tensorboard", "wandb"]
Trackers = Annotated[tuple[TrackerName, ...], BeforeValidator(listed)]


def _tile(value: object) -> str:
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){0,2}", str(value)):
        raise ValueError(f"{str(value)!r} is not a tile such as 256 or 32x256x256")
    return str(value)


Tile = Annotated[str, BeforeValidator(_tile)]
"""``256`` is a square for a 2-D model and a cube for a 3-D one; ``32x256x256`` is z y x."""


def flag(
    default: Any = ...,
    *,
    help: str,
    group: str | None = None,
    alias: str | None = None,
    const: Any = None,
    unit: str | None = None,
) -> Any:
    """A knob with its default and its help.

    ``group`` is the heading under which ``--help-all`` lists a knob that few jobs need. The flag
    ``alias`` sets it to ``const``. ``unit`` is what a number counts, for the reference, where its
    type does not say it.
    """
    extra = {"group": group, "alias": alias, "const": const, "unit": unit}
    said: dict[str, Any] = {key: value for key, value in extra.items() if value is not None}
    return Field(default, description=help, json_schema_extra=said)


_BUILDING = RLock()
TRUST_MODEL = "open a .pt2 or TorchScript model: such a file may run any code"


class Knobs(BaseModel):
    """The base of every set of knobs. A field is a knob: a flag, a key of YAML, a parameter."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        defer_build=True,
        allow_inf_nan=False,  # a limit that is NaN would leave out everything
    )

    @classmethod
    def model_rebuild(cls, **options: Any) -> bool | None:
        """Pydantic makes the checks of a class at its first use, which threads may share."""
        with _BUILDING:
            return super().model_rebuild(**options)


class Overwriting(Knobs):
    """The knob of every verb that writes files which the user names; see `base.outputs`."""

    overwrite: bool = flag(
        False, help="replace what stands in the place of an output, whoever wrote it"
    )


class NetworkKnobs(Knobs):
    """The knobs that say how a network is loaded, beside its name."""

    weights: Path | None = flag(None, help="state dict: safetensors, or a torch file of tensors")
    trust_model: bool = flag(False, help=TRUST_MODEL, group="input and model")
    in_channels: Positive | None = flag(
        None,
        help="channels that the model takes (default: those of its first layer)",
        group="input and model",
    )


Config = TypeVar("Config", bound=Knobs)


def build(model: type[Config], *layers: Mapping[str, Any]) -> Config:
    """A validated config.

    Args:
        model: Its class.
        layers: Settings by name, with dashes or underscores; later layers win.

    Returns:
        The config.

    Raises:
        UsageError: A setting is wrong; the message is one sentence on the first.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        merged |= {str(key).replace("-", "_"): value for key, value in layer.items()}
    try:
        return model.model_validate(merged)
    except ValidationError as error:
        raise UsageError(_fault(model, error.errors()[0], _as_flag)) from None


def check_file(
    model: type[Knobs], settings: Mapping[str, Any], file: str, *, whole: bool = False
) -> None:
    """Refuse settings of a file that are wrong whatever the flags say.

    Args:
        model: The class of the settings.
        settings: The settings in the file.
        file: Its name for the sentence, such as ``--config job.yaml``.
        whole: Whether the file must hold all that is required.

    Raises:
        UsageError: A setting is wrong; the message is one sentence on the first, with its key.
    """
    try:
        model.model_validate({str(key).replace("-", "_"): value for key, value in settings.items()})
    except ValidationError as error:
        for each in error.errors():
            # Flags may add what is missing in the file.
            if whole or (each["loc"] and each["type"] != "missing"):
                raise UsageError(f"{file}: {_fault(model, each, str)}") from None


def check_belongs(given: Iterable[str], kinds: Mapping[str, Collection[str]], kind: str) -> None:
    """Refuse knobs that belong to other kinds of a verb. Those of no kind belong to all.

    Args:
        given: The names of the knobs.
        kinds: The knobs of each kind.
        kind: The kind that is asked for.

    Raises:
        UsageError: A knob belongs to others; the message names the first.
    """
    for name in sorted(given):
        holders = [each for each, knobs in kinds.items() if name in knobs]
        if holders and kind not in holders:
            raise UsageError(
                f"{_as_flag(name)} belongs to {' and '.join(holders)}, but this is {kind}"
            )


def _as_flag(key: object) -> str:
    return "--" + str(key).replace("_", "-")


def _fault(model: type[Knobs], error: ErrorDetails, spelled: Callable[[object], str]) -> str:
    """The sentence for an error of pydantic, with the setting as it was spelled."""
    if not error["loc"]:  # of several settings together
        return error["msg"].removeprefix("Value error, ")
    key = error["loc"][0]
    if error["type"] == "missing":
        return f"{spelled(key)} {'is required' if len(error['loc']) == 1 else 'takes more values'}"
    if error["type"] == "extra_forbidden":
        alike = difflib.get_close_matches(str(key), model.model_fields, 1)
        return f"there is no setting {key!r}{f' (perhaps {alike[0]!r})' if alike else ''}"
    if error["type"] == "value_error":  # one of ours, and whole
        return f"{spelled(key)}: {error['ctx']['error']}"
    message = error["msg"][:1].lower() + error["msg"][1:]
    return f"{spelled(key)} {error['input']!r}: {message}"


def read_yaml(path: Path, asked: str = "--config") -> dict[str, Any]:
    """The settings in a YAML file.

    Args:
        path: The file.
        asked: The flag that names it.

    Returns:
        The settings by name.

    Raises:
        UsageError: It cannot be read, or holds no settings.
    """
    check_ends(path, f"{asked} {path}")
    try:
        settings = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UsageError(f"{asked} {path}: {error.strerror}") from error
    except RecursionError:
        raise UsageError(f"{asked} {path} is nested too deeply") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{asked} {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict):
        raise UsageError(f"{asked} {path} holds no settings")
    return settings


def as_settings(config: Knobs) -> dict[str, Any]:
    """The settings that the user gave, as plain values for a record or a YAML file."""
    given = {name: value for name, value in config if name in config.model_fields_set}
    settings: dict[str, Any] = with_each(given, _plain)
    return settings


def _plain(value: Any) -> Any:
    if hasattr(value, "__array_interface__"):  # not its many numbers
        return f"array in memory, {value.dtype} {tuple(value.shape)}"
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


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
        if info.annotation in ON_OR_OFF:
            spelled |= {f"--{dashed}": f"{parameter}=True", f"--no-{dashed}": f"{parameter}=False"}
        else:
            spelled[f"--{dashed}"] = parameter
        extra = info.json_schema_extra
        if isinstance(extra, dict) and "alias" in extra:
            spelled[str(extra["alias"])] = f"{parameter}={extra['const']!r}"
    return spelled
