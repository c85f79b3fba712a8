"""Is a network what its layers say? Lowering reads the numbers of layers that it knows, and never runs them.

Whatever else changes what a layer computes is refused: a forward of its own, hooks, wrappers around the network.
Parametrisations (`torch.nn.utils.parametrize`) need no care: a layer's weight is then the computed one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import AveragedModel

from lbq.errors import GraphError
from lbq.neuron import SpikingNeuron

COMPUTING_METHODS = (*SpikingNeuron.computing_methods, "_conv_forward")
KNOWN_MODULES = ("torch.nn.modules.", "lbq.")  # whose methods lowering knows
WRAPPERS = (AveragedModel, DataParallel, DistributedDataParallel)
REMEDIES = {  # hooks with which older utilities of PyTorch compute weights, and what makes them ordinary weights again
    "WeightNorm": "torch.nn.utils.remove_weight_norm",
    "SpectralNorm": "torch.nn.utils.remove_spectral_norm",
}


def own_method(module: nn.Module) -> str | None:
    """The name of a method by which a layer computes something else than the class that it derives from, or None."""
    for name in COMPUTING_METHODS:
        definer = next((c for c in type(module).__mro__ if name in vars(c)), None)
        if name in vars(module) or (definer is not None and not definer.__module__.startswith(KNOWN_MODULES)):
            return name
    return None


def check_unwatched(name: str, module: nn.Module) -> None:
    """Refuse forward hooks, which may change what a layer takes or gives."""
    where = f"layer {name!r}" if name else f"the network ({type(module).__name__})"
    for kind, hooks in (("pre-hook", module._forward_pre_hooks), ("hook", module._forward_hooks)):
        for hook in hooks.values():
            called = getattr(hook, "__qualname__", type(hook).__name__)
            raise GraphError(
                f"{where} has a forward {kind} ({called}), which deployment would leave out: {_remedy(hook)}"
            )


def _remedy(hook: Any) -> str:
    if type(hook).__name__ in REMEDIES:
        return f"make its weight an ordinary one first, by {REMEDIES[type(hook).__name__]}"
    if any(c.__name__ == "BasePruningMethod" for c in type(hook).__mro__):
        return "make the pruned weights ordinary ones first, by torch.nn.utils.prune.remove"
    return "remove it first"


def inside(module: nn.Module) -> nn.Module | None:
    """What torch.compile, DataParallel, DistributedDataParallel or AveragedModel (here the average) stands around."""
    compiled = module._modules.get("_orig_mod")
    return module.module if compiled is None and isinstance(module, WRAPPERS) else compiled


def unwrapped(net: nn.Module) -> nn.Module:
    """The network itself, which others may stand around."""
    while (inner := inside(net)) is not None:
        net = inner
    return net


def exact_copy(net: nn.Module) -> nn.Module:
    """A copy in float64 and evaluation mode on the CPU. In float32, softplus would give slightly other steps."""
    return plain_copy(net).cpu().double().eval()


def plain_copy(net: nn.Module) -> nn.Module:
    """A copy of the network without what was wrapped around it, where its layers are all that computes in it."""
    if not isinstance(net, nn.Module):
        raise GraphError(f"net must be a torch.nn.Module, got {type(net).__name__}")
    for name, module in net.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            where = f"layer {name!r}" if name else "the network"
            raise GraphError(f"{where} is TorchScript, which cannot be traced: put what it was made of in its place")
    if any(tensor.is_meta for tensor in (*net.parameters(), *net.buffers())):
        raise GraphError("the network is on the meta device and has no weights: build it on another, and load them")
    for name, module in net.named_modules():
        if any(map(is_lazy, (*module.parameters(recurse=False), *module.buffers(recurse=False)))):
            raise GraphError(f"layer {name!r} has no weights yet, for it is lazy: call the network once on images")
    while (inner := inside(net)) is not None:
        check_unwatched("", net)
        net = inner
    for name, module in net.named_modules():
        check_unwatched(name, module)
        if inside(module) is not None:
            raise GraphError(f"layer {name!r} is wrapped in {type(module).__name__}: put what is inside in its place")
    return copied(net)


def copied(net: nn.Module) -> nn.Module:
    """A deep copy. What a module kept of its last pass, such as an activation for a loss, is copied without its gradient."""
    kept = {id(tensor): tensor.detach().clone() for module in net.modules() for tensor in _with_history(module)}
    try:
        return copy.deepcopy(net, kept)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise GraphError(f"{type(net).__name__} cannot be copied: {reason}; take that out of its attributes") from error


def _with_history(module: nn.Module) -> Iterator[Tensor]:
    """The tensors that a module holds as attributes, or in a list or a dictionary, and that are results of others."""
    for value in vars(module).values():
        inside = (
            value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else (value,)
        )
        yield from (tensor for tensor in inside if isinstance(tensor, Tensor) and not tensor.is_leaf)
