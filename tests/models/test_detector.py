"""The detector: what it is told, what it costs, what it gives, and that it learns."""

import copy
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch

from penstock.base.errors import UsageError
from penstock.data.scenes.objects import Objects

detector: Any = None
workload: Any = None


@pytest.fixture(autouse=True, scope="module")
def _libraries() -> None:
    """Imported by the first test: torchvision and torch's compiler take a second of each worker."""
    names = {
        "detector": "penstock.models.detector",
        "workload": "penstock.training.workloads.detector_workload",
    }
    globals().update({name: import_module(module) for name, module in names.items()})


@pytest.fixture(scope="module")
def _net() -> Any:
    return detector.make_detector(2, width=16)


@pytest.fixture
def net(_net: Any) -> Any:
    """A detector on images of two channels, in training mode."""
    return copy.deepcopy(_net)


NAN = float("nan")


@pytest.mark.parametrize(
    ("vessel", "fishing", "label"),
    [
        (1, 1, "FISHING"),
        (1, 0, "OTHER"),
        (1, -1, "SOME_VESSEL"),  # the common case that the reference took for fishing
        (0, -1, "NO_VESSEL"),
        (0, 0, "NO_VESSEL"),
        (0, 1, "NO_VESSEL"),  # contradictory: what it is not weighs more
        (-1, 1, "FISHING"),
        (-1, 0, "SOMETHING"),
        (-1, -1, "SOMETHING"),
    ],
)
def test_a_label_says_what_is_known_and_no_more(vessel: int, fishing: int, label: str) -> None:
    target = detector.targets_of([[5.0, 9.0]], [vessel], [fishing], [NAN])
    assert target["labels"].tolist() == [getattr(detector, label)]


def test_boxes_are_squares_around_their_points_as_long_as_the_vessel() -> None:
    points = [[20.0, 30.5], [7.0, 8.0], [100.0, 50.0], [1.0, 2.0]]
    target = detector.targets_of(points, [1] * 4, [0] * 4, [250.0, 30.0, 399_000.0, NAN])
    boxes = target["boxes"]
    assert (boxes[:, 2:] - boxes[:, :2]).tolist() == [[25, 25], [10, 10], [40, 40], [14, 14]]
    assert boxes[1].tolist() == [3.5, 2.5, 13.5, 12.5], "around the middle of pixel (7, 8)"
    facts = detector.points_of({**target, "scores": torch.tensor([0.9, 0.8, 0.7, 0.6])})
    assert facts["points"].tolist() == points, "rows and columns again"
    objects = Objects.of("scene", facts.pop("points"), **facts)
    assert objects.score.tolist() == pytest.approx([0.9, 0.8, 0.7, 0.6])
    assert objects.length_m.tolist()[:3] == [250.0, 30.0, 399_000.0]
    assert np.isnan(objects.length_m[3])


def test_the_loss_of_a_kind_is_of_the_probability_of_all_that_the_label_admits() -> None:
    logits = torch.tensor([[0.3, -1.0, 2.0, 0.5]])
    p = logits.softmax(-1)[0].tolist()
    expected = {
        0: p[0],
        1: p[1],
        2: p[2],
        3: p[3],
        detector.SOME_VESSEL: p[1] + p[2],
        detector.SOMETHING: 1 - p[0],
    }
    for label, probability in expected.items():
        nothing = torch.zeros(1, 4), torch.zeros(1)
        parts = detector.losses(
            logits, *nothing, torch.tensor([label]), torch.zeros(1, 4), torch.zeros(1)
        )
        assert parts["loss_kind"].item() == pytest.approx(-np.log(probability), abs=1e-6)


def test_lengths_count_where_they_are_known_and_boxes_where_there_is_something() -> None:
    labels = torch.tensor([0, detector.FISHING, detector.OTHER, detector.NO_VESSEL])
    true = torch.tensor([80.0, 100.0, NAN, 25.0])
    lengths = torch.zeros(4, requires_grad=True)
    boxes = torch.zeros(4, 4, requires_grad=True)
    parts = detector.losses(torch.zeros(4, 4), boxes, lengths, labels, torch.ones(4, 4), true)
    (parts["loss_length"] + parts["loss_box"]).backward()
    assert (lengths.grad != 0).tolist() == [False, True, False, True]
    assert (boxes.grad != 0).all(1).tolist() == [False, True, True, True]
    per_box = np.log(2) - 0.5 / 9  # both lengths are off by a factor of two
    assert parts["loss_length"].item() == pytest.approx(2 * per_box / 4, abs=1e-6)


def some_chips(count: int, channels: int, side: int = 96) -> tuple[list[Any], list[Any]]:
    """Bright squares on noise: small fishing vessels, large others."""
    rng = np.random.default_rng(4)
    images, targets = [], []
    for _ in range(count):
        image = rng.normal(0, 0.3, (channels, side, side))
        points = rng.permutation(np.mgrid[16:side:24, 16:side:24].reshape(2, -1).T)[:3]
        fishing = np.array([1, 0, 1])
        for (row, column), small in zip(points, fishing, strict=True):
            half = 3 if small else 8
            place = slice(row - half, row + half + 1), slice(column - half, column + half + 1)
            image[(slice(None), *place)] += 2
        lengths = np.where(fishing, 60.0, 160.0)
        images.append(torch.tensor(image, dtype=torch.float32))
        targets.append(detector.targets_of(points, [1, 1, 1], fishing, lengths))
    return images, targets


@pytest.mark.slow
@pytest.mark.parametrize(("backbone", "channels"), [("mobilenet", 5), ("resnet50", 1)])
def test_any_channels_and_every_parameter_learns(backbone: str, channels: int) -> None:
    """Of an image without objects too: a rank whose chips are empty must not leave DDP waiting."""
    torch.manual_seed(0)
    net = detector.make_detector(channels, backbone, width=16)
    assert net.in_channels == channels
    images, targets = some_chips(2, channels, 48)
    for target in (targets, [detector.targets_of(np.zeros((0, 2)), [], [], [])] * 2):
        net.zero_grad()
        total = sum(net(images, target).values())
        assert total.isfinite()
        total.backward()
        assert [name for name, p in net.named_parameters() if p.grad is None] == []


@pytest.mark.slow
def test_images_are_padded_and_never_rescaled_in_training_or_after(net: Any) -> None:
    image = torch.arange(2 * 50 * 70.0).view(2, 50, 70)
    for mode in (True, False):
        net.train(mode)
        batch, _ = net.transform([image], None)
        assert batch.tensors.shape == (1, 2, 64, 96)
        assert torch.equal(batch.tensors[0, :, :50, :70], image)
        assert not batch.tensors[0, :, 50:].any() and not batch.tensors[0, :, :, 70:].any()


@torch.no_grad()
def test_anchors_fit_objects_of_ten_pixels(_net: Any) -> None:
    """Wherever it lies, a box overlaps some anchor by more than counts as background (0.3)."""
    net = _net
    batch, _ = net.transform([torch.zeros(2, 128, 128)], None)
    anchors = net.rpn.anchor_generator(batch, list(net.backbone(batch.tensors).values()))[0]
    rng = np.random.default_rng(1)
    for side in (10, 14, 20, 40):
        corner = torch.from_numpy(rng.uniform(20, 60, (200, 2)))
        boxes = torch.cat((corner, corner + side), 1)
        assert (
            detector.torchvision.ops.box_iou(boxes, anchors.double()).max(1).values.min() > 0.4
        ), side


def test_what_is_found_is_one_box_each_strongest_first() -> None:
    torch.manual_seed(1)
    net = detector.make_detector(2, width=16, score_threshold=0.0, most_detections=7).eval()
    images, _ = some_chips(2, 2, 48)
    with torch.no_grad():
        detections = net(images)
    for of in detections:
        assert len(of["scores"]) == 7
        assert of["scores"].tolist() == sorted(of["scores"].tolist(), reverse=True)
        overlaps = detector.torchvision.ops.box_iou(of["boxes"], of["boxes"]).triu(1)
        assert overlaps.max() <= 0.3, "of all kinds together"
        assert set(of["labels"].tolist()) <= {detector.FISHING, detector.OTHER, detector.NO_VESSEL}
        assert (of["lengths"] > 0).all()


@pytest.mark.slow
def test_an_object_on_the_border_of_two_cores_is_found_once() -> None:
    """Whichever way their chips place it, a pixel apart."""
    for ours, theirs in ((31.4, 32.4), (32.4, 31.4), (31.4, 31.2), (32.1, 32.4)):
        parts = []
        for row, offset, core in ((ours, 0, (0, 32, 0, 64)), (theirs - 16, 16, (16, 48, 0, 64))):
            detections = {
                "boxes": torch.tensor([[20.0, row - 5, 30.0, row + 5]]),
                "labels": torch.tensor([detector.OTHER]),
                "scores": torch.tensor([0.9]),
                "lengths": torch.tensor([100.0]),
            }
            parts.append(workload.owned(detections, core, (offset, 0)))
        assert len(workload.joined("s", parts)) == 1, (ours, theirs)


@pytest.mark.long
def test_it_learns_where_what_and_how_long() -> None:
    torch.manual_seed(0)
    images, targets = some_chips(2, 2, 64)
    net = detector.make_detector(2, width=32)
    steps = torch.optim.AdamW(net.parameters(), 3e-3)
    # At a constant rate the lengths swing by more than half of themselves from step to step, and
    # where they are at the end depends on the last bits of a CPU.
    rate = torch.optim.lr_scheduler.LinearLR(steps, 1.0, 0.02, 60)
    for _ in range(60):
        steps.zero_grad()
        sum(net(images, targets).values()).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        steps.step()
        rate.step()
    net.eval()
    with torch.no_grad():
        points = [detector.points_of(of) for of in net(images)]
    for got, target in zip(points, targets, strict=True):
        strong = slice(3)  # strongest first
        assert got["score"][2] > 0.5
        true = detector.points_of({**target, "scores": torch.ones(3)})
        distance = np.linalg.norm(got["points"][strong][:, None] - true["points"], axis=2)
        assert (distance.min(0) < 3).all(), "each to within three pixels"
        order = distance.argmin(0)
        assert got["is_fishing"][strong][order].tolist() == true["is_fishing"].tolist()
        assert got["length_m"][strong][order] == pytest.approx(true["length_m"], rel=0.35)


def test_what_there_is_not_is_said() -> None:
    with pytest.raises(UsageError, match="no backbone 'vgg'; there are mobilenet, resnet50"):
        detector.make_detector(2, "vgg")  # type: ignore[arg-type]
