"""The flags that a report names: each stands beside the verb that has it."""

import ast
import re
from collections.abc import Iterator

import pytest

from penstock.cli import parser_of

from ..house import PACKAGE
from ..scaling.kit import run

SENTENCES = (
    "reports/infer/report.py reports/loader/report.py reports/loader/rungs.py "
    "reports/queue/report.py reports/training/report.py "
    "reports/tune/settings_advice.py reports/suite/report.py reports/model/report.py "
    "scaling/advice.py scaling/simulate.py scaling/study_text.py "
    "scaling/tables.py"
).split()
"""The rooms whose texts stand in reports."""


def texts(room: str) -> Iterator[str]:
    """The texts in a room, those of an f-string together; no docstrings and no names of flags."""
    tree = ast.parse((PACKAGE / room).read_text())
    said = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}  # docstrings
    inner = said | {id(v) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for v in n.values}
    for node in ast.walk(tree):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        text = "".join(str(p.value) for p in parts if isinstance(p, ast.Constant))
        if id(node) not in inner and re.search(r"--[a-z]", text) and " " in text:
            yield text


def flags_of(*words: str) -> set[str]:
    parser = parser_of([words[0]])
    for word in words:
        kinds = [a.choices for a in parser._actions if isinstance(a.choices, dict)]
        parser = next(choices[word] for choices in kinds if word in choices)
    return {flag for action in parser._actions for flag in action.option_strings}


@pytest.mark.slow
def test_a_report_names_a_flag_with_the_verb_that_has_it() -> None:
    named = [(room, text) for room in SENTENCES for text in texts(room)]
    verbs = ("bench queue", "bench loader", "tune loader", "tune infer", "infer", "train")
    for room, text in named:
        verb = next((v for v in verbs if re.search(rf"\b{v}\b", text)), None)
        assert verb is not None, f"{room}: {text}"
        assert set(re.findall(r"--[a-z][a-z-]*", text)) <= flags_of(*verb.split()), (
            f"{room}: {text}"
        )
    assert len(named) > 10


def test_a_report_on_mixed_experiments_names_no_flag() -> None:
    from penstock.scaling import report_of_scaling

    runs = [run(1, 100), run(4, 30, samples=5000, batch=64, global_batch=256)]
    report = report_of_scaling([], "mixed", print, runs)
    assert report.verdict[0].startswith("No scaling study: mixed experiments: 10,000 samples")
    assert "--" not in str(report)
