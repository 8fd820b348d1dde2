"""A plan that is made without torch, held to the one that is made with it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.base.config.infer import InferConfig
from penstock.base.config.knobs import build
from penstock.base.errors import MissingDependency, UsageError
from penstock.inference.opening.draft import Draft
from penstock.inference.opening.facts import WITHOUT_TORCH
from penstock.inference.opening.job import Job

OF_THE_PROCESS = {"base_bytes", "available_bytes"}
"""Facts that differ between two processes, or two moments of one."""
OF_TORCH = {"patch_flops", "arithmetic"}
"""Facts that nobody but torch counts."""


def config(tmp_path: Path, shape: tuple[int, ...], dtype: str, **knobs: Any) -> InferConfig:
    np.save(tmp_path / "in.npy", np.zeros(shape, dtype))
    said = {"in_spec": tmp_path / "in.npy", "out_spec": tmp_path / "out.zarr", "patch": 16,
            "overlap": 4, "max_memory": "64GB", "devices": "cpu"}  # fmt: skip
    return build(InferConfig, said | knobs)


@pytest.mark.parametrize(
    ("shape", "dtype", "knobs"),
    [
        ((40, 50, 60), "uint16", {"model_type": "identity", "devices": "auto"}),
        ((40, 50, 60), "int32", {"model_type": "identity", "normalize": "none", "batch": 5}),
        ((2, 3, 9, 40, 50), "uint8", {"model_type": "identity", "in_channels": 3, "patch": (32, 32),
                                      "head_kind": "labels"}),
        ((2, 2, 9, 40, 50), "float32", {"model_type": "identity", "c": 1, "seam_mode": "blend",
                                        "head_kind": "scores"}),
        ((60, 70, 80), "uint16", {"model_type": "denoise-tiny", "seam_mode": "blend"}),
        ((60, 70, 80), "uint32", {"model_type": "denoise-tiny", "amp": "bf16", "batch": 7,
                                  "normalize": "global", "out_dtype": "float32"}),
        ((6, 1, 64, 64), "uint16", {"model_type": "prithvi-refiner-tiny", "patch": 32}),
    ],
)  # fmt: skip
def test_the_plan_without_torch_is_the_plan_with_it(
    tmp_path: Path, shape: tuple[int, ...], dtype: str, knobs: dict[str, Any]
) -> None:
    settings = config(tmp_path, shape, dtype, **knobs)
    without, plan = Draft(settings).plan, Job(settings).plan
    for fact in fields(plan.facts):
        if fact.name not in OF_THE_PROCESS | OF_TORCH | {"notes"}:
            assert getattr(without.facts, fact.name) == getattr(plan.facts, fact.name), fact.name
    assert without.facts.notes == (WITHOUT_TORCH, *plan.facts.notes)
    lines, others = (
        [line for line in each.lines() if line[0] not in ("host memory", "  base", "arithmetic")]
        for each in (without, plan)
    )
    lines.remove(("note", WITHOUT_TORCH))
    assert lines == others


def test_weights_that_are_not_loaded_are_counted(tmp_path: Path) -> None:
    big = config(tmp_path, (6, 1, 64, 64), "uint16", model_type="prithvi-refiner-300m", patch=32)
    assert Draft(big).plan.memory.base > 1_230_161_240


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        ({"model_type": "nets.py:f"}, "--model-type nets.py:f"),
        ({"model_type": "net.pt2"}, "--model-type net.pt2"),
        ({"model_type": "denoise-net"}, "--model-type denoise-net"),
        ({"model_type": "identity", "weights": "w.safetensors"}, "--weights w.safetensors"),
        ({"model_type": "identity", "devices": "cuda:0"}, "--devices cuda:0"),
        ({"model_type": "identity", "devices": ("cpu", "cuda:0")}, "--devices cpu cuda:0"),
    ],
)
def test_what_needs_torch_names_the_extra(
    tmp_path: Path, knobs: dict[str, Any], named: str
) -> None:
    with pytest.raises(MissingDependency, match=r"dl\[infer\]") as caught:
        Draft(config(tmp_path, (8, 8, 8), "uint8", **knobs))
    assert str(caught.value).startswith(f"{named}: torch is not installed")


def test_settings_are_checked_as_with_torch(tmp_path: Path) -> None:
    """By the same code, so one of each kind will do."""
    for knobs, match in (
        ({"head_kind": ("labels", "scores")}, "--head-kind names 2 kinds"),
        ({"c": 4}, "--c 4 is out of range"),
        ({"out_spec": ("a.zarr", "b.zarr")}, "returns 1 head"),
        ({"metrics_json": tmp_path / "out.zarr" / "m.json"}, "--metrics-json .* inside the output"),
    ):
        settings = config(tmp_path, (16, 16, 16), "uint8", **{"model_type": "identity"} | knobs)
        for opened in (Draft, Job):
            with pytest.raises(UsageError, match=match):
                opened(settings)
