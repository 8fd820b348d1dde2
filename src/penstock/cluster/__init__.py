"""SLURM's jobs as text and states, and which rank a process is.

Nothing here knows training or inference: their verbs and flags are words.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
