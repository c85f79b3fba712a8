"""What the fast kernels take, on CPUs and on GPUs: named tuples of tensors, numbers, strings and such tuples.

PyTorch's operators and autograd know flat lists alone: `Flattening` turns values into flat ones and back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, get_type_hints

from torch import Tensor

from lbq.kernels.reference import Constants, Rule

SCHEMA_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", int: "int", float: "float", bool: "bool", str: "str"}


class RuleArguments(NamedTuple):
    """A `Rule` in plain values; the surrogate by its name."""

    n_max: int
    surrogate: str
    rounding: str
    reset: str
    decay_reset: bool
    reset_grad: bool
    detach_state: bool

    @property
    def delayed(self) -> bool:
        """As `Rule.delayed`."""
        return not self.decay_reset and self.reset != "hard"


class NeuronArguments(NamedTuple):
    """A layer's `Constants` and `Rule`.

    step, scale: one number, or one for each channel, in the same shape and contiguous; scale None: a level is worth the step.
    tail, leak, alpha, gain: one number each; leak, gain None: 1.
    """

    step: Tensor
    scale: Tensor | None
    tail: Tensor
    leak: Tensor | None
    alpha: Tensor
    gain: Tensor | None
    rule: RuleArguments

    @property
    def by_channel(self) -> bool:
        """Whether channels have steps of their own."""
        return self.step.numel() > 1


class StateArguments(NamedTuple):
    """Membrane and pending reset `[B, ...]` at an end of a sequence. v None: at rest; pending None: nothing is pending."""

    v: Tensor | None
    pending: Tensor | None


AT_REST = StateArguments(None, None)


def neuron_arguments(constants: Constants, rule: Rule) -> NeuronArguments:
    """A neuron without a ladder of thresholds as the fast kernels take it."""
    step, scale, leak, alpha, gain = constants.step, constants.scale, constants.leak, constants.alpha, constants.gain
    if scale is not None:
        if scale.numel() != step.numel():  # both for each channel, in the shape of the one that is so already
            shape = max(step, scale, key=Tensor.numel).shape
            step, scale = step.expand(shape), scale.expand(shape)
        scale = scale.contiguous()
    switches = rule.decay_reset, rule.reset_grad, rule.detach_state
    return NeuronArguments(
        step.contiguous(),
        scale,
        constants.tail,
        leak if isinstance(leak, Tensor) else None if leak == 1.0 else step.new_full((), leak),
        alpha if isinstance(alpha, Tensor) else step.new_full((), alpha),
        gain if isinstance(gain, Tensor) else None if gain == 1.0 else step.new_full((), gain),
        RuleArguments(rule.n_max, rule.surrogate.name, rule.rounding, rule.reset, *switches),
    )


# To flat lists and back

Declared = TypeVar("Declared", bound=tuple[Any, ...])


class Flattening(Generic[Declared]):
    """The flat form of a declaration: the values of its fields and of those inside them, tensors before the others.

    tensors: the names of those; schema: all of them as operators declare them.
    flatten, restore: from a value of the declaration to its tensors and its other values, and back.
    """

    def __init__(self, declaration: type[Declared]) -> None:
        scope: dict[str, Any] = {}
        fields, pattern, construction = _described(declaration, scope)
        self.tensors = tuple(name for name, kind in fields.items() if kind.startswith("Tensor"))
        others = tuple(name for name in fields if name not in self.tensors)
        self.schema = ", ".join(f"{fields[name]} {name}" for name in (*self.tensors, *others))
        self.flatten: Callable[[Declared], tuple[tuple[Tensor | None, ...], tuple[Any, ...]]]
        self.restore: Callable[[Sequence[Tensor | None], Sequence[Any]], Declared]
        # both run in every call of a kernel, so they are compiled, as the constructors of named tuples are
        split = [f"({''.join(f'{name}, ' for name in names)})" for names in (self.tensors, others)]
        exec(f"def flatten(values):\n    {pattern} = values\n    return {', '.join(split)}", scope)
        exec(
            f"def restore(tensors, others):\n    {split[0]} = tensors\n    {split[1]} = others\n    return {construction}",
            scope,
        )
        self.flatten, self.restore = scope["flatten"], scope["restore"]


def _described(declaration: type, scope: dict[str, Any]) -> tuple[dict[str, str], str, str]:
    """The schema type of every flat value, by name; and the declaration in Python: its pattern, `(x, (v, pending))`, and its
    construction, `Burst(x, StateArguments(v, pending))`. scope: where its classes are noted by name."""
    fields: dict[str, str] = {}
    patterns, constructions = [], []
    for name, kind in get_type_hints(declaration).items():
        pattern = construction = name
        if hasattr(kind, "_fields"):
            inner, pattern, construction = _described(kind, scope)
            fields |= inner
        else:
            fields[name] = SCHEMA_TYPES[kind]
        patterns.append(pattern)
        constructions.append(construction)
    scope[declaration.__name__] = declaration
    return fields, f"({', '.join(patterns)})", f"{declaration.__name__}({', '.join(constructions)})"
