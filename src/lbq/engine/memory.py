"""The memory that holds the levels and currents of an integer network while it runs; it is planned once. No torch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq.engine.tape import aligned
from lbq.graph import INPUT
from lbq.graph.integer import IntegerLayer, IntegerNetwork
from lbq.graph.levels import Integers


class Plan:
    """The slot of memory that holds each layer's levels. A slot is reused after the last reader has read it.

    levels: the slot of each layer. slots: bytes of each slot for one image. currents: int32 values for one image.
    last: for each layer, the number of the layer that reads it last, or the readout's number where none does.
    """

    def __init__(self, network: IntegerNetwork) -> None:
        self.last = last = dict.fromkeys(network.gate_names, len(network.layers))
        last |= {layer.name: len(network.layers) for layer in network.layers}
        for i, layer in enumerate(network.all_layers):
            last |= {source: i for s in layer.synapses for source in s.sources if source != INPUT}
            last |= {operand: i for gate in network.gates_behind(layer.name) for operand in gate.operands}
        self.levels: dict[str, int] = {}
        self.slots: list[int] = []
        free: list[int] = []
        for i, layer in enumerate(network.layers):
            size = layer.units * network.timesteps
            slot = min(free, key=lambda s: (self.slots[s] < size, abs(self.slots[s] - size)), default=None)
            if slot is None:
                slot = len(self.slots)
                self.slots.append(size)
            else:
                free.remove(slot)
                self.slots[slot] = max(self.slots[slot], size)
            self.levels[layer.name] = slot
            free += [self.levels[done.name] for done in network.layers[: i + 1] if last[done.name] == i]
        widest = max(layer.units for layer in network.layers) * network.timesteps
        self.currents = widest * max(len(layer.convs) > 1 for layer in network.layers) + widest


class Workspace:
    """The memory of one plan, for up to `images` images at a time. recordings: the latest executions in it, by their kind."""

    def __init__(self, plan: Plan, images: int) -> None:
        self.images = images
        self.slots = [aligned((size * images,), np.uint8) for size in plan.slots]
        self.currents = aligned((plan.currents * images,), np.int32)
        self.plan = plan
        self.recordings: dict[tuple[Any, ...], Any] = {}

    def levels(self, layer: IntegerLayer, rows: int) -> Integers:
        """`[rows, H, W, C]` in the layer's slot."""
        c, h, w = layer.shape
        flat = self.slots[self.plan.levels[layer.name]][: rows * layer.units]
        assert layer.neuron is not None
        return flat.view(layer.neuron.dtype).reshape(rows, h, w, c)

    def current(self, layer: IntegerLayer, rows: int, beside: NDArray[np.int32] | None) -> NDArray[np.int32]:
        """`[rows, H, W, C]` for the currents of a synapse, in the half that does not hold other currents, `beside`."""
        c, h, w = layer.shape
        half = len(self.currents) // 2
        start = half if beside is not None and np.may_share_memory(beside, self.currents[:half]) else 0
        return self.currents[start : start + rows * layer.units].reshape(rows, h, w, c)
