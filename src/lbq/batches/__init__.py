"""From a dataset to training batches: sources, augmentation, mixing, and random numbers by seed, epoch and sample.

Imports `data` and what stands below it, and torch. `training` reads the batches.
"""

from lbq.system.lazy import submodules as _submodules

_submodules(__name__)
