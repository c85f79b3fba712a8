"""Make a burst network of an ANN: neurons replace its ReLUs. If it is trained, data choose their steps, and nothing is trained.

`convert` takes any network that torch.fx can trace. `calibrate` takes two networks whose layers have the same names, such
as two of `lbq.models`. `convert_run` takes the run folder of an ANN.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, fx, nn

from lbq.convert.calibration import Fit as Fit
from lbq.convert.calibration import calibrate as calibrate
from lbq.convert.calibration import checked_images
from lbq.convert.run import convert_run as convert_run
from lbq.convert.substitution import separate, unrolled
from lbq.convert.substitution import with_relus as with_relus
from lbq.deploy.lowering.faithful import plain_copy
from lbq.deploy.lowering.trace import Follower, traced
from lbq.errors import GraphError
from lbq.models import NeuronChoice, neuron_maker
from lbq.neuron.checks import check_count, check_flag
from lbq.system.lazy import submodules as _submodules

PROBE_IMAGES = 8  # enough to see whether two networks do the same


class Converted(nn.Module):
    """A burst network made of an ANN: images `[B, ...]` to logits, averaged over `timesteps`.

    `net` is the ANN's graph with neurons in it, its layers under their old names. `fits` says how well each neuron's step
    fits; it is empty where no step was fitted.
    """

    def __init__(self, net: fx.GraphModule, timesteps: int, fits: Mapping[str, Fit]) -> None:
        super().__init__()
        self.net, self.timesteps, self.fits = net, timesteps, dict(fits)
        self.train(net.training)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.net(images)
        return logits


def convert(
    ann: nn.Module, images: Tensor, *, timesteps: int = 2, neuron: NeuronChoice = "lbq", fit: bool = True
) -> Converted:
    """A burst network that does what `ann` does, as well as its levels allow: images `[B, ...]` in, logits averaged over
    time out. It can be trained further, and deployed.

    images: a few hundred inputs as `ann` takes them, of the training set; labels are not needed.
    neuron: as for `lbq.models.create`; it must have a step to fit. Weights are copied, `ann` stays as it is.
    fit: False for an ANN that is not trained yet. Its neurons keep the steps that they are made with, for you to train, and two
    images are enough. The network comes back in the mode of `ann`, training or evaluation; a fitted one in evaluation.
    """
    try:
        steps, fitted = check_count("timesteps", timesteps), check_flag("fit", fit)
    except ValueError as error:
        raise GraphError(str(error)) from error
    with torch.inference_mode(False), torch.no_grad():
        copied = plain_copy(ann).eval()
        plain = separate(copied, checked_images(images).dim())
        _compare(plain, copied, images)
        _compare_over_time(unrolled(plain, images, steps, None), plain, images[:PROBE_IMAGES])
        net = unrolled(plain, images, steps, neuron_maker(neuron, steps))
        if fitted:
            return Converted(net, steps, calibrate(net, plain, images))
        _warn_if_training_differs(copied, images.dim())
        return Converted(net, steps, {}).train(ann.training)


def _warn_if_training_differs(net: nn.Module, dimensions: int) -> None:
    """Warn of a forward that does something else in training: the network was traced in evaluation mode."""
    evaluated = str(traced(net, Follower(dimensions)))
    try:
        alike = str(traced(net.train(), Follower(dimensions))) == evaluated
    except GraphError:  # it cannot even be traced in training
        alike = False
    finally:
        net.eval()
    if not alike:
        warnings.warn(
            f"the forward of {type(net).__name__} does something else in training, which the converted network leaves out: "
            "write F.dropout as nn.Dropout, and what else depends on self.training as a module of its own",
            stacklevel=3,
        )


def _compare(plain: nn.Module, ann: nn.Module, images: Tensor) -> None:
    """Refuse a network that cannot run, or that does something else as torch.fx traces it."""
    name = type(ann).__name__
    try:
        expected, traced = ann(images.clone()), plain(images.clone())
        once, again, _ = (ann(images[:n].clone()) for n in (PROBE_IMAGES, PROBE_IMAGES, 2))  # 2: the fewest used later
    except Exception as error:  # whatever the network's own forward raises
        raise GraphError(
            f"{name} does not run on images of shape {tuple(images.shape)} and {images.dtype}, or not on fewer of them: "
            f"{' '.join(str(error).split())[:200]}"
        ) from error
    if not isinstance(expected, Tensor):
        return  # `unrolled` refuses it
    if not _alike(once, again):
        raise GraphError(
            f"{name} gives other outputs for the same images: something in it is random, such as F.dropout(x) without "
            "training=self.training"
        )
    if not _alike(traced, expected):
        raise GraphError(
            f"{name} gives other outputs as torch.fx traces it: something is computed in place that another part of the "
            "network reads; write it out of place"
        )


def _compare_over_time(timed: nn.Module, plain: nn.Module, images: Tensor) -> None:
    """Refuse a network that, still with its ReLUs, does something else once time is in front."""
    advice = "write what comes before its first ReLU out of place, and give constants no batch of their own"
    try:
        actual, expected = timed(images.clone()), plain(images.clone())
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise GraphError(f"the network cannot run with time in front: {reason}; {advice}") from error
    if not _alike(actual, expected):
        raise GraphError(f"the network gives other outputs with time in front: {advice}")


def _alike(actual: Tensor, expected: Tensor) -> bool:
    scale = float(expected.abs().nan_to_num(0.0, 0.0).max())
    return torch.allclose(actual, expected, rtol=1e-3, atol=1e-3 * scale, equal_nan=True)


_submodules(__name__)
