"""One training loop with its workloads, checkpoints, ranks and trackers; prediction with a trained
detector.

Batches come from `loading`; jobs of SLURM are written in `cluster`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
