"""Two spirals and a small network: the workload of the scaling seed, quick on any machine.

Each class is an Archimedean spiral of two turns, the second turned by half a circle, and normal
noise on both coordinates. The arms are 0.225 apart along a radius, so the noise limits the accuracy
of any model: 97.9 % at 0.05, 94 % at 0.06, and 57 % at 0.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from ...base import TrainConfig
from . import Answer

_TRAIN, _VAL = 0.70, 0.15
"""The fractions of points for training and validation; the rest is in neither, as in the seed."""


class Spiral:
    """The workload that classifies points of two spirals."""

    name = "spiral"
    judge = "val_acc"
    higher_is_better = True

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        points, classes = spirals(config.num_samples, config.noise, config.seed)
        first, second = int(_TRAIN * len(points)), int((_TRAIN + _VAL) * len(points))
        self.train = TensorDataset(points[:first], classes[:first])
        self.val = TensorDataset(points[first:second], classes[first:second])

    def model(self) -> nn.Module:
        return mlp(self.config.hidden_dims, self.config.dropout)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
        points, classes = batch
        logits = model(points)
        hits = logits.detach().argmax(1) == classes
        return functional.cross_entropy(logits, classes), {"train_acc": hits.float().mean()}

    def answers(self, model: nn.Module, batch: Any) -> Sequence[Answer]:
        points, classes = batch
        logits = model(points)
        losses = functional.cross_entropy(logits, classes, reduction="none").tolist()
        hits = (logits.argmax(1) == classes).float().tolist()
        return [{"loss": loss, "hit": hit} for loss, hit in zip(losses, hits, strict=True)]

    def scores(self, answers: Mapping[int, Answer]) -> dict[str, float]:
        return {
            "val_loss": float(np.mean([answer["loss"] for answer in answers.values()])),
            "val_acc": float(np.mean([answer["hit"] for answer in answers.values()])),
        }


def spirals(number: int, noise: float, seed: int) -> tuple[Tensor, Tensor]:
    """Points, float32 (number, 2), and their classes, int64 (number,), in random order.

    >>> points, classes = spirals(10, noise=0, seed=0)
    >>> points.shape, sorted(classes.tolist())
    (torch.Size([10, 2]), [0, 0, 0, 0, 0, 1, 1, 1, 1, 1])
    """
    rng = np.random.default_rng(seed)
    halves = [number - number // 2, number // 2]
    angle = np.concatenate([np.linspace(0, 4 * math.pi, half) for half in halves])
    radius = np.concatenate([np.linspace(0.1, 1, half) for half in halves])
    classes = np.repeat([0, 1], halves)
    angle += math.pi * classes
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    points += rng.normal(0, noise, points.shape)
    shuffled = rng.permutation(number)
    return torch.from_numpy(points[shuffled]).float(), torch.from_numpy(classes[shuffled])


def mlp(hidden: Sequence[int], dropout: float) -> nn.Sequential:
    """A network from two numbers to two logits."""
    layers: list[nn.Module] = []
    for width, wider in zip((2, *hidden), hidden, strict=False):
        layers += [nn.Linear(width, wider), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(hidden[-1], 2))
