"""What a trained network does, seen while it runs in PyTorch: accuracy, counts, levels and membranes.

Imports `training`, `deploy` and what stands below them. Measurements and analyses of `counting` come out.
"""

from lbq.system.lazy import submodules as _submodules

_submodules(__name__)
