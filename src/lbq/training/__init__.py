"""Training: the loop, a job in a run folder, sweeps of jobs, what moves the parameters, and several processes.

Imports `deploy` (for a plan's counts), `runs` and what stands below them. Run folders come out.
"""

from lbq.system.lazy import submodules as _submodules

_submodules(__name__)
