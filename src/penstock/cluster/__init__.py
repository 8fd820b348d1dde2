"""SLURM jobs as text and states, the rank of a process, and Dask workers that do numbered tasks.

Here are the workers of ``--cluster``, which worker gets which task, and what follows if one dies.
What a task does is in the wings that use it: for this wing, their verbs and flags are plain words.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
