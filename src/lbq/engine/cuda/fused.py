"""Layers as the kernels of `tiles` take them: which they take, their weights packed, and how a launch is cut into programs."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lbq.engine.cuda import tiles
from lbq.engine.cuda.plain import on
from lbq.graph import INPUT, Pool, Shape, Synapse
from lbq.graph.integer import MEMBRANE_BOUND, IntegerLayer, IntegerNetwork

PIXEL_OFFSET = 128  # pixels lie as pixel - 128, which fits a signed byte
MOST_LEVEL = 127  # of a signed byte
CHANNEL_STEP = 32  # of the sums that matrix units take at a time
PROGRAMS_WANTED = 128  # about as many as a large GPU has processors


def filled(channels: int) -> int:
    """Channels as they lie in memory."""
    return -(-channels // CHANNEL_STEP) * CHANNEL_STEP


class Field(NamedTuple):
    """Levels `[T, B, height, width, channels]`, int8, with a border around them. inside: the same without the border."""

    whole: Tensor
    border: int
    shape: Shape

    @classmethod
    def empty(cls, shape: Shape, border: int, timesteps: int, images: int, fill: int, device: torch.device) -> Field:
        channels, height, width = shape
        size = timesteps, images, height + 2 * border, width + 2 * border, filled(channels)
        return cls(torch.full(size, fill, dtype=torch.int8, device=device), border, shape)

    @property
    def inside(self) -> Tensor:
        _, height, width = self.shape
        return self.whole[:, :, self.border : self.border + height, self.border : self.border + width]

    def first_tap(self, padding: tuple[int, int]) -> Tensor:
        return self.whole[:, :, self.border - padding[0] :, self.border - padding[1] :]

    @property
    def row(self) -> int:
        return self.whole.stride(2)

    def plain(self) -> Tensor:
        """int32 `[T * B, C, H, W]`."""
        channels = self.shape[0]
        return self.inside[..., :channels].permute(0, 1, 4, 2, 3).flatten(0, 1).int()

    def take(self, levels: Tensor) -> None:
        """Copy levels `[T * B, C, H, W]` into it."""
        steps, images = self.whole.shape[:2]
        channels = self.shape[0]
        self.inside[..., :channels].copy_(levels.reshape(steps, images, *self.shape).permute(0, 1, 3, 4, 2))


def refused(network: IntegerNetwork, layer: IntegerLayer) -> str | None:
    """Why the kernels do not take a layer, or None."""
    neuron = layer.neuron
    assert neuron is not None
    inputs = [s for s in layer.synapses if s.source == INPUT]
    if layer.matmuls:
        return "a product of levels with levels"
    if not 1 <= len(layer.convs) <= 2 or len(layer.identities) > 1:
        return "more than two convolutions, or more than one shortcut"
    if neuron.mixing is not None:
        return "timesteps mixed"
    if neuron.n_max > MOST_LEVEL:
        return f"levels above {MOST_LEVEL}"
    if inputs and network.static and len(layer.synapses) > 1:
        return "an image beside levels"
    for s in layer.synapses:
        if s.kind == "conv" and (s.groups != 1 or s.dilation != (1, 1)):
            return "grouped or dilated"
        if s.weight.dtype == np.int16:
            return "16-bit weights"
        if s.source != INPUT and network.largest(s) > MOST_LEVEL:
            return f"pooled sums above {MOST_LEVEL}"
        if s.kind == "identity" and s.pools:
            return "a pooled shortcut"
    return None


class Tile(NamedTuple):
    """Positions and channels of a program, its warps, and how many steps of its sums are on their way at a time."""

    positions: int
    channels: int
    warps: int
    stages: int


def tile_for(positions: int, channels: int) -> Tile:
    """The largest tile that leaves work for all processors; smaller ones where there are few positions."""
    wide = 64 if channels % 64 == 0 else 32
    for tile in (Tile(128, wide, 4, 4), Tile(64, wide, 4, 4), Tile(32, wide, 4, 4)):
        if -(-positions // tile.positions) * (channels // tile.channels) >= PROGRAMS_WANTED:
            return tile
    return Tile(32, 32, 4, 4)


def depth_for(channels: int) -> int:
    """How many products a step of the sum takes."""
    return next(depth for depth in (128, 64, 32) if channels % depth == 0)


class FusedLayer:
    """A layer with its constants on the device. `run` launches it."""

    def __init__(self, network: IntegerNetwork, layer: IntegerLayer, device: torch.device) -> None:
        assert layer.neuron is not None
        self.layer, self.timesteps = layer, network.timesteps
        neuron, channels = layer.neuron, filled(layer.shape[0])
        self.static = network.static and any(s.source == INPUT for s in layer.convs)
        bias = layer.bias.astype(np.int64)
        for s in layer.convs:
            if s.source == INPUT:
                raised = (PIXEL_OFFSET * s.weight.astype(np.int64).sum((1, 2, 3))) << layer.fraction
                bias = bias + raised.reshape(-1, *[1] * (bias.ndim - 1))
        wrapped = bias.astype(np.int32)  # sums are modulo 2^32, and what they come to is proved to fit
        self.bias_map = wrapped.ndim == 3
        rows = wrapped.reshape(len(wrapped), -1).T if self.bias_map else wrapped
        self.bias = on(device, _widened(rows, channels))
        self.thresholds = on(device, _widened(neuron.thresholds.T, channels, MEMBRANE_BOUND))
        self.reset = on(device, _widened(neuron.reset, channels))
        self.weights = [on(device, _packed(s, channels)) for s in layer.convs]
        self.shortcuts = [on(device, _widened(s.weight, channels)) for s in layer.identities]
        leak_m, leak_k = neuron.leak or (1, 0)
        self.constants: dict[str, Any] = {
            "T": network.timesteps,
            "HO": layer.shape[1],
            "WO": layer.shape[2],
            "O": channels,
            "CONVS": len(layer.convs),
            "SHORTCUT": bool(layer.identities),
            "STATIC": self.static,
            "BIAS_MAP": self.bias_map,
            "FRACTION": layer.fraction,
            "N": neuron.n_max,
            "SIGNED": neuron.signed,
            "RESET": neuron.reset_kind,
            "DECAY": neuron.decay_reset,
            "LEAK_M": leak_m,
            "LEAK_K": leak_k,
        }
        for i, s in enumerate((layer.convs * 2)[:2]):
            self.constants |= {
                f"C_{i}": filled(s.in_shape[0]),
                f"KH_{i}": s.weight.shape[2],
                f"KW_{i}": s.weight.shape[3],
                f"SY_{i}": s.stride[0],
                f"SX_{i}": s.stride[1],
                f"BK_{i}": depth_for(filled(s.in_shape[0])),
            }

    def run(self, fields: dict[str, Field], out: Field) -> None:
        """fields: what each synapse reads, by its name."""
        layer = self.layer
        images = out.whole.shape[1]
        convs = [(fields[s.name], s, w) for s, w in zip(layer.convs, self.weights, strict=True)]
        read: list[Any] = []
        strides: list[int] = []
        rows: dict[str, int] = {}
        for i, (field, synapse, weights) in enumerate((convs * 2)[:2]):
            first = field.first_tap(synapse.padding)
            read += [first, weights]
            strides += [first.stride(0), first.stride(1)]
            rows[f"ROW_{i}"] = field.row
        shortcut = fields[layer.identities[0].name] if layer.identities else out
        positions = images * layer.shape[1] * layer.shape[2]
        tile = tile_for(positions, self.constants["O"])
        grid = (-(-positions // tile.positions) * (self.constants["O"] // tile.channels),)
        with _on_device(out.whole):
            tiles.conv_fire[grid](
                *read,
                shortcut.inside,
                self.shortcuts[0] if self.shortcuts else self.reset,
                self.bias,
                self.thresholds,
                self.reset,
                out.inside,
                images,
                *strides,
                shortcut.whole.stride(0),
                shortcut.whole.stride(1),
                out.whole.stride(0),
                out.whole.stride(1),
                SHORTCUT_ROW=shortcut.row,
                OUT_ROW=out.row,
                BM=tile.positions,
                BN=tile.channels,
                num_warps=tile.warps,
                num_stages=tile.stages,
                **rows,
                **self.constants,
            )


def pool_into(source: Field, pool: Pool, out: Field) -> None:
    steps, images = out.whole.shape[:2]
    channels, height, width = out.shape
    total, wide = steps * images * height * width, min(filled(channels), 128)
    wide = math.gcd(filled(channels), wide)
    with _on_device(out.whole):
        tiles.pooled[(-(-total // 32), filled(channels) // wide)](
            source.inside,
            out.inside,
            total,
            source.whole.stride(0),
            source.whole.stride(1),
            out.whole.stride(0),
            out.whole.stride(1),
            images,
            *source.shape[1:],
            height,
            width,
            *pool.kernel,
            *pool.stride,
            *pool.padding,
            ROW=source.row,
            OUT_ROW=out.row,
            C=filled(channels),
            MAX=pool.kind == "max",
            BM=32,
            BC=wide,
        )


def sum_of(field: Field) -> Tensor:
    """int32 `[B, C]`: its levels over all positions and timesteps."""
    steps, images = field.whole.shape[:2]
    channels, height, width = field.shape
    wide = math.gcd(filled(channels), 128)
    out = torch.empty((images, filled(channels)), dtype=torch.int32, device=field.whole.device)
    with _on_device(out):
        tiles.summed[(images, filled(channels) // wide)](
            field.inside,
            out,
            field.whole.stride(0),
            field.whole.stride(1),
            T=steps,
            H=height,
            W=width,
            ROW=field.row,
            C=filled(channels),
            BC=wide,
            BP=16,
        )
    return out[:, :channels]


def _widened(array: NDArray[Any], channels: int, fill: int = 0) -> NDArray[Any]:
    """The last axis filled up to so many channels."""
    out = np.full((*array.shape[:-1], channels), fill, array.dtype)
    out[..., : array.shape[-1]] = array
    return out


def _packed(synapse: Synapse, channels: int) -> NDArray[np.int8]:
    """`[taps, outputs, inputs]`, both filled up with zeros."""
    outputs, inputs, height, width = synapse.weight.shape
    packed = np.zeros((height * width, channels, filled(inputs)), np.int8)
    packed[:, :outputs, :inputs] = synapse.weight.transpose(2, 3, 0, 1).reshape(-1, outputs, inputs)
    return packed


def _on_device(x: Tensor) -> AbstractContextManager[Any]:
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
