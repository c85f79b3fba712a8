"""What the neurons of any network do, whether or not it can be deployed: `lbq.statistics(net, batches)`.

Neurons are watched while the network runs, on its own device. Convolutions, also transposed ones, and linear layers are
counted where what they read is a neuron's output as it is, that is the same part of the same storage. All others, and other
modules with weights, are named, and not guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import product
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.weak import WeakIdKeyDictionary

from lbq.counting.analysis import Analysis, LayerAnalysis
from lbq.counting.operations import Count, activity_of, saved
from lbq.counting.products import as_counts, worths
from lbq.deploy.lowering.faithful import unwrapped
from lbq.errors import LbqError
from lbq.kernels import counting
from lbq.kernels.memory import is_dense
from lbq.kernels.reference import BurstState, compute_dtype
from lbq.measuring.observer import scale_of, tells_levels, watching
from lbq.neuron.base import SpikingNeuron, neurons_of
from lbq.neuron.baselines import MLF
from lbq.neuron.hooks import attached, evaluating
from lbq.training.evaluation import neuron_tails

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)
# methods that no hook sees, and their implementations whose outputs are levels, worth a scale each
PARTIAL_METHODS = {
    "forward_step": (SpikingNeuron.forward_step, MLF.forward_step),
    "forward_chunk": (SpikingNeuron.forward_chunk, MLF.forward_chunk),
}


@dataclass(frozen=True)
class Statistics:
    """layers: the neurons that ran, in the order of their first calls. synapses: the layers that read a neuron's output as it
    is, with their counts over all samples, rate x MACs. others: layers that also, or only, read something else, and the MACs
    of that. idle: neurons that did not run. samples: how many there were; None where neurons saw batches of several sizes.
    unknown: other modules that ran and hold weights of their own, with their types: nothing is known of their MACs.

    `print` gives tables. Products of tensors, as in attention, and functions of torch.nn.functional are not seen.
    """

    layers: tuple[LayerAnalysis, ...]
    synapses: dict[str, Count]
    others: dict[str, float]
    idle: tuple[str, ...]
    samples: int | None
    unknown: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> LayerAnalysis:
        return {layer.name: layer for layer in self.layers}[name]

    @property
    def total(self) -> Count:
        """Of all synapses."""
        return sum(self.synapses.values(), Count())

    @property
    def analysis(self) -> Analysis:
        """The neurons as `lbq analyze` gives them, for its `summary()`, `table()` and `csv()`."""
        return Analysis(self.samples or 0, False, None, {"kind": "network"}, self.layers)

    def __str__(self) -> str:
        return "\n".join([*_neuron_lines(self), "", *_synapse_lines(self)])


@torch.no_grad()
def statistics(net: nn.Module, batches: Iterable[Any]) -> Statistics:
    """How the neurons of `net` use their levels over `batches`, and what the layers that read them add up.

    batches: inputs, or tuples that begin with them, such as (inputs, labels); they are taken to the network's device. It runs
    in evaluation mode and without gradients; modes, hooks and random numbers are afterwards as they were.
    """
    if isinstance(batches, Tensor | np.ndarray):
        raise LbqError("batches must be a list or a loader of batches, got one tensor or array: give [inputs]")
    if not isinstance(batches, Iterable):
        raise LbqError(f"batches must be a list or a loader of batches, got {type(batches).__name__}: give [inputs]")
    net = unwrapped(net)
    devices = {tensor.device for tensor in (*net.parameters(), *net.buffers())}
    watch = _Watch(net)
    unmoved = torch.random.fork_rng([d for d in devices if d.type == "cuda"])
    with watch.watching(), evaluating(net), unmoved, _eager(net):
        for batch in batches:
            if isinstance(batch, Mapping):
                raise LbqError(f"a batch must be inputs or a tuple that begins with them, got a {type(batch).__name__}")
            x = batch[0] if isinstance(batch, tuple | list) and batch else batch
            if isinstance(x, np.ndarray):
                raise LbqError("a batch must begin with a tensor, got an array: give torch.from_numpy(inputs)")
            net(x.to(next(iter(devices))) if isinstance(x, Tensor) and len(devices) == 1 else x)
            watch.end_pass()
    return watch.result()


def _eager(net: nn.Module) -> AbstractContextManager[Any]:
    """Run what torch.compile has compiled as it was written: compiled code does not call hooks."""
    compiled = any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in net.modules())
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


@dataclass
class _Watch:
    """Counts while `net` runs. In arrays of counts the last axis is the level. Storages are keys for as long as they live."""

    net: nn.Module
    counts: dict[str, NDArray[np.int64]] = field(default_factory=dict)  # by neuron and timestep
    ended: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)  # by states' storages: timesteps so far
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    synapses: dict[str, Count] = field(default_factory=dict)
    others: dict[str, float] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    # of neurons in this pass, by storage: which part of it an output is, and how often each level is in it
    outputs: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)
    sizes: set[int] = field(default_factory=set)  # of the batches that neurons saw in this pass
    samples: int | None = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        readers = []
        for name, module in self.net.named_modules():
            if any(type(module).forward is kind.forward for kind in WEIGHTED):
                readers.append(module.register_forward_hook(self._reader(name), with_kwargs=True))
            elif _holds_weights(module):
                readers.append(module.register_forward_hook(self._stranger(name)))
        with attached(readers), watching(self.net, self._called), ExitStack() as stack:
            for (name, neuron), method in product(neurons_of(self.net).items(), PARTIAL_METHODS):
                if getattr(type(neuron), method) in PARTIAL_METHODS[method] and method not in vars(neuron):
                    setattr(neuron, method, self._partial(method, name, neuron))
                    stack.callback(delattr, neuron, method)
            yield

    def _called(self, name: str, neuron: SpikingNeuron, x: Tensor, output: Tensor) -> None:
        if tells_levels(neuron):
            self._emitted(name, neuron, output, scale_of(neuron), output)
        else:
            self._emitted(name, neuron, neuron.levels(x), output.new_ones((), dtype=torch.float32), output)

    def _partial(self, method: str, name: str, neuron: SpikingNeuron) -> Callable[..., Any]:
        """The same method for a part of a sequence, with its calls counted. With a state, a sequence goes on."""
        plain = getattr(neuron, method)

        def part(x: Tensor, state: BurstState | None = None) -> tuple[Tensor, BurstState | None]:
            exact, after = plain(x.to(compute_dtype(x)) if x.is_floating_point() else x, state)
            output, steps = exact.to(x.dtype), exact[None] if method == "forward_step" else exact
            begin = 0 if state is None else self.ended.get(state.v.untyped_storage(), 0)
            self._emitted(name, neuron, steps, scale_of(neuron), output, begin)
            if after is not None:
                self.ended[after.v.untyped_storage()] = begin + len(steps)
            return output, after

        return part

    def _emitted(
        self, name: str, neuron: SpikingNeuron, x: Tensor, scale: Tensor, output: Tensor, begin: int = 0
    ) -> None:
        """x: `[T, B, ...]` from timestep `begin` on, worth `scale` a level; output: the tensor that others may read."""
        if x.isnan().any():
            raise LbqError(f"neuron {name!r} puts out NaN, which has no level: look at its inputs and its weights")
        counts = _by_timestep(x, scale, neuron.n_max)
        self.counts[name] = _added(self.counts.get(name, counts[:0]), counts, begin)
        self.shapes[name] = tuple(x.shape[2:])
        self.sizes.add(x.shape[1])
        self.outputs[output.untyped_storage()] = _place(output), counts.sum(0)

    def _reader(self, name: str) -> Callable[..., None]:
        def read(module: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor], output: Tensor) -> None:
            x = inputs[0] if inputs else named["input"]
            weight, numbers = cast(Tensor, module.weight), x if isinstance(module, TRANSPOSED) else output
            macs = float(numbers.numel() * weight[0].numel())
            place, by_level = self.outputs.get(x.untyped_storage(), (None, None))
            if place != _place(x):
                self.others[name] = self.others.get(name, 0.0) + macs
            else:
                self.synapses[name] = self.synapses.get(name, Count()) + _count(by_level, macs)

        return read

    def _stranger(self, name: str) -> Callable[..., None]:
        def ran(module: nn.Module, *_: Any) -> None:
            self.unknown[name] = type(module).__name__

        return ran

    def end_pass(self) -> None:
        """After each batch: it had one size, or it is not known."""
        known = self.samples is not None and len(self.sizes) == 1
        self.samples = (self.samples or 0) + next(iter(self.sizes)) if known else None
        self.outputs.clear()
        self.sizes.clear()

    def result(self) -> Statistics:
        neurons, tails = neurons_of(self.net), neuron_tails(self.net)
        if not self.counts:
            raise LbqError("no neuron of lbq.neuron ran: give a network that has some, and at least one batch")
        if self.samples == 0:
            raise LbqError("the batches hold no samples: give some")
        layers = []
        for name, levels in self.counts.items():
            step = neurons[name].step.double()
            ends = (float(step.min()), float(step.max())) if step.numel() > 1 else None
            shape, n_max = self.shapes[name], neurons[name].n_max
            layers.append(LayerAnalysis(name, shape, n_max, float(step.mean()), ends, tails.get(name), levels))
        idle = tuple(name for name in neurons if name not in self.counts)
        return Statistics(tuple(layers), self.synapses, self.others, idle, self.samples, self.unknown)


def _holds_weights(module: nn.Module) -> bool:
    """Of its own. What parametrises a layer's weight is a part of that layer."""
    if isinstance(module, SpikingNeuron | ParametrizationList):
        return False
    return any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))


def _by_timestep(x: Tensor, scale: Tensor, n_max: int) -> NDArray[np.int64]:
    """How often each magnitude 0..n_max of x / scale occurs at each timestep of `x` [T, B, ...]."""
    while x.dim() < 5:
        x = x.unsqueeze(-1)
    x = x.flatten(4)
    counts = torch.zeros(len(x), math.prod(x.shape[3:]), n_max + 1, dtype=torch.int64, device=x.device)
    counting.tally(x, scale, counts)
    by_timestep: NDArray[np.int64] = counts.sum(1).cpu().numpy()
    by_timestep[:, 0] = math.prod(x.shape[1:]) - by_timestep[:, 1:].sum(1)
    return by_timestep


def _added(counts: NDArray[np.int64], part: NDArray[np.int64], begin: int) -> NDArray[np.int64]:
    """Counts by timestep with those of a part from timestep `begin` on, filled up where they end before."""
    end = begin + len(part)
    out = np.zeros((max(len(counts), end), counts.shape[1]), np.int64)
    out[: len(counts)] = counts
    out[begin:end] += part
    return out


def _count(by_level: NDArray[np.int64], macs: float) -> Count:
    """Of a layer with so many MACs: each as much as the mean over what it reads."""
    shares = by_level / max(int(by_level.sum()), 1)
    each = as_counts(worths(np.arange(len(shares))))
    return Count(macs=macs, **{kind: float(shares @ worth) * macs for kind, worth in each.items()})


def _place(x: Tensor) -> tuple[Any, ...]:
    """The same for two views of one storage where they have the same values, each once, in whatever order.

    The version goes up with every change in place; tensors of inference mode have none, and equal nothing.
    """
    version = object() if x.is_inference() else x._version
    return x.storage_offset(), x.numel(), x.dtype, is_dense(x.shape, x.stride()), version


# As text
# -------------------------------------------------------------------------------------------------------------


def _neuron_lines(statistics: Statistics) -> list[str]:
    few = max(layer.n_max for layer in statistics.layers) <= 10
    rows = [("neuron", "step", "active", "entropy", "mean popcount", "P(k | k > 0) %" if few else "P(k = 1 | k > 0) %")]
    for layer in statistics.layers:
        h = layer.histogram
        shown = h.conditional if few else h.conditional[:1]
        rows.append(
            (
                layer.name,
                f"{layer.step:.4f}",
                f"{h.active_ratio:.3f}",
                f"{h.normalised_entropy:.3f}",
                f"{activity_of(layer.levels).mean_popcount:.3f}",
                " ".join(f"{100 * p:4.1f}" for p in shown),
            )
        )
    summary = statistics.analysis.summary()
    means = (
        f"means over neurons: active ratio {summary['active_ratio']:.3f}, normalised burst entropy "
        f"{summary['normalised_entropy']:.3f}, P(k = 1 | k > 0) {100 * summary['first_level']:.1f} %"
    )
    return [*_aligned(rows), means, *([f"did not run: {', '.join(statistics.idle)}"] if statistics.idle else [])]


def _synapse_lines(statistics: Statistics) -> list[str]:
    each = statistics.samples or 1
    lines = []
    if statistics.synapses:
        rows: list[tuple[str, ...]] = [("reads a neuron's output", "MACs", "unary", "bit-sparse", "saved %")]
        for name, count in {**statistics.synapses, "total": statistics.total}.items():
            numbers = (f"{value / each:,.0f}" for value in (count.macs, count.unary, count.bit_sparse))
            rows.append((name, *numbers, f"{saved(count.bit_sparse, count.unary):.1f}"))
        over = f"of a sample, mean over {statistics.samples:,}" if statistics.samples else "of all samples"
        lines += [
            *_aligned(rows),
            f"accumulations {over}, as rate x MACs; products of tensors, as in attention, are not seen",
        ]
    if statistics.others:
        named = ", ".join(f"{name} ({macs / each:,.0f} MACs)" for name, macs in statistics.others.items())
        lines.append(f"not counted, because they read something else: {named}")
    if statistics.unknown:
        named = ", ".join(f"{name or 'the network'} ({kind})" for name, kind in statistics.unknown.items())
        lines.append(f"not counted, because nothing is known of what they do with their weights: {named}")
    return lines


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows of text as columns, the first to the left and the others to the right, with a line under the first row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]
