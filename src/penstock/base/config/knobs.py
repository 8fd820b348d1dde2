"""Sets of knobs, and how YAML, flags and Python arguments fill them."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar
from urllib.parse import unquote

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ..errors import UsageError
from ..units import parse_bytes, parse_seconds

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
Shape = Annotated[tuple[Positive, ...], BeforeValidator(many), Field(min_length=1, max_length=3)]
Selection = Annotated[tuple[str | int, ...], BeforeValidator(many)]
"""``all``, indices, or ranges such as ``0:5`` (half-open)."""
Place = Annotated[Path | str, BeforeValidator(folder_place)]
"""A folder of this machine as a path, or the URL of a prefix in a bucket as text."""
Names = Annotated[tuple[str, ...], BeforeValidator(many), Field(min_length=1)]
Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Seconds = Annotated[float, BeforeValidator(parse_seconds)]


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
    alias: str | None = None,
    const: Any = None,
    unit: str | None = None,
) -> Any:
    """A knob with its default and its help. The flag ``alias`` sets it to ``const``. ``unit`` is
    what a number counts, for the reference, where its type does not say it."""
    extra = {"alias": alias, "const": const} if alias else {}
    return Field(
        default, description=help, json_schema_extra=extra | ({"unit": unit} if unit else {})
    )


_KNOB = "penstock_knob"
_BUILDING = RLock()
TRUST_MODEL = "give a .pt2 or TorchScript file that cannot be checked to torch: it may run any code"


class Knobs(BaseModel):
    """The base of every set of knobs. A field is a knob: a flag, a key of YAML, a parameter."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, defer_build=True
    )

    @classmethod
    def model_rebuild(cls, **options: Any) -> bool | None:
        """Pydantic makes the checks of a class at its first use, which threads may share."""
        with _BUILDING:
            return super().model_rebuild(**options)


class Replacing(Knobs):
    """The knob of every verb that writes files which the user names; see `base.outputs`."""

    replace: bool = flag(
        False, help="replace files that Penstock did not write, or that were edited since"
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
        raise UsageError(_fault(error.errors()[0], _as_flag)) from None


def check_file(model: type[Knobs], settings: Mapping[str, Any], file: str) -> None:
    """Refuse settings of a file that are wrong whatever the flags say.

    Args:
        model: The class of the settings.
        settings: The settings in the file.
        file: Its name for the sentence, such as ``--config job.yaml``.

    Raises:
        UsageError: A setting is wrong; the message is one sentence on the first, with its key.
    """
    try:
        model.model_validate({str(key).replace("-", "_"): value for key, value in settings.items()})
    except ValidationError as error:
        for each in error.errors():
            # Flags may add what is missing in the file.
            if each["loc"] and each["type"] != "missing":
                raise UsageError(f"{file}: {_fault(each, str)}") from None


def _as_flag(key: object) -> str:
    return "--" + str(key).replace("_", "-")


def _fault(error: ErrorDetails, spelled: Callable[[object], str]) -> str:
    """The sentence for an error of pydantic, with the setting as it was spelled."""
    if not error["loc"]:  # of several settings together
        return error["msg"].removeprefix("Value error, ")
    key = error["loc"][0]
    if error["type"] == "missing" and len(error["loc"]) == 1:
        return f"{spelled(key)} is required"
    if error["type"] == "extra_forbidden":
        return f"there is no setting {key!r}"
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
    try:
        settings = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UsageError(f"{asked} {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{asked} {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict):
        raise UsageError(f"{asked} {path} holds no settings")
    return settings


def add_kinds(
    parser: argparse.ArgumentParser,
    kinds: Mapping[str, str],
    metavar: str = "WHAT",
    aliases: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, argparse.ArgumentParser]:
    """Give a verb its kinds, such as ``bench model``; ``args.kind`` will hold the chosen one.

    Args:
        parser: The parser of the verb.
        kinds: The help of each kind.
        metavar: The word for a kind in the verb's help.
        aliases: Other names of some kinds.

    Returns:
        A parser for each kind.
    """
    places = parser.add_subparsers(dest="kind", metavar=metavar, required=True)
    return {
        kind: places.add_parser(
            kind,
            help=about,
            description=about,
            allow_abbrev=False,
            aliases=(aliases or {}).get(kind, ()),
        )
        for kind, about in kinds.items()
    }


def add_flags(
    parser: argparse._ActionsContainer, model: type[Knobs], *, config_file: bool = False
) -> None:
    """Add a flag for each knob, first those of the class itself, then those that it inherits.

    A flag that is not given sets nothing.

    Args:
        parser: The parser.
        model: The class of the knobs.
        config_file: Whether to add ``--config``, the YAML file that `from_flags` takes.
    """
    if config_file:
        parser.add_argument("--config", type=Path, metavar="FILE.yaml", help="settings; flags win")
    for flag, options in _flags_of(model):
        vars(parser.add_argument(flag, **options))[_KNOB] = (model, options["dest"])


def knob_of(action: argparse.Action) -> tuple[type[Knobs], str] | None:
    """The class and the name of the knob that a flag sets; None for a flag of the verb's own."""
    return vars(action).get(_KNOB)


@cache
def _flags_of(model: type[Knobs]) -> list[tuple[str, dict[str, Any]]]:
    """The flags of a class, each with its options for argparse."""
    flags = []
    fields = model.model_fields.items()
    for name, info in sorted(fields, key=lambda field: field[0] not in model.__annotations__):
        dashed, kind = "--" + name.replace("_", "-"), str(info.annotation)
        text = info.description or ""
        plain = info.default is False or info.default in (None, ..., ("all",), {})
        if not plain and not info.is_required() and "default" not in text:
            text += f" (default: {_typed(info.default)})"
        text = text.replace("%", "%%")
        options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": text}
        if info.annotation is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif "Mapping" in kind:
            options |= {"action": "append", "metavar": "KEY=VALUE"}
        else:
            may_be_empty = "tuple[()]" in kind or "_switch" in str(info.metadata)
            options["nargs"] = "*" if may_be_empty else "+" if "tuple" in kind else None
            options["metavar"] = _metavar(info)
            if "NAME=VALUE" in text:  # a second one sets another variable
                options["action"] = "extend"
        flags.append((dashed, options))
        extra = info.json_schema_extra
        if isinstance(extra, dict) and "alias" in extra:
            options = {
                "dest": name,
                "action": "store_const",
                "const": extra["const"],
                "default": argparse.SUPPRESS,
                "help": argparse.SUPPRESS
                if info.annotation is bool
                else f"same as {dashed} {extra['const']}",
            }
            flags.append((str(extra["alias"]), options))
    return flags


def _typed(default: Any) -> str:
    """A default as it is typed on a command line."""
    if isinstance(default, tuple):
        return " ".join(map(_typed, default))
    return ("off", "on")[default] if isinstance(default, bool) else str(default)


def from_flags(model: type[Config], args: argparse.Namespace, config: Path | None = None) -> Config:
    """A config from flags, and from a YAML file where there is one.

    Args:
        model: Its class.
        args: The parsed flags, which win over the file.
        config: The YAML file.

    Returns:
        The config.

    Raises:
        UsageError: A setting is wrong; the message is one sentence on the first.
    """
    names = model.model_fields.keys()
    given = {key: value for key, value in vars(args).items() if key in names}
    return build(model, read_yaml(config) if config else {}, given)


def _metavar(info: Any) -> str:
    choices, kind = getattr(info.annotation, "__args__", ()), str(info.annotation)
    if "Literal" in kind and "tuple" not in kind:
        return "|".join(str(c) for c in choices)
    for part, word in (("int", "N"), ("float", "X"), ("Path", "PATH")):
        if re.search(rf"\b{part}\b", kind):
            return word
    return "VALUE"


def as_settings(config: Knobs) -> dict[str, Any]:
    """The settings that the user gave, as plain values for a record or a YAML file."""
    return {
        name: value if isinstance(value, str | int | float | bool) else _plain(value)
        for name, value in config
        if name in config.model_fields_set
    }


def as_words(model: type[Knobs], settings: Mapping[str, Any]) -> list[str]:
    """Settings as the flags of a command line.

    Args:
        model: The class of the knobs.
        settings: Settings by name, as `as_settings` returns them.

    Returns:
        The words of a command line.
    """
    words = []
    for name, value in settings.items():
        dashed = name.replace("_", "-")
        if model.model_fields[name].annotation is bool:
            words.append(f"--{dashed}" if value else f"--no-{dashed}")
        elif value is not None:
            several = value if isinstance(value, list | tuple) else [value]
            words += [f"--{dashed}", *map(_word, several)]
    return words


def _word(value: Any) -> str:
    if isinstance(value, Mapping):
        return json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(v) for v in value]
    if hasattr(value, "__array_interface__"):  # not its many numbers
        return f"array in memory, {value.dtype} {tuple(value.shape)}"
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
