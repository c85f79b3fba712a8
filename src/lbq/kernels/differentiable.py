"""A kernel with a gradient as PyTorch sees it: declared once, called in two ways.

A small autograd function calls the kernel directly, because the dispatcher of PyTorch's operators costs more than all the
rest of a call. torch.compile places the same two passes in its graph as the operators lbq::name and lbq::name_backward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lbq.kernels.arguments import Declared, Flattening
from lbq.kernels.reference import check_plain

LIBRARY = torch.library.Library("lbq", "DEF")

Backward = Callable[[Declared, Sequence[Tensor], Sequence[str]], tuple[Tensor, ...]]


class DifferentiableKernel(ABC, Generic[Declared]):
    """A subclass says what the kernel computes; call its one instance with a value of `inputs`.

    name: of the operator.
    inputs: the NamedTuple that declares what the kernel takes.
    outputs, states: how many outputs there are, and how many of them, the last ones, have no gradient.
    results: how many tensors `backward` returns.
    no_create_graph: refuse a backward pass that can be differentiated again, instead of only its differentiation.
    """

    name: ClassVar[str]
    inputs: ClassVar[type[tuple[Any, ...]]]
    outputs: ClassVar[int] = 1
    states: ClassVar[int] = 0
    results: ClassVar[int]
    no_create_graph: ClassVar[bool] = False

    @abstractmethod
    def forward(self, inputs: Declared) -> Any:
        """The outputs: a tensor, or a tuple of several."""

    @abstractmethod
    def forward_fake(self, inputs: Declared) -> Any:
        """The same left empty."""

    @abstractmethod
    def backward(self, inputs: Declared, grads: Sequence[Tensor], targets: Sequence[str]) -> tuple[Tensor, ...]:
        """From the outputs' gradients and the names of the inputs that need one, to tensors that share no memory."""

    @abstractmethod
    def backward_fake(self, inputs: Declared, targets: Sequence[str]) -> tuple[Tensor, ...]:
        """The same left empty."""

    @abstractmethod
    def gradients(self, inputs: Declared, results: Sequence[Tensor], targets: Sequence[str]) -> dict[str, Tensor]:
        """Gradients by the inputs' names, from what `backward` returned."""

    def __init__(self) -> None:
        self.flattening: Flattening[Declared] = Flattening(self.inputs)  # type: ignore[arg-type]
        self.differentiable = self.outputs - self.states
        self.direct = _direct(self)
        schema, grads = self.flattening.schema, self.differentiable
        grad_schema = ", ".join(f"Tensor grad_{i}" for i in range(grads))
        self.operator = define(
            f"{self.name}({schema}) -> {_tensors(self.outputs)}",
            lambda *flat: self.forward(self._restored(flat)),
            lambda *flat: self.forward_fake(self._restored(flat)),
        )
        self.backward_operator = define(
            f"{self.name}_backward({grad_schema}, {schema}, str targets) -> {_tensors(self.results)}",
            lambda *flat: self.backward(self._restored(flat[grads:-1]), flat[:grads], flat[-1].split()),
            lambda *flat: self.backward_fake(self._restored(flat[grads:-1]), flat[-1].split()),
        )
        torch.library.register_autograd(
            f"lbq::{self.name}", self._operator_gradients, setup_context=self._keep_for_operator, lib=LIBRARY
        )

    def __call__(self, inputs: Declared) -> Any:
        tensors, others = self.flattening.flatten(inputs)
        if torch.compiler.is_compiling():
            return self.operator(*tensors, *others)
        return self.direct(inputs, others, *tensors)

    def keep(self, ctx: Any, tensors: Sequence[Tensor | None], others: Sequence[Any], output: Any) -> None:
        """Note what the backward pass needs: the flat inputs; and which outputs are constants."""
        ctx.save_for_backward(*tensors)
        ctx.others = others
        if isinstance(output, tuple):
            ctx.mark_non_differentiable(*output[self.differentiable :])

    def differentiate(
        self, ctx: Any, grads: Sequence[Tensor], needed: Sequence[bool], backward: Backward[Declared]
    ) -> list[Tensor | None]:
        """The gradients of the flat tensors; needed: of which."""
        names, inputs = self.flattening.tensors, self.flattening.restore(ctx.saved_tensors, ctx.others)
        targets = [name for name, need in zip(names, needed, strict=True) if need]
        results = backward(inputs, grads[: self.differentiable], targets)
        return list(map(self.gradients(inputs, results, targets).get, names))

    # The operators' side, where all inputs come as one list

    def _restored(self, flat: Sequence[Any]) -> Declared:
        tensors = len(self.flattening.tensors)
        return self.flattening.restore(flat[:tensors], flat[tensors:])

    def _keep_for_operator(self, ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        tensors = len(self.flattening.tensors)
        self.keep(ctx, inputs[:tensors], inputs[tensors:], output)

    def _operator_gradients(self, ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        def backward(inputs: Declared, grads: Sequence[Tensor], targets: Sequence[str]) -> Any:
            tensors, others = self.flattening.flatten(inputs)
            return self.backward_operator(*grads, *tensors, *others, " ".join(targets))

        needed = ctx.needs_input_grad[: len(self.flattening.tensors)]
        return *self.differentiate(ctx, grads, needed, backward), *[None] * len(ctx.others)


def _direct(kernel: DifferentiableKernel[Any]) -> Callable[..., Any]:
    """The kernel as an autograd function: of its inputs as they are, and of the flat ones, which autograd looks at."""

    def differentiate(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        check_plain(grads[0])
        return None, None, *kernel.differentiate(ctx, grads, ctx.needs_input_grad[2:], kernel.backward)

    def differentiate_or_refuse(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "the native neuron kernel has no second derivative: set LBQ_KERNEL=reference, or take "
                'lbq.native.choose.use("reference")'
            )
        return differentiate(ctx, *grads)

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inputs: Any, others: Sequence[Any], *tensors: Tensor | None) -> Any:
            output = kernel.forward(inputs)
            kernel.keep(ctx, tensors, others, output)
            return output

        backward = staticmethod(  # type: ignore[assignment]
            differentiate_or_refuse if kernel.no_create_graph else once_differentiable(differentiate)
        )

    apply: Callable[..., Any] = Direct.apply
    return apply


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """The operator lbq::`schema`, on any device. fake: what it returns, without computing it."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"lbq::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.lbq, name)


def _tensors(count: int) -> str:
    return "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"
