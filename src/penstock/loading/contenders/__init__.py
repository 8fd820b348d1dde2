"""Loaders that are compared, each behind the same protocol."""
