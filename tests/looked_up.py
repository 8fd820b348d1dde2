"""Loaded before processes are forked: which versions of libraries Dask has. Each worker asks, and
the first answer of a process takes longer than all else that a forked one does."""

from distributed.versions import get_versions

get_versions()
