"""Run a model over a volume in tiles: geometry, plan, reading, lanes, stitching, writing, resuming.

Stores are in `data`, models in `models`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
