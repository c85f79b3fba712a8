"""From levels to counts to costs: tallies, operations, level statistics, prices, and deployed networks measured on data.

Imports `data`, `engine` and what stands below them, no torch. `results`, `report` and the commands show what comes out.
"""

from lbq.system.lazy import submodules as _submodules

_submodules(__name__)
