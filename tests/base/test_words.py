"""Settings of a record, as words."""

from typing import Any

import numpy as np

from penstock.base import InferConfig, as_settings, build

NEEDED: dict[str, Any] = {"in_spec": "in put.zarr", "out_spec": "out.zarr", "model_type": "m.py:f"}


def test_an_array_in_memory_is_told_in_words() -> None:
    config = build(InferConfig, NEEDED | {"in_spec": np.zeros((2, 3, 4), "uint16")})
    assert as_settings(config)["in_spec"] == "array in memory, uint16 (2, 3, 4)"
