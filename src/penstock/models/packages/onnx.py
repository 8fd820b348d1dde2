"""ONNX files: a network that onnxruntime runs on the CPU, with the patch that its shape leaves."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from ...base import as_usage_error, require
from ..recipe import Recipe
from .package import Package, Parcel

_LOCATION = re.compile(rb"\n\x08location\x12([\x01-\x7f])")
"""The field of a tensor that names the file of its values; a byte with the length ends it."""


def read(parcel: Parcel) -> Package:
    """Open an ONNX file.

    Args:
        parcel: The file.

    Returns:
        The network, and the patch that it takes if it takes one only.

    Raises:
        UsageError: It is damaged, or takes what a volume does not give.
        MissingDependency: onnxruntime is not installed.
    """
    module = OnnxNet(parcel, parcel.path, "onnx")
    _, channels, *sides = module.shape if len(module.shape) in (4, 5) else (0, 0)
    if not sides or not isinstance(channels, int):
        shape = ", ".join(map(str, module.shape))
        raise parcel.refuse(
            f"its input is of shape ({shape}), and not batch, number of channels, and 2 or 3 sides"
        )
    only_one = all(isinstance(side, int) for side in sides)
    patch: Any = (1, *sides)[-3:] if only_one else None
    return Package(module, Recipe(str(parcel.path), patch=patch), channels, len(sides))


class OnnxNet(nn.Module):
    """A network that onnxruntime runs on the CPU."""

    def __init__(self, parcel: Parcel, file: Path, extra: str = "bioimageio") -> None:
        super().__init__()
        runtime = require("onnxruntime", extra)
        content = file.read_bytes()
        places = {
            content[field.end() :][: field[1][0]].decode() for field in _LOCATION.finditer(content)
        }
        inside = os.path.relpath(file.resolve().parent, parcel.folder.resolve())
        parts = [parcel.file(os.path.normpath(f"{inside}/{place}")) for place in sorted(places)]
        # As all of it decides voxels, a resumed run compares it.
        self.hash = [hashlib.sha256(each.read_bytes()).hexdigest() for each in (file, *parts)]
        self.runtime = str(runtime.__version__)
        self.unseen_work = sum(each.stat().st_size for each in (file, *parts)) / 2
        """Operations for each voxel at most: two for each weight of 4 bytes. Torch sees none."""

        @functools.cache
        def session(threads: int) -> Any:
            options = runtime.SessionOptions()
            options.intra_op_num_threads = threads
            options.log_severity_level = 4  # what is wrong is said once, by the error
            return runtime.InferenceSession(file, options, providers=["CPUExecutionProvider"])

        self._session = session
        # The errors of onnxruntime are of many types.
        with as_usage_error(parcel.sentence(f"onnxruntime cannot open {file.name}")):
            inputs = session(torch.get_num_threads()).get_inputs()
        if len(inputs) != 1 or inputs[0].type != "tensor(float)":
            kinds = ", ".join(each.type for each in inputs)
            raise parcel.refuse(f"{file.name} takes {kinds}, and not one input of 32-bit floats")
        self._input, self.shape = inputs[0].name, inputs[0].shape

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # nothing in it changes

    def forward(self, x: Tensor) -> Any:
        given = {self._input: x.cpu().contiguous().numpy()}
        try:
            made = self._session(torch.get_num_threads()).run(None, given)
        except Exception as error:  # of many types and several lines
            raise RuntimeError(" ".join(str(error).split())) from error
        outputs = [torch.from_numpy(each).to(x.device) for each in made]
        return outputs[0] if len(outputs) == 1 else outputs
