"""The help of every verb and kind: it begins with examples, which the real parsers take."""

import argparse
import shlex
from collections.abc import Iterator, Sequence
from typing import NoReturn

import pytest

from penstock import cli
from penstock.cli import VERBS, main, parser_of, spelled
from penstock.cli.verb_parser import VerbParser, examples_of


def kinds_of(parser: argparse.ArgumentParser) -> Iterator[VerbParser]:
    """The parsers below a parser: a verb, and the kinds of it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in dict.fromkeys(action.choices.values()):
                assert isinstance(each, VerbParser)
                yield each
                yield from kinds_of(each)


@pytest.mark.parametrize("verb", VERBS)
def test_each_example_is_a_command_that_the_verb_takes(verb: str) -> None:
    parser = parser_of([verb])
    commands = examples_of(f"penstock {verb}")
    for command in commands:
        words = shlex.split(command.replace("\\\n", " "), comments=True)
        assert words[0] == "penstock" and parser.parse_args(spelled(words[1:])).verb == verb
        assert all(len(line) <= 100 for line in command.splitlines())
    for each in kinds_of(parser):
        assert examples_of(each.prog), f"{each.prog} has no example in EXAMPLES of its verb"


def test_help_of_a_verb_has_the_examples_of_all_its_kinds(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["slurm", "--help"])
    text = capsys.readouterr().out
    assert text.startswith("examples:\n  penstock slurm render ")
    assert "\n      --in-spec noisy.ome.zarr" in text  # the second line of a command
    assert text.index("penstock slurm cancel") < text.index("usage:")


@pytest.mark.parametrize("verb", VERBS)
def test_help_is_short_and_help_all_has_every_flag(verb: str, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for parser in kinds_of(parser_of([verb])):
        assert len(parser.format_help().splitlines()) <= (45 if verb == "infer" else 60)
        with pytest.raises(SystemExit) as ended:
            parser.parse_args(["--help-all"])
        said = capsys.readouterr().out
        assert not ended.value.code and parser.format_help().partition("usage:")[0] in said
        assert "typing." not in said and "NoneType" not in said
        flags = [action for action in parser._actions if action.help != argparse.SUPPRESS]
        assert all(action.option_strings[0] in said for action in flags if action.option_strings)


def test_a_short_spelling_may_have_its_value_behind_a_sign() -> None:
    words = "infer --in-spec a --out-spec b --model-type=net.py:make --t 0".split()
    assert spelled("infer a b --model=net.py:make --t 0".split()) == words


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("infer --input a --threads 1", "penstock infer: there is no --input (perhaps --in-spec)"),
        ("bench model --tile=4", "there is no --tile=4 (perhaps --tile-sizes)"),
        ("status a.zarr b.zarr", "penstock status: no flag takes b.zarr"),
        ("report x --zzz", "penstock report: there is no --zzz; penstock report --help-all lists"),
    ],
)
def test_a_word_that_is_not_known_is_named(words: str, sentence: str, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "code"), [("--help", 0), ("--nonsense", 2)])
def test_a_command_within_one_ends_as_by_itself(flag: str, code: int, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["slurm", "render", "--", "infer", flag])
    assert ended.value.code == code and "SystemExit" not in capsys.readouterr().err


@pytest.mark.parametrize(("switch", "value"), [("--equal", True), ("--no-equal", False)])
def test_a_switch_of_three_states_takes_no_value(switch: str, value: bool) -> None:
    words = ["label", "in.zarr", switch, "out.zarr"]
    assert parser_of(words).parse_args(words).equal is value


def test_an_interrupt_before_a_verb_begins_is_a_sentence(monkeypatch, capsys) -> None:
    def interrupted(words: Sequence[str]) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "parser_of", interrupted)
    assert main(["status", "out"]) == 3
    assert capsys.readouterr().err == "penstock: interrupted; nothing was begun\n"
