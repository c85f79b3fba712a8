"""How a burst sequence is computed: `surrogate` and `reference` define it, `cpu` and `gpu` do the same faster.

Imports `native`, the rules of `graph`, and torch. `dispatch` picks a kernel; `neuron` wraps what comes out in modules.
"""

from lbq.system.lazy import submodules as _submodules

_submodules(__name__)
