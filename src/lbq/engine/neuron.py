"""The neuron's timesteps on integers: in NumPy, the definition (docs/explanation/integers.md), and by the C library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq.engine.steps import Emitted, NeuronStep, neuron_step
from lbq.graph.integer import IntegerLayer, IntegerNeuron, rounded_leak
from lbq.graph.levels import Integers, popcount


class _Layer:
    """The constants of one layer's neurons, channels last."""

    def __init__(self, layer: IntegerLayer) -> None:
        if layer.neuron is None:
            raise ValueError(f"layer {layer.name!r} has no neuron")
        self.neuron: IntegerNeuron = layer.neuron
        self.fraction = layer.fraction
        bias = layer.bias
        self.bias = bias if bias.ndim == 1 else np.ascontiguousarray(bias.transpose(1, 2, 0))
        self.identities = [s.weight.astype(np.int32) for s in layer.identities]


class NumpyNeuron(_Layer):
    """One layer's neurons in NumPy; `run` takes a whole sequence and keeps nothing."""

    def run(
        self,
        currents: NDArray[np.int32] | None,
        shortcuts: list[Integers],
        out: Integers,
        static: bool,
        timesteps: int,
        watch: Callable[[int, NDArray[np.int32]], None] | None = None,
    ) -> Emitted:
        """Levels `out` [T * B, H, W, C] from convolution currents and the levels on each identity synapse, `[T * B, ...]`.

        currents: `[B, ...]` where `static`, the same at every timestep; None where no convolution leads here.
        watch: called at every timestep with the membranes `[B, H, W, C]` before emission.
        """
        n, batch = self.neuron, len(out) // timesteps
        v: NDArray[np.int32] | None = None
        pending: NDArray[np.int32] | None = None
        for t in range(timesteps):
            now = slice(t * batch, (t + 1) * batch)
            u = np.empty(out[now].shape, np.int32)
            if currents is None:
                u[:] = self.bias
            else:
                np.left_shift(currents if static else currents[now], self.fraction, out=u)
                u += self.bias
            for weight, levels in zip(self.identities, shortcuts, strict=True):
                u += weight * levels[now]
            if v is not None:
                u += v if n.leak is None else rounded_leak(v.astype(np.int64), n.leak).astype(np.int32)
            if pending is not None:
                u -= pending
            if watch is not None:
                watch(t, u)
            level = count_thresholds(u, n.thresholds, n.signed)
            out[now] = level
            v, pending = u, None
            if n.reset_kind == "hard":
                v[level != 0] = 0
                continue
            drop = n.reset * (level if n.reset_kind == "level" else np.sign(level))
            if n.decay_reset:
                v -= drop
            else:
                pending = drop
        return emitted(out)


class NativeNeuron(_Layer):
    """The same by the native library."""

    def step(
        self,
        currents: NDArray[np.int32] | None,
        shortcuts: list[Integers],
        out: Integers,
        static: bool,
        timesteps: int,
        membranes: NDArray[np.int32] | None = None,
    ) -> NeuronStep:
        """membranes: written where given, int32 like `out`, before emission."""
        n = self.neuron
        return neuron_step(
            currents,
            out,
            timesteps=timesteps,
            thresholds=n.thresholds,
            reset=n.reset,
            bias=self.bias,
            fraction=self.fraction,
            leak=n.leak,
            reset_kind=n.reset_kind,
            decay_reset=n.decay_reset,
            shortcuts=list(zip(self.identities, shortcuts, strict=True)),
            static=static,
            membranes=membranes,
        )


def emitted(levels: Integers) -> Emitted:
    """How many levels are not zero, and the set bits of all."""
    return Emitted(int(np.count_nonzero(levels)), int(popcount(levels).sum(dtype=np.int64)))


def count_thresholds(u: NDArray[np.int32], thresholds: NDArray[np.int32], signed: bool) -> NDArray[Any]:
    """How many of `thresholds` [C, N] each `u` [..., C] reaches, as int32; by magnitude and with U's sign where signed."""
    magnitude = np.abs(u) if signed else u
    level = np.zeros(u.shape, np.int32)
    for k in range(thresholds.shape[1]):
        level += magnitude >= thresholds[:, k]
    return level * np.sign(u) if signed else level
