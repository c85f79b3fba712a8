"""What every spiking neuron shares: its membrane, and the calls `forward`, `levels`, `forward_chunk` and `forward_step`.

A neuron maps `[T, B, ...]` to scaled outputs of the same shape, from a zero state, and keeps nothing between calls.
Use by chunks and step by step passes the state explicitly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from lbq.graph import NeuronSpec
from lbq.kernels import surrogate as surrogates
from lbq.kernels.dispatch import burst, burst_chunk, burst_priced, fuses_norm, kernel_for
from lbq.kernels.reference import BurstState, Constants, Rule, burst_levels, burst_step, compute_dtype
from lbq.neuron.checks import check_alone, check_choice, check_flag, check_unit, logit, register_number, unit_interval
from lbq.neuron.hooks import is_watched
from lbq.neuron.hooks import only_outputs as only_outputs
from lbq.neuron.origin import look

MembraneKind = Literal["lif", "if", "plif"]


class SpikingNeuron(nn.Module, ABC):
    """Base of all spiking neurons. Subclasses give a `rule` and the `step`; the base owns membrane and surrogate.

    membrane: `lif` leaks by `beta`; `if` does not leak (beta is ignored); `plif` is the parametric LIF,
        U = (1 - k) V + k x with k = sigmoid(`decay_logit`) learned, started at k = 1 - beta.

    Subclasses with further numbers that are not learned add their names to `fixed_names`. A neuron that overrides one of
    `computing_methods` outside lbq computes something else than its class says, which deployment refuses.
    """

    # numbers that are buffers where they are not learned
    fixed_names: ClassVar[tuple[str, ...]] = ("beta", "alpha", "eta")
    computing_methods: ClassVar[tuple[str, ...]] = ("forward", "constants", "_constants", "_scaled_step", "check_input")

    rule: Rule
    alpha: Tensor
    beta: Tensor
    eta: Tensor
    # constants by dtype and dimensions, for each `unchanging` that is entered
    caches: tuple[dict[Any, Constants], ...] = ()
    emitted: list[Tensor] | None = None  # sums of what was emitted in each call, while `summing_levels` is entered
    origin_seen: bool = False  # whether what feeds it was looked at, or need not be

    def __init__(
        self,
        *,
        surrogate: str,
        membrane: MembraneKind,
        beta: float,
        alpha: float,
        learn_beta: bool = False,
        learn_alpha: bool = False,
        tail: float = surrogates.BOX_ET_TAIL,
        learn_tail: bool = True,
    ) -> None:
        super().__init__()
        self.membrane = check_choice("membrane", membrane, ("lif", "if", "plif"))
        self.surrogate = surrogates.get(surrogate)
        beta = check_unit("beta", beta, open_ends=membrane == "plif")
        alpha = check_unit("alpha", alpha)
        if learn_beta and membrane != "lif":
            raise ValueError(f"learn_beta needs membrane='lif', got membrane={membrane!r}")

        if membrane == "plif":
            self.decay_logit = nn.Parameter(torch.tensor(logit(1 - beta)))
        elif membrane == "lif":
            register_number(self, "beta", torch.tensor(beta), learn_beta)
        register_number(self, "alpha", torch.tensor(alpha), learn_alpha)
        eta, learn_tail = logit(check_unit("tail", tail, open_ends=True)), check_flag("learn_tail", learn_tail)
        if self.surrogate.tail is not None:
            register_number(self, "eta", torch.tensor(eta), learn_tail and self.surrogate.tail == "learned")

    @property
    @abstractmethod
    def step(self) -> Tensor:
        """The distance between neighbouring thresholds, differentiable where learned."""

    @property
    def scale(self) -> Tensor | None:
        """What a level is worth in the output; None where that is the step."""
        return None

    @property
    def thresholds(self) -> Tensor | None:
        return None

    def fixed_numbers(self) -> dict[str, Tensor]:
        """Its numbers that are not learned, by their names in its state_dict."""
        return {name: value for name, value in self.named_buffers(recurse=False) if name in self.fixed_names}

    @property
    def n_max(self) -> int:
        return self.rule.n_max

    @property
    def signed(self) -> bool:
        return self.rule.signed

    @property
    def tail(self) -> Tensor:
        """The coefficient lambda of the surrogate's tails; 0 where it has none."""
        if self.surrogate.tail is None:
            return self.alpha.new_zeros(())
        return torch.sigmoid(self.eta)

    @property
    def leak(self) -> Tensor | float:
        if self.membrane == "plif":
            return 1 - torch.sigmoid(self.decay_logit)
        return self._within("beta") if self.membrane == "lif" else 1.0

    def _within(self, name: str) -> Tensor:
        """A learned number clamped to [0, 1], also while it is frozen. A fixed one was checked in __init__."""
        value: Tensor = getattr(self, name)
        return unit_interval(value) if value.requires_grad or name not in self._buffers else value

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Clamp to [0, 1] what another network learned and this one does not, as the other network uses it."""
        for name in {"beta", "alpha"} & self._buffers.keys():
            if isinstance(value := state_dict.get(prefix + name), Tensor):
                state_dict[prefix + name] = value.clamp(0, 1)
        super()._load_from_state_dict(state_dict, prefix, *args)

    @property
    def gain(self) -> Tensor | float:
        return torch.sigmoid(self.decay_logit) if self.membrane == "plif" else 1.0

    def constants(self, x: Tensor) -> Constants:
        """The layer's numbers in the arithmetic's dtype, shaped for one timestep of `x` [T, B, ...]."""
        caches = self.caches  # another thread may leave its context meanwhile
        if not caches:
            return self._constants(x)
        cache, kind = caches[-1], (x.dtype, x.dim())
        if kind not in cache:
            cache[kind] = self._constants(x)
        return cache[kind]

    def _constants(self, x: Tensor) -> Constants:
        dtype = compute_dtype(x)

        def cast(value: Tensor | float) -> Tensor | float:
            return value.to(dtype) if isinstance(value, Tensor) else value

        def spread(value: Tensor) -> Tensor:
            value = value.to(dtype)
            return value.reshape(-1, *[1] * (x.dim() - 3)) if value.dim() else value

        return Constants(
            step=spread(self._scaled_step(x)),
            tail=self.tail.to(dtype),
            leak=cast(self.leak),
            alpha=self._within("alpha").to(dtype),
            gain=cast(self.gain),
            scale=None if self.scale is None else spread(self.scale),
            thresholds=None if self.thresholds is None else self.thresholds.to(dtype),
        )

    def _scaled_step(self, x: Tensor) -> Tensor:  # noqa: ARG002 - a subclass scales by the size of x
        return self.step

    def check_input(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            kind = f"dtype {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"x must be a floating-point tensor [T, B, ...], got {kind}")
        if x.layout is not torch.strided:
            raise TypeError(f"x must be a dense tensor, got {x.layout}: give x.to_dense()")
        if x.dim() < 2:
            raise ValueError(f"x must be [T, B, ...] with at least two dimensions, got shape {tuple(x.shape)}")
        return x

    def look_at_origin(self, x: Tensor) -> None:
        """Warn once if a batch stands where time is read: see `lbq.neuron.origin`."""
        if not torch.compiler.is_compiling() and not self.origin_seen:
            look(self, x)

    def checked_state(self, x: Tensor, state: BurstState | None) -> BurstState | None:
        """`state`, where it belongs before `x` [T, B, ...]; one of inference mode as a copy that gradients may read."""
        if state is None:
            return None
        if not isinstance(state, BurstState):
            raise TypeError(f"state must be what forward_chunk or forward_step returned, got {type(state).__name__}")
        if state.pending is not None and not self.rule.delayed:
            raise ValueError(f"state.pending must be None: {type(self).__name__} does not delay its reset")
        expected = self.state_shape(x), compute_dtype(x), x.device
        for name, value in zip(state._fields, state, strict=True):
            if value is not None and (tuple(value.shape), value.dtype, value.device) != expected:
                raise ValueError(
                    f"state.{name} must be {expected[0]} {expected[1]} on {expected[2]} for this x, "
                    f"got {tuple(value.shape)} {value.dtype} on {value.device}"
                )
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or not state.v.is_inference():
            return state
        return BurstState(state.v.clone(), None if state.pending is None else state.pending.clone())

    def state_shape(self, x: Tensor) -> tuple[int, ...]:
        """Of the membranes that `x` [T, B, ...] drives."""
        return tuple(x.shape[1:])

    def forward(
        self,
        x: Tensor,
        norm: nn.Module | None = None,
        residual: Tensor | None = None,
        timesteps: int | None = None,
    ) -> Tensor:
        """Scaled outputs of the whole sequence `x` [T, B, ...], from a zero state.

        Where `fuses` holds, BatchNorm `norm` and the add of `residual` may be left to the neuron, which computes them in the
        same pass; `x` is then what enters BatchNorm. With `timesteps` it is `[B, ...]`, shown that often.
        """
        priced = self.emitted is not None
        if norm is None:
            check_alone(residual, timesteps)
            self.look_at_origin(x)
            constants = self.constants(self.check_input(x))
            out: Any = (burst_priced if priced else burst)(x, constants, self.rule)
        else:
            sequence = self.check_input(x if timesteps is None else x.unsqueeze(0).expand(timesteps, *x.shape))
            from lbq.kernels.gpu.operators import norm_burst

            out = norm_burst(x, norm, self.constants(sequence), self.rule, residual, timesteps, priced)  # type: ignore[arg-type]
        if self.emitted is None:
            return out
        scaled, sums = out
        self.emitted.append(sums)
        return scaled

    def kernel(self, timesteps: int, dtype: torch.dtype = torch.float32) -> str:
        """Which kernel runs its sequences of so many timesteps: the chosen one where it can, else the reference."""
        x = torch.zeros(timesteps, 1, self.step.numel(), 1, 1, dtype=dtype, device=self.alpha.device)
        return kernel_for(x, self.constants(x), self.rule)

    def fuses(self, x: Tensor, norm: nn.Module, timesteps: int) -> bool:
        """Whether this neuron takes BatchNorm `norm` of `x` [N, C, ...] into its own pass."""
        plain = type(self).forward is SpikingNeuron.forward and self.thresholds is None
        return plain and not is_watched(self) and fuses_norm(x, norm, self.rule, timesteps)

    def forward_step(self, x: Tensor, state: BurstState | None = None) -> tuple[Tensor, BurstState]:
        """One timestep of current `x` [B, ...]; pass the returned state to the next call, None at the start."""
        state = self.checked_state(self.check_input(x[None]), state)
        current = x.to(compute_dtype(x))
        emission, after = burst_step(current, state, self.constants(x[None]), self.rule)
        if after.v is current:  # whoever reads a stream into one buffer would change the membrane
            after = after._replace(v=current.clone())
        return emission.scaled.to(x.dtype), after

    def forward_chunk(self, x: Tensor, state: BurstState | None = None) -> tuple[Tensor, BurstState | None]:
        """Scaled outputs of the next timesteps `x` [T, B, ...] of a longer sequence, and the state after them.

        `state` is what the chunk or step before returned, None at the start (and after no timestep at all). This is
        truncated backpropagation through time: gradients stop at both ends of a chunk, for which the given state is a
        constant; `forward` over the whole sequence has them all.
        """
        state = self.checked_state(self.check_input(x), state)
        return burst_chunk(x, self.constants(x), self.rule, state)

    @torch.no_grad()
    def levels(self, x: Tensor) -> Tensor:
        """Integer levels of the whole sequence `x` [T, B, ...]: uint8, int8 where signed, int32 past 255."""
        level = self._levels(self.check_input(x))
        if level.isnan().any():
            raise ValueError("x must not contain NaN: a NaN has no level")
        if self.signed:
            return level.to(torch.int8 if self.n_max <= 127 else torch.int32)
        return level.to(torch.uint8 if self.n_max <= 255 else torch.int32)

    def _levels(self, x: Tensor) -> Tensor:
        return burst_levels(x, self.constants(x), self.rule)

    @torch.no_grad()
    def spec(self) -> NeuronSpec:
        """This neuron as plain numbers, for deployment and accounting."""

        def array(value: Tensor) -> Any:
            return value.detach().cpu().double().numpy()

        rule = self.rule
        return NeuronSpec(
            kind=type(self).__name__,
            n_max=rule.n_max,
            step=array(self.step),
            scale=array(self.step if self.scale is None else self.scale),
            leak=float(self.leak),
            gain=float(self.gain),
            alpha=float(self._within("alpha")),
            rounding=rule.rounding,
            reset=rule.reset,
            decay_reset=rule.decay_reset,
            thresholds=None if self.thresholds is None else array(self.thresholds),
        )

    def extra_repr(self) -> str:
        def shown(value: Tensor) -> str:
            low, high = ("?", "?") if value.is_meta else (f"{value.min():.4g}", f"{value.max():.4g}")
            return f"[{low}..{high}]" if value.dim() else low

        def used(name: str) -> str:  # clamped
            return shown(self._within(name).detach())

        beta = f" beta={used('beta')}," if self.membrane == "lif" else ""
        return (
            f"n_max={self.n_max}, step={shown(self.step.detach())}, membrane={self.membrane!r},{beta} "
            f"alpha={used('alpha')}, surrogate={self.surrogate.name!r}"
        )


def neurons_of(net: nn.Module) -> dict[str, SpikingNeuron]:
    """The neurons of a network by name; one that goes by several names, by the first."""
    return {name: module for name, module in net.named_modules() if isinstance(module, SpikingNeuron)}


@contextmanager
def unchanging(net: nn.Module) -> Iterator[None]:
    """While nothing trains: without gradients, and neurons work out their constants once, not in every forward pass.

    On a GPU that takes as many launches as the rest of a layer.
    """
    entered: list[tuple[SpikingNeuron, dict[Any, Constants]]] = [(neuron, {}) for neuron in neurons_of(net).values()]
    for neuron, cache in entered:
        neuron.caches = (*neuron.caches, cache)
    try:
        with torch.no_grad():
            yield
    finally:
        for neuron, cache in entered:  # by identity: another thread's context may have been entered since
            neuron.caches = tuple(other for other in neuron.caches if other is not cache)


@contextmanager
def summing_levels(net: nn.Module, enabled: bool = True) -> Iterator[dict[str, list[Tensor]]]:
    """By neuron, the sums that each of its forward calls emits within the context, `[2]`: of |S|, differentiable, and of the
    set bits of |S|. Nothing where not `enabled`."""
    neurons = neurons_of(net) if enabled else {}
    before = {name: neuron.emitted for name, neuron in neurons.items()}
    emitted: dict[str, list[Tensor]] = {name: [] for name in neurons}
    for name, neuron in neurons.items():
        neuron.emitted = emitted[name]
    try:
        yield emitted
    finally:
        for name, neuron in neurons.items():
            neuron.emitted = outer = before[name]
            if outer is not None:  # its context saw these calls too
                outer += emitted[name]
