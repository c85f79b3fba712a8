"""A whole network on a GPU: pieces of the batch, one after the other, each launched as one CUDA graph.

Every layer runs by the kernels of `fused`, or in PyTorch (`plain`) where they do not take it; the output says which and why.
Images are sent while the piece before them is computed, and logits are fetched once, at the end.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lbq.engine.attention import dense_products
from lbq.engine.convolution import Counts
from lbq.engine.cuda import plain, turn
from lbq.engine.execution import OnLevels
from lbq.engine.method import Choice
from lbq.engine.output import Output
from lbq.errors import LbqError
from lbq.graph import INPUT, Pool, Shape, Synapse
from lbq.graph.integer import IntegerLayer, IntegerNetwork
from lbq.graph.levels import Integers

if TYPE_CHECKING:
    from lbq.engine.cuda.fused import Field, FusedLayer

MOST_IMAGES = 1024  # of a piece
MOST_BYTES = 2**31 - 1  # of the levels of one layer: kernels count them in 32 bits
MATRIX_VALUES_PER_PIECE = 2**27  # of the matrices that PyTorch multiplies at a time


class GpuRunner:
    """The same results as `lbq.engine.runner.Runner`, by dense arithmetic.

    device: `cuda`, or `cpu` to look at the same arithmetic without a GPU. kernels: whether to use those of `fused`; by default
    on a GPU, where Triton is installed.
    """

    def __init__(self, network: IntegerNetwork, device: str, kernels: bool | None = None) -> None:
        if device == "cuda" and not torch.cuda.is_available():
            raise LbqError("engine cuda needs a GPU that PyTorch can use: choose auto, dense or bitplane")
        self.network, self.device = network, torch.device(device)
        installed = device == "cuda" and importlib.util.find_spec("triton") is not None
        self.kernels = installed if kernels is None else kernels
        self.reasons = {layer.name: self._refused(layer) for layer in network.layers}
        self.layers: dict[str, FusedLayer | plain.PlainLayer] = {
            layer.name: self._prepared(layer) for layer in network.layers
        }
        self.heads = {s.name: plain.matrices(s, self.device).double() for s in network.readout.convs}
        self.bias = plain.on(self.device, network.readout.bias)
        self.images_per_piece = self._images_per_piece()
        self.pieces: dict[int, _Piece] = {}
        self.running = False
        self.choices = {s.name: self._choice(layer, s) for layer in network.all_layers for s in layer.synapses}
        self.choices |= {gate.name: Choice("torch", "dense", f"dense on {device}") for gate in network.gates}
        self.products = {s.name: self._passes(s) * s.valid_macs for s in network.synapses}  # of an image
        for layer in network.layers:
            self.products |= {s.name: network.timesteps * dense_products(s) for s in layer.matmuls}
        self.products |= {gate.name: network.timesteps * math.prod(gate.shape) for gate in network.gates}

    def _refused(self, layer: IntegerLayer) -> str | None:
        if not self.kernels:
            return "they need a GPU and the package triton"
        from lbq.engine.cuda.fused import refused

        return refused(self.network, layer)

    def _prepared(self, layer: IntegerLayer) -> FusedLayer | plain.PlainLayer:
        if self.reasons[layer.name] is not None:
            return plain.PlainLayer(self.network, layer, self.device)
        from lbq.engine.cuda.fused import FusedLayer

        return FusedLayer(self.network, layer, self.device)

    def _images_per_piece(self) -> int:
        net = self.network
        slow = [s for layer in net.layers if self.reasons[layer.name] for s in layer.convs]
        matrices = [s.weight[0].size * s.groups * s.out_shape[1] * s.out_shape[2] for s in (*slow, *net.readout.convs)]
        most = min(MOST_IMAGES, MATRIX_VALUES_PER_PIECE // (max(matrices, default=1) * net.timesteps))
        border = 2 * max((max(s.padding) for s in net.synapses), default=0)
        shapes = (net.input_shape, *(layer.shape for layer in net.layers))
        sizes = [net.timesteps * (c + 31) * (h + border) * (w + border) for c, h, w in shapes]  # channels are filled up
        most = min(most, MOST_BYTES // max(sizes))
        if self.device.type == "cuda":  # at most half of what is free, as if no memory were used again
            most = min(most, torch.cuda.mem_get_info(self.device)[0] // (2 * sum(sizes)))
        return max(most, 1)

    @torch.no_grad()
    def run(
        self, x: NDArray[np.uint8], trace: bool | OnLevels = False, progress: Callable[[int], None] | None = None
    ) -> Output:
        """Inputs `[B, C, H, W]`, or `[T, B, C, H, W]` for events; trace as for the `Runner`. Threads take turns."""
        with turn, plain.tf32(self.device):
            if self.running:  # this thread's own: no other has the turn
                raise LbqError("a function that is called during a run on a GPU cannot run the same network there")
            self.running = True
            try:
                return self._run(x, trace, progress)
            finally:
                self.running = False

    def _run(self, x: NDArray[np.uint8], trace: bool | OnLevels, progress: Callable[[int], None] | None) -> Output:
        net, axis = self.network, 0 if self.network.static else 1
        images = x.shape[axis]
        logits: list[Tensor] = []
        traced: dict[str, list[Integers]] = {layer.name: [] for layer in net.layers}
        on_levels: Any = (lambda name, levels: traced[name].append(levels)) if trace is True else trace or None
        for start in range(0, images, self.images_per_piece):
            part = slice(start, min(start + self.images_per_piece, images))
            pixels = x[part] if net.static else x[:, part]
            size = min(1 << (part.stop - start - 1).bit_length(), self.images_per_piece)
            if size not in self.pieces:
                self.pieces[size] = _Piece(self, size)
            logits.append(self.pieces[size].run(pixels, on_levels))
            if progress is not None:
                progress(part.stop - start)
        counts = {name: Counts(products=images * products) for name, products in self.products.items()}
        levels = {name: np.concatenate(parts, axis=1) for name, parts in traced.items()} if trace is True else None
        return Output(torch.cat(logits).cpu().numpy(), net.scale, counts, dict(self.choices), levels)

    def _choice(self, layer: IntegerLayer, synapse: Synapse) -> Choice:
        where = f"dense on {self.device.type}"
        if layer.neuron is None or (reason := self.reasons[layer.name]) is not None:
            why = where if layer.neuron is None else f"{where}; not by the kernels: {reason}"
            return Choice("torch", "dense", why)
        return Choice("triton", "dense", where if synapse.kind == "conv" else f"{where}, with the neuron")

    def _passes(self, synapse: Synapse) -> int:
        """How often an image meets the weights: once in the readout, which reads sums over time, and on a static image."""
        net = self.network
        once = synapse.name in (s.name for s in net.readout.synapses) or (net.static and synapse.source == INPUT)
        return 1 if once else net.timesteps


Key = tuple[str, tuple[Pool, ...]]  # what is read: a source, and what pools make of it


@dataclass
class _Levels:
    """Levels in the form that was computed. The other form is made where it is asked for."""

    field: Field | None = None
    tensor: Tensor | None = None  # int32 [T * B, C, H, W]; pixels are uint8

    def plain(self) -> Tensor:
        if self.tensor is None:
            assert self.field is not None
            self.tensor = self.field.plain()
        return self.tensor


class _Piece:
    """Memory for so many images, and the CUDA graph that computes them there."""

    def __init__(self, runner: GpuRunner, images: int) -> None:
        self.runner, self.network, self.device, self.images = runner, runner.network, runner.device, images
        net = self.network
        lead = (images,) if net.static else (net.timesteps, images)
        self.pixels = torch.zeros((*lead, *net.input_shape), dtype=torch.uint8, device=self.device)
        self.borders, self.last_reader = self._borders(), self._last_readers()
        self.fields: dict[Key, Field] = {}
        self.made: dict[Key, _Levels] = {}
        self.graph: Any = None
        self.staged: list[tuple[Tensor, Any]] = []  # memory that the GPU reads by itself, and when it has

    def _borders(self) -> dict[Key, int]:
        """The border that the kernels want around what they read."""
        borders: dict[Key, int] = {}
        for layer in self.network.layers:
            for s in layer.convs if self.runner.reasons[layer.name] is None else ():
                borders[s.source, s.pools] = max(borders.get((s.source, s.pools), 0), *s.padding)
        return borders

    def _last_readers(self) -> dict[str, int]:
        """For each source, the number of the last layer that reads it, or behind which a gate does."""
        last: dict[str, int] = {}
        for number, layer in enumerate(self.network.all_layers):
            last |= {source: number for s in layer.synapses for source in s.sources}
            last |= {operand: number for gate in self.network.gates_behind(layer.name) for operand in gate.operands}
        return last

    def run(self, x: NDArray[np.uint8], on_levels: OnLevels | None) -> Tensor:
        """Logits `[B, classes]`, on the device."""
        count = x.shape[0 if self.network.static else 1]
        self._send(x)
        if on_levels is not None or self.device.type != "cuda":
            return self._compute(count, on_levels)[:count]
        if self.graph is None:
            self._record()
        self.graph.replay()
        return self.logits[:count].clone()

    def _record(self) -> None:
        """Run once, so that everything is compiled and in memory. Then record."""
        stream, main = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            self._compute(0, None)
        main.wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.logits = self._compute(0, None)
        self.graph = graph

    def _send(self, x: NDArray[np.uint8]) -> None:
        target = self.pixels[: x.shape[0]] if self.network.static else self.pixels[:, : x.shape[1]]
        source = torch.from_numpy(np.ascontiguousarray(x))
        if self.device.type != "cuda":
            target.copy_(source)
            return
        if len(self.staged) < 2:  # one is filled while the other is read
            self.staged.append((torch.empty(self.pixels.shape, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()))
        memory, sent = self.staged.pop(0)
        sent.synchronize()
        staged = memory.flatten()[: source.numel()].view(source.shape)
        staged.copy_(source)
        target.copy_(staged, non_blocking=True)
        sent.record()
        self.staged.append((memory, sent))

    # The layers

    def _compute(self, count: int, on_levels: OnLevels | None) -> Tensor:
        """Logits of all images of the piece. The levels of `count` images are shown."""
        net, self.made = self.network, {}
        for number, layer in enumerate(net.layers):
            prepared = self.runner.layers[layer.name]
            if isinstance(prepared, plain.PlainLayer):
                read = {s.name: [self._levels(source, s.pools).plain() for source in s.sources] for s in layer.synapses}
                levels = _Levels(tensor=prepared.run(read, self.images))
            else:
                fields = {s.name: self._field(s.source, s.pools) for s in layer.synapses}
                out = self._memory((layer.name, ()), layer.shape)
                prepared.run(fields, out)
                levels = _Levels(field=out)
            self.made[layer.name, ()] = levels
            for gate in net.gates_behind(layer.name):
                operands = (self.made[operand, ()].plain() for operand in gate.operands)
                self.made[gate.name, ()] = _Levels(tensor=plain.gated(*operands))
            if on_levels is not None and layer.neuron is not None:
                shown = levels.plain().reshape(net.timesteps, self.images, *layer.shape)[:, :count]
                kind = torch.int8 if layer.neuron.signed else torch.uint8
                on_levels(layer.name, shown.to(kind).cpu().numpy())
            self.made = {key: value for key, value in self.made.items() if self.last_reader.get(key[0], -1) > number}
        return self._readout()

    def _memory(self, key: Key, shape: Shape) -> Field:
        """Memory for levels in the form of the kernels: the one of before, or one that nobody reads any more."""
        from lbq.engine.cuda.fused import PIXEL_OFFSET, Field

        if key in self.fields:
            return self.fields[key]
        is_input, border = key[0] == INPUT, self.borders.get(key, 0)
        in_use = [id(levels.field) for levels in self.made.values()]
        for other, field in self.fields.items():
            if (
                not is_input
                and other[0] != INPUT
                and (field.shape, field.border) == (shape, border)
                and id(field) not in in_use
            ):
                self.fields[key] = field
                return field
        steps = self.network.frames if is_input else self.network.timesteps
        fill = -PIXEL_OFFSET if is_input else 0
        self.fields[key] = Field.empty(shape, border, steps, self.images, fill, self.device)
        return self.fields[key]

    def _levels(self, source: str, pools: tuple[Pool, ...]) -> _Levels:
        if (source, pools) not in self.made:
            if source == INPUT:
                self.made[INPUT, ()] = _Levels(tensor=self.pixels.reshape(-1, *self.network.input_shape))
            else:
                self.made[source, pools] = self._pooled(source, pools)
        return self.made[source, pools]

    def _pooled(self, source: str, pools: tuple[Pool, ...]) -> _Levels:
        before = self._levels(source, pools[:-1])
        if before.field is None or (source, pools) not in self.borders or pools[-1].channels > 1:
            return _Levels(tensor=plain.pooled(before.plain(), pools[-1:]))
        from lbq.engine.cuda.fused import pool_into

        out = self._memory((source, pools), pools[-1].output(before.field.shape))
        pool_into(before.field, pools[-1], out)
        return _Levels(field=out)

    def _field(self, source: str, pools: tuple[Pool, ...]) -> Field:
        """What a synapse reads, in the form of the kernels."""
        levels = self._levels(source, pools)
        if levels.field is None:
            tensor = levels.plain()
            levels.field = self._memory((source, pools), tuple(tensor.shape[1:]))  # type: ignore[arg-type]
            levels.field.take(tensor if source != INPUT else (tensor ^ 128).view(torch.int8))  # pixel - 128
        return levels.field

    def _readout(self) -> Tensor:
        net = self.network
        logits = self.runner.bias.expand(self.images, -1)
        for s in net.readout.synapses:
            summed = self._summed(s)
            if s.kind == "identity":
                logits = logits + summed[:, :, 0, 0].long() * plain.on(self.device, s.weight)
            else:
                sums = plain.convolve(s, self.runner.heads[s.name], summed)  # in float64, below 2^53: exact
                logits = logits + sums.reshape(self.images, -1).round().long()
        return logits

    def _summed(self, synapse: Synapse) -> Tensor:
        """What the readout reads: pooled levels, added up over time."""
        source, pools = synapse.source, synapse.pools
        field = self._levels(source, ()).field
        over_windows = len(pools) == 1 and pools[0].kind == "sum" and pools[0].channels == 1
        if field is not None and over_windows and pools[0].kernel == field.shape[1:]:
            from lbq.engine.cuda.fused import sum_of

            return sum_of(field)[:, :, None, None]
        read = self._levels(source, pools).plain()
        return read.reshape(self.network.timesteps, self.images, *read.shape[1:]).sum(0)
