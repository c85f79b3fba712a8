"""The file of a deployed network, `model.lbq`: written, read as if it were hostile, and mapped into memory. No torch."""

from lbq.system.lazy import submodules as _submodules

_submodules(__name__)
