"""The parser of a verb, or of one of its kinds. Its help begins with examples.

A verb's module has ``EXAMPLES``, one command per line; an indented line continues the one above.
``penstock bench --help`` shows all of them, and ``penstock bench model --help`` only those that
start with ``penstock bench model``.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from typing import Any, NoReturn

_ALIKE = 0.6
"""Least similarity (0 to 1) of an unknown word and a flag to suggest the flag."""


class VerbParser(argparse.ArgumentParser):
    """Parser whose ``args.parser`` is itself."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.set_defaults(parser=self)

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """Exit with code 2 and a sentence that suggests similar flags.

        Args:
            words: Words of the command line that the parser does not know.
        """
        flags = self._option_string_actions
        problems = []
        for word in words:
            flag = word.partition("=")[0]
            alike = [each for each in flags if each.startswith(flag)]
            alike = alike or difflib.get_close_matches(flag, flags, 1, _ALIKE)
            meant = f" (perhaps {alike[0]})" if alike else ""
            problems += [f"there is no {word}{meant}"] * word.startswith("-")
        problem = ", ".join(problems) or f"no flag takes {' '.join(words)}"
        self.exit(2, f"{self.prog}: {problem}; {self.prog} --help lists the flags\n")

    def format_help(self) -> str:
        commands = examples_of(self.prog)
        title = "example" if len(commands) == 1 else "examples"
        shown = "\n".join(commands).replace("\n", "\n  ")
        return f"{title}:\n  {shown}\n\n{super().format_help()}"


def examples_of(prog: str) -> list[str]:
    """The examples of a verb such as ``penstock bench``, or of a kind such as ``bench model``."""
    commands = re.split(r"\n(?! )", _module(prog).EXAMPLES.strip("\n"))
    return [command for command in commands if f"{command} ".startswith(f"{prog} ")]


def named_words(prog: str) -> Mapping[str, Collection[str]]:
    """Words that a shell offers for arguments that take a name or a path, by argument."""
    return getattr(_module(prog), "OFFERED", {}) if " " in prog else {}


def _module(prog: str) -> Any:
    return import_module(f"{__package__}.{prog.split()[1]}")
