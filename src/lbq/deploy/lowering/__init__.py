"""From a traced PyTorch network to `lbq.graph.Graph`: every operation is lowered exactly, or refused by name with a remedy."""

from lbq.system.lazy import submodules as _submodules

_submodules(__name__)
