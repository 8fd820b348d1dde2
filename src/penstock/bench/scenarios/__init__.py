"""Scenarios: kinds of work that launches measure. Each is set up, takes steps, counts the work of
each step, and is closed.

A scenario has no clock: `measure` times its steps, and the phases that a step names.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, Protocol

from ...base import UsageError, absent
from ...models import find_reference

Phase = Callable[[str], None]
"""Ends a phase of a step, ``phase("forward")``: all that was done since the phase before it."""
Work = Mapping[str, float]
"""The counted work of one step by name: samples, pixels, useful_pixels, bytes."""

SCENARIOS = {
    "model": "penstock.bench.scenarios.model:ModelScenario",
    "loader": "penstock.bench.scenarios.loader_scenario:LoaderScenario",
    "ladder": "penstock.bench.scenarios.loader_scenario:rung",
    "queue": "penstock.bench.scenarios.queue:QueueScenario",
    "infer": "penstock.bench.scenarios.infer_scenario:InferScenario",
    "train": "penstock.bench.scenarios.train_scenario:TrainScenario",
}

EXTRAS = {"loader": "loaders", "ladder": "loaders", "queue": "loaders", "train": "train"}
"""The pip extra that a scenario needs; a scenario that is not listed needs ``infer``."""


class Scenario(Protocol):
    """An object whose steps `measure` times."""

    device: str
    """The device of the work, ``cpu``, ``cuda:0`` or ``mps``; it decides the clock and the memory
    that are read."""
    facts: Mapping[str, Any]
    """Facts for the record beside the case: model, parameters, structure hash."""

    def step(self, phase: Phase) -> Work:
        """Do the work once, and return its amounts.

        Raises `WrongResult` (of this module) if a result is wrong, and `UsageError` for a case that
        is not supported here.
        """

    # A scenario may also have ``verify()``, which is called once, after the timed part.

    def close(self) -> None:
        """Release memory, files and threads."""


class WrongResult(Exception):
    """A step ran and its result is wrong. ``facts`` are for its record."""

    def __init__(self, message: str, facts: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.facts = dict(facts or {})


@contextlib.contextmanager
def flags_of_bench() -> Iterator[None]:
    """Rewrite flag names in errors of `penstock.models` from those of ``infer`` to those of
    ``bench``."""
    try:
        yield
    except UsageError as error:
        text = str(error).replace("--model-type", "--model").replace("--devices", "--device")
        raise UsageError(text) from error


def backend_of(device: str) -> Any:
    """``torch.cuda``, with this device as the current one, or ``torch.mps``; None for the CPU,
    which needs no torch.
    """
    kind = device.partition(":")[0]
    if kind == "cpu":
        return None
    import torch

    if kind == "cuda":
        torch.cuda.set_device(torch.device(device))
    return getattr(torch, kind)


def make(name: str, case: Mapping[str, Any]) -> Scenario:
    """Set up a scenario of this family, or a user's ``package.module:Class``, from its case."""
    find(name)
    with find_reference(SCENARIOS.get(name, name)) as scenario:
        made: Scenario = scenario(case)
    return made


def find(name: str) -> tuple[ModuleType, str]:
    """The module of a scenario, and the name of its class there."""
    place, colon, attribute = SCENARIOS.get(name, name).rpartition(":")
    if not colon:
        raise UsageError(f"there is no scenario {name!r}; try {', '.join(SCENARIOS)}")
    try:
        with find_reference(f"{place}:{attribute}") as scenario:
            return sys.modules.get(place) or sys.modules[scenario.__module__], attribute
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and name in SCENARIOS:
            raise absent(error, EXTRAS.get(name, "infer")) or error from error
        raise UsageError(f"there is no scenario {name!r}: {error}") from error
