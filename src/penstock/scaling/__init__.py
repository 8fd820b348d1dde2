"""Runs on several devices: reading them, comparing them, laws of scaling, simulation.

Training itself lives in `training`, and jobs of SLURM live in `cluster`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
