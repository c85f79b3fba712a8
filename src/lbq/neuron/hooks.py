"""Watch the modules of a network while it runs: hooks that come off again, and evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

N = TypeVar("N", bound=nn.Module)  # a neuron


def only_outputs(hook: Callable[..., None]) -> Callable[..., None]:
    """Mark a forward hook that looks at outputs alone: BatchNorm may then run in one pass with what it watches."""
    hook.only_outputs = True  # type: ignore[attr-defined]
    return hook


def attached(handles: Iterable[RemovableHandle]) -> ExitStack:
    """A context at whose end these hooks are removed."""
    stack = ExitStack()
    for handle in handles:
        stack.enter_context(handle)
    return stack


def received(inputs: tuple[Tensor, ...], named: Mapping[str, Tensor]) -> Tensor:
    """What a neuron was called with, as its hooks see it."""
    return inputs[0] if inputs else named["x"]


def before_each(neurons: Mapping[str, N], call: Callable[[str, N, Tensor], None]) -> list[RemovableHandle]:
    """Have `call` called before each of these neurons runs, with its name, itself and its currents."""

    def hook(name: str) -> Any:
        return lambda neuron, inputs, named: call(name, neuron, received(inputs, named))

    return [neuron.register_forward_pre_hook(hook(name), with_kwargs=True) for name, neuron in neurons.items()]


def is_watched(module: nn.Module) -> bool:
    """Whether a hook may look at what a module receives, or at its gradient, which no pass together with BatchNorm shows."""
    hooks = module._forward_pre_hooks or module._backward_pre_hooks or module._backward_hooks
    return bool(hooks) or not all(hasattr(hook, "only_outputs") for hook in module._forward_hooks.values())


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; the mode of each of its layers is restored."""
    modes = [(module, module.training) for module in net.modules()]
    net.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
