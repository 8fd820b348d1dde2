"""The old import path of the callback for a Lightning Trainer."""

from .training.lightning import Records as Records
