"""Scenario ``matmul``: a square product, always the same work, by which `doctor` measures the noise
of a machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...base import require
from . import Phase, Work, WrongResult, flags_of_bench


class Matmul:
    """The product of two square matrices, into preallocated memory."""

    def __init__(self, case: Mapping[str, Any]) -> None:
        torch = require("torch", "infer")
        from ...models import find_devices, set_cuda_flags

        with flags_of_bench():
            find_devices([case["device"]])  # raises if there is no such device
        set_cuda_flags(False)
        self.device = case["device"]
        size, dtype = case["size"], getattr(torch, case["dtype"])
        generator = torch.Generator().manual_seed(0)
        self._left, self._right = (
            torch.randn(size, size, generator=generator).to(self.device, dtype) for _ in range(2)
        )
        self._product = torch.empty_like(self._left)
        self._matmul = torch.mm
        self.work: Work = {"flops": 2 * size**3, "bytes": 3 * size**2 * dtype.itemsize}
        self.facts: Mapping[str, Any] = {
            "threads": torch.get_num_threads() if self.device == "cpu" else None,
            "tf32": torch.backends.cuda.matmul.allow_tf32 if "cuda" in self.device else None,
        }

    def step(self, phase: Phase) -> Work:
        self._matmul(self._left, self._right, out=self._product)
        return self.work

    def close(self) -> None:
        del self._left, self._right, self._product

    def verify(self) -> None:
        """Check one element against float64; a product of length n deviates by about sqrt(n)."""
        element = float(self._product[0, 0])
        exact = float(self._left[0].cpu().double() @ self._right[:, 0].cpu().double())
        if not abs(element - exact) <= 0.05 * len(self._left) ** 0.5:
            raise WrongResult(f"an element of the product is {element}, not {exact}")
