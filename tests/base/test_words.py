"""Settings of a record, as the flags of a command line that gives them again."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import pytest

from penstock.base.config.infer import InferConfig
from penstock.base.config.knobs import add_flags, as_settings, as_words, build, from_flags

NEEDED: dict[str, Any] = {"in_spec": "in put.zarr", "out_spec": "out.zarr", "model_type": "m.py:f"}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"patch": (1, 64, 64), "overlap": 4, "seam_mode": "blend", "batch": 3},
        {"denormalize": False, "tf32": True, "compile": False, "amp": "off"},
        {"clip_norm": ()},
        {"clip_norm": (-1.5, 2.0), "norm_lower": -20.0, "norm_upper": 1e-7, "normalize": "fixed"},
        {"out_spec": ["a.zarr", {"driver": "zarr", "kvstore": "file:///b c/"}]},
        {"head_kind": {"a": "labels"}, "out_dtype": ["int64"], "t": ["0:5", "7"], "c": "all"},
        {"max_memory": "16GiB", "compile_dynamic": True, "normalize": False, "run_dir": "a b"},
        {"eps": 0.5, "weights": "w.pt", "retry_for": "1h"},
    ],
)
def test_flags_of_settings_give_them_again(more: dict[str, Any]) -> None:
    config = build(InferConfig, NEEDED | more)
    parser = argparse.ArgumentParser()
    add_flags(parser, InferConfig)
    again = from_flags(InferConfig, parser.parse_args(as_words(InferConfig, as_settings(config))))
    wanted = as_settings(config)
    mapped = [each for each in wanted["out_spec"] if isinstance(each, dict)]
    assert len(mapped) == len([each for each in as_settings(again)["out_spec"] if "{" in each])
    for name, value in wanted.items():
        assert mapped or as_settings(again)[name] == value, name


def test_an_array_in_memory_is_told_in_words() -> None:
    config = build(InferConfig, NEEDED | {"in_spec": np.zeros((2, 3, 4), "uint16")})
    assert as_settings(config)["in_spec"] == "array in memory, uint16 (2, 3, 4)"
