"""Workloads of which one rank, or every step, is slow."""

from __future__ import annotations

import os
import time
from typing import Any

from penstock.training.workloads.spiral import Spiral


class Slowed(Spiral):
    """Two spirals, on whose second rank every step takes 50 ms more."""

    def loss(self, model: Any, batch: Any) -> Any:
        if os.environ["RANK"] == "1":
            time.sleep(0.05)
        return super().loss(model, batch)
