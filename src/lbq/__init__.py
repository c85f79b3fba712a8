"""Learnable Burst Quantization: train spiking networks whose neurons learn their own burst resolution, and run them as
integer, bit-sparse networks.

`import lbq` is light and needs no torch; the names below load what they need on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lbq import _moved
from lbq._version import __version__ as __version__
from lbq.errors import LbqError as LbqError

if TYPE_CHECKING:
    from lbq.kernels.reference import BurstState as BurstState
    from lbq.kernels.reference import Constants as Constants
    from lbq.kernels.reference import Rule as Rule
    from lbq.kernels.reference import burst_levels as burst_levels
    from lbq.kernels.reference import burst_sequence as burst_sequence
    from lbq.kernels.reference import burst_step as burst_step
    from lbq.measuring.leaks import check as check
    from lbq.measuring.statistics import Statistics as Statistics
    from lbq.measuring.statistics import statistics as statistics
    from lbq.neuron import ILIF as ILIF
    from lbq.neuron import LIF as LIF
    from lbq.neuron import LMHT as LMHT
    from lbq.neuron import MLF as MLF
    from lbq.neuron import BurstNeuron as BurstNeuron
    from lbq.neuron import LadderNeuron as LadderNeuron
    from lbq.neuron import Ternary as Ternary
    from lbq.runs.run_folder import load as load

_WHERE = {
    "BurstNeuron": "lbq.neuron",
    "BurstState": "lbq.kernels.reference",
    "Constants": "lbq.kernels.reference",
    "ILIF": "lbq.neuron",
    "LIF": "lbq.neuron",
    "LMHT": "lbq.neuron",
    "LadderNeuron": "lbq.neuron",
    "MLF": "lbq.neuron",
    "Rule": "lbq.kernels.reference",
    "Statistics": "lbq.measuring.statistics",
    "Ternary": "lbq.neuron",
    "burst_levels": "lbq.kernels.reference",
    "burst_sequence": "lbq.kernels.reference",
    "burst_step": "lbq.kernels.reference",
    "check": "lbq.measuring.leaks",
    "load": "lbq.runs.run_folder",
    "statistics": "lbq.measuring.statistics",
}
_MODULES = frozenset(
    {
        "batches",
        "config",
        "convert",
        "counting",
        "data",
        "deploy",
        "engine",
        "export",
        "graph",
        "kernels",
        "measuring",
        "models",
        "native",
        "neuron",
        "report",
        "results",
        "runs",
        "system",
        "training",
    }
)

__all__ = ["LbqError", "__version__", *_WHERE]

_moved.install()


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return _import(f"lbq.{name}", name)
    if name in _moved.MOVED:
        _moved.warn(name, stacklevel=2)
        return _import(f"lbq.{_moved.MOVED[name]}", name)
    if name not in _WHERE:
        raise AttributeError(f"module 'lbq' has no attribute {name!r}")
    return getattr(_import(_WHERE[name], name), name)


def _import(module: str, name: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            f"lbq.{name} needs PyTorch, which is not installed: pip install torch", name="torch"
        ) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE, *_MODULES})
