"""Independent restatements of the paper's equations, in scalar loops, for the tests to compare with."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lbq.graph import INPUT, Synapse
from lbq.graph.integer import IntegerLayer, IntegerNetwork


def burst_loop(
    x: np.ndarray[Any, Any], step: float, n_max: int, beta: float, alpha: float
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Levels and membranes of Eqs. lbq_level, lif_burst_integrate, lif_burst_reset, one neuron and timestep at a time.

    Every operation rounds to x's dtype, as the vectorised code does.
    """
    kind = x.dtype.type
    step_, beta_, alpha_ = kind(step), kind(beta), kind(alpha)
    levels = np.zeros(x.shape, np.int64)
    membranes = np.zeros_like(x)
    for index in np.ndindex(*x.shape[1:]):
        v = kind(0)
        for t in range(x.shape[0]):
            u = beta_ * v + x[(t, *index)]
            s = min(max(math.floor(u / step_), 0), n_max)
            levels[(t, *index)], membranes[(t, *index)] = s, u
            v = u - alpha_ * step_ if s > 0 else u
    return levels, membranes


def lif_loop(x: np.ndarray[Any, Any], threshold: float, beta: float, alpha: float) -> np.ndarray[Any, Any]:
    """Spikes of Eqs. lif and bispiking: the reset is not decayed, the threshold is strict."""
    spikes = np.zeros(x.shape, np.int64)
    for index in np.ndindex(*x.shape[1:]):
        u, s = 0.0, 0
        for t in range(x.shape[0]):
            u = beta * u + float(x[(t, *index)]) - alpha * threshold * s
            s = int(u > threshold)
            spikes[(t, *index)] = s
    return spikes


def relsg_et(r: Tensor, n_max: int, tail: Tensor) -> Tensor:
    """Eq. surrogate_level, case by case."""
    low = 1 + tail * (torch.exp(r.clamp(max=1) - 1) - 1)
    high = n_max + tail * (1 - torch.exp(n_max - r.clamp(min=n_max)))
    return torch.where(r < 1, low, torch.where(r > n_max, high, r))


# the integer network of docs/explanation/integers.md, one number at a time, in Python's own integers -----------------------

Cells = dict[tuple[int, int, int], int]  # (channel, y, x) -> value


def integer_network(network: IntegerNetwork, image: np.ndarray[Any, Any]) -> tuple[list[int], list[dict[str, Cells]]]:
    """Logits and, by timestep and layer, the levels of one image [C, H, W] or sequence of frames [T, C, H, W]."""
    frames = [image] * network.timesteps if network.static else list(image)
    steps = [{INPUT: {index: int(frame[index]) for index in np.ndindex(*frame.shape)}} for frame in frames]
    for layer in network.layers:  # all timesteps: LM-HT mixes their currents before the first emission
        currents = _mixed(layer, [_currents(layer, levels) for levels in steps])
        membranes: dict[str, Cells] = {}
        for levels, current in zip(steps, currents, strict=True):
            levels[layer.name] = _fire(layer, current, membranes)
    logits = []
    for o in range(network.readout.shape[0]):
        total = int(network.readout.bias[o])
        for s in network.readout.synapses:
            total += sum(_current(s, _pool(s, levels[s.source]), o, 0, 0) for levels in steps)
        logits.append(total)
    return logits, steps


def _currents(layer: IntegerLayer, levels: dict[str, Cells]) -> Cells:
    read, out = {s.name: _pool(s, levels[s.source]) for s in layer.synapses}, {}
    for c, y, x in np.ndindex(*layer.shape):
        at = (c, y, x)
        out[at] = int(layer.bias[c] if layer.bias.ndim == 1 else layer.bias[at])
        for s in layer.synapses:
            out[at] += _current(s, read[s.name], c, y, x) << (layer.fraction if s.kind == "conv" else 0)
        assert abs(out[at]) < 2**30, "the proved bound does not hold"
    return out


def _mixed(layer: IntegerLayer, currents: list[Cells]) -> list[Cells]:
    assert layer.neuron is not None
    mixing = layer.neuron.mixing
    if mixing is None:
        return currents
    half = 1 << (mixing.bits - 1)
    return [
        {
            at: (sum(int(w) * c[at] for w, c in zip(row, currents, strict=True)) + half) >> mixing.bits
            for at in currents[0]
        }
        for row in mixing.weights
    ]


def _fire(layer: IntegerLayer, current: Cells, state: dict[str, Cells]) -> Cells:
    neuron, out = layer.neuron, {}
    assert neuron is not None
    before, delayed = state.get("v"), state.get("pending", {})
    v, pending = state["v"], state["pending"] = {}, {}
    for at, arriving in current.items():
        c, u = at[0], arriving
        if before is not None:
            m, k = neuron.leak or (1, 0)
            u += (before[at] * m + ((1 << k) >> 1)) >> k
        u -= delayed.get(at, 0)
        assert abs(u) < 2**30, "the proved bound does not hold"
        level = sum((abs(u) if neuron.signed else u) >= int(theta) for theta in neuron.thresholds[c])
        sign = -1 if neuron.signed and u < 0 else 1
        out[at] = sign * level
        drop = sign * int(neuron.reset[c]) * (level if neuron.reset_kind == "level" else min(level, 1))
        if neuron.reset_kind == "hard":
            v[at] = 0 if level else u
        elif neuron.decay_reset:
            v[at] = u - drop
        else:
            v[at], pending[at] = u, drop
    return out


def _current(s: Synapse, read: Cells, o: int, oy: int, ox: int) -> int:
    if s.kind == "identity":
        return int(s.weight[o]) * read[o, oy, ox]
    outputs, per_group, kh, kw = s.weight.shape
    first = o // (outputs // s.groups) * per_group
    total = 0
    for i, ky, kx in np.ndindex(per_group, kh, kw):
        y = oy * s.stride[0] + ky * s.dilation[0] - s.padding[0]
        x = ox * s.stride[1] + kx * s.dilation[1] - s.padding[1]
        total += int(s.weight[o, i, ky, kx]) * read.get((first + i, y, x), 0)
    return total


def _pool(s: Synapse, cells: Cells) -> Cells:
    for p in s.pools:
        channels, height, width = (1 + max(index[axis] for index in cells) for axis in range(3))
        out: Cells = {}
        for c, oy, ox in np.ndindex(p.output((channels, height, width))):
            window = [
                cells[c, y, x]
                for y in range(oy * p.stride[0] - p.padding[0], oy * p.stride[0] - p.padding[0] + p.kernel[0])
                for x in range(ox * p.stride[1] - p.padding[1], ox * p.stride[1] - p.padding[1] + p.kernel[1])
                if (c, y, x) in cells
            ]
            out[c, oy, ox] = max(window) if p.kind == "max" else sum(window)
        cells = out
    return cells
