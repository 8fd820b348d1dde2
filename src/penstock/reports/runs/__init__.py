"""Runs that a reader picks and compares on a page: found in folders, and read as they grow."""
