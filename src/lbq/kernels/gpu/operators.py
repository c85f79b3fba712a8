"""The fused kernels as PyTorch operators: a whole burst sequence in one pass each way, alone or after BatchNorm.

All save the input and recompute the rest; a second derivative is refused (the reference has it). In half precision the
fused form is the more exact one: nothing is rounded between BatchNorm and the neuron.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lbq.kernels.arguments import AT_REST, NeuronArguments, RuleArguments, StateArguments, neuron_arguments
from lbq.kernels.differentiable import DifferentiableKernel, define
from lbq.kernels.gpu import launch
from lbq.kernels.gpu.launch import NormArguments
from lbq.kernels.memory import sequence_like, settled, shaped_like
from lbq.kernels.reference import BurstState, Constants, Rule
from lbq.kernels.surrogate import SURROGATES

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_TIMESTEPS = 32  # so many a program holds in registers
MAX_LEVELS = 1 << 20  # up to so many the kernel's rounding is exact
NORM_DIMENSIONS = {nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,)}  # of the input
RELU = RuleArguments(  # the ANN's activation, which the kernels compute as a neuron of one timestep without a reset
    n_max=1,
    surrogate="relu",
    rounding="relu",
    reset="once",
    decay_reset=True,
    reset_grad=False,
    detach_state=False,
)


# The neuron alone


class Burst(NamedTuple):
    """Currents `x` [T, B, ...], the neuron, and the state before the first timestep."""

    x: Tensor
    neuron: NeuronArguments
    before: StateArguments


def learned_sums(neuron: NeuronArguments, targets: Sequence[str]) -> tuple[str, ...]:
    """Which of the neuron's constants need a gradient that exists: most surrogates have no tail that learns."""
    names = [name for name in NeuronArguments._fields if name in targets]
    if "tail" in names and SURROGATES[neuron.rule.surrogate].tail != "learned":
        names.remove("tail")
    return tuple(names)


def neuron_gradients(neuron: NeuronArguments, sums: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """The gradients of the neuron's constants `names` from the rows of `sums`, each in the shape of its constant."""
    if not names:
        return {}
    scalars = sums.sum(1) if sums.shape[1] > 1 else sums[:, 0]
    values = [getattr(neuron, name) for name in names]
    rows = [sums[row] if value.numel() > 1 else scalars[row] for row, value in enumerate(values)]
    return {name: shaped_like(row, value) for name, row, value in zip(names, rows, values, strict=True)}


class BurstKernel(DifferentiableKernel[Burst]):
    """Scaled outputs."""

    name, inputs, results = "burst", Burst, 2

    def forward(self, inputs: Burst) -> Any:
        return launch.forward(inputs.x, inputs.x.shape[0], inputs.neuron, before=inputs.before)

    def forward_fake(self, inputs: Burst) -> Any:
        return sequence_like(settled(inputs.x))

    def backward(self, inputs: Burst, grads: Sequence[Tensor], targets: Sequence[str]) -> tuple[Tensor, Tensor]:
        sums, price = learned_sums(inputs.neuron, targets), grads[1] if len(grads) > 1 else None
        return launch.backward(grads[0], inputs.x, inputs.neuron, sums, before=inputs.before, price=price)

    def backward_fake(self, inputs: Burst, targets: Sequence[str]) -> tuple[Tensor, Tensor]:
        x, neuron = inputs.x, inputs.neuron
        sums = len(learned_sums(neuron, targets)), neuron.step.numel()
        return sequence_like(settled(x)), x.new_empty(sums, dtype=torch.float32)

    def gradients(self, inputs: Burst, results: Sequence[Tensor], targets: Sequence[str]) -> dict[str, Tensor]:
        by_x, sums = results
        return {"x": by_x, **neuron_gradients(inputs.neuron, sums, learned_sums(inputs.neuron, targets))}


class ChunkKernel(BurstKernel):
    """Scaled outputs, and membrane and pending reset after them."""

    name, outputs, states = "burst_chunk", 3, 2

    def forward(self, inputs: Burst) -> tuple[Tensor, Tensor, Tensor]:
        x, neuron = settled(inputs.x), inputs.neuron
        v, pending = launch.states_like(x, neuron.rule)
        after = StateArguments(v, pending if neuron.rule.delayed else None)
        return launch.forward(x, x.shape[0], neuron, before=inputs.before, after=after), v, pending

    def forward_fake(self, inputs: Burst) -> tuple[Tensor, Tensor, Tensor]:
        x = settled(inputs.x)
        return sequence_like(x), *launch.states_like(x, inputs.neuron.rule)


class PricedKernel(BurstKernel):
    """Scaled outputs, and the sums of `reference.priced_sequence`."""

    name, outputs = "burst_priced", 2

    def forward(self, inputs: Burst) -> tuple[Tensor, Tensor]:
        sums = inputs.x.new_empty(2, dtype=torch.float32)
        return launch.forward(inputs.x, inputs.x.shape[0], inputs.neuron, before=inputs.before, sums=sums), sums

    def forward_fake(self, inputs: Burst) -> tuple[Tensor, Tensor]:
        return sequence_like(settled(inputs.x)), inputs.x.new_empty(2, dtype=torch.float32)


BURST, BURST_CHUNK, BURST_PRICED = BurstKernel(), ChunkKernel(), PricedKernel()


# The neuron after BatchNorm and a residual add


class NormBurst(NamedTuple):
    """x `[T, B, C, ...]`, or `[1, B, C, ...]` shown at every timestep; BatchNorm; what is added behind it, `[T, B, C, ...]`;
    the neuron. Where norm.elements > 0, its mean and variance are those of x, and the gradient of x goes through them too."""

    x: Tensor
    norm: NormArguments
    residual: Tensor | None
    neuron: NeuronArguments
    timesteps: int


class NormBurstKernel(DifferentiableKernel[NormBurst]):
    """Scaled outputs."""

    name, inputs, results = "norm_burst", NormBurst, 3

    def forward(self, inputs: NormBurst) -> Any:
        return launch.forward(inputs.x, inputs.timesteps, inputs.neuron, inputs.norm, inputs.residual)

    def forward_fake(self, inputs: NormBurst) -> Any:
        return sequence_like(settled(inputs.x), inputs.timesteps)

    def backward(
        self, inputs: NormBurst, grads: Sequence[Tensor], targets: Sequence[str]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient of x, that of the neuron's currents (empty without a residual), and sums: those of BatchNorm's bias and
        weight, then the neuron's."""
        x, norm, residual, neuron, _ = inputs
        sums, price = ("current", "hat", *learned_sums(neuron, targets)), grads[1] if len(grads) > 1 else None
        shown = x.shape[0] == 1
        current, totals = launch.backward(grads[0], x, neuron, sums, norm, residual, shown=shown, price=price)
        by_x = launch.norm_backward(current, x, norm, totals)
        return by_x, x.new_empty(0) if residual is None else current, totals

    def backward_fake(self, inputs: NormBurst, targets: Sequence[str]) -> tuple[Tensor, Tensor, Tensor]:
        x, sums = settled(inputs.x), 2 + len(learned_sums(inputs.neuron, targets))
        current = x.new_empty(0) if inputs.residual is None else sequence_like(x)
        return sequence_like(x), current, x.new_empty((sums, x.shape[2]), dtype=torch.float32)

    def gradients(self, inputs: NormBurst, results: Sequence[Tensor], targets: Sequence[str]) -> dict[str, Tensor]:
        (by_x, current, totals), norm, neuron = results, inputs.norm, inputs.neuron
        return {
            "x": by_x,
            "bias": totals[0].to(norm.bias.dtype),
            "weight": totals[1].to(norm.weight.dtype),
            **({} if inputs.residual is None else {"residual": current}),
            **neuron_gradients(neuron, totals[2:], learned_sums(neuron, targets)),
        }


class NormPricedKernel(NormBurstKernel):
    """Scaled outputs, and the sums of `reference.priced_sequence`."""

    name, outputs = "norm_burst_priced", 2

    def forward(self, inputs: NormBurst) -> tuple[Tensor, Tensor]:
        sums = inputs.x.new_empty(2, dtype=torch.float32)
        x, norm, residual, neuron, timesteps = inputs
        return launch.forward(x, timesteps, neuron, norm, residual, sums=sums), sums

    def forward_fake(self, inputs: NormBurst) -> tuple[Tensor, Tensor]:
        return sequence_like(settled(inputs.x), inputs.timesteps), inputs.x.new_empty(2, dtype=torch.float32)


NORM_BURST, NORM_PRICED = NormBurstKernel(), NormPricedKernel()


# BatchNorm's statistics, which have no gradient of their own

define(
    "moments(Tensor x) -> (Tensor, Tensor)",
    launch.moments,
    lambda x: (x.new_empty(x.shape[1], dtype=torch.float32), x.new_empty(x.shape[1], dtype=torch.float32)),
)
define(
    "track_moments(Tensor(a!) running_mean, Tensor(b!) running_var, Tensor(c!) batches, Tensor mean, Tensor var, "
    "float momentum, int count) -> ()",
    launch.track_moments,
    lambda *_: None,
)


# What neurons call


def supports(x: Tensor, constants: Constants, rule: Rule) -> bool:
    """Whether the fused kernel computes the sequence `x` [T, B, ...]. It knows no ladder of thresholds."""
    return constants.thresholds is None and supports_sequence(x.dtype, x.shape[0], rule)


def supports_sequence(dtype: torch.dtype, timesteps: int, rule: Rule | None) -> bool:
    """Whether the fused kernel computes such a sequence. rule None: a ReLU."""
    known = rule is None or (rule.n_max <= MAX_LEVELS and rule.surrogate.in_kernels)
    return known and dtype in DTYPES and timesteps <= MAX_TIMESTEPS


def supports_norm(norm: nn.Module, x: Tensor) -> bool:
    """Whether `norm` is plain BatchNorm with weights, running statistics and no hooks, and takes `x` [N, C, ...]. Otherwise it
    runs by itself, and refuses a wrong x in its own words."""
    if type(norm) not in NORM_DIMENSIONS:
        return False
    assert isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
    if x.dim() not in NORM_DIMENSIONS[type(norm)] or x.shape[1] != norm.num_features:
        return False
    if norm.training and x.numel() <= x.shape[1]:  # one value by channel
        return False
    hooks = norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks or norm._backward_pre_hooks
    plain = norm.affine and norm.track_running_stats and norm.momentum is not None and not hooks
    return plain and norm.weight.device == x.device


def burst(x: Tensor, constants: Constants, rule: Rule) -> Tensor:
    """Scaled outputs of the sequence `x` [T, B, ...] from rest: `reference.burst_sequence`, fused."""
    out: Tensor = BURST(Burst(x, neuron_arguments(constants, rule), AT_REST))
    return out


def burst_priced(x: Tensor, constants: Constants, rule: Rule) -> tuple[Tensor, Tensor]:
    """The same, and the sums of `reference.priced_sequence`."""
    out, sums = BURST_PRICED(Burst(x, neuron_arguments(constants, rule), AT_REST))
    return out, sums


def burst_chunk(x: Tensor, constants: Constants, rule: Rule, state: BurstState | None) -> tuple[Tensor, BurstState]:
    """Scaled outputs of one timestep or more from `state` on (None: at rest), and the state after them, of which gradients know
    nothing."""
    before = AT_REST if state is None else StateArguments(state.v, state.pending)
    out, v, pending = BURST_CHUNK(Burst(x, neuron_arguments(constants, rule), before))
    return out, BurstState(v, pending if rule.delayed else None)


def norm_burst(
    x: Tensor,
    norm: nn.BatchNorm2d,
    constants: Constants,
    rule: Rule,
    residual: Tensor | None = None,
    timesteps: int | None = None,
    priced: bool = False,
) -> Any:
    """Outputs `[T, B, C, ...]` of the neuron that receives BatchNorm of `x` [T, B, C, ...], plus `residual` of that shape.

    With `timesteps`, x is `[B, C, ...]` and shown that many times. Updates the running statistics while training.
    priced: returns the sums of `reference.priced_sequence` too.
    """
    kernel = NORM_PRICED if priced else NORM_BURST
    return kernel(_normalised(x, norm, neuron_arguments(constants, rule), residual, timesteps))


def norm_relu(x: Tensor, norm: nn.BatchNorm2d, one: Tensor, zero: Tensor, residual: Tensor | None = None) -> Tensor:
    """relu(BatchNorm(x) + residual) of `x` [N, C, ...], for the ANN beside which a burst network is measured."""
    neuron = NeuronArguments(step=one, scale=None, tail=zero, leak=None, alpha=zero, gain=None, rule=RELU)
    added = None if residual is None else residual[None]
    out: Tensor = NORM_BURST(_normalised(x, norm, neuron, added, timesteps=1))
    return out.squeeze(0)


def _normalised(
    x: Tensor, norm: nn.BatchNorm2d, neuron: NeuronArguments, residual: Tensor | None, timesteps: int | None
) -> NormBurst:
    """What the kernel takes, with statistics of `x` while training, which the running ones follow."""
    folded = x.flatten(0, 1) if timesteps is None else x
    elements = 0
    if norm.training:
        compiling = torch.compiler.is_compiling()
        moments: Any = torch.ops.lbq.moments if compiling else launch.moments
        track: Any = torch.ops.lbq.track_moments if compiling else launch.track_moments
        elements = folded.numel() // folded.shape[1]
        mean, var = moments(folded.detach())
        track(norm.running_mean, norm.running_var, norm.num_batches_tracked, mean, var, norm.momentum, elements)
    else:
        mean, var = norm.running_mean, norm.running_var
    return NormBurst(
        x if timesteps is None else x[None],
        NormArguments(norm.weight, norm.bias, mean, var, norm.eps, elements),
        residual,
        neuron,
        x.shape[0] if timesteps is None else timesteps,
    )
