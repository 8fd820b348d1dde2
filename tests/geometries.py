"""Geometries of volumes, for laws that hold of all of them."""

from __future__ import annotations

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
def geometries(draw: st.DrawFn) -> Geometry:
    """Any small geometry: thin axes, odd overlaps, misaligned anchors, one or many parts."""
    origin = tuple(draw(st.integers(-20, 20)) for _ in range(3))
    shape = tuple(draw(st.integers(1, 12)) for _ in range(3))
    seam: Any = draw(st.sampled_from(["trim", "blend"]))
    patch = tuple(draw(st.integers(1, 6)) for _ in range(3))
    block = tuple(draw(st.integers(2, 8)) for _ in range(3))
    domain = Box.of(origin, shape)
    return Geometry(
        domain=domain,
        patch=patch,
        overlap=tuple(draw(st.integers(0, p - 1)) for p in patch),
        seam=seam,
        block=block,
        anchor=tuple(draw(st.integers(-5, 5)) for _ in range(3)),
        part=tuple(u * draw(st.integers(1, 4)) for u in block),
        patches_per_brick=tuple(draw(st.integers(1, 3)) for _ in range(3)),
        steps=draw(st.sampled_from(STEPS)) if seam == "blend" else "context",
        inner=draw(st.none() | inner_boxes(domain)),
    )
