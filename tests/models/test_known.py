"""The facts of models that are known without torch, held to what the modules themselves say."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

from penstock.base.errors import UsageError
from penstock.models import prithvi
from penstock.models.footprint import measure_footprint
from penstock.models.known import known_model
from penstock.models.load import Model, load_model
from penstock.models.registry import REGISTRY

PRITHVI = [name for name in REGISTRY if name.startswith("prithvi")]


def test_models_that_need_a_file_are_not_known() -> None:
    for name in ("denoise-net", "nets.py:f", "net.pt2", torch.nn.Identity()):
        assert known_model(name, None) is None
    assert known_model("denoise-tiny", 3) is None


def described(name: str) -> Model:
    """The model as it is loaded, without the gigabytes of its weights."""
    if name not in PRITHVI:
        return load_model(name)
    with torch.device("meta"):
        return load_model(getattr(prithvi, REGISTRY[name].factory.partition(":")[2])())


@pytest.mark.parametrize("name", ["identity", "denoise-tiny", *PRITHVI])
def test_its_facts_are_those_of_the_module(name: str) -> None:
    model, facts = described(name), known_model(name, None)
    assert facts is not None
    same = ("in_channels", "spatial_axes", "weight_bytes")
    assert [getattr(facts, each) for each in same] == [getattr(model, each) for each in same]
    assert str(model.dtype) == f"torch.{facts.dtype}"
    assert facts.kind == REGISTRY[name].kind


VOLUMES = [(4, 4, 4), (5, 7, 9), (64, 64, 64), (4, 100, 31), (200, 6, 6)]
CELLS = [(1, 1), (2, 1), (14, 28), (28, 28), (40, 64)]


@pytest.mark.parametrize(
    ("name", "channels", "patches", "batches"),
    [("identity", 1, VOLUMES, (1, 3)), ("identity", 3, CELLS, (1, 3)),
     ("denoise-tiny", 1, VOLUMES[1::2], (1, 3)),
      pytest.param("denoise-tiny", 1, VOLUMES, (1, 3), marks=pytest.mark.slow),
      ("prithvi-refiner-tiny", 6, CELLS[2:3], (1,)),
      *(pytest.param(name, 6, CELLS[at::2], (3 - 2 * at,), marks=pytest.mark.slow)
        for name in PRITHVI for at in (0, 1))],
)  # fmt: skip
def test_its_forward_holds_what_was_measured(
    name: str, channels: int, patches: Sequence[Sequence[int]], batches: Sequence[int]
) -> None:
    facts, model = known_model(name, channels), described(name)
    assert facts is not None
    for sides, batch in itertools.product(patches, batches):
        shape = (batch, channels, *(side * facts.step for side in sides))
        stated, measured = facts.footprint(shape), measure_footprint(model, shape)
        assert stated.peak_bytes == measured.peak_bytes, shape
        assert stated.channels_last == measured.channels_last
        assert [(h.name, h.channels, f"torch.{h.dtype}") for h in stated.heads] == [
            (head.name, head.channels, str(head.dtype)) for head in measured.heads
        ]


@pytest.mark.parametrize(
    ("name", "shape"),
    [("denoise-tiny", (2, 1, 4, 3, 4)), ("prithvi-refiner-tiny", (2, 6, 16, 24)),
     ("prithvi-refiner-600m", (2, 6, 14, 16))],
)  # fmt: skip
def test_sides_that_it_does_not_take_are_refused(name: str, shape: Sequence[int]) -> None:
    facts = known_model(name, None)
    assert facts is not None
    with pytest.raises(UsageError, match=r"does not take a batch of shape .*--patch.* must be"):
        facts.footprint(shape)
    if not name.endswith("600m"):
        with pytest.raises(UsageError):
            measure_footprint(load_model(name), shape)
