"""The neuron's timesteps on integers: in NumPy, the definition (docs/explanation/integers.md), and by the C library."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq import native
from lbq.engine.tape import Step, address, ready
from lbq.graph.integer import LARGEST_MIXING, IntegerLayer, rounded_leak
from lbq.graph.levels import Integers, highest_level, popcount

RESETS: dict[str, int] = {"once": 0, "level": 1, "hard": 2}  # enum lbq_reset


@dataclass(frozen=True)
class Emitted:
    """What a layer emitted: how many levels are not zero, and the set bits of all levels."""

    active: int
    bits: int


NeuronCall = native.structure(  # struct lbq_neuron
    int64="timesteps batch sites channels n_max identities products",
    pointer="currents bias thresholds reset identity_weights identity_levels product_weights product_sums levels counts "
    "identity_signed membranes carried",
    int32="is_static bias_map fraction leak_m leak_k reset_kind decay_reset is_signed isa",
)


class NeuronStep(Step):
    """A layer of neurons; `emitted` says what they emitted in the last performance."""

    def __init__(self, call: ctypes.Structure, counted: NDArray[np.int64], *memory: Any) -> None:
        super().__init__("neuron", call, counted, *memory)
        self.counted = counted

    def emitted(self) -> Emitted:
        return Emitted(int(self.counted[0]), int(self.counted[1]))


class LayerNeurons:
    """One layer's neurons, channels last: `run` takes a whole sequence in NumPy, `step` the same by the native library."""

    def __init__(self, layer: IntegerLayer) -> None:
        if layer.neuron is None:
            raise ValueError(f"layer {layer.name!r} has no neuron")
        self.neuron = n = layer.neuron
        self.fraction, self.mixing = layer.fraction, n.mixing
        bias = layer.bias
        self.bias = bias if bias.ndim == 1 else np.ascontiguousarray(bias.transpose(1, 2, 0))
        self.identities = [s.weight.astype(np.int32) for s in layer.identities]
        self.products = [s.weight.astype(np.int32) for s in layer.matmuls]
        channels = len(n.reset)
        if n.thresholds.shape != (channels, n.n_max) or n.n_max > highest_level(n.signed):
            raise ValueError(f"thresholds must be [{channels}, n_max] with 8-bit levels, got {n.thresholds.shape}")
        most = 1 if n.mixing is None else LARGEST_MIXING
        if n.leak is not None and not (1 <= n.leak[1] <= 30 and 0 <= n.leak[0] <= most << n.leak[1]):
            raise ValueError(f"leak must be (m, k) with k in 1..30 and m <= {most} * 2^k, got {n.leak}")
        if any(w.shape != (channels,) for w in (*self.identities, *self.products)):
            raise ValueError(f"weights of identities and products must be [{channels}]")

    def run(
        self,
        currents: NDArray[np.int32] | None,
        shortcuts: list[Integers],
        out: Integers,
        static: bool,
        timesteps: int,
        watch: Callable[[int, NDArray[np.int32]], None] | None = None,
        carried: NDArray[np.int32] | None = None,
        products: Sequence[NDArray[np.int32]] = (),
    ) -> Emitted:
        """Write levels to `out` [T * B, H, W, C], from convolution currents, the levels on each identity synapse, and products.

        Where currents are mixed over time, they must be all there and mixed already: see `complete`.

        currents: `[T * B, ...]`, or `[B, ...]` where `static`: the same at every timestep. None: no convolution leads here.
        shortcuts: levels `[T * B, ...]`.
        watch: called at every timestep with the membranes `[B, H, W, C]` before emission.
        carried: for one timestep of a stream, `[B, H, W, C]`: what it begins with; then what the next begins with.
        products: sums of products of levels, `[T * B, ...]`.
        """
        assert self.mixing is None
        assert carried is None or timesteps == 1
        n, batch = self.neuron, len(out) // timesteps
        v: NDArray[np.int32] | None = None
        pending: NDArray[np.int32] | None = None if carried is None else -carried
        for t in range(timesteps):
            now = slice(t * batch, (t + 1) * batch)
            u = np.empty(out[now].shape, np.int32)
            convolved = currents if static or currents is None else currents[now]
            self._current(convolved, [s[now] for s in shortcuts], [p[now] for p in products], u)
            if v is not None:
                u += self._leaked(v)
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
        if carried is not None and v is not None:
            carried[...] = self._leaked(v) if pending is None else self._leaked(v) - pending
        return emitted(out)

    def _leaked(self, v: NDArray[np.int32]) -> NDArray[np.int32]:
        leak = self.neuron.leak
        return v if leak is None else rounded_leak(v.astype(np.int64), leak).astype(np.int32)

    def _current(
        self,
        convolved: NDArray[np.int32] | None,
        shortcuts: list[Integers],
        products: list[NDArray[np.int32]],
        out: NDArray[np.int32],
    ) -> None:
        """Write the currents of one timestep to `out`, in units of the membrane."""
        if convolved is None:
            out[:] = self.bias
        else:
            np.left_shift(convolved, self.fraction, out=out)
            out += self.bias
        for weight, levels in zip(self.identities, shortcuts, strict=True):
            out += weight * levels
        for weight, sums in zip(self.products, products, strict=True):
            out += weight * sums

    def complete(
        self,
        currents: NDArray[np.int32] | None,
        shortcuts: list[Integers],
        products: Sequence[NDArray[np.int32]],
        shape: tuple[int, ...],
        static: bool,
        timesteps: int,
    ) -> NDArray[np.int32]:
        """All that a membrane adds, of all timesteps, mixed where it is to be: `[T * B, H, W, C]` as `shape` says."""
        batch = shape[0] // timesteps
        whole = np.empty((timesteps, batch, *shape[1:]), np.int32)
        for t, out in enumerate(whole):
            now = slice(t * batch, (t + 1) * batch)
            convolved = currents if static or currents is None else currents[now]
            self._current(convolved, [s[now] for s in shortcuts], [p[now] for p in products], out)
        return (whole if self.mixing is None else self.mixing.of(whole)).reshape(shape)

    def for_complete_currents(self) -> LayerNeurons:
        """The same neurons with nothing to add to their currents: no bias, shortcuts or products, no fraction to shift by."""
        plain = copy.copy(self)
        plain.fraction, plain.bias, plain.mixing = 0, np.zeros_like(self.neuron.reset), None
        plain.identities, plain.products = [], []
        return plain

    def step(
        self,
        currents: NDArray[np.int32] | None,
        shortcuts: list[Integers],
        out: Integers,
        static: bool,
        timesteps: int,
        membranes: NDArray[np.int32] | None = None,
        carried: NDArray[np.int32] | None = None,
        products: Sequence[NDArray[np.int32]] = (),
    ) -> NeuronStep:
        """The same as `run`, ready to be performed. The caller has proved that every sum fits int32.

        out: contiguous, uint8 or, for signed neurons, int8. shortcuts: 8-bit levels. products: contiguous.
        membranes: the array to write the membranes before emission to, contiguous int32 `[T * B, H, W, C]`.
        """
        assert self.mixing is None  # a step may be performed again, and would not mix again
        n = self.neuron
        rows, height, width, channels = out.shape
        batch = rows // timesteps
        # C reads and writes where these say, whatever lies there
        assert out.dtype == n.dtype
        assert out.flags.c_contiguous
        assert rows == timesteps * batch
        assert len(n.reset) == channels
        assert self.bias.shape in ((channels,), out.shape[1:])
        assert currents is None or currents.shape == (batch if static else rows, *out.shape[1:])
        assert [(s.shape, s.itemsize) for s in shortcuts] == [(out.shape, 1)] * len(self.identities)
        assert len(products) == len(self.products)
        for given in (membranes, carried, *products):
            assert given is None or (given.shape == out.shape and given.dtype == np.int32 and given.flags.c_contiguous)
        assert carried is None or timesteps == 1
        levels = [ready(s, s.dtype) for s in shortcuts]
        signs = np.array([s.dtype == np.int8 for s in levels], np.int32)
        lists = (self.identities, levels, self.products, products)
        pointers = [(ctypes.c_void_p * max(len(arrays), 1))(*map(address, arrays)) for arrays in lists]
        constants = [
            None if currents is None else ready(currents),
            ready(self.bias),
            ready(n.thresholds.T),
            ready(n.reset),
        ]
        counts = np.zeros(2, np.int64)
        call = NeuronCall(timesteps, batch, height * width, channels, n.n_max, len(levels), len(products))
        call.currents, call.bias, call.thresholds, call.reset = map(address, constants)
        call.identity_weights, call.identity_levels = map(ctypes.addressof, pointers[:2])
        call.product_weights, call.product_sums = map(ctypes.addressof, pointers[2:])
        call.levels, call.counts, call.identity_signed = address(out), address(counts), address(signs)
        call.membranes, call.carried = address(membranes), address(carried)
        call.is_static, call.bias_map, call.fraction = static, self.bias.ndim == 3, self.fraction
        call.leak_m, call.leak_k = n.leak or (1, 0)
        call.reset_kind, call.decay_reset, call.is_signed = RESETS[n.reset_kind], n.decay_reset, n.signed
        call.isa = native.ISAS[native.isa()]
        memory = (out, membranes, carried, *constants, *lists, signs, *pointers)
        return NeuronStep(call, counts, *memory)


def emitted(levels: Integers) -> Emitted:
    """How many levels are not zero, and the set bits of all."""
    return Emitted(int(np.count_nonzero(levels)), int(popcount(levels).sum(dtype=np.int64)))


def count_thresholds(u: NDArray[np.int32], thresholds: NDArray[np.int32], signed: bool) -> NDArray[Any]:
    """How many of `thresholds` [C, N] each `u` [..., C] reaches, as int32; how many |u| reaches, signed as u, if `signed`."""
    magnitude = np.abs(u) if signed else u
    level = np.zeros(u.shape, np.int32)
    for k in range(thresholds.shape[1]):
        level += magnitude >= thresholds[:, k]
    return level * np.sign(u) if signed else level
