"""Choose the steps of a burst network from data, so that it does what an ANN does.

This goes layer by layer from the input on. Each layer sees the currents that really arrive from the layers before it:

- each neuron's step is the one for which its outputs, averaged over time, are nearest to the ANN's activations (least
  squares over a geometric grid);
- each channel's scale and shift are those for which the current, averaged over time, is nearest to the ANN's. BatchNorm,
  convolutions and linear layers with a bias have them. They compensate for what levels lose.
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
from lbq.neuron.burst import SteppedNeuron
from lbq.neuron.hooks import attached, before_each, evaluating

SYNAPTIC_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
AFFINE_LAYERS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, *SYNAPTIC_LAYERS)
SAMPLED_ACTIVATIONS = 2**18  # of each layer
STEP_GRID = torch.linspace(-4, 1, 41).exp2().tolist()  # steps to try, in units of the largest activation / n_max
MIN_STEP = 4e-6  # softplus reaches no step below 2e-6
MAX_SCALE = 4.0  # a scale stays within this factor of 1: without a correlation it would be meaningless


@dataclass(frozen=True)
class Fit:
    """How well a neuron's outputs, averaged over time, give the ANN's activations.

    step: the chosen one, or the mean over channels. error: the squared error left, relative to the activations' mean
    square.
    """

    step: float
    error: float


def calibrate(snn: nn.Module, ann: nn.Module, images: Tensor) -> dict[str, Fit]:
    """Choose the steps of `snn`, and the scales and shifts of its layers, in place. Returns the fit of each neuron.

    Both networks take `images` and have the same weights. A neuron's target is the output of the ANN's layer of the same
    name.
    """
    neurons = stepped_neurons(snn)
    corrected = {name: module for name, module in snn.named_modules() if _is_affine(module)}
    shared = Counter(id(p) for module in corrected.values() for p in module.parameters(recurse=False))
    fits: dict[str, Fit] = {}

    def fit(name: str, neuron: SteppedNeuron, x: Tensor) -> None:
        fits[name] = _fit_step(neuron, targets[name].sample(name, x), targets[name].values)

    def correct(name: str) -> Callable[..., Tensor]:
        def hook(module: nn.Module, _: Any, output: Tensor) -> Tensor:
            return _correct(module, output, targets[name].sample(name, output).mean(0), targets[name].values)

        return hook

    with torch.inference_mode(False), torch.no_grad():
        targets = _activations(ann, {*neurons, *corrected}, checked_images(images))
        for name in neurons:
            if name not in targets:
                raise GraphError(
                    f"layer {name!r} of the spiking network: the ANN must have one of that name, used once, whose outputs are "
                    "[B, ...]"
                )
        _check_weights(snn, ann)
        hooks = before_each(neurons, fit)
        hooks += [
            module.register_forward_hook(correct(name))
            for name, module in corrected.items()
            if name in targets and all(shared[id(p)] == 1 for p in module.parameters(recurse=False))
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
    """Refuse a network whose weights are not the ANN's, up to scales: no step compensates for other weights."""
    ann_layers, similarities = dict(ann.named_modules()), []
    for name, layer in snn.named_modules():
        other = ann_layers.get(name)
        if isinstance(layer, SYNAPTIC_LAYERS) and isinstance(other, SYNAPTIC_LAYERS):
            if layer.weight.shape != other.weight.shape:
                continue
            ours, theirs = (m.weight.detach().flatten(1).double().cpu() for m in (layer, other))
            similarities.append(nn.functional.cosine_similarity(ours, theirs).mean().item())
    if similarities and max(similarities) < 0.5:
        raise GraphError(
            "the spiking network has other weights than the ANN: load them first, "
            "snn.load_state_dict(ann.state_dict(), strict=False)"
        )


def stepped_neurons(snn: nn.Module) -> dict[str, SteppedNeuron]:
    """The neurons of a network by name; each must have a step that can be chosen."""
    neurons: dict[str, SteppedNeuron] = {}
    for name, module in snn.named_modules():
        if isinstance(module, SteppedNeuron) and not module.signed:
            neurons[name] = module
        elif isinstance(module, SpikingNeuron | ReLU):
            raise GraphError(
                f"layer {name!r}: {type(module).__name__} has no step to choose for activations from 0 up: use lbq, "
                "another burst neuron, ilif or qann"
            )
    if not neurons:
        raise GraphError(f"{type(snn).__name__} has no spiking neuron whose step could be chosen")
    return neurons


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
            raise GraphError(f"layer {name!r} has other shapes in the two networks: {tuple(x.shape)}, {self.shape}")
        return _rows(x.reshape(-1, self.batch, *self.shape), self.last)[:, self.rows]


def _activations(ann: nn.Module, names: set[str], images: Tensor) -> dict[str, _Activations]:
    """Outputs of the ANN's layers of these names. Layers that it calls more than once are left out."""
    activations: dict[str, _Activations] = {}
    calls = Counter[str]()
    batch = len(images)

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, _: Any, output: Tensor) -> None:
            calls[name] += 1
            x = output[0] if output.shape[:2] == (1, batch) else output  # networks of lbq.models have time in front
            if x.shape[0] != batch or x.dim() < 2:
                return
            if not bool(x.isfinite().all()):
                raise GraphError(f"layer {name!r} of the ANN gives NaN or infinity: look at its weights and the images")
            last = isinstance(module, nn.Linear)
            table = _rows(x[None], last)[0]
            order = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))
            rows = order[: max(SAMPLED_ACTIVATIONS // table.shape[1], 1)].to(x.device)
            activations[name] = _Activations(table[rows].clone(), tuple(x.shape[1:]), last, batch, rows)

        return hook

    with attached([m.register_forward_hook(watch(n)) for n, m in ann.named_modules() if n in names]), evaluating(ann):
        ann(images.clone())
    return {name: value for name, value in activations.items() if calls[name] == 1}


def _rows(x: Tensor, last: bool) -> Tensor:
    """`[T, B, C, ...]`, or `[T, B, ..., C]` if `last`, as `[T, rows, C]`."""
    return (x if last else x.movedim(2, -1)).flatten(1, -2)


def _is_affine(module: nn.Module) -> bool:
    """Whether a layer has its own scales and shifts, which can be changed, and uses them as its class does."""
    plain = isinstance(module, AFFINE_LAYERS) and module.bias is not None and not hasattr(module, "parametrizations")
    return plain and own_method(module) is None


def _fit_step(neuron: SteppedNeuron, currents: Tensor, target: Tensor) -> Fit:
    """Set the step for which the mean output over `currents` [T, rows, channels] is nearest to `target` [rows, channels]."""
    largest = _largest(target)
    if not largest:
        return Fit(float(neuron.step.mean()), 0.0)  # silent on all images: the step stays
    tops = torch.tensor([_largest(channel) or largest for channel in target.T] if neuron.step.dim() else largest)
    steps = [(tops / neuron.n_max * factor).clamp_min(MIN_STEP) for factor in STEP_GRID]

    def error(step: Tensor) -> Tensor:
        neuron.set_step(step)
        return (neuron.forward(currents).mean(0) - target).float().square().mean(0)  # of each channel

    errors = torch.stack([error(step) for step in steps]).cpu()
    best = errors.argmin(0) if neuron.step.dim() else errors.mean(1).argmin()
    left = error(torch.stack(steps).gather(0, best[None])[0]).mean() / target.float().square().mean()
    return Fit(float(neuron.step.mean()), float(left))


def _largest(activations: Tensor) -> float:
    """The largest activation, after the top thousandth of those above 0 is left out; 0 if none is above 0."""
    positive = activations[activations > 0].float().sort().values
    return float(positive[-1 - len(positive) // 1000]) if len(positive) else 0.0


def _correct(module: nn.Module, output: Tensor, currents: Tensor, target: Tensor) -> Tensor:
    """Scale and shift a layer's channels so that `currents` come nearest to `target` (both `[rows, channels]`).

    Returns the layer's output, scaled and shifted alike.
    """
    centred = currents - currents.mean(0)
    slope = (centred * (target - target.mean(0))).mean(0) / centred.square().mean(0)
    slope = slope.nan_to_num(1.0, 1.0, 1.0).clamp(1 / MAX_SCALE, MAX_SCALE)
    shift = target.mean(0) - slope * currents.mean(0)
    module.weight.mul_(slope.reshape(-1, *[1] * (module.weight.dim() - 1)))  # type: ignore[operator]
    module.bias.mul_(slope).add_(shift)  # type: ignore[operator]
    trailing = [1] * (0 if isinstance(module, nn.Linear) else output.dim() - 2)
    return output * slope.reshape(-1, *trailing) + shift.reshape(-1, *trailing)


def checked_images(images: Tensor) -> Tensor:
    if not isinstance(images, Tensor) or not images.is_floating_point() or images.dim() < 2 or len(images) < 2:
        raise GraphError("images must be a floating-point tensor of two inputs or more, as the ANN takes them")
    if not bool(images.isfinite().all()):
        raise GraphError("images must be finite, and hold NaN or infinity")
    return images
