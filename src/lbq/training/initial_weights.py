"""What a training starts from, as `train.init_from` asks: a run folder, a deployed network or a file of weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from lbq import engine
from lbq.config import Config
from lbq.data.dataset import Inputs
from lbq.deploy.lowering.trace import NORMS
from lbq.deploy.unfolding import unfold
from lbq.engine import published
from lbq.errors import GraphError, LbqError, RunError
from lbq.graph.integer import IntegerNetwork
from lbq.neuron import SpikingNeuron
from lbq.neuron.burst import FIXED_STEP
from lbq.neuron.hooks import attached, evaluating
from lbq.runs import run_folder
from lbq.runs.build import outline
from lbq.system import files
from lbq.training import evaluation
from lbq.training.trainer import NORM_SAMPLES, Trainer

HEAD = "fc."  # begins the names of the classifier's tensors
COUNTER = "num_batches_tracked"  # of BatchNorm, which other programs leave out
SHOWN_NAMES = 3
KINDS = "a run folder, a model.lbq or a weights.safetensors"
HOW_TO = "docs/howto/fine-tune.md shows how to write one"


@dataclass(frozen=True)
class Start:
    """weights: by their names in the network's state. folded: BatchNorm has no statistics yet. notes: what to know of it."""

    weights: dict[str, Tensor]
    sha256: str
    folded: bool = False
    notes: tuple[str, ...] = ()


def _place(path: str) -> str:
    """The path itself, or that of a network which lbq knows by this name."""
    return str(path if Path(path).exists() else published.names().get(path, path))


def check(path: str) -> None:
    """Refuse what is no start at all, before anything is read that takes long."""
    path = _place(path)
    try:
        if not Path(path).exists():
            raise RunError(f"{path} does not exist: give {KINDS}, or a name of lbq models")
        if Path(path).is_dir():
            run_folder.check_folder(path, "weights.safetensors")
        elif Path(path).suffix not in (".lbq", ".safetensors"):
            raise RunError(f"{path} is none of {KINDS}: give one of these; {HOW_TO}")
    except RunError as error:
        raise RunError(f"train.init_from: {error}") from error


def read(config: Config, net: nn.Module, inputs: Inputs) -> Start:
    """What `config` starts from, for its network and what that reads."""
    path, head = _place(config.train.init_from), not config.train.new_head
    check(path)
    try:
        if Path(path).suffix == ".lbq" and Path(path).is_file():
            return _artefact(path, config, net, inputs, head)
        if Path(path).is_file():
            weights = _named_weights(path, config.model.id, net, head)
            return Start(weights, files.sha256_of(path, RunError))
        weights = fitting_weights(path, net)
        kept = {name: value for name, value in weights.items() if head or not name.startswith(HEAD)}
        return Start(kept, run_folder.weights_checksum(path))
    except LbqError as error:
        known = str(error).startswith("train.init_from")
        raise RunError(str(error) if known else f"train.init_from: {error}") from error


# A deployed network
# ---------------------------------------------------------------------------------------------------------------------


def _artefact(path: str, config: Config, net: nn.Module, inputs: Inputs, head: bool) -> Start:
    loaded = engine.load(path)
    network = loaded.network
    ours, theirs = (inputs.static, inputs.shape[0]), (network.static, network.input_shape[0])
    if ours != theirs:
        here, there = (
            f"{'images' if static else 'event frames'} of {count} channels" for static, count in (ours, theirs)
        )
        raise RunError(f"{path} reads {there}, and {config.data.name} has {here}: give data of the same kind")
    if network.static and network.input_max != inputs.scale:
        raise RunError(
            f"{path} reads pixels up to {network.input_max}, those of {config.data.name} go to {inputs.scale}"
        )
    try:
        unfolded = unfold(net, network, inputs.mean, inputs.std, inputs.scale, head)
    except GraphError as error:
        model = network.facts.get("model", config.model.id)
        other = f"; its network is {model!s:.40}: set model.id" * (model != config.model.id)
        raise RunError(f"{path}: {error}{other}") from error
    notes = tuple(_notes(path, network, config, inputs, unfolded.border, head))
    checksum = files.sha256_of(path, RunError)
    loaded.check_file()
    return Start(unfolded.weights, checksum, True, notes)


def _notes(
    path: str, network: IntegerNetwork, config: Config, inputs: Inputs, border: float, head: bool
) -> Iterator[str]:
    """How a deployed network was used otherwise than it will be."""
    yield f"{path} has no BatchNorm: statistics are measured on {NORM_SAMPLES:,} training images, or all"
    if network.timesteps != config.model.timesteps:
        yield f"{path} ran over {network.timesteps} timesteps, this network runs over {config.model.timesteps}"
    if network.input_shape != inputs.shape:
        yield f"{path} read {list(network.input_shape)}, {config.data.name} has {list(inputs.shape)}"
    if border:
        yield (
            f"{path} normalised images by another mean. Weights were adapted; where layers pad, currents differ by up to "
            f"{border:.2g} steps"
        )
    if head and network.classes and inputs.classes and network.classes != inputs.classes:
        yield f"{path} names its classes {', '.join(network.classes)[:60]}: for a new classifier set train.new_head=true"


@torch.no_grad()
def give_statistics(trainer: Trainer) -> None:
    """Give each BatchNorm, which passes on what it gets, the mean and variance of that, and a weight and bias that undo them.

    The network computes what it did. In training, where BatchNorm takes the statistics of a batch, it computes nearly that.
    """
    t, world, net = trainer.config.train, trainer.world, trainer.net
    norms: list[Any] = [module for module in net.modules() if isinstance(module, NORMS)]
    sums = {norm: norm.running_mean.new_zeros(3, norm.num_features, dtype=torch.float64) for norm in norms}

    def watch(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0]
        variance, mean = torch.var_mean(x, [d for d in range(x.dim()) if d != 1], correction=0)
        count = torch.full_like(mean, x.numel() // x.shape[1])
        sums[norm] += count * torch.stack([torch.ones_like(mean), mean, variance + mean.square()]).double()

    with attached(norm.register_forward_pre_hook(watch) for norm in norms), evaluating(net), evaluation.without_tf32():
        for x, _ in trainer.source.train_batches(trainer.norm_samples(at_least=True), 0, trainer.config.seed):
            net(evaluation.cast(x, t))
    for norm in norms:
        count, mean, square = world.sum(sums[norm])
        mean, square = mean / count, square / count
        variance = (square - mean.square()).clamp_min(0)
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(variance)
        norm.weight.copy_((variance + norm.eps).sqrt())
        norm.bias.add_(mean)
    trainer.start_from(net.state_dict())


# A file of weights
# ---------------------------------------------------------------------------------------------------------------------


def _named_weights(path: str, model: str, net: nn.Module, head: bool) -> dict[str, Tensor]:
    """The tensors of a file that holds a state_dict: all of the network's, and no other."""
    try:
        theirs = load_file(path)
    except (SafetensorError, OSError) as error:
        raise RunError(f"{path} cannot be read ({error}): give a safetensors file; {HOW_TO}") from error
    ours = {k: v for k, v in net.state_dict().items() if head or not k.startswith(HEAD)}
    theirs = {k: v for k, v in theirs.items() if head or not k.startswith(HEAD)}
    both = [name for name in ours if name in theirs]
    misshapen = [name for name in both if theirs[name].shape != ours[name].shape]
    shapes = (f"{name} ({list(theirs[name].shape)} there, {list(ours[name].shape)} here)" for name in misshapen)
    wrong = {
        "it lacks": [name for name in ours if name not in theirs and not name.endswith(COUNTER)],
        "it has, and the network has not,": [name for name in theirs if name not in ours],
        "of another shape are": list(shapes),
        "not finite are": [name for name in both if not theirs[name].isfinite().all()],
    }
    if problems := [f"{what} {_some(names)}" for what, names in wrong.items() if names]:
        only_head = misshapen and len(problems) == 1 and all(name.startswith(HEAD) for name in misshapen)
        sizes_alone = misshapen and len(problems) == 1
        remedy = (
            "give the id of a network of these sizes" if sizes_alone else f"name the tensors as {model} does; {HOW_TO}"
        )
        remedy = "set train.new_head=true to train a new classifier" if only_head else remedy
        raise RunError(f"{path} does not fit {model}: {'; '.join(problems)}: {remedy}")
    for name, value in _constants(net).items():
        if not torch.allclose(theirs[name].to(value), value, rtol=1e-6):
            there, here = (float(one.float().mean()) for one in (theirs[name], value))
            raise RunError(
                f"{path}: {name} is {there:.6g} there and {here:.6g} here, where it is not learned: set the neuron's options "
                "as they were, or give a run folder, of which such constants are not taken"
            )
    return theirs


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more


# A run folder
# ---------------------------------------------------------------------------------------------------------------------


def fitting_weights(run: str, net: nn.Module) -> dict[str, Tensor]:
    """The weights of a run that have the same name and shape in `net`, such as the synapses of an ANN.

    A single number of the run is repeated for each channel of `net`. A neuron's constant, such as a decay that is not
    learned, stays as `net` has it where the run has another one.
    """
    weights, ours = run_folder.read_weights(run), net.state_dict()
    constants = _constants(net)
    theirs = {**weights, **_first_steps(run)}
    own = {name for name, value in constants.items() if name not in theirs or not _equal(theirs[name], value)}
    fitting = {
        name: value.expand(ours[name].shape)
        for name, value in weights.items()
        if name in ours and value.shape in ((), ours[name].shape) and name not in own
    }
    if not any(name.endswith("weight") for name in fitting):
        raise RunError(f"train.init_from: no weight of {run} fits this network")
    return fitting


def _first_steps(run: str) -> dict[str, Tensor]:
    """The fixed steps that a run began with. A conversion may have chosen others for its weights, layer by layer."""
    try:
        constants = _constants(outline(run_folder.load_config(run)))
    except (LbqError, ValueError):  # weights alone, or a network that is not known here
        return {}
    return {name: value for name, value in constants.items() if name.endswith(f".{FIXED_STEP}")}


def _constants(net: nn.Module) -> dict[str, Tensor]:
    """The numbers of neurons that are not learned, by all their names in the network's state."""
    neurons = [(n, m) for n, m in net.named_modules(remove_duplicate=False) if isinstance(m, SpikingNeuron)]
    return {f"{n}.{k}": v.cpu() for n, m in neurons for k, v in m.fixed_numbers().items()}


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether they are equal, or `one` is the number that all channels of `other` have."""
    return one.shape in ((), other.shape) and bool((one == other).all())
