"""What several test files of this folder share: small inputs, nets, jobs and plans."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import penstock
from penstock.base import InferConfig, build
from penstock.data.box import Box
from penstock.inference.opening.job import Job
from penstock.inference.planning.memory import Facts
from penstock.inference.tiling.geometry import PatchShape

Array = NDArray[Any]
SMALL: dict[str, Any] = {"model": "identity", "patch": 8, "overlap": 1, "devices": "cpu"}
"""A job of a volume of 20 cubed."""


def opened(out: Any, shape: tuple[int, ...] = (20, 20, 20), **knobs: Any) -> Job:
    config = {"in_spec": np.zeros(shape, "uint8"), "out_spec": out, "model_type": "identity",
              "patch": 8, "overlap": 2, "devices": "cpu"}  # fmt: skip
    return Job(build(InferConfig, config | knobs))


def run(source: Array, net: Any = "identity", out: Array | None = None, **knobs: Any) -> Array:
    """Infer into a new array and return it."""
    result = np.full_like(source, 77) if out is None else out
    penstock.run_inference(source, result, model=net, devices="cpu", **knobs)
    return result


def values(spec: Any) -> Array:
    """All of a stored array, with its five axes."""
    source = penstock.open_source(spec)
    return source.read(source.domain)


def arange(shape: tuple[int, ...], dtype: str = "uint16") -> Array:
    """Distinct values, so that a misplaced voxel shows."""
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def conv(channels: int = 1, seed: int = 0) -> nn.Module:
    """Two seeded 3-D convolutions of width 4; each output sees two voxels around it."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv3d(channels, 4, 3, padding=1), nn.GELU(), nn.Conv3d(4, 1, 3, padding=1)
    )


def job(tmp_path, **knobs: Any) -> Job:
    """27 blocks, of 64 patches."""
    config = {"in_spec": arange((24, 24, 24)), "out_spec": np.zeros((24, 24, 24), "uint16"),
              "model_type": "identity", "patch": 8, "overlap": 2, "devices": "cpu", "batch": 4,
              "block": 10, "normalize": "none"}  # fmt: skip
    return Job(build(InferConfig, config | {"run_dir": tmp_path / "run"} | knobs))


def facts(shape: tuple[int, ...], **changes: Any) -> Facts:
    """A uint16 volume in chunks of 128 on a machine of 64 GB."""
    given_ = {
        "domain": Box.of((0, 0, 0), shape), "source_itemsize": 2, "source_chunk": (128, 128, 128),
        "source_origin": (0, 0, 0), "flag_bytes": 0,
        "source_cache": None, "num_volumes": 1,
        "batch": 64, "in_channels": 1, "out_channels": 1, "out_bytes": 2,
        "brick_voxel_bytes": (2,), "block_voxel_bytes": (2, 0), "summed": False,
        "write_grids": ((256, 256, 256),), "anchor": (0, 0, 0), "weight_bytes": 0,
        "forward_bytes": 0, "devices": ("cpu",), "base_bytes": 10**8,
        "available_bytes": 64 * 10**9, "device_bytes": None, "chunk_bytes": 2 * 128**3, "cores": 2,
    }  # fmt: skip
    return Facts(**(given_ | changes))


def config(**knobs: Any) -> InferConfig:
    given_ = {"in_spec": "", "out_spec": "", "model_type": "", "normalize": "global"}
    return build(InferConfig, given_ | knobs)


KILLED = """
import os, signal, sys
from penstock.cli import main
from penstock.inference.run_folder.journal import Journal
note, last = Journal.note, int(sys.argv.pop())
def killed(self, *args):
    note(self, *args)
    self.flush()
    if self.written == last:
        os.kill(os.getpid(), signal.SIGKILL)
Journal.note = killed
main(["infer", *sys.argv[1:], "--writer-workers", "1"])
"""
"""An infer that is killed once it has noted as many blocks as its last word says."""
SEED = PatchShape((64, 64, 64), (10, 10, 10), 3)
