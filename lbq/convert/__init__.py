"""Make a burst network of a trained ANN: neurons in place of its ReLUs, their steps chosen from data, no training.

`convert` takes any network that torch.fx can trace, `calibrate` a pair of networks whose layers have the same names, such as
two of `lbq.models`, and `convert_run` the run folder of an ANN.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, fx, nn

from lbq.convert.calibration import Fit as Fit
from lbq.convert.calibration import calibrate as calibrate
from lbq.convert.calibration import checked
from lbq.convert.rewrite import over_time, separate
from lbq.convert.run import convert_run as convert_run
from lbq.errors import GraphError
from lbq.models import NeuronChoice, neuron_maker
from lbq.neuron.base import check_count


class Converted(nn.Module):
    """A burst network made of an ANN: images `[B, ...]` to logits, averaged over `timesteps`. `net` is the ANN's graph with
    neurons in it, its layers under their old names; `fits` says how well each neuron's step fits."""

    def __init__(self, net: fx.GraphModule, timesteps: int, fits: Mapping[str, Fit]) -> None:
        super().__init__()
        self.net, self.timesteps, self.fits = net, timesteps, dict(fits)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.net(images)
        return logits


def convert(ann: nn.Module, images: Tensor, *, timesteps: int = 2, neuron: NeuronChoice = "lbq") -> Converted:
    """A burst network that does what `ann` does, as well as its levels allow: images `[B, ...]` in, logits out, averaged over
    time. It can be trained further, and deployed.

    images: some hundred inputs as `ann` takes them, of the training set; labels are not needed.
    neuron: as for `lbq.models.create`; it must have a step. Weights are copied, `ann` stays as it is.
    """
    try:
        steps = check_count("timesteps", timesteps)
    except ValueError as error:
        raise GraphError(str(error)) from error
    plain = separate(ann, checked(images).dim())
    made = over_time(plain, images, steps, neuron_maker(neuron, steps))
    return Converted(made, steps, calibrate(made, plain, images))
