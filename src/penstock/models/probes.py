"""Finds from outside how far a network sees: it is run on inputs that differ in some voxels only.

    one half of a long window changes  ──▶  the outputs past the cut that change   (reach)
    a window moves by k voxels         ──▶  the outputs only move along            (period)
    a patch lies in a larger window    ──▶  its core is equal                      (check)

All is run in float64 where the network allows it, on windows that are long along one axis only; one
that is wide along all of them is run in the dtype of a job. NaN passes through all arithmetic, so
it bounds the reach; but comparisons, a maximum and `nan_to_num` swallow it. Finite changes, small
and large, are not swallowed, but may drown. The reach is the union. Two runs differ only in the
probe, so neither biases nor padding count.
"""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..base import UsageError, format_count
from .footprint import Operations
from .load import Model
from .probe_windows import Compared, ProbeWindows, box_of, comparisons, equal, same
from .registry import Reach

MOST_PERIOD = 64
"""The largest period that is looked for. A larger grid is no use for patches."""
_SIDES = {3: [8, 10, 12, 16, 18, 20, 24, 28, 30, 32, 36, 40, 48, 50, 56, 60, 64, 72, 80, 96]}
_SIDES[2] = [*_SIDES[3], 100, 112, 128, 160, 192, 224, 256]
"""Sides of windows to try, by axes: many networks take multiples only, and memory has an end."""
_TELLING_SIDE = 32
"""Side at which a network whose output has another shape is not tried on larger windows."""
_LONGEST = {2: 1024, 3: 256}
"""Length of the longest window, by the number of axes: twice the largest context that is found. In
3-D no default patch has more than 72 voxels of it, but a user may name one that has."""
_MOST_WORK = 6e11
"""Floating-point operations that are spent at most: about a minute of one core. They are counted,
and no clock is asked, as what is found decides on the patch, which must not depend on the load."""
_SHORTEST = 64
"""Least length of a window in which the reach is looked for."""
_OF_WHOLE = (
    nn.GroupNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.MultiheadAttention,
    nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd,
)
"""Layers that see all of a short window as they see all of a long one, but faster."""
_SMALL, _LARGE = 1.0, (1e6, -1e6)
"""Sizes of finite changes. Inputs are normalised, so the first is theirs."""
_ALIKE = 16
"""Voxels that are compared to see that a shift only shifts."""


class NotProbed(UsageError):
    """The network cannot be run on probes."""


class AnotherShape(NotProbed):
    """The output of a probe has another shape than the probe."""


class _TooMuchWork(UsageError):
    """The search costs more than it may."""


def find_reach(model: Model, axes: int) -> Reach:
    """Find how far a network sees.

    Args:
        model: The model. It is copied, and not changed.
        axes: The number of axes that it is given, 2 or 3.

    Returns:
        What was found. A network that cannot be run on other shapes, that makes other outputs each
        time or that sees whole patches is not exact, and the result says why.
    """
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of NaN and infinities, which are probes
            return _searched(_Probed(model, axes))
    except (_TooMuchWork, NotProbed) as error:  # it may have one
        return Reach(blame=str(error), partly=True)
    except UsageError as error:
        return Reach(blame=str(error))


def _searched(net: _Probed) -> Reach:
    axes = range(net.axes)
    rough = []
    for axis in axes:  # a small change shows most networks that see the whole patch
        net.looks_for("how far it sees", axis)
        if (extents := net.extents(axis, 1, (_SMALL,))) is None:
            return _blamed(net, axis)
        rough.append(extents)
    periods = []
    for axis, extents in enumerate(rough):
        net.looks_for("its grid", axis)
        if (period := net.period(axis, extents)) is None:
            return Reach(
                blame="its output depends on where a patch lies: no shift of up to "
                f"{MOST_PERIOD} voxels along {'zyx'[axis - net.axes]} only shifts it"
            )
        periods.append(period)
    contexts, seen = [], []
    for axis, period in enumerate(periods):
        net.looks_for("the context that it needs", axis)
        if (extents := net.extents(axis, period, (math.nan, _SMALL, *_LARGE))) is None:
            return _blamed(net, axis)
        contexts.append(extents)
        seen.append(net.pulses(axis, period, extents))
    reach = Reach(
        period=tuple(periods),
        before=tuple(before for before, _ in contexts),
        after=tuple(after for _, after in contexts),
        seen_before=tuple(before for before, _ in seen),
        seen_after=tuple(after for _, after in seen),
        step=tuple(math.lcm(period, net.step) for period in periods),
    )
    if net.mixes_its_batch():
        return Reach(blame="its output of a patch depends on others in its batch")
    places, where = net.check(reach)
    blame = f"a patch differs from a larger input along {where}"
    return Reach(blame=blame) if where else replace(reach, places=places)


class _Probed:
    """A network in float64 that is run on probes."""

    def __init__(self, model: Model, axes: int) -> None:
        self.model, self.axes = model, axes
        self.windows = ProbeWindows(model.in_channels)
        self.looking, self.work, self.work_per_voxel = "its shapes", 0.0, 0.0
        self.begin(torch.float64)
        try:
            self.side = self._least_side()
        except NotProbed:  # it makes float32 tensors itself
            self.begin(model.dtype)
            if model.dtype not in (torch.float64, torch.float32):
                raise NotProbed(f"it computes in {model.dtype}") from None
            self.side = self._least_side()
        self.step = self._step()

    def begin(self, dtype: torch.dtype) -> None:
        """Go on with a copy that was not run, for windows of a dtype."""
        self.net, self.windows.dtype = _copied(self.model.module), dtype
        if dtype == torch.float64:
            self.net.double()

    def looks_for(self, what: str, axis: int) -> None:
        """Note what is looked for next along an axis."""
        self.looking = f"{what} along {'zyx'[axis - self.axes]}"

    def run(self, x: Tensor, place: int = 0) -> Tensor:
        """All heads of the window at a place of a batch, shape (channels, spatial...)."""
        self.work += self.work_per_voxel * math.prod(x.shape[2:])
        if self.work > _MOST_WORK:
            raise _TooMuchWork(
                f"to look at it takes more than {format_count(_MOST_WORK)} operations; "
                f"{self.looking} and what comes after was not looked at"
            )
        try:
            heads = self.model.heads(self.net(x.clone())).values()
            joined = torch.cat([head[place].double() for head in heads])
        except Exception as error:  # of a user's network
            raise NotProbed(f"it cannot be run on probes ({type(error).__name__})") from error
        if joined.shape[1:] != x.shape[2:]:
            raise AnotherShape("its output has another shape than its input")
        return joined

    def _least_side(self) -> int:
        for side in _SIDES[self.axes]:
            try:
                self.run(self.windows.noise([side] * self.axes))  # long enough along all axes
                x = self.windows.noise([*[side] * (self.axes - 1), 2 * side])
                with Operations() as counted:
                    once = self.run(x)
                unseen = (getattr(part, "unseen_work", 0) for part in self.net.modules())
                self.work_per_voxel = counted.total / math.prod(x.shape[2:]) + sum(unseen)
                if not same(once, self.run(x)).all():
                    raise UsageError("it makes another output of the same input each time")
                return side
            except AnotherShape:
                if side >= _TELLING_SIDE:
                    raise
            except NotProbed:
                continue
        raise NotProbed("it cannot be run on windows of other shapes")

    def _step(self) -> int:
        """The number of which sides must be multiples, as far as sides above the least tell."""
        for step in range(1, self.side):
            if self.side % step == 0:
                with contextlib.suppress(NotProbed):
                    self.run(self.windows.noise([self.side + step] * self.axes))
                    return step
        return self.side

    def window(self, axis: int, length: int) -> Tensor:
        sides = [self.side] * self.axes
        sides[axis] = length
        return self.windows.noise(sides)

    def extents(self, axis: int, period: int, sizes: Sequence[float]) -> tuple[int, int] | None:
        """Voxels past a cut that change with what lies before it, and before a cut that change with
        what lies after it. None if they are as many as the longest window has."""
        unit = 2 * math.lcm(self.side, period)
        shortest = unit * -(-_SHORTEST // unit)
        longest = unit * -(-_LONGEST[self.axes] // unit)
        for length in dict.fromkeys((shortest, min(3 * shortest, longest), longest)):
            x = self.window(axis, length)
            before, cut = self.run(x), length // 2
            past = below = 0
            for changed in self._answers(x, before, axis, slice(0, cut), sizes):
                past = max(past, changed[1] - cut + 1)
            if past < cut:
                for changed in self._answers(x, before, axis, slice(cut, length), sizes):
                    below = max(below, cut - changed[0])
            if max(past, below) < cut:
                return past, below
            if sizes == (_SMALL,) and length == shortest and _layer_to_blame(self, axis):
                return None
        return None

    def _answers(
        self, x: Tensor, before: Tensor, axis: int, where: slice, sizes: Sequence[float]
    ) -> Iterator[tuple[int, int]]:
        """The first and the last place along an axis at which the output changes, for a probe of
        each size in ``where`` of a window. ``before`` is the output without a probe."""
        for size in sizes:
            probe = x.clone()
            part = probe.movedim(2 + axis, 0)[where]
            part.copy_(self.windows.noise(x.shape[2:]).movedim(2 + axis, 0)[where] * size)
            try:
                differs = ~same(before, self.run(probe))
                places = differs.movedim(1 + axis, 0).flatten(1).any(1).nonzero()
            except NotProbed:  # it refuses what is not finite, so it lets none pass
                continue
            if len(places):
                yield int(places[0]), int(places[-1])

    def pulses(self, axis: int, period: int, extents: Sequence[int]) -> tuple[int, int]:
        """How far a voxel of the output sees before and after itself, by pulses in the first and
        the last voxel of a cell of the grid."""
        unit = 2 * math.lcm(self.side, period)
        x = self.window(axis, unit * -(-2 * (max(extents) + period + 1) // unit))
        before, middle = self.run(x), x.shape[2 + axis] // 2
        sees_before = sees_after = 0
        for place in sorted({middle, middle + period - 1}):
            where = slice(place, place + 1)
            for first, last in self._answers(x, before, axis, where, (math.nan, *_LARGE)):
                sees_before = max(sees_before, last - place)
                sees_after = max(sees_after, place - first)
        return sees_before, sees_after

    def period(self, axis: int, extents: Sequence[int]) -> int | None:
        """The least shift of the input that only shifts the output; None if there is none."""
        margins = [extent + 2 * self.side for extent in extents]
        powers = [2**n for n in range(MOST_PERIOD.bit_length())]
        # The least period divides all others, so it is the first power of two, if one is a period.
        others = [k for k in range(3, MOST_PERIOD) if k not in powers]
        for tried in (powers[:-2], powers[-2:] + others):  # most have a small one
            least = sum(margins) + _ALIKE + max(tried)
            length = self.side * -(-least // self.side)
            x = self.window(axis, length + max(tried))
            first = self.run(x.narrow(2 + axis, 0, length))
            for k in tried:
                moved = self.run(x.narrow(2 + axis, k, length))
                count = length - k - sum(margins)
                if equal(
                    first.narrow(1 + axis, k + margins[0], count),
                    moved.narrow(1 + axis, margins[0], count),
                    self.windows.dtype,
                ):
                    return k
        return None

    def mixes_its_batch(self) -> bool:
        """Whether a window comes out otherwise beside others. Kernels round by batch, too."""
        x = self.windows.noise([self.side] * self.axes)
        batch, alone = torch.cat([x, 6 * x - 3, x]), self.run(x)
        with contextlib.suppress(NotProbed):  # it takes one at a time
            return not all(equal(alone, self.run(batch, n), torch.float32) for n in (0, -1))
        return False

    def check(self, reach: Reach) -> tuple[int, str]:
        """Compare the cores of patches with larger windows.

        Returns the number of places in small windows, and the axes along which one differs.
        """
        places = 0
        for each in comparisons(reach, self.side, self.work_per_voxel):
            if each.as_run:
                self.begin(self.model.dtype)
            try:
                agree = self.agree(each, reach)
            except NotProbed:
                if not each.kind and not each.as_run:
                    raise
                continue  # it refuses such values, so it is never given them
            if not agree:
                words = " and ".join("zyx"[a - self.axes] for a in each.axes)
                return places, words + f" in {self.model.dtype}" * each.as_run
            places += len(each.patches) == 1
        return places, ""

    def agree(self, each: Compared, reach: Reach) -> bool:
        """Whether the cores of the patches of a window are as the window has them."""
        whole = self.windows.of_kind(each.kind, each.window, box_of(*each.patches[0]))
        expected = self.run(whole)
        if each.as_run:  # what it keeps of its first input is another now
            self.begin(self.windows.dtype)
        for corner, sides in each.patches:
            low, core = each.core(sides, reach)
            there = [c + before for c, before in zip(corner, low, strict=True)]
            patch = self.run(whole[box_of(corner, sides)])[box_of(low, core)]
            if not equal(expected[box_of(there, core)], patch, self.windows.dtype, each.as_run):
                return False
        return True


def _layer_to_blame(net: _Probed, axis: int) -> str:
    """The name and the class of the first layer whose output changes everywhere when the voxels at
    one end of a window do; empty if there is none, or it is not known."""
    tries = ((_SHORTEST, _OF_WHOLE), (_LONGEST[net.axes], (nn.Module,)))
    return next(filter(None, (_layer_of(net, axis, *each) for each in tries)), "")


def _layer_of(net: _Probed, axis: int, length: int, kinds: tuple[type[nn.Module], ...]) -> str:
    """The same among some kinds of layers, by a window of about this length."""
    layers = [each for each in net.net.named_modules() if isinstance(each[1], kinds)]
    unit = 2 * net.side
    x = net.window(axis, unit * -(-length // unit))
    probe = x.clone()
    probe.movedim(2 + axis, 0)[0] += _SMALL

    def compare(name: str, *forward: Any) -> None:
        output = forward[-1][0] if isinstance(forward[-1], tuple) else forward[-1]
        if isinstance(output, Tensor) and _differs_far(output, axis, net.axes):
            raise _Whole(name)

    with contextlib.ExitStack() as hooks:
        for name, layer in layers:
            words = f"{name or 'the network'} ({type(layer).__name__})"
            with contextlib.suppress(RuntimeError):  # some programs take no hooks
                hooks.callback(layer.register_forward_hook(partial(compare, words)).remove)
        try:
            net.net(torch.cat([x, probe]))
        except _Whole as whole:
            return str(whole)
        except Exception:  # it takes no batch of two, so the layer is not known
            return ""
    return ""


class _Whole(Exception):
    """Ends a forward at the layer that is to blame."""


def _differs_far(output: Tensor, axis: int, axes: int) -> bool:
    """Whether the two samples of a layer's output differ at the far end of an axis, or everywhere
    where there is no such axis."""
    if output.ndim < 2 or output.shape[0] != 2:
        return False
    differs = output[0] != output[1]
    if output.ndim == 2 + axes and output.shape[2 + axis] > 1:
        return bool(differs.movedim(1 + axis, 0)[-1].any())
    return float(differs.double().mean()) > 0.99


def _blamed(net: _Probed, axis: int) -> Reach:
    """Why no overlap is exact, for a network that sees far along an axis."""
    if layer := _layer_to_blame(net, axis):
        return Reach(blame=f"{layer} sees the whole patch")
    return Reach(blame=f"it sees farther than {_LONGEST[net.axes] // 2} voxels", partly=True)


def _copied(module: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(module).cpu().eval()
    except Exception as error:  # such as weights that were computed from others
        raise NotProbed(f"it cannot be copied ({type(error).__name__})") from error
