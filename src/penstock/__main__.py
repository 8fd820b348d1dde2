"""``python -m penstock``."""

from .cli import entry

entry()
