"""Penstock runs deep learning on arrays larger than memory, and measures every stage of it.

    import penstock
    summary = penstock.run_inference("in.ome.zarr", "out.ome.zarr", model="denoise-tiny")
    print(summary.mb_per_second, summary.bound_by)

The names below are the public API. Each is imported when it is first used, so that
``import penstock`` needs neither torch nor a store.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if getattr(sys, "argv", [])[:1] == ["-m"] and not getattr(sys.flags, "safe_path", False):
    # ``python -m penstock`` has put the folder that it is said in before all others: no
    # ``triton.py`` that lies there is a library's. `reference` finds what the user names there.
    del sys.path[0]

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .base import Incomplete as Incomplete
    from .base import PenstockError as PenstockError
    from .base import Refused as Refused
    from .base import StageError as StageError
    from .base import UsageError as UsageError
    from .data import Box as Box
    from .data import open_sink as open_sink
    from .data import open_source as open_source
    from .inference import Plan as Plan
    from .inference import Progress as Progress
    from .inference import Summary as Summary
    from .inference import plan_inference as plan_inference
    from .inference import run_inference as run_inference
    from .loading import Loader as Loader
    from .training import run_training as run_training

_HOMES = {
    "Box": "data",
    "Incomplete": "base",
    "PenstockError": "base",
    "Loader": "loading",
    "Plan": "inference",
    "Progress": "inference",
    "Refused": "base",
    "StageError": "base",
    "Summary": "inference",
    "UsageError": "base",
    "plan_inference": "inference",
    "open_sink": "data",
    "open_source": "data",
    "run_inference": "inference",
    "run_training": "training",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    home = _HOMES[name]
    try:
        return getattr(import_module(f"{__name__}.{home}"), name)
    except ModuleNotFoundError as error:
        from .base import absent

        raise absent(error, "train" if home == "training" else "infer") or error from None


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
