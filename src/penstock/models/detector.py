"""A detector of ships: Faster R-CNN over a feature pyramid, for objects of ten pixels.

    (C, H, W) ─ backbone ─ pyramid, strides 4 8 16 (32) ┬─ RPN: boxes that may hold an object
                                                        └─ for each box: kind, better box, length

It is made of torchvision's parts, and differs from torchvision's own in this:

- any number of input channels, which must be normalised already and are never rescaled;
- anchors from 8 to a few dozen pixels, square, because a label is a point and its box is square;
- one box for an object, whatever its kind, so that no object is detected once for each kind;
- labels may leave the kind open. "A vessel" is scored on the probability of either kind of vessel,
  "something" on the probability of any kind;
- lengths are learned from those labels that have one.

It starts untrained: weights for RGB photographs are of little use for radar. Group normalisation is
used because it does not depend on the number of chips in a batch, or of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from ..base import UsageError
from .torchvision_ops import import_torchvision

torchvision = import_torchvision()
parts: Any = torchvision.models.detection

KINDS = ("background", "fishing vessel", "other vessel", "no vessel")
FISHING, OTHER, NO_VESSEL, SOME_VESSEL, SOMETHING = 1, 2, 3, 4, 5
"""Labels. The last two are for objects whose kind is partly or wholly unknown."""

_ADMITTED = (  # the kinds that a label leaves open
    (1, 0, 0, 0),
    (0, 1, 0, 0),
    (0, 0, 1, 0),
    (0, 0, 0, 1),
    (0, 1, 1, 0),
    (0, 1, 1, 1),
)
PIXEL_M = 10.0
LEAST_SCORE = 0.05
"""The least probability of a detection that is kept, unless another is asked for."""
PIXEL_CENTRE = 0.5
"""A point (3, 5) means the pixel that spans 3 to 4 and 5 to 6 in the coordinates of boxes."""
LEAST_SIDE, MOST_SIDE, USUAL_SIDE = 10.0, 40.0, 14.0
"""Sides of the box around a point, in pixels; the last where the length is unknown."""
USUAL_LENGTH_M = 50.0
"""Lengths are learned as the logarithm of their ratio to it."""

Target = dict[str, Tensor]
"""``boxes`` (n, 4) x0 y0 x1 y1, ``labels`` (n,) int64, ``lengths`` (n,) metres, NaN unknown."""


def targets_of(
    points: ArrayLike, is_vessel: ArrayLike, is_fishing: ArrayLike, length_m: ArrayLike
) -> Target:
    """The objects that the detector should find in one image.

    Args:
        points: Row and column of each object, shape (n, 2).
        is_vessel: 1 yes, 0 no, -1 unknown, shape (n,).
        is_fishing: 1 yes, 0 no, -1 unknown, shape (n,).
        length_m: Length in metres, NaN where unknown, shape (n,).

    Returns:
        ``boxes`` (n, 4), ``labels`` (n,) and ``lengths`` (n,), as in `Target`.
    """
    centre = np.asarray(points, np.float32).reshape(-1, 2)[:, ::-1] + PIXEL_CENTRE
    lengths = np.asarray(length_m, np.float32).reshape(-1)
    sides = np.clip(lengths / PIXEL_M, LEAST_SIDE, MOST_SIDE)
    half = np.where(np.isnan(lengths), USUAL_SIDE, sides)[:, None] / 2
    boxes = np.concatenate((centre - half, centre + half), axis=1).astype(np.float32)
    vessel, fishing = (np.asarray(each).reshape(-1) for each in (is_vessel, is_fishing))
    labels = np.select(
        [vessel == 0, fishing == 1, (vessel == 1) & (fishing == 0), vessel == 1],
        [NO_VESSEL, FISHING, OTHER, SOME_VESSEL],
        SOMETHING,
    )
    return {
        "boxes": torch.from_numpy(boxes),
        "labels": torch.from_numpy(labels.astype(np.int64)),
        "lengths": torch.from_numpy(lengths.copy()),
    }


def points_of(detections: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
    """The detections in one image as arguments of `Objects.of`: n points and their attributes."""
    boxes, labels = detections["boxes"].detach().cpu().numpy(), detections["labels"].cpu().numpy()
    centre = (boxes[:, :2] + boxes[:, 2:]) / 2 - PIXEL_CENTRE
    return {
        "points": centre[:, ::-1].astype(np.float64),
        "is_vessel": (labels != NO_VESSEL).astype(np.int8),
        "is_fishing": (labels == FISHING).astype(np.int8),
        "length_m": detections["lengths"].detach().cpu().numpy().astype(np.float64),
        "score": detections["scores"].detach().cpu().numpy().astype(np.float64),
    }


class Padding(parts.transform.GeneralizedRCNNTransform):  # type: ignore[misc]
    """Makes one batch of images: sides are padded to whole strides, nothing is rescaled."""

    def resize(self, image: Tensor, target: Target | None = None) -> tuple[Tensor, Target | None]:
        return image, target


class Predictor(nn.Module):
    """From the features of each box: logits of the kinds, one correction of the box, the length."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.kinds = nn.Linear(features, len(KINDS))
        self.box = nn.Linear(features, 4)
        self.length = nn.Linear(features, 1)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.kinds(features), self.box(features), self.length(features)[:, 0]


class Heads(parts.roi_heads.RoIHeads):  # type: ignore[misc]
    """The second stage: the kind, the box and the length of the object in each proposed box."""

    def forward(
        self,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        image_shapes: list[tuple[int, int]],
        targets: list[Target] | None = None,
    ) -> tuple[list[Target], dict[str, Tensor]]:
        if not self.training:
            kinds, boxes, lengths = self._predict(features, proposals, image_shapes)
            return self._select(kinds.float(), boxes.float(), lengths.float(), proposals), {}
        if targets is None:
            raise ValueError("a detector that trains needs targets")
        proposals, matched, labels, corrections = self.select_training_samples(proposals, targets)
        kinds, boxes, lengths = self._predict(features, proposals, image_shapes)
        none = kinds.new_full((1,), torch.nan)  # stands for the targets of an empty image
        lengths_of = [each["lengths"] if len(each["lengths"]) else none for each in targets]
        true_lengths = torch.cat([of[i] for of, i in zip(lengths_of, matched, strict=True)])
        return [], losses(
            kinds.float(),
            boxes.float(),
            lengths.float(),
            torch.cat(labels),
            torch.cat(corrections),
            true_lengths,
        )

    def _predict(
        self,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        image_shapes: list[tuple[int, int]],
    ) -> tuple[Tensor, Tensor, Tensor]:
        pooled = self.box_roi_pool(features, proposals, image_shapes)
        return self.box_predictor(self.box_head(pooled))

    def _select(
        self, kinds: Tensor, corrections: Tensor, lengths: Tensor, proposals: list[Tensor]
    ) -> list[Target]:
        """The detections of each image, strongest first. Boxes may reach beyond the image, so that
        their centres stay where the objects are."""
        shares = [len(boxes) for boxes in proposals]
        decoded = self.box_coder.decode_single(corrections, torch.cat(proposals).float())
        each = (tensor.split(shares) for tensor in (kinds.softmax(-1), decoded, lengths))
        detections = []
        for probability, boxes, length in zip(*each, strict=True):
            scores = 1 - probability[:, 0]
            likely = (scores > self.score_thresh).nonzero()[:, 0]
            keep = likely[torchvision.ops.nms(boxes[likely], scores[likely], self.nms_thresh)]
            keep = keep[: self.detections_per_img]
            vessel = probability[keep, FISHING] + probability[keep, OTHER]
            no_vessel = vessel < probability[keep, NO_VESSEL]
            kind = 1 + probability[keep, 1:3].argmax(-1)
            detections.append(
                {
                    "boxes": boxes[keep],
                    "scores": scores[keep],
                    "labels": kind.masked_fill(no_vessel, NO_VESSEL),
                    "lengths": USUAL_LENGTH_M * length[keep].clamp(-4, 4).exp(),
                }
            )
        return detections


def losses(
    kinds: Tensor,
    boxes: Tensor,
    lengths: Tensor,
    labels: Tensor,
    corrections: Tensor,
    true_lengths: Tensor,
) -> dict[str, Tensor]:
    """Losses of the second stage over n sampled boxes, each a mean over all n.

    The kind costs the negative logarithm of the probability of the kinds that the label admits.
    """
    admitted = torch.tensor(_ADMITTED, dtype=torch.bool, device=labels.device)[labels]
    log_probability = kinds.log_softmax(-1).masked_fill(~admitted, -torch.inf).logsumexp(-1)
    objects = labels > 0
    measured = objects & ~true_lengths.isnan()
    true = torch.log(true_lengths[measured].clamp(min=1.0) / USUAL_LENGTH_M)
    total = {
        "loss_box": F.smooth_l1_loss(
            boxes[objects], corrections[objects], beta=1 / 9, reduction="sum"
        ),
        "loss_length": F.smooth_l1_loss(lengths[measured], true, beta=1 / 9, reduction="sum"),
    }
    num_boxes = max(len(labels), 1)
    return {
        "loss_kind": -log_probability.mean(),
        **{name: loss / num_boxes for name, loss in total.items()},
    }


def _group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(channels // gcd(8, channels), channels)


def _mobilenet(in_channels: int, width: int) -> Any:
    net = torchvision.models.mobilenet_v3_large(weights=None, norm_layer=_group_norm).features
    net[0][0] = nn.Conv2d(in_channels, net[0][0].out_channels, 3, 2, 1, bias=False)
    last_of_stride = {"3": 24, "6": 40, "12": 112}  # strides 4, 8, 16
    names = {layer: str(level) for level, layer in enumerate(last_of_stride)}
    return parts.backbone_utils.BackboneWithFPN(net, names, list(last_of_stride.values()), width)


def _resnet50(in_channels: int, width: int) -> Any:
    net = torchvision.models.resnet50(weights=None, norm_layer=_group_norm)
    net.conv1 = nn.Conv2d(in_channels, net.conv1.out_channels, 7, 2, 3, bias=False)
    names = {f"layer{level + 1}": str(level) for level in range(4)}
    return parts.backbone_utils.BackboneWithFPN(net, names, [256, 512, 1024, 2048], width)


_BACKBONES = {"mobilenet": (_mobilenet, 3, 96), "resnet50": (_resnet50, 4, 256)}
"""Each backbone: the function that makes it, its levels, the channels of the pyramid above it."""


class Detector(parts.generalized_rcnn.GeneralizedRCNN):  # type: ignore[misc]
    """Called with images (C, H, W). In training mode it takes targets too and returns losses; in
    eval mode it returns detections. See `targets_of` and `points_of`."""

    def __init__(self, in_channels: int, *stages: nn.Module) -> None:
        super().__init__(*stages)
        self.in_channels = in_channels


def _region_proposals(levels: int, width: int) -> Any:
    """The first stage: anchors from 8 pixels on, square, two sizes for each level."""
    sizes = [(int(8 * 2**level), int(12 * 2**level)) for level in range(levels + 1)]
    anchors = parts.anchor_utils.AnchorGenerator(tuple(sizes), ((1.0,),) * len(sizes))
    return parts.rpn.RegionProposalNetwork(
        anchors,
        parts.rpn.RPNHead(width, anchors.num_anchors_per_location()[0]),
        fg_iou_thresh=0.5,
        bg_iou_thresh=0.3,
        batch_size_per_image=256,
        positive_fraction=0.5,
        pre_nms_top_n={"training": 1000, "testing": 1000},
        post_nms_top_n={"training": 500, "testing": 500},
        nms_thresh=0.7,
    )


def make_detector(
    in_channels: int = 2,
    backbone: Literal["mobilenet", "resnet50"] = "mobilenet",
    *,
    width: int | None = None,
    score_threshold: float = LEAST_SCORE,
    most_detections: int = 300,
) -> Detector:
    """An untrained detector.

    Args:
        in_channels: Channels of an image.
        backbone: The network that makes features: ``mobilenet`` or ``resnet50``.
        width: Channels of the feature pyramid; by default those of the backbone.
        score_threshold: The least probability of a detection.
        most_detections: Most detections in an image.

    Returns:
        The detector, in training mode.

    Raises:
        UsageError: There is no such backbone.
    """
    if backbone not in _BACKBONES:
        raise UsageError(f"there is no backbone {backbone!r}; there are {', '.join(_BACKBONES)}")
    make, levels, usual_width = _BACKBONES[backbone]
    width = width or usual_width
    features = make(in_channels, width)
    proposals = _region_proposals(levels, width)
    names = [str(level) for level in range(levels)]
    pool = torchvision.ops.MultiScaleRoIAlign(names, output_size=7, sampling_ratio=2)
    heads = Heads(
        pool,
        parts.faster_rcnn.TwoMLPHead(width * 7 * 7, 512),
        Predictor(512),
        fg_iou_thresh=0.5,
        bg_iou_thresh=0.4,
        batch_size_per_image=128,
        positive_fraction=0.25,
        bbox_reg_weights=None,
        score_thresh=score_threshold,
        nms_thresh=0.3,
        detections_per_img=most_detections,
    )
    transform = Padding(1, 1, [0.0] * in_channels, [1.0] * in_channels)
    return Detector(in_channels, features, proposals, heads, transform)
