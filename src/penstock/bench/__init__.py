"""Measuring cases in fresh processes: scenarios, launches, sweeps, limits and the suite.

What the records mean for a user is worked out in `reports`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
