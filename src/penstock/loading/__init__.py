"""Batches of samples or patches, read ahead: which items, which chunks, into which buffer.

`engines` read chunks; `contenders` are other loaders to compare with. Stores and packed data sets
are opened in `data`; volumes are read block by block in `inference`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
