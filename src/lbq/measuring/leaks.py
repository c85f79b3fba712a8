"""Do the samples of a batch stay apart? `lbq.check(net, images)` turns a batch round, takes half of it, and compares."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lbq.deploy.lowering.faithful import copied, unwrapped
from lbq.deploy.verify import InFloat64
from lbq.errors import GraphError
from lbq.neuron.base import neurons_of
from lbq.neuron.hooks import attached, before_each

TOLERANCE = 1e-6  # relative to the largest output: in float64, the same sums in another order differ by far less


@torch.no_grad()
def check(net: nn.Module, images: Tensor | NDArray[Any], static: bool = True) -> None:
    """Refuse a network whose samples leak into each other: `net(x.flip(0))` must equal `net(x).flip(0)`, and half of a batch
    must give half of the outputs.

    It says which neuron reads the batch as time. A copy of the network runs, in evaluation mode and in float64. Where nothing
    fires in it, as before training, its BatchNorms first measure their statistics on these images.

    net: its output has the batch in front, as logits `[B, classes]` do.
    images: two inputs or more, normalised as the network reads them.
    static: False for event frames `[T, B, ...]`, whose batch is the second axis.
    """
    axis = 0 if static else 1
    if not isinstance(net, nn.Module):
        raise GraphError(f"net must be a torch.nn.Module, got {type(net).__name__}")
    x = torch.from_numpy(images) if isinstance(images, np.ndarray) else images
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < axis + 2 or x.shape[axis] < 2:
        got = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise GraphError(
            f"images must be two inputs or more as the network reads them, a floating-point tensor [B, ...], got {got}"
        )
    if x.is_meta or any(t.is_meta for t in chain(net.parameters(), net.buffers())):
        raise GraphError("images and the network must have numbers: they are on the meta device")
    if not torch.isfinite(x).all():
        raise GraphError("images hold numbers that are not finite: leave those images out")
    x = x.double()
    if torch.equal(x, x.flip(axis)):
        raise GraphError("images must differ from each other: of equal ones nothing can be said")
    exact = copied(unwrapped(net)).double().eval()
    half = x.shape[axis] // 2
    with InFloat64():
        there = exact(x)
        if _are_all_one(there):
            _settle(exact, x)
            there = exact(x)
        back, alone = exact(x.flip(axis)), exact(x.narrow(axis, 0, half))
        if not isinstance(there, Tensor) or there.dim() < 1 or len(there) != x.shape[axis]:
            raise GraphError(
                f"{type(net).__name__} must return one tensor with the batch in front, as logits [B, classes]"
            )
        if not torch.isfinite(there).all():
            raise GraphError(f"{type(net).__name__} gives outputs that are not finite: did training diverge?")
        if _are_all_one(there):
            raise GraphError(
                "all images have one output, as where no neuron fires: of such nothing can be said; check the network again "
                "after some steps of training"
            )
        differences = torch.cat([back - there.flip(0), alone - there[:half]])
        name = _batch_as_time(exact, x, axis)  # also of a neuron that counts for nothing yet
        if name is None and differences.abs().max() <= TOLERANCE * there.abs().max():
            return
    if name is None:
        where, remedy = "one of its layers mixes the batch", "find the layer that does"
    else:
        where, remedy = f"neuron {name!r} reads the batch as time", "call layers by over_time(x, layer, timesteps=T)"
    raise GraphError(
        f"samples of {type(net).__name__} leak into each other, {where}: logits of an image depend on the others; {remedy}"
    )


def _are_all_one(outputs: Any) -> bool:
    """Whether all samples have the same output."""
    return isinstance(outputs, Tensor) and outputs.dim() > 0 and all(torch.equal(outputs[0], one) for one in outputs)


def _settle(net: nn.Module, x: Tensor) -> None:
    """Let every BatchNorm measure its statistics on `x`: those of a new network are 0 and 1, whatever reaches it."""
    norms = [norm for norm in net.modules() if isinstance(norm, _BatchNorm) and norm.track_running_stats]
    for norm in norms:
        norm.train()
        norm.momentum = 1.0  # forgets what was there
    net(x)
    for norm in norms:
        norm.eval()


def _batch_as_time(net: nn.Module, x: Tensor, axis: int) -> str | None:
    """The first neuron whose input is turned round in its first axis when the batch is."""
    neurons = neurons_of(net)

    def inputs(batch: Tensor) -> list[tuple[str, Tensor]]:
        seen: list[tuple[str, Tensor]] = []
        with attached(before_each(neurons, lambda name, _, y: seen.append((name, y.clone())))):
            net(batch)
        return seen

    for (name, there), (_, back) in zip(inputs(x), inputs(x.flip(axis)), strict=True):
        if torch.allclose(back, there.flip(0)) and not torch.allclose(back, there.flip(1)):
            return name
    return None
