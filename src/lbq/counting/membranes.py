"""What a deployed network's membranes did: histograms of all layers, and a few neurons' traces. No torch."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from lbq.counting.analysis import Membrane, Trace, typical_units
from lbq.engine.neuron import count_thresholds
from lbq.engine.steps import histogram
from lbq.graph.integer import MOST_STEPS_UP, IntegerNetwork, rounded_leak
from lbq.native import library


class Membranes:
    """`add` is a callback of `Network.watch`. layers: histograms, in units of each channel's step."""

    def __init__(self, network: IntegerNetwork) -> None:
        self.network = network
        self.layers: dict[str, Membrane] = {}
        self._steps: dict[str, NDArray[np.float64]] = {}
        self._traced = network.layers[len(network.layers) // 2].name
        self._seen: list[NDArray[np.int32]] = []  # the traced layer's membranes of the first image, by timestep

    def add(self, name: str, timestep: int, u: NDArray[np.int32]) -> None:
        if name not in self.layers:
            spec = self.network.spec(name)
            thresholds, step = spec.thresholds.astype(np.float64), spec.steps
            reached = np.isfinite(step)  # not where a channel has no inputs
            ratios = thresholds[0] / 1e9
            if reached.any():
                ratios = np.median(thresholds[reached] / step[reached, None], axis=0)
            begins = [min(round(float(r), 3), MOST_STEPS_UP) for r in ratios]
            self.layers[name] = Membrane.empty(self.network.timesteps, begins)
            self._steps[name] = step
        membrane, step = self.layers[name], self._steps[name]
        if library() is None:
            membrane.add(timestep, u / step)
        else:
            bins = membrane.counts.shape[1]
            membrane.counts[timestep] += histogram(u, step, Membrane.LOW, Membrane.WIDTH, bins)
        if name == self._traced and len(self._seen) < self.network.timesteps:
            self._seen.append(u[0].copy())

    def traces(self) -> list[Trace]:
        """A few neurons of the middle layer on the first watched image, in the trained network's units."""
        if len(self._seen) < self.network.timesteps:
            return []
        layer, spec = self.network[self._traced], self.network.spec(self._traced)
        positions = math.prod(layer.shape[1:])
        before = np.stack(self._seen)  # [T, H, W, C]
        levels = np.stack([count_thresholds(u, spec.thresholds, spec.signed) for u in before]).astype(np.int64)
        drop = spec.reset * (levels if spec.reset_kind == "level" else np.sign(levels))
        after = np.where(levels != 0, 0, before) if spec.reset_kind == "hard" else before - drop
        # where the reset is delayed, the drop comes after the leak
        leaking = after if spec.decay_reset or spec.reset_kind == "hard" else before
        carried = leaking.astype(np.int64) if spec.leak is None else rounded_leak(leaking.astype(np.int64), spec.leak)
        carried = carried - (leaking - after)
        current = before - np.concatenate([np.zeros_like(carried[:1]), carried[:-1]])

        def flat(values: NDArray[np.integer]) -> NDArray[np.int64]:
            return values.transpose(0, 3, 1, 2).reshape(len(values), -1).astype(np.int64)  # units as in [C, H, W]

        unit_levels, traces = flat(levels), []
        for unit in typical_units(unit_levels):
            channel = unit // positions
            worth = float(layer.unit[channel]) / 2.0**layer.fraction
            step = float(spec.steps[channel])
            currents, befores, afters = (tuple(map(float, worth * flat(v)[:, unit])) for v in (current, before, after))
            traces.append(
                Trace(
                    layer=layer.name,
                    unit=unit,
                    step=step * worth,
                    n_max=spec.n_max,
                    leak=1.0 if spec.leak is None else spec.leak[0] / 2.0 ** spec.leak[1],
                    alpha=float(spec.reset[channel]) / step,
                    current=currents,
                    before=befores,
                    levels=tuple(map(int, unit_levels[:, unit])),
                    after=afters,
                )
            )
        return traces
