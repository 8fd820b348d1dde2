"""Sets of knobs, and how YAML, flags and Python arguments fill them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ..errors import UsageError
from ..units import parse_bytes

Positive = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]


def many(value: object) -> object:
    """A tuple of one for a single value where several may stand."""
    return value if isinstance(value, list | tuple) else (value,)


PerAxis = Annotated[tuple[Natural, ...], BeforeValidator(many), Field(min_length=1, max_length=3)]
"""One number for every spatial axis, or one for each of z y x (y x in two dimensions)."""
Shape = Annotated[tuple[Positive, ...], BeforeValidator(many), Field(min_length=1, max_length=3)]
Selection = Annotated[tuple[str | int, ...], BeforeValidator(many)]
"""``all``, indices, or ranges such as ``0:5`` (half-open)."""
Names = Annotated[tuple[str, ...], BeforeValidator(many), Field(min_length=1)]
Bytes = Annotated[int, BeforeValidator(parse_bytes)]


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


TrackerName = Literal["comet", "mlflow", "tensorboard"]
Trackers = Annotated[tuple[TrackerName, ...], BeforeValidator(listed)]


def _tile(value: object) -> str:
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){0,2}", str(value)):
        raise ValueError(f"{str(value)!r} is no tile such as 256 or 32x256x256")
    return str(value)


Tile = Annotated[str, BeforeValidator(_tile)]
"""``256`` is a square or a cube, as the model has axes; ``32x256x256`` is z y x."""


def flag(default: Any = ..., *, help: str, alias: str | None = None, const: Any = None) -> Any:
    """A knob with its default and its help. The flag ``alias`` sets it to ``const``."""
    extra = {"alias": alias, "const": const} if alias else None
    return Field(default, description=help, json_schema_extra=extra)


TRUST_MODEL = "give a .pt2 or TorchScript file that cannot be checked to torch: it may run any code"


class Knobs(BaseModel):
    """The base of every set of knobs. A field is a knob: a flag, a key of YAML, a parameter."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


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
        first = error.errors()[0]
        if not first["loc"]:  # of several settings together
            raise UsageError(first["msg"].removeprefix("Value error, ")) from None
        name = "--" + str(first["loc"][0]).replace("_", "-")
        if first["type"] == "missing" and len(first["loc"]) == 1:
            raise UsageError(f"{name} is required") from None
        if first["type"] == "extra_forbidden":
            raise UsageError(f"there is no setting {first['loc'][0]!r}") from None
        if first["type"] == "value_error":  # one of ours, and whole
            raise UsageError(f"{name}: {first['ctx']['error']}") from None
        message = first["msg"][:1].lower() + first["msg"][1:]
        raise UsageError(f"{name} {first['input']!r}: {message}") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """The settings in a YAML file.

    Raises:
        UsageError: It cannot be read, or holds no settings.
    """
    try:
        settings = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict):
        raise UsageError(f"--config {path} holds no settings")
    return settings


def add_kinds(
    parser: argparse.ArgumentParser,
    kinds: Mapping[str, str],
    metavar: str = "WHAT",
    aliases: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, argparse.ArgumentParser]:
    """Give a verb its kinds, such as ``bench model``; ``args.kind`` will be the one that is asked.

    Args:
        parser: The parser of the verb.
        kinds: The help of each kind.
        metavar: What a kind is called in the verb's help.
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
    fields = model.model_fields.items()
    for name, info in sorted(fields, key=lambda field: field[0] not in model.__annotations__):
        dashed = "--" + name.replace("_", "-")
        text = info.description or ""
        plain = info.default is False or info.default in (None, ..., ("all",))
        if not plain and not info.is_required() and "default" not in text:
            text += f" (default: {_typed(info.default)})"
        text = text.replace("%", "%%")
        options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": text}
        if info.annotation is bool:
            parser.add_argument(dashed, **options, action=argparse.BooleanOptionalAction)
        else:
            many = "tuple" in str(info.annotation)
            may_be_empty = "tuple[()]" in str(info.annotation) or "_switch" in str(info.metadata)
            nargs = "*" if may_be_empty else "+" if many else None
            parser.add_argument(dashed, **options, nargs=nargs, metavar=_metavar(info))
        extra = info.json_schema_extra
        if isinstance(extra, dict):
            parser.add_argument(
                str(extra["alias"]),
                dest=name,
                action="store_const",
                const=extra["const"],
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS
                if info.annotation is bool
                else f"same as {dashed} {extra['const']}",
            )


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
    choices = getattr(info.annotation, "__args__", ())
    if "Literal" in str(info.annotation) and "tuple" not in str(info.annotation):
        return "|".join(str(c) for c in choices)
    for kind, word in (("int", "N"), ("float", "X"), ("Path", "PATH")):
        if re.search(rf"\b{kind}\b", str(info.annotation)):
            return word
    return "VALUE"


def as_settings(config: Knobs) -> dict[str, Any]:
    """The settings that the user gave, as plain values for a record or a YAML file."""
    return {
        name: value if isinstance(value, str | int | float | bool) else _plain(value)
        for name, value in config
        if name in config.model_fields_set
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(v) for v in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
