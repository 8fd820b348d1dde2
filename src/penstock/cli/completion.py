"""Completion of a command line by bash, zsh and fish, through argcomplete.

The shell runs ``penstock`` with the line so far in an environment variable. Only the verb in that
line is imported, so that pressing Tab does not load torch or the other verbs.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator
from types import NoneType
from typing import Any, get_args

import argcomplete
from argcomplete.completers import FilesCompleter

from ..base import knob_of
from .verb_parser import named_words


def complete(parser: argparse.ArgumentParser) -> None:
    """If the shell asks for completions, print them and end the process; otherwise do nothing.

    Args:
        parser: The parser of the line to complete.
    """
    argcomplete.autocomplete(offering(parser))


def offering(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Give each argument its completer, and return the parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                if len(each._actions) > 2:  # a verb that is not in the line has only its two helps
                    offering(each)
        else:
            _offer(action, named_words(parser.prog).get(action.dest, ()))
    return parser


def _offer(action: argparse.Action, names: Collection[str]) -> None:
    """Give an argument its completer. Without one, argcomplete offers paths."""
    if names:  # a path is valid, too
        files = FilesCompleter()
        vars(action)["completer"] = lambda prefix, **_: [*names, *files(prefix)]
    elif knob := knob_of(action):
        field = knob[0].model_fields[knob[1]]
        words = {str(word) for word in _words_of([field.annotation, *field.metadata])}
        if words or not _may_be_text(field.annotation):
            vars(action)["completer"] = lambda **_: sorted(words)


def _words_of(kinds: Any) -> Iterator[Any]:
    """Yield the literals in types, such as ``trim`` and ``blend`` of `Literal["trim", "blend"]`."""
    for kind in kinds:
        if isinstance(kind, str | bool | int):
            yield kind
        else:
            yield from _words_of(get_args(kind))


def _may_be_text(kind: Any) -> bool:
    """Whether a value may be free text, such as a path."""
    if parts := get_args(kind):
        return any(map(_may_be_text, parts))
    return kind is Any or (isinstance(kind, type) and kind not in (int, float, bool, NoneType))
