"""What describes a run to its trackers: its name, its tags, its settings and its environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..base import TRAIN_KNOBS, TrainConfig


def kind_of_run(workload: str, world_size: int, device: str) -> tuple[str, str]:
    """A word for a workload, and one for its devices, such as ``spiral`` and ``4gpu``."""
    kind = "gpu" if device == "cuda" else device
    return re.sub(r"\W+", "_", workload.rpartition(":")[2]), f"{world_size}{kind}"


def run_facts(
    workload: str,
    config: TrainConfig,
    world_size: int,
    device: str,
    labels: Mapping[str, Any],
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """What trackers log of a run as it begins.

    Args:
        workload: Its name.
        config: Its settings. Those that change neither the weights nor the speed are left out.
        world_size: The number of ranks.
        device: The kind of their devices.
        labels: Its name and its tags.
        facts: What else describes it, such as its environment; nested.

    Returns:
        The project, the name, the words and tags by which runs are found, and the hyperparameters.
    """
    settings = config.model_dump(mode="json", exclude_none=True)
    others = frozenset().union(*TRAIN_KNOBS.values()) - TRAIN_KNOBS.get(workload, frozenset())
    silent = _SILENT if workload not in TRAIN_KNOBS else _SILENT | others
    chosen = {name: value for name, value in settings.items() if name not in silent}
    numbers = {name: value for name, value in chosen.items() if isinstance(value, int | float)}
    return {
        "project": config.project,
        "name": labels["name"],
        "words": [*kind_of_run(workload, world_size, device)],
        "tags": labels["tags"],
        "hyperparameters": {
            "workload": workload,
            "world_size": world_size,
            **flat(chosen),
            **numbers,
            **flat({"tag": labels["tags"], **facts}),
        },
    }


_SILENT = frozenset(
    "name tag output_dir resume overwrite track track_every project profile profile_steps".split()
)
"""The knobs that change neither the trained weights nor the speed."""


def flat(value: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Nested settings as texts by dotted names, without those that are None.

    Args:
        value: The settings.
        before: A prefix of each name.

    Returns:
        The texts.

    >>> flat({"launch": {"job_id": "7", "hosts": ["a", "b"]}, "git": None})
    {'launch.job_id': '7', 'launch.hosts': 'a b'}
    """
    texts: dict[str, str] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            texts |= flat(item, f"{before}{key}.")
        elif isinstance(item, list | tuple):
            texts[before + key] = " ".join(map(str, item))
        elif item is not None:
            texts[before + key] = str(item)
    return texts
