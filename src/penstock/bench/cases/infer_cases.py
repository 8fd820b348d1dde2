"""The cases of ``penstock tune infer``: the job as it is, and with one setting more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...base import InferConfig, TuneInferConfig, UsageError
from ...inference import SIDE_STEP

Case = dict[str, Any]

SIDES = {2: (256, 384, 512, 768, 1024), 3: (64, 96, 128, 144, 160, 192)}
"""Sides of patches to try, by the number of axes that a network takes."""
BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Patches of a forward to try on a GPU. A CPU takes two at a time, whatever the batch."""
_NOT_MEASURED = frozenset(
    "box mask mask_output skip_below skip_level overwrite resume name tag metrics_json trace "
    "run_dir levels".split()
)
"""Settings of a job that do not change how fast a patch is computed."""


def infer_case(config: TuneInferConfig) -> Case:
    """The case of a job as its settings have it.

    Args:
        config: The settings of the job, and how it is to be tuned.

    Returns:
        A case of scenario ``infer``.

    Raises:
        UsageError: The job has several processes, or names what no other process can open.
    """
    if config.cluster is not None or config.is_element or config.prepare:
        raise UsageError(
            "tune infer measures one process: leave out --cluster and the steps of an array"
        )
    if not isinstance(config.in_spec, str | dict) or not isinstance(config.model_type, str):
        raise UsageError("tune infer needs an input and a model that other processes can open")
    settings = job_settings(config)
    measured = {name: settings[name] for name in settings.keys() - _NOT_MEASURED}
    return {"settings": measured, "seconds": config.launch_seconds}


def job_settings(config: TuneInferConfig) -> dict[str, Any]:
    """The settings that the user gives the job itself, as JSON."""
    tuning = TuneInferConfig.model_fields.keys() - InferConfig.model_fields.keys()
    return config.model_dump(mode="json", exclude_unset=True, exclude=set(tuning))


def with_setting(case: Mapping[str, Any], **settings: Any) -> Case:
    """The case with other settings."""
    return {**case, "settings": {**case["settings"], **settings}}


def infer_case_name(case: Mapping[str, Any]) -> str:
    """The settings that are tried, in words."""
    settings = case["settings"]
    shown = {name: settings.get(name) for name in ("patch", "batch", "threads", "block")}
    words = [
        f"{name} {' '.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in shown.items()
        if value is not None
    ]
    return ", ".join(words) or "as it is"


def patch_cases(case: Mapping[str, Any], facts: Mapping[str, Any]) -> list[Case]:
    """The job with other patches, unless the user names one.

    Args:
        case: The case of the job as it is.
        facts: What the scenario says of that case.

    Returns:
        Cases, without that of the job itself.
    """
    if "patch" in case["settings"]:
        return []
    patches = (_fitted(side, facts) for side in SIDES[len(facts["patch"])])
    others = {tuple(patch): patch for patch in patches if patch != facts["patch"]}
    return [with_setting(case, patch=patch) for patch in others.values()]


def _fitted(side: int, facts: Mapping[str, Any]) -> list[int]:
    """A patch of this side, less along the axes on which the volume is shorter."""
    extents: Sequence[int] = facts["volume"][-len(facts["patch"]) :]
    return [
        default if extent < SIDE_STEP else min(side, extent // SIDE_STEP * SIDE_STEP)
        for extent, default in zip(extents, facts["patch"], strict=True)
    ]


def other_cases(case: Mapping[str, Any], facts: Mapping[str, Any]) -> list[Case]:
    """The job with another batch, number of threads or block, each where the user names none.

    Args:
        case: The case of the best patch.
        facts: What the scenario says of that case.

    Returns:
        Cases that differ from ``case`` in one setting.
    """
    return [
        with_setting(case, **{name: value})
        for name, value in _others(facts)
        if name not in case["settings"] and value != facts[name]
    ]


def _others(facts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if facts["threads"] is None:  # on a GPU
        yield from (("batch", batch) for batch in BATCHES)
    elif facts["threads"] > 1:
        yield "threads", facts["threads"] // 2
    for factor in (0.5, 2):
        block = [max(1, int(factor * side)) for side in facts["block"]]
        if all(side <= 2 * extent for side, extent in zip(block, facts["volume"], strict=True)):
            yield "block", block
