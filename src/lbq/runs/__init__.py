"""Run folders: the files of a training, its checkpoints, the network of a configuration, and the record of a finished run.

Imports `models`, `batches` and what stands below them. `training` writes run folders; deployment and measuring read them.
"""

from lbq.system.lazy import submodules as _submodules

_submodules(__name__)
