"""Geometries of volumes, for laws that hold of all of them."""

from typing import Any

from hypothesis import strategies as st

from penstock.data.box import Box
from penstock.inference.tiling.geometry import Geometry

STEPS = ("context", "inset", "narrowed", "moved")


@st.composite
def inner_boxes(draw: st.DrawFn, domain: Box) -> Box:
    """Any box in a domain that holds a voxel."""
    start = [
        draw(st.integers(low, high - 1))
        for low, high in zip(domain.start, domain.stop, strict=True)
    ]
    stop = [draw(st.integers(low + 1, high)) for low, high in zip(start, domain.stop, strict=True)]
    return Box(tuple(start), tuple(stop))


@st.composite
def geometries(draw: st.DrawFn, long: bool = False) -> Geometry:
    """Any small geometry: thin axes, odd overlaps, misaligned anchors, one or many parts. If it is
    ``long``, it is so along one axis for every kind of brick, with an overlap of up to 15 strides;
    the others are short."""
    most = (12, 6), (12, 6), (12, 6)
    if long:
        most = draw(st.permutations([(40, 16), (5, 4), (5, 4)]))
    shape, patch = (
        tuple(draw(st.integers(1, m)) for m in each) for each in zip(*most, strict=True)
    )
    seam: Any = draw(st.sampled_from(["trim", "blend"]))
    block = tuple(draw(st.integers(1, 9)) for _ in range(3))
    domain = Box.of(tuple(draw(st.integers(-30, 30)) for _ in range(3)), shape)
    return Geometry(
        domain=domain,
        patch=patch,
        overlap=tuple(draw(st.integers(0, p - 1)) for p in patch),
        seam=seam,
        block=block,
        anchor=tuple(draw(st.integers(-12, 12)) for _ in range(3)),
        part=tuple(u * draw(st.integers(1, 5)) for u in block),
        patches_per_brick=tuple(draw(st.integers(1, 4)) for _ in range(3)),
        steps=draw(st.sampled_from(STEPS)) if seam == "blend" else "context",
        inner=draw(st.none() | inner_boxes(domain)),
    )
