"""Boxes and grids, stores, packed data sets, scenes, weather and synthetic data: arrays and where
they lie.

Batches of them are made in `loading`, and models are run over them in `inference`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
