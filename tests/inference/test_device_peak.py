"""A forward that is measured on the device it runs on: what no shape shows is counted."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn

from penstock.inference.opening.device_peak import forward_peak, with_peak
from penstock.models.footprint import _Peak

from .kit import opened

CPU = torch.device("cpu")
WORKSPACE = 5 << 20


class Allocator:
    """The CPU's twin of `torch.cuda`: it counts the tensors that are alive."""

    def __init__(self) -> None:
        self.before, self.emptied, self.counting = 1000, False, contextlib.ExitStack()

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.counter = self.counting.enter_context(_Peak())

    def memory_allocated(self, device: torch.device) -> int:
        return self.before

    def synchronize(self, device: torch.device) -> None:
        self.counting.close()

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.before + self.counter.peak

    def empty_cache(self) -> None:
        self.counting.close()
        self.emptied = True


class Works(nn.Module):
    """Takes a workspace on a real device alone, as a library does, and may have no room for it."""

    def __init__(self, room: bool = True) -> None:
        super().__init__()
        self.net, self.room = nn.Conv3d(1, 1, 3, padding=1), room

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_meta and not self.room:
            raise torch.OutOfMemoryError("there is none")
        workspace = torch.empty(0 if x.is_meta else WORKSPACE, dtype=torch.uint8)
        out: Tensor = self.net(x)
        del workspace
        return out


def test_what_a_library_takes_is_counted_with_the_tensors() -> None:
    net, allocator = opened(None, model_type=Works()).net, Allocator()
    by_shapes = net.footprint.peak_bytes
    measured = forward_peak(net, CPU, allocator)
    assert by_shapes is not None and measured is not None and allocator.emptied
    assert WORKSPACE < measured < WORKSPACE + by_shapes + 1000
    assert with_peak(net, measured).footprint.peak_bytes == measured > by_shapes


def test_a_device_without_room_leaves_the_plan_as_it_is() -> None:
    net, allocator = (
        opened(None, model_type=Works(room=False), head_kind="intensity").net,
        Allocator(),
    )
    assert forward_peak(net, CPU, allocator) is None and allocator.emptied
    assert with_peak(net, None).footprint == net.footprint


def test_the_smaller_of_two_peaks_is_passed_over_and_one_is_enough() -> None:
    net = opened(None).net
    by_shapes = net.footprint.peak_bytes
    assert by_shapes and with_peak(net, by_shapes - 1).footprint.peak_bytes == by_shapes
