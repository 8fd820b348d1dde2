"""Runs compared in a browser: a list to filter, and views of the runs that are selected.

Nothing here measures, and no file that is read is changed.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
