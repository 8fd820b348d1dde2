"""Errors, units, files, threads, secrets, processes and every knob: what all other wings use.

Nothing here knows what Penstock is for.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
