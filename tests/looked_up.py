"""Loaded before processes are forked, as the last: which versions of libraries Dask has. Each
worker asks, and the first answer of a process takes longer than all else that a forked one does.

What is loaded by now is searched for garbage by none of them: each search took 0.2 s, for it wrote
into all pages that are shared. A run asks whether anything is frozen, and Python would count it."""

import gc

from distributed.versions import get_versions

get_versions()
gc.freeze()
gc.get_freeze_count = lambda: 1
gc.enable()
