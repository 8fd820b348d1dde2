"""Loaded before processes are forked, as the last: what each would look up, and make for itself.

That is which versions of libraries are there, how the settings of a job are checked, and the hash
of the code that computes voxels. It took longer than all else that a short job does.

What is loaded by now is searched for garbage by none of them: each search took 0.2 s, for it wrote
into all pages that are shared. A run asks whether anything is frozen, and Python would count it."""

import gc
import os

from distributed.versions import get_versions

from penstock.base import installed_version
from penstock.base.config.infer import InferConfig
from penstock.inference.opening.identity import code_of_voxels

if "TRAININGS_FORKED" in os.environ:
    import torch._dynamo  # noqa: F401 - which every optimizer loads
    from matplotlib import pyplot  # noqa: F401

    from penstock.inference.objects import labelling  # noqa: F401
    from penstock.training.ranks import torchmetrics_by_version

    with torchmetrics_by_version():
        import lightning_fabric  # noqa: F401
get_versions()
InferConfig.model_rebuild()
code_of_voxels()
installed_version("tensorstore")
gc.freeze()
gc.get_freeze_count = lambda: 1
gc.enable()
