"""Does the deployed network do what the trained network does? Three comparisons, each as exact as it can be.

`confirm` runs a network once beside the graph that was read off its trace. torch.fx follows a symbolic tensor: its trace misses
what a forward does to real tensors only, behind `isinstance(x, Tensor)` or in a hook on all modules. On a whole test set,
`check_absorption` compares the absorbed graph with the trained network, and `check_integers` the integer network.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lbq.batches.sources import Source
from lbq.counting.operations import Counter
from lbq.data.testset import TestSet
from lbq.deploy.float_execution import execute
from lbq.deploy.lowering.lower import lower
from lbq.engine import Network
from lbq.errors import GraphError
from lbq.graph import INPUT, Array, Graph
from lbq.graph.rewrites import absorb
from lbq.neuron.hooks import evaluating
from lbq.neuron.recorder import record_levels

LOGIT_TOLERANCE = 1e-6  # relative to the largest: the same sums in another order differ by far less
ABSORBED_LOGIT_TOLERANCE = 1e-9
LARGEST_TIED_SHARE = 0.02  # of images


# The network against its trace
# ---------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def confirm(net: nn.Module, graph: Graph, x: Array, inputs: Array) -> None:
    """Refuse a network (in float64) whose levels or logits for `x` are not those of its absorbed graph for `inputs`.

    x: as the network reads it, [B, ...] or [T, B, ...]; inputs: the same as the graph reads it, which may be pixels. Images
    with a membrane at a threshold, where rounding decides, are not compared.
    """
    try:
        with record_levels(net) as levels, InFloat64():
            logits = net(torch.from_numpy(x.copy())).numpy()  # x may be `inputs`, and a forward may change what it gets
    except Exception as error:  # whatever the network's own forward raises
        reason = " ".join(str(error).split()) or type(error).__name__
        raise GraphError(f"{type(net).__name__} does not run on inputs {list(x.shape)}: {reason}") from error
    expected = execute(graph, inputs)
    compared = expected.ties == 0
    differs = (
        f"{type(net).__name__} computes something else than its trace by torch.fx says: forward must not ask what a tensor is "
        "(isinstance, hasattr), nor may hooks on all modules change what they give"
    )
    for name, level in expected.levels.items():
        recorded = levels.get(name, level[:0])
        same_size = recorded.size == level.size and recorded.shape[:2] == level.shape[:2]
        if not same_size or (graph[name].placed(recorded) != level)[:, compared].any():
            raise GraphError(f"layer {name!r}: {differs}")
    same_size = logits.size == expected.logits.size and len(logits) == len(expected.logits)
    if not same_size or not _agree(logits.reshape(expected.logits.shape)[compared], expected.logits[compared]):
        raise GraphError(f"its logits: {differs}")


class InFloat64(TorchFunctionMode):
    """Casts to float leave the float64 that all else here is in."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        to_float = func is Tensor.float or (
            func is Tensor.to and torch.float32 in (*args[1:], *(kwargs or {}).values())
        )
        return Tensor.double(args[0]) if to_float else func(*args, **(kwargs or {}))


def _agree(outputs: Array, logits: Array) -> bool:
    """Whether a network gives these logits or, which lowering leaves out, their softmax or its logarithm."""
    logarithms = torch.from_numpy(logits).log_softmax(1).numpy()
    return any(
        bool((np.abs(outputs - expected) <= LOGIT_TOLERANCE * (1 + np.abs(expected).max(initial=0))).all())
        for expected in (logits, logarithms, np.exp(logarithms))
    )


# The deployed network against the trained one, on a test set
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pass:
    """One batch through a network: its inputs `[B, ...]` or `[T, B, ...]`, labels, logits, and every layer's levels."""

    x: Tensor
    labels: NDArray[np.int64]
    logits: NDArray[np.float64]
    levels: dict[str, NDArray[np.integer[Any]]]


@torch.no_grad()
def passes(net: nn.Module, source: Source) -> Iterator[Pass]:
    """The test part of `source` through `net` in evaluation mode and in its own precision, batch by batch."""
    parameter = next(net.parameters())
    for x, labels in source.eval_batches("test"):
        with record_levels(net) as levels, evaluating(net):
            logits = net(x.to(parameter))
        yield Pass(x, labels.cpu().numpy(), logits.double().cpu().numpy(), levels)


@dataclass(frozen=True)
class AbsorptionCheck:
    """The absorbed network on integer levels, with real weights in float64, against the trained network in float64.

    Both compute the same sums in another order. Only an image with a membrane within 1e-9 steps of a threshold may round
    differently: these are `tied_images`. `untied` and `largest_logit_error` are of all other images.
    """

    images: int
    levels: int
    different: int
    untied: int
    tied_images: int
    largest_logit_error: float

    @property
    def passed(self) -> bool:
        few = self.tied_images <= LARGEST_TIED_SHARE * self.images
        return self.untied == 0 and self.largest_logit_error < ABSORBED_LOGIT_TOLERANCE and few


def check_absorption(net: nn.Module, source: Source) -> AbsorptionCheck:
    """Compare every layer and timestep on the test part of `source`."""
    exact = copy.deepcopy(net).cpu().double()
    graph = absorb(lower(exact, source.shape, static=source.static))
    images = levels = different = untied = tied = 0
    logit_error = 0.0
    for trained in passes(exact, source):
        result = execute(graph, trained.x.cpu().double().numpy())
        for name, level in result.levels.items():
            per_image = (level != graph[name].placed(trained.levels[name])).sum((0, 2, 3, 4))
            different += int(per_image.sum())
            untied += int(per_image[result.ties == 0].sum())
            levels += level.size
        error = np.abs(result.logits - trained.logits)[result.ties == 0]
        logit_error = max(logit_error, float(error.max(initial=0)))
        tied += int((result.ties > 0).sum())
        images += len(trained.labels)
    return AbsorptionCheck(images, levels, different, untied, tied, logit_error)


@dataclass(frozen=True)
class IntegerCheck:
    """The integer network against the network as trained, in float32; shares in percent.

    Accumulations are counted while executing by bit planes and, independently, from the levels.
    """

    images: int
    bytes: int
    levels_agree: float
    predictions_agree: float
    accuracy: float
    accumulations_executed: int
    accumulations_counted: int
    images_per_second: float
    kernel: str

    @property
    def passed(self) -> bool:
        return self.accumulations_executed == self.accumulations_counted


def check_integers(net: nn.Module, source: Source, deployed: Network, test: TestSet, size: int) -> IntegerCheck:
    """Run a deployed network by bit planes on the test part, and compare it with `net`. size: bytes of its file."""
    deployed.verify("dense")
    deployed.verify("bitplane")
    counter, graph = Counter(deployed.network), lower(net, source.shape, static=source.static, weights=False)
    images = correct = agree = equal_levels = levels = executed = 0
    seconds, kernels = 0.0, set()
    for trained in passes(net, source):
        x = test.read(images, images + len(trained.labels))
        started = time.perf_counter()
        out = deployed.run(x, "bitplane", trace=True)
        seconds += time.perf_counter() - started
        assert out.levels is not None
        for name, level in out.levels.items():
            equal_levels += int((level == graph[name].placed(trained.levels[name])).sum())
            levels += level.size
        counter.add({**out.levels, INPUT: x[None] if test.static else x})
        executed += sum(counts.accumulations for counts in out.counts.values())
        kernels |= {choice.kernel for choice in out.choices.values()}
        images += len(trained.labels)
        correct += int((out.predictions == trained.labels).sum())
        agree += int((out.predictions == trained.logits.argmax(1)).sum())
    account = counter.account()
    counted = sum(
        count.bit_sparse for part in (account.synapses, account.shortcuts, account.stem) for count in part.values()
    )
    return IntegerCheck(
        images=images,
        bytes=size,
        levels_agree=100 * equal_levels / levels,
        predictions_agree=100 * agree / images,
        accuracy=100 * correct / images,
        accumulations_executed=executed,
        accumulations_counted=round(counted * images),
        images_per_second=images / seconds,
        kernel="native" if "native" in kernels else "NumPy",
    )
