"""The parser of a verb, or of one of its kinds. Its help begins with examples.

A verb's module has ``EXAMPLES``, one command per line; an indented line continues the one above.
``penstock bench --help`` shows all of them, and ``penstock bench model --help`` only those that
start with ``penstock bench model``. ``--help`` lists the flags that most jobs need; ``--help-all``
lists the others too, in groups.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from ..base import plural

_ALIKE = 0.6
"""Least similarity (0 to 1) of an unknown word and a flag to suggest the flag."""


class VerbParser(argparse.ArgumentParser):
    """Parser whose ``args.parser`` is itself."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{"formatter_class": _Formatter, **settings})
        self.set_defaults(parser=self)
        self.add_argument("--help-all", action=_HelpAll, nargs=0, help=argparse.SUPPRESS)

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
        self.exit(2, f"{self.prog}: {problem}; {self.prog} --help-all lists the flags\n")

    def format_usage(self) -> str:
        formatter = self._get_formatter()
        formatter.add_usage(None, self._get_positional_actions(), [])
        return formatter.format_help().replace(self.prog, f"{self.prog} [flags]", 1)

    def format_help(self, *, everything: bool = False) -> str:
        """The examples, the usage and the flags: those that most jobs need, or everything."""
        from ..base import group_of

        commands = examples_of(self.prog)
        title = "example" if len(commands) == 1 else "examples"
        shown = "\n".join(commands).replace("\n", "\n  ")
        groups: dict[str | None, list[argparse.Action]] = {}
        for action in self._actions:
            title_of = group_of(action) if action.option_strings else "arguments"
            groups.setdefault(title_of, []).append(action)
        formatter = self._get_formatter()
        formatter.add_text(self.description)
        seldom = [each for each in groups if each not in (None, "arguments")]
        for group in ("arguments", None, *(seldom if everything else ())):
            formatter.start_section(group or "flags")
            formatter.add_arguments(groups.get(group, ()))
            formatter.end_section()
        if seldom and not everything:
            count = sum(len(groups[group]) for group in seldom)
            formatter.add_text(f"--help-all also lists {plural(count, 'flag')} that few jobs need.")
        said = f"{self.format_usage()}\n{formatter.format_help()}"
        return f"{title}:\n  {shown}\n\n{said}"


class _Formatter(argparse.HelpFormatter):
    """Short lines: a switch that is off by default has one spelling, and several values a dot."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            from ..base import knob_of

            knob = knob_of(action)
            if knob is not None and knob[0].model_fields[knob[1]].default is False:
                return action.option_strings[0]
        return super()._format_action_invocation(action)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if action.nargs == argparse.ONE_OR_MORE:
            return f"{self._metavar_formatter(action, default_metavar)(1)[0]} ..."
        return super()._format_args(action, default_metavar)


class _HelpAll(argparse.Action):
    """The flag ``--help-all``."""

    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> NoReturn:
        assert isinstance(parser, VerbParser)
        print(parser.format_help(everything=True), end="")
        parser.exit()


def examples_of(prog: str) -> list[str]:
    """The examples of a verb such as ``penstock bench``, or of a kind such as ``bench model``."""
    verb: Any = import_module(f"{__package__}.{prog.split()[1]}")
    commands = re.split(r"\n(?! )", verb.EXAMPLES.strip("\n"))
    return [command for command in commands if f"{command} ".startswith(f"{prog} ")]
