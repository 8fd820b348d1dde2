"""nms and roi_align in plain torch, against loops over boxes and points."""

import importlib
import math
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import MissingDependency

from ..preloaded import started

vision: Any = None


@pytest.fixture(autouse=True, scope="module")
def _library() -> None:
    """Imported by the first test: torchvision and torch's compiler take a second of each worker."""
    globals()["vision"] = importlib.import_module("penstock.models.torchvision_ops")
    vision.import_torchvision()


def greedy(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> list[int]:
    """Box by box: kept unless a kept one of a higher score overlaps it too much."""

    def area(box: list[float]) -> float:
        return (box[2] - box[0]) * (box[3] - box[1])

    kept: list[int] = []
    places = boxes.tolist()
    for index in sorted(range(len(scores)), key=lambda i: -scores[i].item()):
        a = places[index]
        for other in kept:
            b = places[other]
            width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
            height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
            union = area(a) + area(b) - width * height
            if union > 0 and width * height / union > threshold:
                break
        else:
            kept.append(index)
    return kept


def by_points(
    features: torch.Tensor,
    rois: torch.Tensor,
    scale: float,
    bins: tuple[int, int],
    ratio: int,
    aligned: bool,
) -> torch.Tensor:
    """roi_align as it is defined: bin by bin, point by point."""
    height, width = features.shape[2:]

    def read(image: int, y: float, x: float) -> torch.Tensor:
        if y < -1 or y > height or x < -1 or x > width:
            return torch.zeros(features.shape[1], dtype=features.dtype)
        y, x = min(max(y, 0.0), height - 1), min(max(x, 0.0), width - 1)
        low = math.floor(y), math.floor(x)
        total = torch.zeros(features.shape[1], dtype=features.dtype)
        for row in range(low[0], min(low[0] + 2, height)):
            for column in range(low[1], min(low[1] + 2, width)):
                weight = (1 - abs(y - row)) * (1 - abs(x - column))
                total = total + weight * features[image, :, row, column]
        return total

    out = torch.zeros(len(rois), features.shape[1], *bins, dtype=features.dtype)
    for number, roi in enumerate(rois.tolist()):
        x0, y0, x1, y1 = (side * scale - (0.5 if aligned else 0) for side in roi[1:])
        sides = (y1 - y0, x1 - x0) if aligned else (max(y1 - y0, 1.0), max(x1 - x0, 1.0))
        points = [
            ratio if ratio > 0 else math.ceil(s / b) for s, b in zip(sides, bins, strict=True)
        ]
        for row in range(bins[0]):
            for column in range(bins[1]):
                for i in range(points[0]):
                    for j in range(points[1]):
                        y = y0 + (row + (i + 0.5) / points[0]) * sides[0] / bins[0]
                        x = x0 + (column + (j + 0.5) / points[1]) * sides[1] / bins[1]
                        value = read(int(roi[0]), y, x) / (points[0] * points[1])
                        out[number, :, row, column] += value
    return out


def some_boxes(seed: int, count: int, span: float, side: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    corner = torch.rand(count, 2, generator=generator) * span
    return torch.cat((corner, corner + torch.rand(count, 2, generator=generator) * side), 1)


@given(
    seed=st.integers(0, 10_000),
    count=st.integers(0, 60),
    span=st.sampled_from([5.0, 40.0]),  # all on top of each other, or few
    block=st.sampled_from([4, 1024]),
    threshold=st.sampled_from([0.0, 0.3, 0.7, 1.0]) | st.floats(0, 1),
)
def test_nms_is_greedy(seed: int, count: int, span: float, block: int, threshold: float) -> None:
    boxes = some_boxes(seed, count, span, 20)
    scores = torch.rand(count, generator=torch.Generator().manual_seed(seed)).mul(20).round()
    with pytest.MonkeyPatch.context() as patch:  # many scores are equal
        patch.setattr(vision, "NMS_BLOCK", block)
        kept = vision.nms(boxes, scores, threshold)
        assert kept.tolist() == greedy(boxes, scores, threshold)
        assert vision.nms(boxes[kept], scores[kept], threshold).tolist() == list(range(len(kept)))


def test_nms_of_boxes_without_area_and_of_none() -> None:
    points = torch.tensor([[1.0, 1, 1, 1]] * 3)
    assert vision.nms(points, torch.tensor([1.0, 3, 2]), 0.5).tolist() == [1, 2, 0]
    assert vision.nms(torch.zeros(0, 4), torch.zeros(0), 0.5).tolist() == []


@pytest.mark.parametrize(("ratio", "aligned"), [(1, False), (2, True), (3, False), (-1, True)])
def test_roi_align_is_the_mean_of_its_points(ratio: int, aligned: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    features = torch.rand(2, 3, 9, 7, generator=generator, dtype=torch.float64)
    boxes = some_boxes(4, 12, 30, 25).double() - 8  # some begin or end outside
    boxes = torch.cat((boxes, torch.tensor([[3.0, 4, 3, 4], [-90, -90, -80, -80], [0, 0, 28, 36]])))
    rois = torch.cat((torch.arange(len(boxes))[:, None] % 2, boxes), 1)
    pooled = vision.roi_align(features, rois, 0.25, 2, 3, ratio, aligned)
    expected = by_points(features, rois, 0.25, (2, 3), ratio, aligned)
    torch.testing.assert_close(pooled, expected, rtol=0, atol=1e-12)


def test_roi_align_in_parts_is_the_same(monkeypatch) -> None:
    features = torch.rand(1, 2, 8, 8, generator=torch.Generator().manual_seed(5))
    rois = torch.cat((torch.zeros(9, 1), some_boxes(6, 9, 20, 20)), 1)
    whole = vision.roi_align(features, rois, 0.5, 2, 2, -1, False)
    monkeypatch.setattr(vision, "GATHERED_BYTES", 1)
    assert torch.equal(vision.roi_align(features, rois, 0.5, 2, 2, -1, False), whole)


def test_the_gradient_of_roi_align() -> None:
    features = torch.rand(2, 2, 5, 6, dtype=torch.float64, requires_grad=True)
    rois = torch.tensor(
        [[0.0, 1, 1, 9, 8], [1, -3, 2, 6, 12], [1, 2, 2, 3, 3]], dtype=torch.float64
    )
    weight = torch.arange(3 * 2 * 2 * 2, dtype=torch.float64).view(3, 2, 2, 2)
    (vision.roi_align(features, rois, 0.5, 2, 2, 2, False) * weight).sum().backward()
    gradient, features.grad = features.grad, None
    (by_points(features, rois, 0.5, (2, 2), 2, False) * weight).sum().backward()
    torch.testing.assert_close(gradient, features.grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_roi_align_keeps_the_dtype_and_takes_no_regions(dtype: torch.dtype) -> None:
    features = torch.ones(1, 4, 6, 6, dtype=dtype)
    rois = torch.tensor([[0, 2.0, 2, 4, 4]])
    out = vision.roi_align(features, rois, 1.0, 2, 2, 2, False)
    assert out.dtype == dtype and torch.equal(out, torch.ones(1, 4, 2, 2, dtype=dtype))
    assert vision.roi_align(features, rois[:0], 1.0, 2, 2, 2, False).shape == (0, 4, 2, 2)


def test_torchvision_itself_calls_them_or_agrees_with_them() -> None:
    ops = vision.import_torchvision().ops
    boxes, scores = some_boxes(7, 200, 40, 30), torch.rand(200)
    assert torch.equal(ops.nms(boxes, scores, 0.4), vision.nms(boxes, scores, 0.4))
    features = torch.rand(1, 3, 20, 20, requires_grad=True)
    pooled = ops.roi_align(features, [boxes[:50]], 7, 0.5, 2)
    rois = torch.cat((torch.zeros(50, 1), boxes[:50]), 1)
    ours = vision.roi_align(features, rois, 0.5, 7, 7, 2, False)
    torch.testing.assert_close(pooled, ours)
    weight = torch.from_numpy(np.random.default_rng(0).random(pooled.shape)).float()
    gradients = [
        torch.autograd.grad((out * weight).sum(), features, retain_graph=True)[0]
        for out in (pooled, ours)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_what_does_not_load_is_replaced_and_said_once(tmp_path) -> None:
    """In a process that has loaded torch alone. Lightning imports torchvision itself."""
    code = "import sys; assert sys.modules.keys().isdisjoint(['torchvision', 'pytorch_lightning'])"
    code += "; from penstock.models import compiled_operators, import_torchvision"
    code += "; import_torchvision()"
    code += "; import torch, torchvision, pytorch_lightning; print(compiled_operators())"
    code += "; print(torchvision.ops.nms(*map(torch.ones, ((1, 4), 1)), 0.5).tolist())"
    process = started(tmp_path, code=code)
    process.join(300)
    *said, compiled, kept = (tmp_path / "said").read_text().splitlines()
    assert process.exitcode == 0 and kept == "[0]", said
    notes = [line for line in said if "nms and roi_align are Penstock's" in line]
    assert len(notes) == (compiled == "False")
    assert all(line.endswith("torchvision together, from one index") for line in notes)


def test_without_torchvision_the_line_that_mends_it(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)  # as where it is not installed
    with pytest.raises(MissingDependency, match=r"run: pip install 'penstock-dl\[train\]'"):
        vision._import()
