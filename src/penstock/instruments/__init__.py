"""Clocks, samplers and statistics: measuring, and keeping what was measured.

Other wings decide what is measured and what it means for a user.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
