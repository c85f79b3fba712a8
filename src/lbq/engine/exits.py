"""Early exit: inputs whose answer is clear after some timesteps stop there.

An input that goes on starts anew from the first timestep, over one timestep more: to keep every membrane of every input for
the few that go on would take longer. What is executed again is counted again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lbq.engine.convolution import Counts
from lbq.engine.method import Choice
from lbq.engine.output import Output
from lbq.errors import LbqError
from lbq.graph.integer import Exits, IntegerNetwork

if TYPE_CHECKING:
    from lbq.engine.engine import Network

Run = Callable[["Network", NDArray[np.uint8]], Output]


def leads(logits: NDArray[np.int64]) -> NDArray[np.int64]:
    """By how much the largest logit of each input leads its second."""
    second, first = np.partition(logits, -2, axis=1)[:, -2:].T
    return first - second


def some(x: NDArray[np.uint8], static: bool, which: NDArray[np.intp], timesteps: int) -> NDArray[np.uint8]:
    """Inputs by number, as a network over so many timesteps reads them."""
    return x[which] if static else x[:timesteps, which]


def run(stages: Sequence[Network], exits: Exits, x: NDArray[np.uint8], run_stage: Run) -> Output:
    """stages: the network over 1, 2, ... timesteps. Logits are those of the timestep at which an input stopped."""
    whole = stages[-1].network
    left = np.arange(x.shape[0 if whole.static else 1])
    logits = np.empty((len(left), whole.readout.shape[0]), np.int64)
    stopped = np.full(len(left), whole.timesteps)
    counts: dict[str, Counts] = {}
    choices: dict[str, Choice] = {}
    for timesteps, stage in enumerate(stages, 1):
        out = run_stage(stage, some(x, whole.static, left, timesteps))
        logits[left] = out.logits
        choices |= out.choices
        for name, count in out.counts.items():
            counts[name] = counts.get(name, Counts()) + count
        if timesteps == whole.timesteps:
            break
        done = leads(out.logits) >= exits.margins[timesteps - 1]
        stopped[left[done]] = timesteps
        left = left[~done]
        if not len(left):
            break
    return Output(logits, whole.scale, counts, choices, timesteps=stopped, whole=whole.timesteps)


def choose(
    network: IntegerNetwork,
    stages: Sequence[Network],
    x: NDArray[np.uint8],
    shares: Sequence[float],
    source: str,
    run_stage: Run,
) -> IntegerNetwork:
    """The network with margins such that these shares of `x` go on after timesteps 1, 2, ...; fewer, where leads are equal."""
    count = x.shape[0 if network.static else 1]
    left, margins, gone_on = np.arange(count), [], []
    for timesteps, (share, stage) in enumerate(zip(shares, stages[:-1], strict=True), 1):
        lead = leads(run_stage(stage, some(x, network.static, left, timesteps)).logits)
        going = min(round(share * count), len(left))
        margin = int(np.sort(lead)[going]) if going < len(left) else int(lead.max()) + 1
        left = left[lead < margin]
        margins.append(margin)
        gone_on.append(len(left) / count)
    bias = np.stack([stage.network.readout.bias for stage in stages[:-1]])
    return replace(network, exits=Exits(tuple(margins), bias, tuple(gone_on), source))


def check(network: IntegerNetwork) -> None:
    """Refuse networks that have no timestep before the last one to stop at, or no second class to lead."""
    if network.timesteps == 1:
        raise LbqError("the network has one timestep, so nothing can stop before it")
    if network.readout.shape[0] == 1:
        raise LbqError("the network has one class, which leads no second one, so nothing can stop early")
    if mixed := network.mixed_layers:
        raise LbqError(f"layer {mixed[0]!r} mixes all timesteps, so that nothing can stop before the last one")
