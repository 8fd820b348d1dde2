"""``infer --instances``: the scores of a model go to a scratch, from which objects are labelled.

IN ──▶ infer ──▶ OUT.scores.zarr ──▶ label ──▶ OUT, table
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..base import (
    LOCK_SUFFIX,
    DecodedConfig,
    InferConfig,
    InstanceConfig,
    LabelConfig,
    UsageError,
    as_settings,
    build,
    check_outputs,
    from_flags,
)

_OF_BOTH = ("chunks", "shards", "levels", "take_over", "cluster", "worker_timeout",
            "max_memory")  # fmt: skip
"""Settings of both, where they are given."""


def instances_of(
    args: argparse.Namespace, config: InferConfig
) -> tuple[InferConfig, LabelConfig] | None:
    """What ``infer --instances`` does first, and then.

    Args:
        args: The flags.
        config: The job as the user gives it.

    Returns:
        The job that writes scores, and the labelling of these; None without ``--instances``.

    Raises:
        UsageError: The flags do not go together, or the output exists.
    """
    objects = from_flags(InstanceConfig, args)
    if objects.instances is None:
        if objects.model_fields_set:
            flag = min(objects.model_fields_set).replace("_", "-")
            raise UsageError(f"--{flag} has no effect without --instances")
        return None
    from ..inference import check_decoder

    if config.is_element:
        raise UsageError(
            "--instances is no step of an array; let the array write scores, and then penstock "
            "label them"
        )
    if objects.instances == "components" and objects.threshold is None:
        raise UsageError("--instances components needs --threshold X: an object is what is above")
    if len(config.out_spec) != 1 or "://" in (place := str(config.out_spec[0])):
        raise UsageError("--instances writes one output, an OME-Zarr on this machine")
    if Path(place).exists() and not (config.overwrite or config.resume):
        raise UsageError(f"--out-spec {place}: exists; use --overwrite to replace it")
    check_outputs(("--table", objects.table), replace=config.overwrite or config.resume)
    scratch = f"{place}.scores.zarr"
    asked = {key: value for key, value in as_settings(objects).items() if key != "instances"}
    output = {name: getattr(config, name) for name in _OF_BOTH if name in config.model_fields_set}
    once = {"overwrite": config.overwrite, "resume": config.resume}
    label = build(
        LabelConfig, asked, output, once,
        {"in_spec": scratch, "out_spec": place, "decoder": objects.instances},
    )  # fmt: skip
    check_decoder(label)  # before the scores are computed, and not after
    scores: dict[str, Any] = {"out_spec": (scratch,), "levels": "none", "shards": None}
    scores["run_dir"] = config.run_dir or Path(f"{place}.scores.penstock")
    kept = {**dict(config), **scores}
    return DecodedConfig.model_construct(config.model_fields_set | scores.keys(), **kept), label


def run_instances(
    infer: Callable[[InferConfig], int], scores: InferConfig, label: LabelConfig, *, dry: bool
) -> int:
    """Infer scores, label them, and remove them.

    Args:
        infer: Carries out a job, and returns its exit code.
        scores: The job that writes scores.
        label: The labelling.
        dry: True to plan and stop.

    Returns:
        The exit code.
    """
    from .label import run_labelling

    code = infer(scores)
    if dry or code:
        return code
    code = run_labelling(label)
    scratch = Path(label.in_spec)
    shutil.rmtree(scratch)
    scratch.with_name(scratch.name + LOCK_SUFFIX).unlink(missing_ok=True)
    return code
