"""Modules under their former names: one table, and the import hook that answers for them.

`import lbq.account` still works, says the new name in a DeprecationWarning, and gives the module itself.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

MOVED = {  # former name -> name now, both below lbq
    "account": "counting.operations",
    "analyze": "counting.analysis",
    "build": "runs.build",
    "capture": "training.cuda_graph",
    "checkpoint": "runs.checkpoint",
    "costs": "counting.costs",
    "data.augment": "batches.augment",
    "data.base": "data.dataset",
    "data.event_augment": "batches.event_augment",
    "data.mixing": "batches.mixing",
    "data.own": "data.user_arrays",
    "data.policies": "batches.policies",
    "data.random": "batches.random",
    "data.sources": "batches.sources",
    "demo": "cli.demo",
    "deploy.absorbed": "deploy.float_execution",
    "deploy.export": "deploy.pipeline",
    "deploy.faithful": "deploy.lowering.faithful",
    "deploy.rewrites": "graph.rewrites",
    "distributed": "training.distributed",
    "divergence": "training.divergence",
    "doctor": "cli.doctor",
    "engine.choose": "engine.method",
    "engine.evaluate": "counting.deployed",
    "engine.layers": "engine.steps",
    "engine.levelfile": "engine.file.levelfile",
    "engine.levels": "graph.levels",
    "engine.membranes": "counting.membranes",
    "engine.native": "engine.convolution",
    "engine.network": "graph.integer",
    "engine.reading": "engine.file.reading",
    "evaluation": "training.evaluation",
    "files": "system.files",
    "firing": "measuring.statistics",
    "gather": "results.gather",
    "imports": "system.plugins",
    "job": "training.job",
    "kernels.choose": "native.choose",
    "kernels.fused": "kernels.gpu.operators",
    "kernels.native": "kernels.cpu",
    "kernels.sequence": "kernels.dispatch",
    "measure": "measuring.measure",
    "measurement": "counting.measurement",
    "neuron.record": "neuron.recorder",
    "observe": "measuring.observer",
    "optim": "training.optim",
    "paper": "results.paper",
    "plan": "training.plan",
    "records": "runs.records",
    "report.folder": "report.output",
    "schema": "system.schema",
    "stops": "system.signals",
    "surrogate": "kernels.surrogate",
    "sweep": "training.sweep",
    "tally": "counting.tally",
    "technology": "counting.technology",
    "toml": "system.toml",
    "train": "training.trainer",
}


def warn(old: str, stacklevel: int) -> None:
    """Say the new name of `lbq.<old>` to whoever used the former one."""
    warnings.warn(f"lbq.{old} is now lbq.{MOVED[old]}", DeprecationWarning, stacklevel=stacklevel + 1)


class _Loader:
    """Not derived from importlib.abc's, whose import takes as long as all the rest of `import lbq`."""

    def create_module(self, spec: ModuleSpec) -> None:
        """As Python makes any module."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of the new name where the import system looks for the one it asked for."""
        old = module.__name__.removeprefix("lbq.")
        sys.modules[module.__name__] = import_module(f"lbq.{MOVED[old]}")


class Finder:
    """Finds modules under their former names; asked last, so that it costs nothing elsewhere."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        old = fullname.removeprefix("lbq.")
        if old == fullname or old not in MOVED:
            return None
        warn(old, stacklevel=2)  # Python passes over the frames of the import system
        return ModuleSpec(fullname, cast(Any, _Loader()))


def install() -> None:
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.append(cast(Any, Finder()))
