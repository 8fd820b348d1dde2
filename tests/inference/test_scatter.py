"""Patches put back into their blocks: alone as on a CPU, or alike ones at once as on a GPU."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.data import Scaling
from penstock.inference.lanes import scatter
from penstock.inference.lanes.blocks import Loaded, Slot
from penstock.inference.lanes.lane import Lane
from penstock.inference.lanes.scatter import PatchScatter
from penstock.inference.planning import cuts
from penstock.inference.tiling.stitch import axis_weights, place_in_row

from ..parameters import crossed
from .kit import conv
from .test_lane import CPU, lane_of, started, through


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2 x 2 x 2 patches."""
    monkeypatch.setattr(cuts, "BLOCK_VOXELS", 14**3)


class Heads(nn.Module):
    """Values that a dtype of 8 bits clips, and labels as floats and as integers."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        labels = (x * 7).round()
        return {"values": x * 2.5 - 9, "labels": labels, "counts": labels.to(torch.int64)}


def computed(one: Lane, begun: Any) -> tuple[list[list[Tensor]], list[Tensor]]:
    done = list(through(begun, one))
    for each in done:
        each.wait()
    return [each.outputs for each in done], [each.tally for each in done]


@pytest.mark.parametrize(("seam", "normalize"), crossed(["trim", "blend"], ["none", "percentile"]))
def test_alike_patches_at_once_give_the_bits_of_each_alone(
    seam: str, normalize: str, one_thread: None
) -> None:
    data = np.random.default_rng(3).integers(0, 250, (22, 12, 19)).astype("uint8")
    outs = [np.zeros(data.shape, dtype) for dtype in ("uint8", "int32", "int64")]
    knobs: dict[str, Any] = {
        "out_spec": outs, "head_kind": ("values=intensity", "labels=labels", "counts=labels"),
        "seam_mode": seam, "normalize": normalize, "batch": 12, "overlap": 3,
    }  # fmt: skip
    results = []
    for together in (False, True):
        begun = started(data, Heads(), **knobs)
        one = lane_of(begun)
        begun.job.net = replace(begun.job.net, forward=begun.job.net.batch)  # as on a GPU
        one.scatter = PatchScatter(CPU, begun.job, together=together)
        results.append(computed(one, begun))
    (alone, tallies), (at_once, others) = results
    assert len(alone) > 3
    for heads, same in zip(alone, at_once, strict=True):
        assert all(map(torch.equal, heads, same))
    assert all(map(torch.equal, tallies, others))


class Operators(TorchDispatchMode):
    """Counts the operators that touch memory; each is a kernel or more on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_a_batch_of_alike_patches_takes_few_operators() -> None:
    """One for each patch, and some for all of them."""
    data = np.zeros((80, 80, 80), "float32")
    counts = []
    for together in (False, True):
        begun = started(
            data, conv(), batch=8, seam_mode="blend", normalize="fixed", norm_upper=9, block=64
        )
        one = lane_of(begun)
        one.scatter = PatchScatter(CPU, begun.job, together=together)
        block = next(block for block in begun.blocks if min(block.patches.start) > 1)
        assert block.patches.size == 8
        opened = one._opened(Loaded(block, None, Scaling(1, 2)))
        first = block.patches.start
        slots = [
            Slot(opened, tuple(np.add(first, index)), tuple(np.multiply(6, index)))
            for index in np.ndindex(2, 2, 2)
        ]
        output = torch.ones(8, 1, 8, 8, 8)
        one.scatter.put(0, output, slots)  # the weights are there now
        with torch.inference_mode(), Operators() as operators:
            one.scatter.put(0, output, slots)
        counts.append(operators.count)
    alone, at_once = counts
    assert alone >= 8 * 8
    assert at_once == 8 + (alone - 8) / 8


def test_weights_go_to_a_device_once_and_with_their_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Tensor]] = []
    weights_on = scatter._weights_on

    def noted(*args: Any) -> Tensor:
        weights = weights_on(*args)
        made.append(weakref.ref(weights))
        return weights

    monkeypatch.setattr(scatter, "_weights_on", noted)
    begun = started(np.zeros((26, 26, 26), "float32"), seam_mode="blend")
    one = lane_of(begun)
    assert list(through(begun, one))
    assert len(made) == 3, "those at either edge and in between, though each axis has more patches"
    assert all(ref() is not None for ref in made)
    del one
    assert all(ref() is None for ref in made)


def test_patches_with_one_place_in_the_row_have_the_same_weights() -> None:
    for patch, overlap, count in ((8, 3, 5), (8, 5, 9), (8, 0, 4), (8, 7, 20), (8, 2, 1)):
        for index in range(count):
            weights = axis_weights(patch, overlap, 0.05, index, count)
            there = place_in_row(patch, overlap, index, count)
            assert (axis_weights(patch, overlap, 0.05, *there) == weights).all()
