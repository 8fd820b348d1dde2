"""Losses and scores of a network that learns an array, for each kind of target.

    kind           losses, the default first     scores
    intensity      mse, l1                       PSNR
    mask           bce, dice, mse, l1            AUC, F1, IoU
    labels         ce, dice                      F1 and IoU, their means over classes; accuracy
    probabilities  bce, ce, dice, mse, l1        RMSE; AUC, F1 and IoU of what is at least one half

Target values that are not finite are in no loss and in no score. A loss is the mean over the others
of a batch; it is 0 if there are none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from ...base import Loss, TargetKind
from ...models import are_exclusive, probabilities_of
from . import Answer

LOSSES: Mapping[TargetKind, tuple[Loss, ...]] = {
    "intensity": ("mse", "l1"),
    "mask": ("bce", "dice", "mse", "l1"),
    "labels": ("ce", "dice"),
    "probabilities": ("bce", "ce", "dice", "mse", "l1"),
}
_JUDGES = {
    "intensity": "val_psnr",
    "mask": "val_auc",
    "labels": "val_f1",
    "probabilities": "val_rmse",
}
_TINY = 1e-7
"""The distance from 0 and 1 that probabilities keep where a logit is taken of them."""
_BINS, _WIDEST = 512, 16.0
"""Logits are counted in this many bins, from minus this number to this number."""

Returns = Literal["values", "logits", "probabilities"]


@dataclass(frozen=True)
class Objective:
    """What a head of a network is to return, and how far it is from that."""

    kind: TargetKind
    loss: Loss
    returns: Returns
    """The numbers of the head; the losses bce, dice and ce compare probabilities."""
    channels: int
    """Channels of the head: classes, if the target is labels."""
    peak: float = 1.0
    """The range of an image, for the PSNR, on the scale that it is trained on."""

    @property
    def judge(self) -> str:
        """The score that chooses the best epoch."""
        return _JUDGES[self.kind]

    @property
    def higher_is_better(self) -> bool:
        """Whether a greater score is better."""
        return self.kind != "probabilities"

    def of_batch(self, made: Tensor, target: Tensor) -> Tensor:
        """The loss of a batch.

        Args:
            made: What the head returned: (batch, channels, sides).
            target: What it should be, in the same shape, or with one channel of classes. NaN where
                nothing is known.

        Returns:
            The mean over all values that are known.
        """
        valid = target.isfinite()
        wanted = torch.where(valid, target, 0)
        if self.loss == "dice":
            return self._dice(made, wanted, valid)
        if self.loss == "bce":
            far = functional.binary_cross_entropy_with_logits(
                self._logits(made), wanted, reduction="none"
            )
        elif self.loss == "ce":
            true = wanted[:, 0].long() if self.kind == "labels" else wanted
            far = functional.cross_entropy(self._logits(made), true, reduction="none")[:, None]
            valid = valid.all(1, keepdim=True)
        else:
            far = (made - wanted) ** 2 if self.loss == "mse" else (made - wanted).abs()
        return torch.where(valid, far, 0).sum() / valid.sum().clamp(min=1)

    def of_samples(self, made: Tensor, target: Tensor, given: Tensor | None) -> list[Answer]:
        """What `scores` needs of each sample of a batch.

        Args:
            made: What the head returned: (batch, channels, sides).
            target: What it should be, as `of_batch` takes it.
            given: The input, where it may be compared with the target.

        Returns:
            Sums and counts of each.
        """
        return [
            self._of_sample(made[i], target[i], None if given is None else given[i])
            for i in range(len(made))
        ]

    def scores(self, answers: Sequence[Answer]) -> dict[str, float]:
        """The scores by name, from the `of_samples` of all samples. NaN where nothing is known."""

        def total(name: str) -> Any:
            return np.sum([answer[name] for answer in answers], axis=0)

        if self.kind == "labels":
            pairs = total("confusion")
            hits = np.diag(pairs)
            overlaps = _overlaps(hits, pairs.sum(0) - hits, pairs.sum(1) - hits)
            return {**overlaps, "val_accuracy": float(_ratio(hits.sum(), pairs.sum()))}
        error = float(_ratio(total("error"), total("known")))
        if self.kind == "intensity":
            scores = {"val_psnr": _psnr(error, self.peak)}
            if "given" in answers[0]:
                before = float(_ratio(total("given"), total("known")))
                scores["val_psnr_input"] = _psnr(before, self.peak)
            return scores
        false, true = np.moveaxis(total("counts"), 1, 0)
        half = _BINS // 2
        sure = (true[:, half:].sum(1), false[:, half:].sum(1), true[:, :half].sum(1))
        scores = {"val_auc": _mean(_auc(true, false)), **_overlaps(*sure)}
        return scores if self.kind == "mask" else {"val_rmse": math.sqrt(error), **scores}

    @property
    def _exclusive(self) -> bool:
        """Whether the channels of a voxel are probabilities that sum to 1."""
        return are_exclusive(self.kind, self.loss)

    def _probabilities(self, made: Tensor) -> Tensor:
        if self.returns != "logits":
            return made
        return probabilities_of(made, exclusive=self._exclusive)

    def _logits(self, made: Tensor) -> Tensor:
        if self.returns == "logits":
            return made
        return made.clamp(min=_TINY).log() if self._exclusive else torch.logit(made, _TINY)

    def _dice(self, made: Tensor, wanted: Tensor, valid: Tensor) -> Tensor:
        """One less the overlap of a batch, the mean over channels."""
        ours = self._probabilities(made) * valid
        if self.kind == "labels":
            one_hot = functional.one_hot(wanted[:, 0].long(), self.channels).movedim(-1, 1)
            wanted = one_hot * valid
        axes = [axis for axis in range(ours.ndim) if axis != 1]
        both, each = (ours * wanted).sum(axes), ours.sum(axes) + wanted.sum(axes)
        # One more above and below: a channel that neither has is right, and divides by no 0.
        return (1 - (2 * both + 1) / (each + 1)).mean()

    def _of_sample(self, made: Tensor, target: Tensor, given: Tensor | None) -> Answer:
        valid, shape = target.isfinite(), (self.channels, self.channels)
        if self.kind == "labels":
            places = target[valid].long() * self.channels + made.argmax(0, keepdim=True)[valid]
            return {"confusion": _counted(places, shape, made)}
        values = self._probabilities(made[None])[0]
        answer: dict[str, Any] = {"known": int(valid.sum())}
        for name, one in (("error", values), *([("given", given)] if given is not None else [])):
            answer[name] = float(((one - target)[valid].double() ** 2).sum())
        if self.kind != "intensity":
            binary = self.returns == "logits" and not self._exclusive
            logits = made if binary else torch.logit(values, _TINY)
            bins = ((logits / _WIDEST + 1) * (_BINS / 2)).floor().clamp(0, _BINS - 1)
            rows = torch.arange(len(made), device=made.device).reshape(-1, *[1] * (made.ndim - 1))
            places = ((rows * 2 + (target >= 0.5)) * _BINS + bins.nan_to_num().long())[valid]
            answer["counts"] = _counted(places, (len(made), 2, _BINS), made)
        return answer


def _counted(places: Tensor, shape: tuple[int, ...], made: Tensor) -> NDArray[Any]:
    """How often each place of a table was counted; NaN if a network returned NaN."""
    if made.isnan().any():
        return np.full(shape, np.nan)
    return torch.bincount(places, minlength=math.prod(shape)).reshape(shape).cpu().numpy()


def _ratio(part: Any, whole: Any) -> NDArray[np.float64]:
    """A quotient, NaN where the divisor is 0."""
    whole = np.asarray(whole, np.float64)
    return np.divide(part, whole, out=np.full(whole.shape, np.nan), where=whole != 0)


def _mean(values: NDArray[np.float64]) -> float:
    """The mean of those that are not NaN, as a class that occurs nowhere has no score."""
    numbers = values[~np.isnan(values)]
    return float(numbers.mean()) if numbers.size else math.nan


def _overlaps(hits: Any, too_many: Any, missed: Any) -> dict[str, float]:
    """F1 and IoU, their means over channels or classes."""
    f1 = _ratio(2 * hits, 2 * hits + too_many + missed)
    return {"val_f1": _mean(f1), "val_iou": _mean(_ratio(hits, hits + too_many + missed))}


def _auc(true: NDArray[Any], false: NDArray[Any]) -> NDArray[np.float64]:
    """The area under the ROC curve of each channel, from counts (channels, bins). A pair in one bin
    counts one half."""
    below = np.cumsum(false, 1) - false / 2
    return _ratio((true * below).sum(1), true.sum(1) * false.sum(1))


def _psnr(error: float, peak: float) -> float:
    return 10 * math.log10(peak**2 / max(error, 1e-30))
