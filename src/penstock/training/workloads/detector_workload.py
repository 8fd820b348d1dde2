"""Ships in radar scenes: Faster R-CNN on chips, judged by the score of xView3 on whole scenes.

    chip ── image and validity masks, boxes ──▶ losses
    chip ──▶ detections in its core ──▶ joined by scene, doubles dropped ──▶ xView3 score, COCO AP

An object belongs to the chip that has it in its core, so no object of a scene is counted twice. Two
detections of neighbouring chips near their border are one object.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...base import TrainConfig, UsageError, XView3Rules, group_by, plural
from ...data import (
    CHANNELS,
    SPLITS,
    Chips,
    ImageResult,
    Objects,
    best_threshold,
    coco_ap,
    keep_strongest,
    planes_of,
    read_labels,
    read_shoreline,
    score_xview3,
    seen_again,
    shoreline_path,
)
from ...models import (
    compiled_operators,
    import_torchvision,
    make_detector,
    points_of,
    targets_of,
)
from . import Answer

RULES = XView3Rules(drop_low_detect=True, costly_dist=True)
"""The rules of the challenge's leaderboard."""
MOST_SHOWN = 6
"""The number of chips whose detections are kept as pictures."""
_SAME_OBJECT = 5.0
"""The distance in pixels up to which detections of overlapping chips are one object."""


class DetectorWorkload:
    """The workload that detects ships."""

    name = "detector"
    judge = "val_best_loc_fscore"
    """The F score of locations at the best threshold, which `predict` then uses."""
    higher_is_better = True
    leaves_out_not_finite = True
    """A length that is unknown is NaN, and a pixel without a value is masked."""
    _best_threshold = 0.0
    """The threshold of the last `scores`."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        train = _open(config, "train")
        self.chips = _open(config, "val")
        if differing := train.record.differing(self.chips.record):
            val, of_train = (of.record.told(differing) for of in (self.chips, train))
            raise UsageError(f"--val-chips-path has {val} and --train-chips-path {of_train}")
        self.in_channels = planes_of(train.channels)
        self.facts = {
            "chips": train.record.as_document(),
            "labels_unseen": {"train": train.labels_unseen, "val": self.chips.labels_unseen},
            "torchvision": import_torchvision().__version__,
            "compiled_operators": compiled_operators(),
        }
        self.notes = [seen] if (seen := seen_again(train, self.chips)) else []
        for chips in (train, self.chips):
            if chips.labels_unseen:
                labels = sum(map(len, chips.labels.values()))
                self.notes.append(
                    f"{chips.labels_unseen} of {plural(labels, 'label')} of {chips.folder} lie "
                    "where radar has no value"
                )
        self.train = Pictures(train, chosen(train.num_points, config.background, config.seed))
        self.val = Pictures(self.chips, np.arange(len(self.chips)))

    def model(self) -> nn.Module:
        return make_detector(
            self.in_channels, self.config.backbone, most_detections=self.config.max_dets
        )

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
        rows = []
        for detections, target, place in zip(
            model(list(images)), targets, places.cpu(), strict=True
        ):
            *core, row, column = place.tolist()
            rows.append(
                {
                    **owned(detections, core, (row, column)),
                    "boxes": detections["boxes"].double().cpu().numpy(),
                    "scores": detections["scores"].double().cpu().numpy(),
                    "true_boxes": target["boxes"].double().cpu().numpy(),
                }
            )
        return rows

    def name_of(self, index: int) -> str:
        """Where a chip of the training comes from."""
        return self.train.name_of(index)

    def scores(self, answers: Mapping[int, Answer]) -> dict[str, float]:
        objects = self.joined(answers)
        labels = Objects.join(self.chips.labels.values())
        sure = objects[objects.score >= self.config.score_threshold]
        score = score_xview3(sure, labels, RULES, self._shorelines())
        scores = {f"val_{name}": value for name, value in score.as_dict().items()}
        threshold, fscore = best_threshold(objects, labels, RULES)
        scores |= {"val_best_threshold": threshold, "val_best_loc_fscore": fscore}
        self._best_threshold = threshold
        results = (
            ImageResult(answer["boxes"], answer["scores"], answer["true_boxes"])
            for answer in answers.values()
        )
        precision = coco_ap(results, max_dets=self.config.max_dets)
        scores |= {f"val_{name}": value for name, value in precision.items()}
        return {name: math.nan if value is None else value for name, value in scores.items()}

    def pictures(self, answers: Mapping[int, Answer]) -> dict[str, NDArray[Any]]:
        """The chips with the most objects, with their true boxes and the boxes that the model
        predicts at the best threshold of the last `scores`.

        Chip ``i`` has the arrays ``image_i``, uint8 (row, column); ``true_i`` and ``predicted_i``,
        float32 (box, 4) with x0, y0, x1, y1 in pixels of the chip; and ``scores_i``, float32
        (box,). ``names`` has the scene, row and column of each chip.
        """
        most = sorted(answers, key=lambda index: -len(answers[index]["true_boxes"]))[:MOST_SHOWN]
        arrays: dict[str, NDArray[Any]] = {}
        for number, index in enumerate(most):
            chip, answer = self.chips.read(index), answers[index]
            sure = answer["scores"] >= self._best_threshold
            arrays |= {
                f"image_{number}": greys(chip.image[0], chip.valid[0]),
                f"true_{number}": answer["true_boxes"].astype(np.float32),
                f"predicted_{number}": answer["boxes"][sure].astype(np.float32),
                f"scores_{number}": answer["scores"][sure].astype(np.float32),
            }
        return {**arrays, "names": np.array([self.val.name_of(index) for index in most])}

    def joined(self, answers: Mapping[int, Answer]) -> Objects:
        """The detections of whole scenes with any score, each object once."""
        chips = group_by(answers, self.chips.scene_of)
        return Objects.join(
            [
                joined(scene, [answers[index] for index in chips.get(scene, ())])
                for scene in self.chips.scenes
            ]
        )

    def _shorelines(self) -> Any:
        """A function that reads a scene's shoreline, beside the scenes or in a folder
        ``shoreline``; None if one is missing."""
        root = self.config.val_data_root
        if root is None:
            return None
        for folder in (root, root / "shoreline", root.parent, root.parent / "shoreline"):
            if all(shoreline_path(folder, scene).is_file() for scene in self.chips.scenes):
                return lambda scene, of=folder: read_shoreline(shoreline_path(of, scene))
        return None


class Pictures:
    """Some of the chips as tensors: the image, its objects, and its place in the scene."""

    def __init__(self, chips: Chips, which: Any) -> None:
        self.chips, self._which = chips, which

    def __len__(self) -> int:
        return len(self._which)

    def name_of(self, index: int) -> str:
        """The scene of a chip, and its place in it."""
        chip = int(self._which[index])
        row, column = self.chips.read(chip).offset
        return f"{self.chips.scene_of(chip)}, row {row}, column {column}"

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        chip = self.chips.read(int(self._which[index]))
        labels = chip.labels
        return (
            picture(chip.image, chip.valid),
            targets_of(labels.points, labels.is_vessel, labels.is_fishing, labels.length_m),
            torch.tensor([*chip.core, *chip.offset]),
        )


def picture(image: NDArray[np.float32], valid: NDArray[np.bool_]) -> Tensor:
    """The channels and their masks, float32 (planes, row, column); a mask is 1 at valid pixels."""
    return torch.from_numpy(np.concatenate([image, valid.astype(np.float32)]))


def greys(image: NDArray[np.float32], valid: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """A channel in 256 greys, from its 1st to its 99.5th percentile; 0 where it has no value."""
    if not valid.any():
        return np.zeros(image.shape, np.uint8)
    low, high = np.percentile(image[valid], (1, 99.5))
    scaled = (image - low) / (high - low) if high > low else np.zeros_like(image)
    return np.where(valid, 255 * scaled.clip(0, 1), 0).astype(np.uint8)


def turn(image: Tensor, target: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Rotate or mirror an image and its boxes in one of eight ways, at random."""
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
    """The numbers of the chips to train on: all with an object in their core and, for each of
    those, ``background`` chips without any."""
    full, empty = np.flatnonzero(num_points > 0), np.flatnonzero(num_points == 0)
    wanted = min(len(empty), round(background * len(full)))
    some = np.random.default_rng(seed).permutation(empty)[:wanted]
    return np.sort(np.concatenate([full, some]))


def owned(
    detections: Mapping[str, Tensor], core: Sequence[int], offset: tuple[int, int]
) -> dict[str, NDArray[Any]]:
    """The detections in the core of a chip (row0, row1, column0, column1) and a little around it,
    in the coordinates of the scene: columns of `Objects`.

    Two chips may detect an object on the border of their cores a pixel apart, so that it is in
    neither core. The margin keeps both detections, and `joined` makes them one.
    """
    columns = points_of(detections)
    at = columns["points"]
    row0, row1, column0, column1 = core
    around = _SAME_OBJECT / 2
    inside = (at >= (row0 - around, column0 - around)).all(axis=1)
    inside &= (at < (row1 + around, column1 + around)).all(axis=1)
    return {name: values[inside] for name, values in columns.items()} | {
        "points": at[inside] + offset
    }


def joined(scene: str, chips: Sequence[Mapping[str, Any]]) -> Objects:
    """The detections of all chips of a scene, each object once, strongest first."""
    names = ("points", "is_vessel", "is_fishing", "length_m", "score")
    if not chips:
        return Objects.of([], [])
    columns: dict[str, Any] = {name: np.concatenate([of[name] for of in chips]) for name in names}
    objects = Objects.of(scene, columns.pop("points"), **columns)
    return objects[keep_strongest(objects.points, objects.score, _SAME_OBJECT)]


def _open(config: TrainConfig, split: Literal["train", "val"]) -> Chips:
    """The chips of a split. Raises `UsageError` unless they were cut from the given scenes and
    labels."""
    path, root, file = (
        (config.train_chips_path, config.train_data_root, config.train_label_file)
        if split == "train"
        else (config.val_chips_path, config.val_data_root, config.val_label_file)
    )
    if path is None:
        raise UsageError(f"--{split}-chips-path is required by the detector")
    chips = Chips(path)
    if root is not None:
        _check_scenes(chips, root, split)
    if file is not None:
        _check_labels(chips, file, split)
    return chips


def _check_scenes(chips: Chips, root: Path, split: Literal["train", "val"]) -> None:
    """Refuse a folder that has the scenes of the chips neither itself nor in a folder of its
    splits."""
    flag = f"--{split}-data-root {root}"
    if not root.is_dir():
        raise UsageError(f"{flag} is not a folder")
    within = [root / name for name in SPLITS["train" if split == "train" else "validation"]]
    folders = [folder for folder in (root, *within) if folder.is_dir()]
    for scene in chips.scenes:
        places = [folder / scene for folder in folders if (folder / scene).is_dir()]
        if not places:
            raise UsageError(
                f"{flag} has no scene {scene}, of which --{split}-chips-path has chips"
            )
        for channel, size in chips.input_bytes(scene).items():
            raster = places[0] / CHANNELS[channel].file
            if not raster.is_file():
                raise UsageError(f"{raster} is missing, and the chips of its scene hold {channel}")
            if raster.stat().st_size != size:
                raise UsageError(
                    f"{raster} has {raster.stat().st_size} bytes and had {size} when its chips "
                    "were cut; run penstock preprocess again"
                )


def _check_labels(chips: Chips, file: Path, split: Literal["train", "val"]) -> None:
    """Refuse a file whose labels of a scene differ from those that its chips were cut with."""
    given = read_labels(file)
    for scene, cut_with in chips.labels.items():
        if given.get(scene, cut_with[:0]).as_lists() != cut_with.as_lists():
            raise UsageError(
                f"--{split}-label-file {file} has other labels of scene {scene} than the "
                f"{len(cut_with)} that its chips were cut with; run penstock preprocess again"
            )
