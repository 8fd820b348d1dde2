"""Ships in radar scenes: Faster R-CNN on chips, judged by the score of xView3 on whole scenes.

    chip ── image and validity mask, boxes ──▶ losses
    chip ──▶ detections in its core ──▶ joined by scene, doubles dropped ──▶ xView3 score, COCO AP

An object belongs to the chip in whose core it is, so a scene is put together from its chips without
counting anything twice; what two chips both claim along a border is one object.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..chips import Chip, Chips, open_chips
from ..config import TrainConfig, XView3Rules
from ..detection import ImageResult, Objects, best_threshold, coco_ap, keep_strongest, score_xview3
from ..errors import UsageError
from ..models.detector import detector, points_of, targets_of
from ..scenes import read_labels
from ..shoreline import Contour, read_shoreline, shoreline_path
from . import Answer, optimizer_of

RULES = XView3Rules(drop_low_detect=True, costly_dist=True)
"""Those of the challenge's leaderboard."""
_SAME_OBJECT = 5.0
"""Pixels between detections of overlapping chips that are one object."""


class Detector:
    """Finds ships."""

    name = "detector"
    judge = "val_loc_fscore"
    higher_is_better = True

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        train = _open(config.train_chips_path, config.train_label_file, "train")
        self.chips = _open(config.val_chips_path, config.val_label_file, "val")
        if train.channels != self.chips.channels:
            raise UsageError(
                f"--val-chips-path has channels {','.join(self.chips.channels)} and "
                f"--train-chips-path {','.join(train.channels)}"
            )
        for flag, root in (("train", config.train_data_root), ("val", config.val_data_root)):
            if root is not None and not root.is_dir():
                raise UsageError(f"--{flag}-data-root {root} is not a folder")
        self.in_channels = len(train.channels) + 1  # the last says which pixels are valid
        self.train = Pictures(train, chosen(train.num_points, config.background, config.seed))
        self.val = Pictures(self.chips, np.arange(len(self.chips)))

    def model(self) -> nn.Module:
        net: nn.Module = detector(self.in_channels, self.config.backbone)
        return net

    def optimizer(self, model: nn.Module) -> Optimizer:
        return optimizer_of(model, self.config)

    def collate(self, samples: Sequence[Any]) -> Any:
        images, targets, places = zip(*samples, strict=True)
        return torch.stack(images), list(targets), torch.stack(places)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
        images, targets, _ = batch
        turned = [turn(*pair) for pair in zip(images, targets, strict=True)]
        losses: dict[str, Tensor] = model([image for image, _ in turned], [of for _, of in turned])
        return torch.stack(list(losses.values())).sum(), losses

    def answers(self, model: nn.Module, batch: Any) -> Sequence[Answer]:
        images, targets, places = batch
        told = []
        for found, target, place in zip(model(list(images)), targets, places.cpu(), strict=True):
            row0, row1, col0, col1, row, column = place.tolist()
            points = points_of(found)
            at = points["points"]
            own = (at >= (row0, col0)).all(axis=1) & (at < (row1, col1)).all(axis=1)
            told.append(
                {
                    **{name: values[own] for name, values in points.items()},
                    "points": at[own] + (row, column),
                    "boxes": found["boxes"].double().cpu().numpy(),
                    "scores": found["scores"].double().cpu().numpy(),
                    "labels": found["labels"].cpu().numpy(),
                    "true_boxes": target["boxes"].double().cpu().numpy(),
                    "true_labels": target["labels"].cpu().numpy(),
                }
            )
        return told

    def scores(self, answers: Mapping[int, Answer]) -> dict[str, float]:
        found = self.joined(answers)
        labels = Objects.join(
            [
                Objects.of(
                    name,
                    of.points,
                    is_vessel=of.is_vessel,
                    is_fishing=of.is_fishing,
                    length_m=of.length_m,
                    confidence=of.confidence,
                    shore_km=of.shore_km,
                )
                for name, of in self.chips.labels.items()
            ]
        )
        sure = found[found.score >= self.config.score_threshold]
        score = score_xview3(sure, labels, RULES, self._shorelines())
        told = {f"val_{name}": value for name, value in score.as_dict().items()}
        told["val_best_threshold"], told["val_best_loc_fscore"] = best_threshold(
            found, labels, RULES
        )
        precision = coco_ap(
            (
                ImageResult(
                    index,
                    *(answer[name] for name in ImageResult.__slots__[1:]),
                )
                for index, answer in answers.items()
            ),
            by_class=False,
        )
        told |= {f"val_{name}": value for name, value in precision.items()}
        return {name: math.nan if value is None else value for name, value in told.items()}

    def joined(self, answers: Mapping[int, Answer]) -> Objects:
        """The detections of whole scenes, whatever their score, each object once."""
        parts = []
        for scene in self.chips.scenes:
            own = [of for index, of in answers.items() if self.chips.scene_of(index) == scene]
            names = ("points", "is_vessel", "is_fishing", "length_m", "score")
            if not own:
                continue
            columns: dict[str, Any] = {n: np.concatenate([of[n] for of in own]) for n in names}
            objects = Objects.of(scene, columns.pop("points"), **columns)
            parts.append(objects[keep_strongest(objects.points, objects.score, _SAME_OBJECT)])
        return Objects.join(parts)

    def _shorelines(self) -> Any:
        """The shorelines of all scenes, in their folder or in ``shoreline`` beside it, or None."""
        root = self.config.val_data_root
        for folder in (root, root.parent / "shoreline") if root is not None else ():
            paths = {scene: shoreline_path(folder, scene) for scene in self.chips.scenes}
            if all(path.is_file() for path in paths.values()):

                def read(scene: str, paths: dict[str, Path] = paths) -> list[Contour]:
                    return read_shoreline(paths[scene])

                return read
        return None


class Pictures:
    """Some of the chips, as tensors: the image, what is in it, and its place in the scene."""

    def __init__(self, chips: Chips, which: Any) -> None:
        self.chips, self._which = chips, which

    def __len__(self) -> int:
        return len(self._which)

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        chip = self.chips.read(int(self._which[index]))
        return picture(chip), target(chip), torch.tensor([*chip.core, *chip.offset])


def picture(chip: Chip) -> Tensor:
    """(channels + 1, row, column); the last channel is 1 where the others are valid."""
    return torch.from_numpy(np.concatenate([chip.image, chip.valid[None].astype(np.float32)]))


def target(chip: Chip) -> dict[str, Tensor]:
    return targets_of(chip.points, chip.is_vessel, chip.is_fishing, chip.length_m)


def turn(image: Tensor, target: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """One of the eight ways to lay a square down; all are as likely at sea."""
    flip_rows, flip_columns, swap = (torch.rand(3) < 0.5).tolist()
    x0, y0, x1, y1 = target["boxes"].unbind(1)
    height, width = image.shape[-2:]
    if flip_rows:
        image, y0, y1 = image.flip(-2), height - y1, height - y0
    if flip_columns:
        image, x0, x1 = image.flip(-1), width - x1, width - x0
    if swap:
        image, x0, y0, x1, y1 = image.transpose(-2, -1), y0, x0, y1, x1
    return image.contiguous(), {**target, "boxes": torch.stack([x0, y0, x1, y1], dim=1)}


def chosen(num_points: Any, background: float, seed: int) -> Any:
    """Numbers of the chips to train on: all that have an object in their core and, for each of
    them, ``background`` that have none."""
    full, empty = np.flatnonzero(num_points > 0), np.flatnonzero(num_points == 0)
    wanted = min(len(empty), round(background * len(full)))
    some = np.random.default_rng(seed).permutation(empty)[:wanted]
    return np.sort(np.concatenate([full, some]))


def _open(path: Path | None, labels: Path | None, split: str) -> Chips:
    """The chips of a split; their labels are those of the file, if one is given."""
    if path is None:
        raise UsageError(f"--{split}-chips-path is required by the detector")
    chips = open_chips(path)
    if labels is None:
        return chips
    flag, given = f"--{split}-label-file {labels}", read_labels(labels)
    for scene in chips.scenes:
        if scene not in given:
            raise UsageError(
                f"{flag} has no labels of scene {scene}, which --{split}-chips-path has"
            )
        there, here = len(given[scene]), len(chips.labels[scene])
        if there != here:
            raise UsageError(
                f"{flag} has {there} labels of scene {scene} and its chips were cut with {here}; "
                "run penstock preprocess again"
            )
    return chips
