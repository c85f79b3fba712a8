"""One call in a network's forward, as the handlers of `operations` and `products` see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import fx

from lbq.deploy.lowering.arranged import Arranged
from lbq.deploy.lowering.currents import Value
from lbq.deploy.lowering.layers import Layers
from lbq.deploy.lowering.remedies import remedy
from lbq.deploy.lowering.shapes import Shapes
from lbq.deploy.lowering.trace import place_of
from lbq.errors import GraphError


@dataclass(frozen=True)
class Call:
    """One call in a network's forward.

    inputs: the values among its arguments. arguments: all behind the first. options: those by name. Sizes are numbers in
    both. values: what all calls so far gave.
    """

    node: fx.Node
    inputs: Sequence[Value | Arranged]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    values: Mapping[fx.Node, Value | Arranged]
    layers: Layers

    @property
    def value(self) -> Value:
        """What it reads, where it is a value as layers read it: `operations` has other handlers for arranged ones."""
        return cast(Value, self.inputs[0])

    @property
    def shapes(self) -> Shapes:
        return self.layers.shapes

    @property
    def name(self) -> str:
        target = self.node.target
        return target if isinstance(target, str) else getattr(target, "__name__", str(target))

    @property
    def where(self) -> str:
        return place_of(self.node)

    def named(self, *names: str) -> dict[str, Any]:
        """Arguments behind the first by these names, and all options."""
        return {**dict(zip(names, self.arguments, strict=False)), **self.options}


def refusal(call: Call) -> GraphError:
    """What is said where an operation has no integer form."""
    return GraphError(f"{call.where}: operation {call.name!r} has no integer form here: {remedy(call.name)}")
