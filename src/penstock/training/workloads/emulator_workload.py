"""A weather emulator on packed fields: it forecasts the next step from the last ones.

The net forecasts the change of a field. The forecast of no change is called *persistence*. The
score is the RMSE, weighted by area, over that of persistence, averaged over channels. Values that
are not finite, such as those of an ocean's field on land, enter the net as their channel's mean; a
target is left out of the loss and of the scores where it, or its last value, is not finite, and the
share of these is a metric. Batches come from `penstock.Loader`. As in the seed, an epoch may be
read in ``--chunks-per-epoch`` pieces, each held in memory as a whole: more pieces need less memory.
The order of samples, and so the result, is the same for any number of pieces.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...base import TrainConfig, UsageError, group_by, nth_share, plural
from ...data import Packed, PackedArray, num_shared_samples, open_dataset
from ...loading import Items, Loader, Order
from ...models import Emulator, latitudes
from . import Answer

MERIDIONAL = {"v", "v10", "vgrd", "vgrd10m"}
"""The variables that point northward, which change sign when the globe is mirrored."""
_SAMPLES_FOR_SCALE = 16


class EmulatorWorkload:
    """The workload that forecasts packed fields."""

    name = "emulator"
    judge = "val_relative_rmse"
    higher_is_better = False
    leaves_out_not_finite = True

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self._packed = {
            "train": _open(config.train_data_root, "--train-data-root"),
            "val": _open(config.val_data_root, "--val-data-root"),
        }
        train, val = self._packed.values()
        for name, array in train.arrays.items():
            other = val.arrays.get(name)
            if (
                other is None
                or other.shape[1:] != array.shape[1:]
                or _bases(other) != _bases(array)
            ):
                raise UsageError(
                    f"--val-data-root {val.root}: its {name} are not those of --train-data-root: "
                    f"{other.shape[1:] if other else 'absent'} and {array.shape[1:]}"
                )
        self.train, self.val = range(train.num_samples), range(val.num_samples)
        both = num_shared_samples(train, val)
        self.notes = list[str]()
        if both:
            self.notes.append(
                f"{both} of {plural(val.num_samples, 'sample')} of --val-data-root {val.root} are "
                "trained on too: the scores of validation say nothing of samples that are new"
            )
        self.inputs, self.targets = train.arrays["inputs"], train.arrays["targets"]
        self.names = _bases(self.targets)
        self.last = last_seen(self.inputs, self.targets)
        batches = -(-train.num_samples // config.batch_size)
        if (pieces := config.chunks_per_epoch or 1) > batches:
            raise UsageError(
                f"--chunks-per-epoch {pieces}: an epoch of {plural(train.num_samples, 'sample')} "
                f"has {plural(batches, 'batch')} of --batch-size {config.batch_size}"
            )

    def model(self) -> nn.Module:
        rows = len(range(0, self.inputs.shape[1], self.config.grid_step))
        train = self._packed["train"]
        mean, deviation = train.statistics()["inputs"]
        if not (np.isfinite(mean).all() and np.isfinite(deviation).all()):
            raise UsageError(
                f"--train-data-root {train.root}: its statistics of the inputs are not finite; "
                "pack it again"
            )
        net = Emulator(
            len(mean),
            len(self.last),
            latent_size=self.config.latent_size,
            message_steps=self.config.message_steps,
            mesh_level=self.config.mesh_level,
        )
        return Forecast(
            net,
            last=self.last,
            mean=mean,
            deviation=deviation,
            change=self._change(),
            mirrored=(_mirrored(self.inputs), _mirrored(self.targets)),
            rows=rows,
        )

    def feed(self, split: str, order: Order) -> LoaderFeed:
        pieces = self.config.chunks_per_epoch if split == "train" else None
        return LoaderFeed(self._packed[split].root, order, self.config, pieces)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
        inputs, targets = self._fields(batch)
        # The wrapped module is called, so that ranks sum their gradients.
        said, scaled, area = model(inputs, targets)
        valid = scaled.isfinite()
        # What is not known is compared with itself, so that it adds neither loss nor gradient.
        square = (said - torch.where(valid, scaled, said.detach())) ** 2 * area
        share = (valid * area).mean().clamp(min=1e-12)
        return square.mean() / share, {"train_left_out": 1 - valid.float().mean()}

    def answers(self, model: nn.Module, batch: Any) -> Sequence[Answer]:
        inputs, targets = self._fields(batch)
        assert isinstance(model, Forecast)
        forecast, area = model.forecast(inputs).double(), model.area.double()
        persistence, targets = inputs[:, model.last].double(), targets.double()
        valid = targets.isfinite() & persistence.isfinite()

        def square(made: Tensor) -> NDArray[np.float64]:
            return (torch.where(valid, (made - targets) ** 2, 0) * area).sum((2, 3)).cpu().numpy()

        columns = {
            "square": square(forecast),
            "persistence": square(persistence),
            "area": (valid * area).sum((2, 3)).cpu().numpy(),
            "left_out": 1 - valid.double().mean((1, 2, 3)).cpu().numpy(),
        }
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def scores(self, answers: Mapping[int, Answer]) -> dict[str, float]:
        total = {
            name: np.sum([answer[name] for answer in answers.values()], axis=0)
            for name in ("square", "persistence", "area", "left_out")
        }
        with np.errstate(invalid="ignore"):  # NaN for a channel of which nothing is known
            rmse, persistence = (
                np.sqrt(total[name] / total["area"]) for name in ("square", "persistence")
            )
        relative = (rmse / np.maximum(persistence, 1e-30))[total["area"] > 0]
        scores = {
            "val_relative_rmse": float(relative.mean()) if relative.size else math.nan,
            "val_left_out": float(total["left_out"] / len(answers)),
        }
        for name, ours, theirs in zip(self.names, rmse, persistence, strict=True):
            scores |= {f"val_rmse_{name}": float(ours), f"val_persistence_{name}": float(theirs)}
        return scores

    def _fields(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Inputs and targets as float32 (sample, channel, row, column)."""
        step = self.config.grid_step
        inputs = batch["inputs"].movedim(-1, 1)[..., ::step, ::step]
        targets = batch["targets"].movedim(-1, 1)[..., ::step, ::step]
        return inputs.float(), targets.float()

    def _change(self) -> NDArray[np.float64]:
        """The root mean square change of each target channel in a step, over some samples."""
        packed = self._packed["train"]
        some = min(packed.num_samples, _SAMPLES_FOR_SCALE)
        total, count = np.zeros((2, len(self.last)))
        with Loader(packed.root, batch_size=1) as loader:
            for batch, _ in zip(loader, range(some), strict=False):
                before = batch["inputs"][..., self.last].astype(np.float64)
                square = (batch["targets"] - before) ** 2
                finite = np.isfinite(square)
                total += np.where(finite, square, 0).sum(axis=(0, 1, 2))
                count += finite.sum(axis=(0, 1, 2))
        return np.sqrt(total / np.maximum(count, 1))


class Forecast(nn.Module):
    """A net with inputs and outputs in physical units: it takes fields and forecasts the next
    ones."""

    mean: Tensor
    deviation: Tensor
    change: Tensor
    last: Tensor
    area: Tensor
    turned_in: Tensor
    turned_out: Tensor

    def __init__(
        self,
        net: Emulator,
        *,
        last: Sequence[int],
        mean: NDArray[np.float64],
        deviation: NDArray[np.float64],
        change: NDArray[np.float64],
        mirrored: tuple[Sequence[bool], Sequence[bool]],
        rows: int,
    ) -> None:
        super().__init__()
        self.net = net
        latitude = latitudes(rows)
        area = np.maximum(np.cos(latitude), 0.0)
        southern = latitude < 0
        for name, per_channel in (("mean", mean), ("deviation", deviation), ("change", change)):
            value = np.asarray(per_channel)
            if name != "mean":  # a channel that never varies is not scaled
                value = np.where(value > 0, value, 1.0)
            self.register_buffer(name, torch.from_numpy(value).float()[:, None, None])
        self.register_buffer("last", torch.tensor(list(last)))
        self.register_buffer("area", torch.from_numpy(area / area.mean()).float()[:, None])
        for name, flags in zip(("turned_in", "turned_out"), mirrored, strict=True):
            signs = np.where(np.outer(np.asarray(flags), southern), -1.0, 1.0)
            self.register_buffer(name, torch.from_numpy(signs).float()[:, :, None])

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The forecast change and the true change, both divided by the RMS change, float32 (sample,
        channel, row, column), and the area weights of rows (row, 1)."""
        came = (targets - inputs[:, self.last]) / self.change
        return self._said(inputs), came, self.area

    def forecast(self, inputs: Tensor) -> Tensor:
        return inputs[:, self.last] + self._said(inputs) * self.change

    def _said(self, inputs: Tensor) -> Tensor:
        # Meridional winds are turned poleward, because the net does not know the hemisphere.
        fields = (inputs - self.mean) / self.deviation * self.turned_in
        fields = torch.where(fields.isfinite(), fields, 0)
        said: Tensor = self.net(fields).float()
        return said * self.turned_out


class LoaderFeed:
    """Batches of `penstock.Loader`, prefetched, or in pieces that are held in memory as a whole."""

    def __init__(self, root: Path, order: Order, config: TrainConfig, pieces: int | None) -> None:
        self._order, self._pieces = order, pieces
        self._loader = Loader(
            root,
            batch_size=order.batch_size,
            shuffle=order.shuffle,
            seed=order.seed,
            rank=order.rank,
            world_size=order.world_size,
            workers=max(1, config.num_workers),
            queue=config.prefetch_factor or 2,
        )
        assert self._loader.order.plan == order.plan

    def epoch(self, epoch: int, first: int) -> Iterator[tuple[Items, Any]]:
        self._loader.load_state_dict(self._order.state_dict(epoch, first))
        batches = iter(self._loader)
        if self._pieces is None:
            for batch in batches:
                yield (
                    batch.indices,
                    {name: torch.from_numpy(array) for name, array in batch.items()},
                )
                del batch  # the loader uses its memory again for the next batch
            return
        for piece in range(self._pieces):
            share = nth_share(piece, self._pieces, len(self._loader))
            held = []
            for _ in range(max(share.start, first), share.stop):
                batch = next(batches)
                copies = {name: torch.from_numpy(array.copy()) for name, array in batch.items()}
                held.append((batch.indices, copies))
                del batch
            held.reverse()
            while held:
                yield held.pop()

    def close(self) -> None:
        self._loader.close()


def _open(root: Path | None, flag: str) -> Packed:
    if root is None:
        raise UsageError(f"{flag} is required by the emulator: a packed data set")
    packed = open_dataset(root, flag)
    for name in ("inputs", "targets"):
        array = packed.arrays.get(name)
        if array is None or array.axes != ("sample", "lat", "lon", "channels"):
            there = f"axes {', '.join(array.axes)}" if array else "none"
            raise UsageError(
                f"{flag} {root}: {name} need axes sample, lat, lon and channels, in this order; "
                f"{there}"
            )
        if not array.channels:
            raise UsageError(f"{flag} {root}: the channels of {name} have no names")
    covered = packed.document.get("covered_degrees") or {}
    for name, whole in (("latitude", 180), ("longitude", 360)):
        if covered.get(name, whole) < 0.9 * whole:  # of a few Gaussian rows the poles lack more
            raise UsageError(
                f"{flag} {root}: its grid covers {covered[name]:g} of {whole} degrees of {name}, "
                "and the emulator takes rows and columns for those of the whole globe"
            )
    return packed


def _base(channel: str) -> tuple[str, int]:
    """A channel's variable and time step.

    >>> _base("tmp_500_t-1"), _base("land")
    (('tmp_500', -1), ('land', 0))
    """
    named = re.fullmatch(r"(.+)_t([+-]\d+)", channel)  # as `channel_name` of packed data writes it
    return (named[1], int(named[2])) if named else (channel, 0)


def _bases(array: PackedArray) -> list[str]:
    return [_base(channel)[0] for channel in array.channels]


def _mirrored(array: PackedArray) -> list[bool]:
    return [base.partition("_")[0] in MERIDIONAL for base in _bases(array)]


def last_seen(inputs: PackedArray, targets: PackedArray) -> list[int]:
    """For each target, the index of the input channel with the same variable at the nearest time
    step.

    Raises `UsageError` if the inputs lack the variable.
    """
    channels = [(*_base(channel), place) for place, channel in enumerate(inputs.channels)]
    places = group_by(channels, lambda channel: channel[0])
    latest = dict(map(_base, targets.channels))
    nearest = {}
    for base, step in latest.items():
        if base not in places:
            raise UsageError(f"the targets have {base} and the inputs do not: it cannot persist")
        nearest[base] = min((abs(step - offset), place) for _, offset, place in places[base])[1]
    return [nearest[base] for base, _ in map(_base, targets.channels)]
