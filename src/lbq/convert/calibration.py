"""Steps of a burst network, chosen from data so that it does what an ANN does.

From the input on, layer by layer, each with the currents that really arrive from the layers before it:

- each neuron's step is the one for which its outputs, averaged over time, are nearest to the ANN's activations (least
  squares over a geometric grid);
- each channel's scale and shift, of layers that have them (BatchNorm; convolutions and linear layers with a bias), are the
  ones for which the current, averaged over time, is nearest to the ANN's. They make good for what levels lose.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lbq.deploy.lowering.faithful import own_method
from lbq.errors import GraphError
from lbq.neuron import ReLU, SpikingNeuron
from lbq.neuron.base import attached, before_each
from lbq.neuron.burst import SteppedNeuron, set_step
from lbq.training.evaluation import evaluating

LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
AFFINE = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, *LAYERS)
SAMPLE = 2**18  # activations of a layer that are looked at
GRID = torch.linspace(-4, 1, 41).exp2().tolist()  # steps that are tried, in parts of the largest activation / n_max
SMALLEST = 4e-6  # step: softplus has none below 2e-6
SLOPES = 4.0  # how far a scale may go from 1, either way: what correlates with nothing has none


@dataclass(frozen=True)
class Fit:
    """How well a neuron's outputs, averaged over time, give the ANN's activations: the step chosen (the mean, where there is
    one for each channel), and the squared error that is left, in parts of the activations' mean square."""

    step: float
    error: float


def calibrate(snn: nn.Module, ann: nn.Module, images: Tensor) -> dict[str, Fit]:
    """Choose the steps of `snn`, and scales and shifts of its layers, in place; what came out of it, neuron by neuron.

    Both networks take `images`, and have the same weights; a neuron's activations are the outputs of the ANN's layer of the
    same name.
    """
    neurons = stepped_neurons(snn)
    corrected = {name: module for name, module in snn.named_modules() if _is_affine(module)}
    shared = Counter(id(p) for module in corrected.values() for p in module.parameters(recurse=False))
    fits: dict[str, Fit] = {}

    def fit(name: str, neuron: SpikingNeuron, x: Tensor) -> None:
        fits[name] = _fit_step(neuron, wanted[name].sample(name, x), wanted[name].values)

    def correct(name: str) -> Callable[..., Tensor]:
        def hook(module: nn.Module, _: Any, output: Tensor) -> Tensor:
            return _correct(module, output, wanted[name].sample(name, output).mean(0), wanted[name].values)

        return hook

    with torch.inference_mode(False), torch.no_grad():
        wanted = _activations(ann, {*neurons, *corrected}, checked(images))
        for name in neurons:
            if name not in wanted:
                raise GraphError(
                    f"layer {name!r} of the spiking network: the ANN must have one of that name, used once, whose outputs are "
                    "[B, ...]"
                )
        _check_weights(snn, ann)
        hooks = before_each(neurons, fit)
        hooks += [
            module.register_forward_hook(correct(name))
            for name, module in corrected.items()
            if name in wanted and all(shared[id(p)] == 1 for p in module.parameters(recurse=False))
        ]
        before = {name: value.clone() for name, value in snn.state_dict().items()}
        try:
            with attached(hooks), evaluating(snn):
                snn(images.clone())
        except BaseException:
            snn.load_state_dict(before)
            raise
    return fits


def _check_weights(snn: nn.Module, ann: nn.Module) -> None:
    """Refuse a network that is not the ANN's but for scales: one with weights of its own, which no step can make good for."""
    theirs, alike = dict(ann.named_modules()), []
    for name, module in snn.named_modules():
        if isinstance(module, LAYERS) and isinstance(other := theirs.get(name), LAYERS):
            if module.weight.shape != other.weight.shape:
                continue
            ours, given = (m.weight.detach().flatten(1).double().cpu() for m in (module, other))
            alike.append(nn.functional.cosine_similarity(ours, given).mean().item())
    if alike and max(alike) < 0.5:
        raise GraphError(
            "the spiking network has other weights than the ANN: load them first, "
            "snn.load_state_dict(ann.state_dict(), strict=False)"
        )


def stepped_neurons(snn: nn.Module) -> dict[str, SteppedNeuron]:
    """The neurons of a network by name; each must have a step that can be chosen."""
    found: dict[str, SteppedNeuron] = {}
    for name, module in snn.named_modules():
        if isinstance(module, SteppedNeuron) and not module.signed:
            found[name] = module
        elif isinstance(module, SpikingNeuron | ReLU):
            raise GraphError(
                f"layer {name!r}: {type(module).__name__} has no step to choose for activations from 0 up: use lbq, "
                "another burst neuron, ilif or qann"
            )
    if not found:
        raise GraphError(f"{type(snn).__name__} has no spiking neuron whose step could be chosen")
    return found


@dataclass(frozen=True)
class _Activations:
    """Some rows `[rows, channels]` of a layer's outputs for all images; `shape` is one image's."""

    values: Tensor
    shape: tuple[int, ...]
    last: bool  # whether channels are the last dimension of `shape`, not the first
    batch: int
    rows: Tensor

    def sample(self, name: str, x: Tensor) -> Tensor:
        """The same rows of another network's outputs `[T, B, ...]`, `[T * B, ...]` or `[B, ...]`, as `[T, rows, channels]`."""
        if x.numel() % (self.batch * math.prod(self.shape)) or x.shape[-len(self.shape) :] != self.shape:
            raise GraphError(
                f"layer {name!r} has other shapes in the two networks: {tuple(x.shape)}, [B, ...] {self.shape}"
            )
        return _rows(x.reshape(-1, self.batch, *self.shape), self.last)[:, self.rows]


def _activations(ann: nn.Module, names: set[str], images: Tensor) -> dict[str, _Activations]:
    """Outputs of the ANN's layers of these names, of those that it calls just once."""
    found: dict[str, _Activations] = {}
    calls = Counter[str]()
    batch = len(images)

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, _: Any, output: Tensor) -> None:
            calls[name] += 1
            x = output[0] if output.shape[:2] == (1, batch) else output  # of networks that know time
            if x.shape[0] != batch or x.dim() < 2:
                return
            if not bool(x.isfinite().all()):
                raise GraphError(f"layer {name!r} of the ANN gives NaN or infinity: look at its weights and the images")
            last = isinstance(module, nn.Linear)
            laid = _rows(x[None], last)[0]
            chosen = torch.randperm(len(laid), generator=torch.Generator().manual_seed(0))
            rows = chosen[: max(SAMPLE // laid.shape[1], 1)].to(x.device)
            found[name] = _Activations(laid[rows].clone(), tuple(x.shape[1:]), last, batch, rows)

        return hook

    with attached([m.register_forward_hook(watch(n)) for n, m in ann.named_modules() if n in names]), evaluating(ann):
        ann(images.clone())
    return {name: value for name, value in found.items() if calls[name] == 1}


def _rows(x: Tensor, last: bool) -> Tensor:
    """`[T, B, C, ...]`, or `[T, B, ..., C]` where `last`, as `[T, rows, C]`."""
    return (x if last else x.movedim(2, -1)).flatten(1, -2)


def _is_affine(module: nn.Module) -> bool:
    """Whether a layer has scales and shifts of its own, which can be changed, and does with them what its class does."""
    plain = isinstance(module, AFFINE) and module.bias is not None and not hasattr(module, "parametrizations")
    return plain and own_method(module) is None


def _fit_step(neuron: nn.Module, currents: Tensor, wanted: Tensor) -> Fit:
    """Set the step for which the mean output over `currents` [T, rows, channels] is nearest to `wanted` [rows, channels]."""
    assert isinstance(neuron, SteppedNeuron)
    top = _top(wanted)
    if not top:
        return Fit(float(neuron.step.mean()), 0.0)  # silent on all images: as it began
    each = torch.tensor([_top(channel) or top for channel in wanted.T] if neuron.step.dim() else top)
    steps = [(each / neuron.n_max * part).clamp_min(SMALLEST) for part in GRID]

    def error(step: Tensor) -> Tensor:
        set_step(neuron, step)
        return (neuron.forward(currents).mean(0) - wanted).float().square().mean(0)  # of each channel

    errors = torch.stack([error(step) for step in steps]).cpu()
    best = errors.argmin(0) if neuron.step.dim() else errors.mean(1).argmin()
    left = error(torch.stack(steps).gather(0, best[None])[0]).mean() / wanted.float().square().mean()
    return Fit(float(neuron.step.mean()), float(left))


def _top(wanted: Tensor) -> float:
    """The largest activation but for one in a thousand of those above 0; 0 where none is."""
    above = wanted[wanted > 0].float().sort().values
    return float(above[-1 - len(above) // 1000]) if len(above) else 0.0


def _correct(module: nn.Module, output: Tensor, found: Tensor, wanted: Tensor) -> Tensor:
    """Scale and shift a layer's channels so that `found` is nearest to `wanted` (both `[rows, channels]`), and its output."""
    centred = found - found.mean(0)
    slope = (centred * (wanted - wanted.mean(0))).mean(0) / centred.square().mean(0)
    slope = slope.nan_to_num(1.0, 1.0, 1.0).clamp(1 / SLOPES, SLOPES)
    shift = wanted.mean(0) - slope * found.mean(0)
    module.weight.mul_(slope.reshape(-1, *[1] * (module.weight.dim() - 1)))  # type: ignore[operator]
    module.bias.mul_(slope).add_(shift)  # type: ignore[operator]
    behind = [1] * (0 if isinstance(module, nn.Linear) else output.dim() - 2)
    return output * slope.reshape(-1, *behind) + shift.reshape(-1, *behind)


def checked(images: Tensor) -> Tensor:
    if not isinstance(images, Tensor) or not images.is_floating_point() or images.dim() < 2 or len(images) < 2:
        raise GraphError("images must be a floating-point tensor of two inputs or more, as the ANN takes them")
    if not bool(images.isfinite().all()):
        raise GraphError("images must be finite, and hold NaN or infinity")
    return images
