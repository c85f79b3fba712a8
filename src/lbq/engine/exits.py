"""Early exit: inputs whose answer is clear after some timesteps stop there.

An input that goes on starts anew from the first timestep, over one timestep more: to keep every membrane of every input for
the few that go on would take longer. What is executed again is counted again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lbq.engine.convolution import Counts, add_counts
from lbq.engine.method import Choice
from lbq.engine.output import Output
from lbq.errors import LbqError
from lbq.graph.integer import Exits, IntegerNetwork

RunStage = Callable[[int, NDArray[np.uint8]], Output]  # some inputs through the network over so many timesteps


def leads(logits: NDArray[np.int64]) -> NDArray[np.int64]:
    """By how much the largest logit of each input leads its second."""
    second, first = np.partition(logits, -2, axis=1)[:, -2:].T
    return first - second


def some(x: NDArray[np.uint8], static: bool, which: NDArray[np.intp], timesteps: int) -> NDArray[np.uint8]:
    """Inputs by number, as a network over so many timesteps reads them."""
    return x[which] if static else x[:timesteps, which]


def margins_of(network: IntegerNetwork) -> tuple[int, ...]:
    """The margins by which inputs stop; refused where none were chosen."""
    if network.exits is None:
        raise LbqError("the network has no margins to stop by: choose them with lbq exits MODEL DATA --share 0.05")
    return network.exits.margins


def run(network: IntegerNetwork, x: NDArray[np.uint8], run_stage: RunStage) -> Output:
    """Logits are those of the timestep at which an input stopped."""
    margins = margins_of(network)
    left = np.arange(x.shape[network.batch_axis])
    logits = np.empty((len(left), network.readout.shape[0]), np.int64)
    stopped = np.full(len(left), network.timesteps)
    counts: dict[str, Counts] = {}
    choices: dict[str, Choice] = {}
    for timesteps, margin in enumerate((*margins, 0), 1):  # after the last timestep all stop
        out = run_stage(timesteps, some(x, network.static, left, timesteps))
        logits[left] = out.logits
        choices = choices or out.choices  # all inputs run to the first timestep
        add_counts(counts, out.counts)
        done = leads(out.logits) >= margin
        stopped[left[done]] = timesteps
        left = left[~done]
        if not len(left):
            break
    return Output(logits, network.scale, counts, choices, timesteps=stopped, whole=network.timesteps)


def choose(
    network: IntegerNetwork, x: NDArray[np.uint8], shares: Sequence[float], source: str, run_stage: RunStage
) -> IntegerNetwork:
    """The network with margins such that these shares of `x` go on after timesteps 1, 2, ...; fewer, where leads are equal."""
    count = x.shape[network.batch_axis]
    left, margins, gone_on = np.arange(count), [], []
    for timesteps, share in enumerate(shares, 1):
        if not len(left):  # all have stopped: there is nothing to run, and no lead to choose by
            margins.append(0)
            gone_on.append(0.0)
            continue
        lead = leads(run_stage(timesteps, some(x, network.static, left, timesteps)).logits)
        going = min(round(share * count), len(left))
        margin = int(np.sort(lead)[going]) if going < len(left) else int(lead.max()) + 1
        left = left[lead < margin]
        margins.append(margin)
        gone_on.append(len(left) / count)
    bias = np.stack([network.first(t).readout.bias for t in range(1, network.timesteps)])
    return replace(network, exits=Exits(tuple(margins), bias, tuple(gone_on), source))


def default_shares(timesteps: int) -> list[float]:
    """A share for each timestep but the last: 0.05, and each half of the one before, so that some can stop everywhere."""
    return [0.05 / 2**t for t in range(timesteps - 1)]


def check_falling(shares: Sequence[float]) -> None:
    """Refuse a share that lets nothing stop at its timestep: one not below the share before it. All, and none, may stay so."""
    for t, (before, share) in enumerate(pairwise(shares), 2):
        if share > before or (share == before and 0 < share < 1):
            raise LbqError(
                f"--share: {share:g} after {before:g} lets nothing stop after timestep {t}, which is executed all the "
                "same: give shares that fall"
            )


def check(network: IntegerNetwork) -> None:
    """Refuse networks that have no timestep before the last one to stop at, or no second class to lead."""
    if network.timesteps == 1:
        raise LbqError("the network has one timestep, so nothing can stop before it")
    if network.readout.shape[0] == 1:
        raise LbqError("the network has one class, which leads no second one, so nothing can stop early")
    if mixed := network.mixed_layers:
        raise LbqError(f"layer {mixed[0]!r} mixes all timesteps, so that nothing can stop before the last one")
