"""Which of the driver's cards is torch's: by UUID, slices too, and none rather than another."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

import penstock

from .kit import GIB, Driver

if TYPE_CHECKING:
    from penstock.instruments.machine import Gpu


def gpu(monkeypatch, driver: Driver | None, uuid: str) -> Gpu:
    """The second device that torch sees, which has this UUID."""
    import torch

    from penstock.instruments.machine import Gpu

    properties = SimpleNamespace(uuid=uuid)
    monkeypatch.setitem(sys.modules, "pynvml", driver)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    return Gpu(torch.device("cuda", 1))


@pytest.mark.parametrize(
    ("cards", "slices", "uuid", "handle"),
    [
        ({"GPU-a": False, "GPU-b": False}, (), "a", "GPU-a"),
        ({"GPU-a": False, "GPU-b": False}, (), "b", "GPU-b"),
        ({"GPU-a": True, "GPU-b": False}, ("MIG-s", "MIG-t"), "t", "MIG-t"),
        # No other card is taken for the one that is meant,
        ({"GPU-a": False, "GPU-b": False}, (), "c", None),
        ({"GPU-a": True}, (), "s", None),
        ({}, (), "a", None),
        # but where there is only one it can be no other.
        ({"GPU-a": False}, (), "c", "GPU-a"),
        ({"GPU-old": False}, (), "c", "GPU-old"),
    ],
)
def test_which_card_it_is(monkeypatch, cards, slices, uuid, handle) -> None:
    card = gpu(monkeypatch, Driver(cards, slices), uuid)
    assert card._handle == handle
    assert card.used() == (None if handle is None else (1 if handle in slices else 5) * GIB)
    whole = handle is not None and handle not in slices
    assert card.clocks()["sm_mhz"] == (1980 if whole else None)


def test_without_a_driver_nothing_is_known(monkeypatch) -> None:
    card = gpu(monkeypatch, None, "a")  # no such package
    assert card.used() is None
    assert set(card.clocks().values()) == {None}


def test_the_library_has_each_name_that_is_asked_of_it() -> None:
    """Its lowest version too, in `make lowest`: what it lacks would read as None on every GPU."""
    sources = [path.read_text() for path in Path(penstock.__file__).parent.rglob("*.py")]
    asked = {name for text in sources for name in re.findall(r"nvml\.((?:nvml|NVML)\w+)", text)}
    assert {"nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlMemory_v2"} <= asked
    assert asked <= set(dir(pytest.importorskip("pynvml")))
