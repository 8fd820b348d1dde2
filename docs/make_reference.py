"""The pages of the reference: from the parsers, the knobs and the doors, never by hand.

Each verb has a page with every flag, and each wing one with the names of its door. Pages that lie
elsewhere in the repository, such as ARCHITECTURE.md, are brought in, with links that lead to their
place in the site.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo
from sphinx.pycode import ModuleAnalyzer

import penstock
from penstock.base import Knobs, knob_of
from penstock.cli import VERBS, parser_of
from penstock.cli.verb_parser import examples_of

ROOT = Path(__file__).parent.parent
ELSEWHERE = {
    "README.md": "readme",
    "ARCHITECTURE.md": "architecture",
    "CONTRIBUTING.md": "contributing",
    "benchmarks/README.md": "benchmarks",
    "training/README.md": "training",
}
"""Pages of the repository, and their names in the reference."""


def write(folder: Path) -> None:
    """Write all pages; a page that is the same as before is left alone.

    Args:
        folder: Where they go. Other files in it are removed.
    """
    pages = dict(_pages())
    for name, text in pages.items():
        path = folder / f"{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    for path in folder.rglob("*.md"):
        if str(path.relative_to(folder).with_suffix("")) not in pages:
            path.unlink()


def _pages() -> Iterator[tuple[str, str]]:
    guides = sorted(path.stem for path in (ROOT / "docs").glob("*.md") if path.stem != "index")
    tasks = "\n".join(_task(ROOT / f"docs/{guide}.md") for guide in guides)
    yield "howto", contents("How-to guides", tasks, *(f"../{guide}" for guide in guides))
    parts = ["Penstock on one page <readme>", "verbs/index", "knobs", "python/index", "rooms"]
    parts += sorted({*ELSEWHERE.values()} - {"readme", "architecture"})
    yield "index", contents("Reference", "Every command, every setting, every public name.", *parts)
    for place, name in ELSEWHERE.items():
        yield name, relinked((ROOT / place).read_text(), (ROOT / place).parent, "reference")
    parsers = {verb: list(_verb_and_kinds(verb)) for verb in VERBS}
    yield "verbs/index", contents("Commands", "What `penstock VERB --help` says.", *VERBS)
    for verb, found in parsers.items():
        yield f"verbs/{verb}", _verb_page(verb, found)
    yield "knobs", _knobs_page(parsers)
    yield (
        "python/penstock",
        _python_page("penstock", penstock.__doc__, dict.fromkeys(penstock.__all__, "penstock")),
    )
    wings = _doors()
    about = "`penstock` is the public API. The other pages list what the wings hand to each other."
    yield "python/index", contents("Python", about, "penstock", *wings)
    yield "rooms", _rooms_page()
    for wing, names in wings.items():
        door = importlib.import_module(f"penstock.{wing}")
        yield f"python/{wing}", _python_page(f"penstock.{wing}", door.__doc__, names)


def _task(guide: Path) -> str:
    """A list item with the guide's title and its first sentence, which says what it is for."""
    title, first, *_ = guide.read_text().removeprefix("# ").split("\n\n")
    sentence = re.split(r"(?<=[.:])\s", " ".join(first.split()))[0].removesuffix(":")
    return f"- [{title}](../{guide.name}): {sentence.removesuffix('.')}."


def _rooms_page() -> str:
    """Every room of the house by the first sentence of its docstring."""
    package = Path(penstock.__file__).parent
    page = ["# Rooms", "", "Every file of the package, by the first sentence of its docstring.", ""]
    for wing in sorted(path.parent for path in package.glob("*/__init__.py")):
        page += [f"## {wing.name}", ""]
        for path in sorted(wing.rglob("*.py")):
            text = ast.get_docstring(ast.parse(path.read_text())) or ""
            if text and path.name != "__init__.py":
                sentence = " ".join(text.split("\n\n")[0].split()).replace("``", "`")
                page.append(f"- `{path.relative_to(wing)}`: {sentence}")
        page.append("")
    return "\n".join(page)


def contents(title: str, about: str, *pages: str) -> str:
    """A page that lists others."""
    return "\n".join(
        [f"# {title}", "", about, "", "```{toctree}", ":maxdepth: 1", "", *pages, "```", ""]
    )


# --- pages that lie elsewhere ---------------------------------------------------------------------


def relink(app: Any, page: str, text: list[str]) -> None:
    """Let links of a page lead to other pages of the site where those have their place."""
    if not page.startswith("reference/"):
        folder = Path(page).parent
        text[0] = relinked(text[0], ROOT / "docs" / folder, folder)


def relinked(text: str, written_in: Path, shown_in: str | Path) -> str:
    """A page whose relative links lead on from another folder.

    Args:
        text: The page.
        written_in: The folder of the file that it is from.
        shown_in: The folder of its page in the site.

    Returns:
        The page.
    """
    homes = {ROOT / place: ROOT / f"docs/reference/{name}.md" for place, name in ELSEWHERE.items()}

    def link(match: re.Match[str]) -> str:
        picture, words, target, anchor = match.groups()
        place = Path(os.path.normpath(written_in / target))
        place = homes.get(place, place)
        if not (picture or place.is_relative_to(ROOT / "docs")):
            return words  # a file of the repository that is no page
        return f"{picture}[{words}]({os.path.relpath(place, ROOT / 'docs' / shown_in)}{anchor})"

    return re.sub(r"(!?)\[([^\]]+)\]\((?!\w+:)([^)#\s]+)((?:#[^)]*)?)\)", link, text)


# --- verbs ----------------------------------------------------------------------------------------


def _verb_and_kinds(verb: str) -> Iterator[argparse.ArgumentParser]:
    """The parser of a verb, and those of its kinds."""
    (verbs,) = _kinds(parser_of([verb]))
    yield verbs
    yield from _kinds(verbs)


def _kinds(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    subparsers = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return [each for action in subparsers for each in dict.fromkeys(action.choices.values())]


def _verb_page(verb: str, parsers: list[argparse.ArgumentParser]) -> str:
    """Every kind with its examples and flags; a knob's entry tells what it takes."""
    lines = [f"# penstock {verb}", "", _sentence(VERBS[verb]), ""]
    for parser in parsers:
        kinds = _kinds(parser)
        if parser is not parsers[0]:
            lines += [f"## {parser.prog.removeprefix('penstock ')}", ""]
            lines += [_sentence(parser.description or ""), ""]
        if not kinds:
            lines += ["```sh", *examples_of(parser.prog), "```", ""]
            lines += [f"```{{program}} {parser.prog}", "```", ""]
            lines += [text for action in _shown(parser) for text in _entry(action)]
    return "\n".join(lines)


def _shown(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    hidden = (argparse._HelpAction, argparse._SubParsersAction)
    for action in parser._actions:
        if not isinstance(action, hidden) and action.help != argparse.SUPPRESS:
            yield action


def _entry(action: argparse.Action) -> list[str]:
    """One flag or argument as an option of Sphinx, which its search knows."""
    value = _value(action)
    names = [f"{flag}{value and ' '}{value}" for flag in action.option_strings] or [value]
    knob = knob_of(action)
    about = knob[0].model_fields[knob[1]].description if knob else action.help
    about = _escaped(_sentence((about or "").replace("%%", "%")))
    takes = " · ".join(filter(None, _takes(action)))
    return [f"````{{option}} {', '.join(names)}", about, "", *_muted(takes), "````", ""]


def _muted(text: str) -> list[str]:
    return ["```{rst-class} takes", "```", text] if text else []


def _value(action: argparse.Action) -> str:
    if isinstance(action, argparse.BooleanOptionalAction) or action.nargs == 0:
        return ""
    name = action.metavar or action.dest.upper()
    name = " ".join(name) if isinstance(name, tuple) else name
    if action.choices and not action.metavar:
        name = "|".join(map(str, action.choices))
    return {"+": f"{name} ...", "*": f"[{name} ...]", "?": f"[{name}]"}.get(str(action.nargs), name)


def _takes(action: argparse.Action) -> Iterator[str]:
    """Type, unit and default of a flag, and the settings that it is of."""
    if knob := knob_of(action):
        model, name = knob
        field = model.model_fields[name]
        yield kind_of_knob(field)
        if field.is_required():
            yield "required"
        elif field.default is not None and not isinstance(field.default, bool):
            yield f"default `{_typed(field.default)}`"
        elif isinstance(field.default, bool):
            yield f"default {('off', 'on')[field.default]}"
        yield f"[{_home(model, name).__name__}](../knobs.md#{_home(model, name).__name__.lower()})"
    elif action.type is not None:
        yield {"int": "whole number", "float": "number"}.get(action.type.__name__, "path")


def _home(model: type[Knobs], name: str) -> type[Knobs]:
    """The class in which a knob is written, which others may inherit."""
    bases = (each for each in reversed(model.__mro__) if issubclass(each, Knobs))
    return next(each for each in bases if name in each.model_fields)


def _typed(default: Any) -> str:
    return " ".join(map(_typed, default)) if isinstance(default, tuple) else str(default)


UNITS = {
    "parse_bytes": "bytes, or with a unit such as `512MiB`",
    "parse_seconds": "seconds, or with a unit such as `15min`",
    "_hours": "hours, or with a unit such as `30d`",
    "_share": "share, or per cent such as `1%`",
}
"""What the values of a type are counted in, by the function that reads them."""
WORDS = {int: "whole number", float: "number", bool: "on or off", str: "text", Path: "path"}


def kind_of_knob(knob: FieldInfo) -> str:
    """The type of a knob in words, with its bounds, and the unit of its type or its own."""
    kind, extra = kind_of(knob.annotation, knob.metadata), knob.json_schema_extra
    unit = extra.get("unit") if isinstance(extra, dict) else None
    if unit is None:
        return kind
    _, comma, how = kind.partition(", or with a unit")
    return f"{unit}{comma}{how}" if comma else f"{kind} ({unit})"


def kind_of(annotation: Any, metadata: Any = ()) -> str:
    """The type of a knob in words, with its unit and its bounds."""
    for each in metadata:
        if unit := UNITS.get(getattr(getattr(each, "func", None), "__name__", "")):
            return unit
    bounds = " ".join(filter(None, map(_bound, metadata)))
    return f"{_words(annotation)} {bounds}".strip()


def _bound(of: Any) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    inner = getattr(of, "metadata", None)
    if inner is not None:
        return " ".join(filter(None, map(_bound, inner)))
    return " ".join(f"{sign} {getattr(of, a)}" for a, sign in signs.items() if hasattr(of, a))


def _words(kind: Any) -> str:
    origin, parts = get_origin(kind), get_args(kind)
    if kind in WORDS:
        return WORDS[kind]
    if origin is None:
        return "" if kind is Any else getattr(kind, "__name__", "").lower()
    if "Literal" in str(origin):
        return ", ".join(f"`{word}`" for word in parts)
    if "Annotated" in str(origin):
        return kind_of(parts[0], parts[1:])
    if origin is tuple:
        inner = _words(parts[0]) if parts else "nothing"
        return (
            f"several{inner and ': '}{inner}"
            if Ellipsis in parts
            else " and ".join(map(_words, parts))
        )
    return " or ".join(dict.fromkeys(_words(each) for each in parts if each is not NoneType))


def _sentence(text: str) -> str:
    text = text.strip()
    if not text or re.match(r"\w+,", text):  # values, such as cpu, cuda
        return text
    return text[0].upper() + text[1:] + ("" if text.endswith(".") else ".")


def _escaped(text: str) -> str:
    return re.sub(r"([*_<>\[\]|`$\\])", r"\\\1", text)


# --- all knobs ------------------------------------------------------------------------------------


SETTINGS = """
Command line, YAML and Python share one set of settings. `--batch-size 4` on a command line is
`batch_size: 4` in a file for `--config`, and `batch_size=4` in Python. This page lists the sets and
the verbs that take each setting. The page of a verb tells what a setting does.
"""


def _knobs_page(parsers: dict[str, list[argparse.ArgumentParser]]) -> str:
    """Each class of knobs with its knobs, and the verbs that have them."""
    used: dict[type[Knobs], dict[str, list[str]]] = {}
    for found in parsers.values():
        for parser in found:
            for action in _shown(parser):
                if knob := knob_of(action):
                    knobs = used.setdefault(_home(*knob), {})
                    knobs.setdefault(knob[1], []).append(parser.prog.removeprefix("penstock "))
    for model in _subclasses(Knobs):  # what Python alone takes
        own = [name for name in model.model_fields if _home(model, name) is model]
        if own:
            used.setdefault(model, {name: ["Python"] for name in own})
    lines = ["# Settings", *SETTINGS.splitlines(), ""]
    for model in sorted(used, key=lambda model: model.__name__):
        lines += [f"## {model.__name__}", "", _prose(model.__doc__), ""]
        lines += ["| setting | type and unit | default | where it is used |", "|---|---|---|---|"]
        for name, verbs in used[model].items():
            field = model.model_fields[name]
            default = "required" if field.is_required() else f"`{_typed(field.default)}`"
            kind = kind_of_knob(field)
            links = ", ".join(
                verb if verb == "Python" else f"[{verb}](verbs/{verb.split()[0]}.md)"
                for verb in dict.fromkeys(verbs)
            )
            default = "" if field.default is None else default
            lines += [f"| `{name}` | {kind} | {default} | {links} |"]
        lines += [""]
    return "\n".join(lines)


def _subclasses(model: type[Knobs]) -> Iterator[type[Knobs]]:
    for each in model.__subclasses__():
        yield each
        yield from _subclasses(each)


def _prose(text: str | None) -> str:
    """A docstring as Markdown."""
    return re.sub(r"``?([^`]+)``?", r"`\1`", inspect.cleandoc(text or ""))


# --- Python ---------------------------------------------------------------------------------------


def _doors() -> dict[str, dict[str, str]]:
    """For each wing the names of its door, and the module that each is written in."""
    found = {}
    for stub in sorted((ROOT / "src/penstock").glob("*/__init__.pyi")):
        wing = f"penstock.{stub.parent.name}"
        imports = (n for n in ast.parse(stub.read_text()).body if isinstance(n, ast.ImportFrom))
        found[stub.parent.name] = {
            alias.name: f"{wing}.{node.module}" for node in imports for alias in node.names
        }
    return found


def _python_page(module: str, text: str | None, names: dict[str, str]) -> str:
    """The names that a module hands out, each with its docstring."""
    lines = [f"# {module}", "", "```{eval-rst}", *inspect.cleandoc(text or "").splitlines(), ""]
    show_blocks(None, "module", module, None, None, lines)
    for name in sorted(names, key=str.lower):
        what = getattr(importlib.import_module(module), name)
        if module != "penstock" and name in penstock.__all__:
            lines += [f"`{name}`: see `penstock.{name}`.", ""]
        elif inspect.isclass(what):
            lines += [f".. autoclass:: {module}.{name}", "   :members:", ""]
        elif inspect.isfunction(what):
            lines += [f".. autofunction:: {module}.{name}", ""]
        else:  # autodata would show the text of a constant's type where it has none of its own
            text = ModuleAnalyzer.for_module(names[name]).find_attr_docs().get(("", name), [])
            lines += [f".. py:data:: {module}.{name}", "", *(f"   {t}" for t in text), ""]
    return "\n".join([*lines, "```", ""])


def show_blocks(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Show what a docstring indents, such as a diagram, as it stands."""
    for number, line in reversed(list(enumerate(lines))):
        before = next((above for above in reversed(lines[:number]) if above.strip()), " ")
        if line[:1] == " " and not lines[number - 1].strip() and before[0] != " ":
            lines[number:number] = ["::", ""]
