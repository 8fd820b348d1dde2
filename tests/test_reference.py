"""The reference says what the number of each knob counts."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.base import Knobs
from penstock.cli import VERBS, parser_of

RATE = r"\bbytes (?:a|per) second\b"
TIME = r"^(?:most )?seconds\b|\blate$"


@pytest.fixture(scope="module")
def reference() -> Any:
    pytest.importorskip("sphinx")
    path = Path(__file__).parent.parent / "docs" / "make_reference.py"
    spec = importlib.util.spec_from_file_location("make_reference", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def knobs() -> Iterator[tuple[str, Any]]:
    """Every knob of every verb, with its name."""
    for verb in VERBS:
        parser_of([verb])
    models = [Knobs]
    for model in models:
        models += model.__subclasses__()
        for name, field in model.model_fields.items():
            yield f"{model.__name__}.{name}", field


def test_rates_and_times_have_their_unit(reference: Any) -> None:
    missing, seen = [], 0
    for name, field in knobs():
        kind, text = reference.kind_of_knob(field), field.description or ""
        for said, unit in ((RATE, "bytes a second"), (TIME, "seconds")):
            if re.search(said, text) and "SECONDS" not in text:
                seen += 1
                missing += [f"{name}: {kind}"] * (unit not in kind)
    assert missing == [] and seen > 20
