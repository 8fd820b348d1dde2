"""Knobs as flags of a command line."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from .knobs import ON_OR_OFF, Config, Knobs, build, read_yaml

_KNOB, _GROUP = "penstock_knob", "penstock_group"


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
    parser: argparse._ActionsContainer,
    model: type[Knobs],
    *,
    config_file: bool = False,
    only: Collection[str] | None = None,
    group: str | None = None,
) -> None:
    """Add a flag for each knob, first those of the class itself, then those that it inherits.

    A flag that is not given sets nothing.

    Args:
        parser: The parser.
        model: The class of the knobs.
        config_file: Whether to add ``--config``, the YAML file that `from_flags` takes.
        only: The names of the knobs that get a flag; None for all.
        group: The heading of all of them; by default each has its own, or none.
    """
    if config_file:
        parser.add_argument("--config", type=Path, metavar="FILE.yaml", help="settings; flags win")
    for flag, options in _flags_of(model):
        if only is not None and options["dest"] not in only:
            continue
        said: Any = model.model_fields[options["dest"]].json_schema_extra
        action = vars(parser.add_argument(flag, **options))
        action[_KNOB] = (model, options["dest"])
        action[_GROUP] = group or said.get("group")


def knob_of(action: argparse.Action) -> tuple[type[Knobs], str] | None:
    """The class and the name of the knob that a flag sets; None for a flag of the verb's own."""
    return vars(action).get(_KNOB)


def group_of(action: argparse.Action) -> str | None:
    """The heading of a flag that few jobs need; None for one that ``--help`` lists."""
    return vars(action).get(_GROUP)


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
        if info.annotation in ON_OR_OFF:
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
    """What a flag takes: its words, such as ``trim|blend``, or the kind of its value."""
    kind, words = str(info.annotation), list(_words(info.annotation))
    if words and "tuple" not in kind:
        return "|".join([*words, "N"] if re.search(r"\bint\b", kind) else words)
    for part, word in (("int", "N"), ("float", "X"), ("Path", "PATH")):
        if re.search(rf"\b{part}\b", kind):
            return word
    return "VALUE"


def _words(annotation: Any) -> Iterator[str]:
    """The words of the `Literal` in an annotation, or in the members of a union."""
    if get_origin(annotation) is Literal:
        yield from map(str, get_args(annotation))
    else:
        for member in get_args(annotation):
            yield from _words(member)
