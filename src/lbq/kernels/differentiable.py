"""A kernel with a gradient as PyTorch sees it: declared once, called in two ways.

Outside torch.compile a small autograd function calls the kernel directly: the dispatcher of PyTorch's operators costs more
than all the rest that Python does for a call. While torch.compile traces, the same two passes are the operators lbq::name
and lbq::name_backward, which the compiler can place in its graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lbq.kernels.arguments import Declared, Flattening
from lbq.kernels.reference import check_plain

LIBRARY = torch.library.Library("lbq", "DEF")

Forward = Callable[[Declared], Any]
Backward = Callable[[Declared, Sequence[Tensor], Sequence[str]], tuple[Tensor, ...]]
Gradients = Callable[[Declared, Sequence[Tensor], Sequence[str]], dict[str, Tensor]]


class DifferentiableKernel(Generic[Declared]):
    """Call it with a value of `inputs` for a tensor, or for a tuple where it has several outputs.

    Args:
        name: of the operator.
        inputs: the NamedTuple that declares what the kernel takes.
        forward: from inputs to the outputs.
        backward: from inputs, the outputs' gradients and the names of the inputs that need one, to `results` tensors that
            share no memory.
        gradients: from inputs, those tensors and those names, to gradients by the inputs' names.
        forward_fake, backward_fake: the same as without `fake`, but tensors are left empty.
        outputs, states: how many outputs there are, and how many of them, the last ones, have no gradient.
        no_create_graph: refuse a backward pass that can be differentiated again, instead of only its differentiation.
    """

    def __init__(
        self,
        name: str,
        inputs: type[Declared],
        *,
        forward: Forward[Declared],
        forward_fake: Forward[Declared],
        backward: Backward[Declared],
        backward_fake: Backward[Declared],
        gradients: Gradients[Declared],
        results: int,
        outputs: int = 1,
        states: int = 0,
        no_create_graph: bool = False,
    ) -> None:
        self.flattening = Flattening(inputs)
        self.forward, self.backward, self.gradients = forward, backward, gradients
        self.differentiable = outputs - states
        self.direct = _direct(self, no_create_graph)

        schema = self.flattening.schema
        self.operator = define(
            f"{name}({schema}) -> {_tensors(outputs)}",
            lambda *flat: forward(self._restored(flat)),
            lambda *flat: forward_fake(self._restored(flat)),
        )
        grads = ", ".join(f"Tensor grad_{i}" for i in range(self.differentiable))
        self.backward_operator = define(
            f"{name}_backward({grads}, {schema}, str wanted) -> {_tensors(results)}",
            lambda *flat: backward(*self._backward_arguments(flat)),
            lambda *flat: backward_fake(*self._backward_arguments(flat)),
        )
        torch.library.register_autograd(
            f"lbq::{name}", self._operator_gradients, setup_context=self._keep_for_operator, lib=LIBRARY
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
        wanted = [name for name, need in zip(names, needed, strict=True) if need]
        results = backward(inputs, grads[: self.differentiable], wanted)
        return list(map(self.gradients(inputs, results, wanted).get, names))

    # The operators' side, where all inputs come as one list

    def _restored(self, flat: Sequence[Any]) -> Declared:
        tensors = len(self.flattening.tensors)
        return self.flattening.restore(flat[:tensors], flat[tensors:])

    def _backward_arguments(self, flat: Sequence[Any]) -> tuple[Declared, Sequence[Tensor], list[str]]:
        """Those of `backward` from its operator's: gradients, inputs, and names in one string."""
        first = self.differentiable
        return self._restored(flat[first:-1]), flat[:first], flat[-1].split()

    def _keep_for_operator(self, ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        tensors = len(self.flattening.tensors)
        self.keep(ctx, inputs[:tensors], inputs[tensors:], output)

    def _operator_gradients(self, ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        def backward(inputs: Declared, grads: Sequence[Tensor], wanted: Sequence[str]) -> Any:
            tensors, others = self.flattening.flatten(inputs)
            return self.backward_operator(*grads, *tensors, *others, " ".join(wanted))

        needed = ctx.needs_input_grad[: len(self.flattening.tensors)]
        return *self.differentiate(ctx, grads, needed, backward), *[None] * len(ctx.others)


def _direct(kernel: DifferentiableKernel[Any], no_create_graph: bool) -> Callable[..., Any]:
    """The kernel as an autograd function: of its inputs as they are, and of the flat ones, which autograd looks at."""

    def differentiate(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        check_plain(grads[0])
        return None, None, *kernel.differentiate(ctx, grads, ctx.needs_input_grad[2:], kernel.backward)

    def differentiate_or_refuse(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError("the native neuron kernel has no second derivative: set LBQ_KERNEL=reference")
        return differentiate(ctx, *grads)

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inputs: Any, others: Sequence[Any], *tensors: Tensor | None) -> Any:
            output = kernel.forward(inputs)
            kernel.keep(ctx, tensors, others, output)
            return output

        backward = staticmethod(  # type: ignore[assignment]
            differentiate_or_refuse if no_create_graph else once_differentiable(differentiate)
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
