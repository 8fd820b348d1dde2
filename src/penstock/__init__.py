"""Penstock runs deep learning on arrays larger than memory, and measures every stage of it.

    import penstock
    summary = penstock.run_inference("in.ome.zarr", "out.ome.zarr", model="denoise-tiny")
    print(summary.mb_per_second, summary.bound_by)

The names below are the public API. Each is imported when it is first used, so that
``import penstock`` needs neither torch nor a store.
"""

from __future__ import annotations

import sys
from typing import Any

if getattr(sys, "argv", [])[:1] == ["-m"] and not getattr(sys.flags, "safe_path", False):
    # ``python -m penstock`` has put the folder that it is said in before all others: no
    # ``triton.py`` that lies there is a library's. `reference` finds what the user names there.
    del sys.path[0]

__version__ = "0.1.0"

import lazy_loader

_lazily, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    try:
        return _lazily(name)
    except ModuleNotFoundError as error:
        from .base import absent

        raise absent(error, "train" if name == "run_training" else "infer") or error from None
