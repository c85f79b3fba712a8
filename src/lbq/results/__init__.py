"""Records read back: what is one result, which runs are seeds of one recipe, and the numbers that the paper publishes.

Imports `counting` and what stands below it, no torch. `report` draws what comes out.
"""

from lbq.system.lazy import submodules as _submodules

_submodules(__name__)
