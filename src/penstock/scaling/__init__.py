"""Runs on several devices: where they are read from, scaling laws, stragglers, simulation and
reports.

Training itself is in `training`, jobs of SLURM in `cluster`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
