"""What tests of training share: small runs, what they leave, and two ranks of them."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.base import TRAIN_DEFAULTS, TrainConfig, build, environment_kept
from penstock.data.packed.format import ArrayLayout
from penstock.data.packed.write import write_dataset

from ..ports import held_port
from ..preloaded import started
from ..rows import rows_of

if TYPE_CHECKING:
    import pytest
    import torch
    from torch import nn


SMALL = {"num_samples": 203, "batch_size": 8, "epochs": 3, "hidden_dims": (8, 4), "device": "cpu"}


def config_of(out: Path, **changes: Any) -> TrainConfig:
    return build(TrainConfig, TRAIN_DEFAULTS["spiral"], SMALL, {"output_dir": out}, changes)


def train_workload(workload: str, config: TrainConfig, **how: Any) -> dict[str, Any]:
    """Penstock's own, with which torch is imported by the first test that trains."""
    from penstock.training import loop

    return loop.train_workload(workload, config, **how)


def weights(out: Path) -> dict[str, torch.Tensor]:
    import torch

    state: dict[str, torch.Tensor] = torch.load(out / "checkpoints" / "last.pt", weights_only=True)[
        "model"
    ]
    return state


def rows(out: Path, rank: int = 0) -> list[dict[str, str]]:
    return rows_of(out / "steps" / f"rank{rank}.csv")


def assert_same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    import torch

    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def kill_at(step: int) -> Callable[[Any], None]:
    def look(now: Any) -> None:
        if now.step == step and not now.validated:
            os.kill(os.getpid(), signal.SIGTERM)

    return look


def torchrun(folder: Path, *words: str, seed: str = "0") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": seed}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command += ["--local-addr", "127.0.0.1", "-m", "penstock", "train"]
    return subprocess.run(
        [*command, *words, "--distributed", "--device", "cpu", "--output-dir", str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


class Ended(NamedTuple):
    """How two ranks ended, and what they said."""

    codes: list[int | None]
    said: str


def forked_ranks(folder: Path, *words: str) -> Ended:
    """Train on two ranks that have the variables of torchrun's, without the seconds that torchrun
    and each of its ranks take to load torch."""
    words = ("train", *words, "--distributed", "--device", "cpu", "--output-dir", str(folder))
    places = [folder.with_name(f"{folder.name}-rank{rank}") for rank in (0, 1)]
    with contextlib.closing(held_port()) as held:
        common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(held.getsockname()[1])}
        processes = []
        for rank, place in enumerate(places):
            place.mkdir()
            with environment_kept():
                os.environ.update({**common, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"})
                processes.append(started(place, words))
        try:
            for process in processes:
                process.join(300)
        finally:
            for process in processes:
                process.kill()
    said = "".join((place / "said").read_text() for place in places)
    return Ended([each.exitcode for each in processes], said)


def light_backbone(in_channels: int, width: int) -> Any:
    """Four strided convolutions with features where mobilenet has them. Its weights take longer to
    draw, write, read and hash than the scenes to search."""
    from torch import nn
    from torchvision.models.detection.backbone_utils import BackboneWithFPN

    widths = (in_channels, 8, 8, 8, 8)
    layers = (
        nn.Sequential(nn.Conv2d(taken, given, 3, 2, 1), nn.GroupNorm(1, given), nn.ReLU())
        for taken, given in itertools.pairwise(widths)
    )
    return BackboneWithFPN(nn.Sequential(*layers), {"1": "0", "2": "1", "3": "2"}, [8] * 3, width)


def lighten(patch: pytest.MonkeyPatch) -> None:
    """Give this process's detectors on mobilenet the light backbone in its place."""
    from penstock.models import detector

    patch.setitem(detector._BACKBONES, "mobilenet", (light_backbone, 3, 8))


NET = "tests.training.kit:tiny"


def tiny(in_channels: int = 1) -> nn.Module:
    """Two layers that can do better than nothing."""

    from torch import nn

    return nn.Sequential(
        nn.Conv3d(in_channels, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 1, 3, padding=1)
    )


def four(in_channels: int = 1) -> nn.Module:
    """A channel for each of four classes."""
    from torch import nn

    return nn.Sequential(
        nn.Conv3d(in_channels, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 4, 3, padding=1)
    )


def sure(in_channels: int = 1) -> nn.Module:
    from torch import nn

    return nn.Sequential(tiny(in_channels), nn.Sigmoid())


def soft(in_channels: int = 1) -> nn.Module:
    from torch import nn

    return nn.Sequential(four(in_channels), nn.Softmax(1))


ROWS, COLUMNS = 6, 8


def packed(root: Path, samples: int, first: int = 0) -> Path:
    """Fields that drift eastward by a column a step: `a`, which is seen twice, and `v`."""
    waves = np.random.default_rng(0).normal(size=(2, ROWS, COLUMNS)).astype(np.float32)

    def at(step: int) -> Any:
        return np.stack([np.roll(wave, step, axis=1) for wave in waves], axis=-1)

    def make(index: int) -> dict[str, Any]:
        now = first + index
        inputs = np.concatenate([at(now - 1)[..., :1], at(now)], axis=-1)
        return {"inputs": np.ascontiguousarray(inputs), "targets": at(now + 1)}

    names = {"inputs": ("a_t-1", "a_t+0", "v_500_t+0"), "targets": ("a_t+1", "v_500_t+1")}
    layouts = {n: ArrayLayout((ROWS, COLUMNS, len(of)), (ROWS, COLUMNS, len(of)), of)
               for n, of in names.items()}  # fmt: skip
    write_dataset(
        root, layouts, range(samples), make,
        shards=None, workers=1, overwrite=False, facts={},
    )  # fmt: skip
    return root
