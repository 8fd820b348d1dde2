"""Models by name, reference or file; their weights, devices and memory; the networks that Penstock
ships.

Running a model over a volume is `inference`, changing its weights is `training`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
