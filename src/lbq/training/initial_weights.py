"""Which weights of another run a network starts from, as `train.init_from` asks."""

from __future__ import annotations

from torch import Tensor, nn

from lbq.errors import LbqError, RunError
from lbq.neuron import SpikingNeuron
from lbq.neuron.burst import FIXED_STEP
from lbq.runs import run_folder
from lbq.runs.build import outline


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
