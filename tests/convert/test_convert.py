"""Burst networks made of trained ANNs: networks of every shape, the steps chosen, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lbq import models
from lbq.convert import Fit, calibrate, convert
from lbq.deploy import deploy
from lbq.errors import ConfigError, GraphError
from lbq.neuron import BurstNeuron
from tests.support.anns import Forward, Net, head

FINE = {"name": "ilif", "n_max": 255, "membrane": "if"}  # levels so fine that little is lost


def test_a_converted_network_is_exported_with_any_batch() -> None:
    x = torch.randn(4, 3, 8, 8)
    net = convert(Net(lambda m, x: head(m, F.relu(m.bn(m.conv(x))))), x).eval()
    exported = torch.export.export(net, (x,), dynamic_shapes={"images": {0: torch.export.Dim("batch")}})
    more = torch.randn(7, 3, 8, 8)
    torch.testing.assert_close(exported.module()(more), net(more))


def test_a_parameter_may_have_the_name_of_an_activation() -> None:
    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__(lambda m, x: head(m, F.relu(m.bn(m.conv(x))) * m.relu))
            self.relu = nn.Parameter(torch.ones(1))

    net = convert(Scaled(), torch.randn(4, 3, 8, 8))
    assert net.net.relu.shape == (1,)


def with_in_place(m: Any, x: Tensor) -> Tensor:
    x = m.bn(m.conv(x))
    y = m.conv2(F.relu(x, inplace=True))
    y += x  # which is rectified by now
    return head(m, y.relu_())


def by_sizes(m: Any, x: Tensor) -> Tensor:
    """The batch's size is read from the image, and used behind the neurons."""
    y = m.act(m.bn(m.conv(x)))
    return m.wide(y.view(x.shape[0], -1))


def aliased(m: Any, x: Tensor) -> Tensor:
    """A view is rectified in place, and what it is a view of is read."""
    y = m.conv(x)
    y.flatten(1).relu_()
    return head(m, m.act(m.conv2(y)))


def changed(m: Any, x: Tensor) -> Tensor:
    """What comes before the first neuron is changed in place."""
    x = m.conv(x)
    x.add_(F.relu(m.conv2(x)))
    return head(m, F.relu(x))


FORWARDS: dict[str, Forward] = {
    "modules": lambda m, x: head(m, m.act2(m.bn2(m.conv2(m.act(m.bn(m.conv(x))))))),
    "one_module_twice": lambda m, x: head(m, m.act(m.bn2(m.conv2(m.act(m.bn(m.conv(x))))))),
    "functions": lambda m, x: head(m, F.relu(m.bn2(m.conv2(torch.relu(m.bn(m.conv(x))))))),
    "methods_and_modules": lambda m, x: head(m, m.act(m.bn2(m.conv2(m.bn(m.conv(x)).relu())).relu() * 0.5)),
    "relu6": lambda m, x: head(m, F.relu6(m.bn2(m.conv2(F.relu(input=m.bn(m.conv(x))))))),
    "residual": lambda m, x: head(m, m.act2(m.bn2(m.conv2(y := m.act(m.bn(m.conv(x))))) + y)),
    "residual_before_the_first_neuron": lambda m, x: head(m, m.act2(m.conv2(m.act(y := m.bn(m.conv(x)))) + y)),
    "activation_and_its_input": lambda m, x: head(m, m.act2(m.conv2((y := m.bn(m.conv(x))) + m.act(y)))),
    "in_place": with_in_place,
    "sizes_of_the_image": by_sizes,
    "sizes_of_activations": lambda m, x: m.wide((y := m.act(m.conv2(m.bn(m.conv(x))))).reshape(y.size(0), -1)),
    "features": lambda m, x: m.norm(m.wide(m.act(m.bn(m.conv(x))).flatten(1))).relu(),
    "without_norms": lambda m, x: head(m, m.act2(m.conv2(m.act(m.conv(x))))),
    "no_neuron_at_the_end": lambda m, x: m.act(m.conv2(m.act(m.conv(x)))).mean((2, 3)),
}


def images(count: int = 64, *shape: int) -> Tensor:
    return torch.randn(count, *(shape or (3, 8, 8)), generator=torch.Generator().manual_seed(1))


def unlike(a: Tensor, b: Tensor) -> float:
    return float(((a - b).square().mean() / b.var()).detach())


@pytest.mark.parametrize("name", FORWARDS)
def test_fine_levels_give_the_anns_logits(name: str) -> None:
    ann = Net(FORWARDS[name])
    before = copy.deepcopy(ann.state_dict())
    made = convert(ann, images(), timesteps=3, neuron=FINE)
    fresh = torch.randn(32, 3, 8, 8)
    with torch.no_grad():
        assert made(fresh).shape == ann(fresh).shape
        assert unlike(made(fresh), ann(fresh)) < 1e-3
        coarse = convert(ann, images(), timesteps=1, neuron={"name": "ilif", "n_max": 2})
        assert unlike(made(fresh), ann(fresh)) < unlike(coarse(fresh), ann(fresh))
    assert all(torch.equal(value, before[key]) for key, value in ann.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in (*ann.modules(), *made.modules()))
    assert made.timesteps == 3
    assert all(fit.error < 1e-3 for fit in made.fits.values())


def test_what_comes_before_the_first_neuron_runs_once() -> None:
    seen: dict[str, int] = {}
    made = convert(Net(FORWARDS["modules"]), images(), timesteps=4)
    for name in ("conv", "conv2"):
        made.net.get_submodule(name).register_forward_hook(lambda m, i, o, n=name: seen.__setitem__(n, len(o)))
    made(images(5))
    assert seen == {"conv": 5, "conv2": 20}


def test_scales_and_shifts_make_good_for_what_levels_lose() -> None:
    """The paper's neuron rounds down, and amplifies over time: without them nothing of the logits is left."""
    ann, x = Net(FORWARDS["modules"]), images(256)
    made = convert(ann, x, timesteps=2, neuron="lbq")
    stepped = copy.deepcopy(made)
    own = ann.state_dict()
    stepped.net.load_state_dict({k: own.get(k, v) for k, v in made.net.state_dict().items()})
    with torch.no_grad():
        assert unlike(made(x), ann(x)) < 0.5 * unlike(stepped(x), ann(x))
        np.testing.assert_allclose(made(x).mean(0), ann(x).mean(0), atol=1e-4)


def test_the_step_is_the_best_of_its_grid() -> None:
    class Shown(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self[1](x=self[0](x[None].repeat(2, 1, 1)))  # by name, which is seen as well
            return out

    ann, x = nn.Sequential(nn.Linear(4, 6), nn.ReLU()), images(200, 4)
    snn = Shown(nn.Linear(4, 6), BurstNeuron(n_max=3))
    snn.load_state_dict({**snn.state_dict(), **ann.state_dict()})
    with torch.no_grad():
        neuron = snn[1]
        assert isinstance(neuron, BurstNeuron)
        currents, target = snn[0](x)[None].repeat(2, 1, 1), ann(x)

        def error(step: float) -> float:
            trial = BurstNeuron(n_max=3, step=step)
            return float((trial(currents).mean(0) - target).square().mean() / target.square().mean())

        fit = calibrate(snn, ann, x)["1"]
        assert fit.step == pytest.approx(float(neuron.step), rel=1e-6)
        assert fit.error == pytest.approx(error(fit.step), rel=1e-3)
        assert all(fit.error <= error(fit.step * 2 ** (0.125 * i)) + 1e-9 for i in range(-8, 9) if i)


def test_one_step_for_each_channel_fits_better() -> None:
    ann, x = Net(FORWARDS["modules"]), images(256)
    with torch.no_grad():
        ann.bn.weight.copy_(torch.tensor([0.05, 0.1, 0.2, 1, 3, 6]))
    one, each = (convert(ann, x, timesteps=1, neuron={"name": "lbq", "per_channel": p}) for p in (False, True))
    steps = each.net.get_submodule("act").step
    assert isinstance(steps, Tensor)
    assert steps.shape == (6,)
    assert steps[5] > 8 * steps[0]
    assert each.fits["act"].error <= one.fits["act"].error
    assert unlike(each(x), ann(x)) < unlike(one(x), ann(x))


@pytest.mark.parametrize(
    ("forward", "neuron", "timesteps"),
    [
        ("residual", "lbq", 2),
        ("residual", "v1", 2),
        ("residual", {"name": "qann", "n_max": 7}, 1),
        ("residual", {"name": "lbq", "per_channel": True}, 2),
        ("residual_before_the_first_neuron", {"name": "lbq", "n_max": 7}, 2),
    ],
)
def test_it_deploys(forward: str, neuron: Any, timesteps: int) -> None:
    made = convert(Net(FORWARDS[forward]), images(256), timesteps=timesteps, neuron=neuron)
    x = np.random.default_rng(0).integers(0, 256, (16, 3, 8, 8), np.uint8)
    network = deploy(made, (3, 8, 8), bits=16, mean=[0.5] * 3, std=[0.25] * 3)
    with torch.no_grad():
        logits = made.double()((torch.from_numpy(x).double() / 255 - 0.5) / 0.25).numpy()
    run = network.run(x)
    np.testing.assert_allclose(run.logits * run.scale, logits, atol=0.05 * np.ptp(logits))


def test_it_trains_further() -> None:
    made = convert(Net(FORWARDS["residual"]), images())
    made.train()
    made(images(8)).square().sum().backward()
    grads = {name: p.grad for name, p in made.named_parameters()}
    assert all(grads[f"net.{name}"] is not None for name in ("conv.weight", "act.rho", "act2.eta", "fc.bias"))


def test_a_layer_without_activations_keeps_its_step() -> None:
    ann = Net(FORWARDS["modules"])
    with torch.no_grad():
        ann.bn.bias.fill_(-1e3)
    assert convert(ann, images()).fits["act"] == Fit(pytest.approx(0.4), 0.0)  # type: ignore[arg-type]


def test_networks_of_the_same_names_by_pairs() -> None:
    """As `lbq convert` does: the same network of lbq.models, as an ANN and with burst neurons."""
    torch.manual_seed(0)
    ann = models.create("resnet8w4", neuron="relu", timesteps=1)
    ann(images(64)).sum().backward()  # statistics
    snn = models.create("resnet8w4", neuron=FINE, timesteps=2)
    snn.load_state_dict({**snn.state_dict(), **ann.state_dict()})
    fits = calibrate(snn, ann.eval(), images(64))
    assert list(fits) == ["sn1", *(f"layer{i}.0.sn{j}" for i in (1, 2, 3) for j in (1, 2))]
    assert unlike(snn.eval()(images(64)), ann(images(64))) < 1e-3
    assert snn.training is False


def test_the_modes_of_layers_and_the_images_stay(tmp_path: Path) -> None:
    ann, x = Net(FORWARDS["residual"]), images()
    ann.train()
    ann.bn.eval()  # frozen
    modes, pixels = [m.training for m in ann.modules()], x.clone()
    made = convert(ann, x)
    assert [m.training for m in ann.modules()] == modes
    assert torch.equal(x, pixels)
    assert not any(m.training for m in made.modules())
    torch.save(made, tmp_path / "made.pt")
    loaded = torch.load(tmp_path / "made.pt", weights_only=False)
    assert torch.equal(loaded(x), made(x))
    with torch.inference_mode():
        other = convert(ann, x)
    other.train()(x).sum().backward()  # as if made elsewhere


def test_calibration_is_whole_or_not_at_all() -> None:
    """A network of other widths behind its first layers."""
    ann = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU())
    snn = nn.Sequential(nn.Linear(4, 6), BurstNeuron(), nn.Linear(6, 7), BurstNeuron())
    snn[0].load_state_dict(ann[0].state_dict())
    snn.train()
    before = copy.deepcopy(snn.state_dict())

    class Shown(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return snn(x[None].repeat(2, 1, 1))

    with pytest.raises(GraphError, match="layer '0.2' has other shapes in the two networks"):
        calibrate(Shown(snn), nn.Sequential(ann), images(32, 4))
    assert all(torch.equal(value, before[name]) for name, value in snn.state_dict().items())
    assert snn.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in snn.modules())


def test_a_network_of_other_weights_is_refused() -> None:
    ann = models.create("resnet8w4", neuron="relu", timesteps=1).eval()
    snn = models.create("resnet8w4", neuron={"name": "lbq", "n_max": 15}).eval()
    with pytest.raises(
        GraphError, match=r"^the spiking network has other weights than the ANN: load them first, snn\.load"
    ):
        calibrate(snn, ann, images(16, 3, 8, 8))
    snn.load_state_dict(ann.state_dict(), strict=False)
    for _ in range(2):  # scales that the first has changed are no other weights
        assert max(fit.error for fit in calibrate(snn, ann, images(16, 3, 8, 8)).values()) < 0.5


def rectified(bias: float) -> nn.Sequential:
    """x + bias, rectified, and a linear layer."""
    ann = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))
    nn.init.ones_(ann.get_parameter("0.weight"))
    nn.init.constant_(ann.get_parameter("0.bias"), bias)
    return ann


def test_activations_that_are_rare_or_small() -> None:
    ann, x = Net(FORWARDS["modules"]), images(256)
    with torch.no_grad():
        ann.bn.weight.mul_(1e-6)
        ann.bn.bias.mul_(0)
    assert 3.9e-6 < convert(ann, x, neuron={"name": "lbq", "n_max": 255}).fits["act"].step < 5e-6
    seen = torch.randn(10000, 1, generator=torch.Generator().manual_seed(0))
    fit = convert(rectified(-3.5), seen, neuron={"name": "ilif", "n_max": 15}).fits["1"]
    assert fit.step < 0.1  # three of ten thousand are above 0, by 0.5 at the most
    assert 0 < fit.error < 0.1


def test_one_activation_in_a_thousand_does_not_set_the_steps_that_are_tried() -> None:
    """Two thousand up to 1, and one of 1000: steps are tried from 1/16 to 2 times 1 / n_max."""
    ann = rectified(0)
    x = torch.cat([torch.arange(1, 2001) / 2000, torch.tensor([1000.0])])[:, None]
    step = convert(ann, x, timesteps=1, neuron={"name": "ilif", "n_max": 10}).fits["1"].step
    assert 0.1 / 16 - 1e-6 < step < 0.2 + 1e-6
    few = torch.cat([torch.arange(1, 101) / 100, torch.tensor([1000.0])])[:, None]  # one of a hundred does
    assert convert(ann, few, timesteps=1, neuron={"name": "ilif", "n_max": 10}).fits["1"].step > 100 / 16 - 1e-3


def test_scales_go_no_further_than_a_factor_of_four() -> None:
    """Channels that are half, a tenth, twenty times and the opposite of the ANN's."""

    class OneStep(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            x = x[None]
            for layer in self:
                x = layer(x)
            return x

    torch.manual_seed(0)
    ann = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    snn = OneStep(nn.Linear(6, 4), BurstNeuron(n_max=15), nn.Linear(4, 3))
    snn.load_state_dict({**snn.state_dict(), **ann.state_dict()})
    first, theirs = cast(nn.Linear, snn[0]), cast(nn.Linear, ann[0])
    x = images(100, 6)
    with torch.no_grad():
        first.weight.mul_(torch.tensor([[0.5], [0.1], [20.0], [-1.0]]))
        calibrate(snn, ann, x)
        factors = torch.tensor([0.5 * 2, 0.1 * 4, 20 / 4, -1 / 4])  # 2, 10, 1/20 and -1 would have been the nearest
        torch.testing.assert_close(first.weight, theirs.weight * factors[:, None])
        torch.testing.assert_close(first(x).mean(0), theirs(x).mean(0))  # shifts make good for the mean all the same


def test_weights_of_two_layers_are_not_scaled() -> None:
    ann = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    ann[2].weight = ann[0].weight
    made = convert(ann, images(64, 6), timesteps=1)
    assert torch.equal(made.net.get_parameter("2.weight"), ann.get_parameter("0.weight"))
    assert not torch.equal(made.net.get_parameter("4.weight"), ann.get_parameter("4.weight"))


def test_constants_without_a_batch_are_not_shown_over_time() -> None:
    def with_places(m: Any, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[-1]) / 8
        return m.wide((F.relu(m.conv2(F.relu(m.conv(x)))) + places).flatten(1))

    net, x = Net(with_places), images(32)
    made = convert(net, x, timesteps=2, neuron={"name": "ilif", "n_max": 255})
    with torch.no_grad():
        expected = net(x)
        assert torch.allclose(made(x), expected, atol=0.02 * float(expected.abs().max()))


class Standardised(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        w = self.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(input, w, self.bias, self.stride, self.padding)


def test_layers_with_a_forward_of_their_own_are_left_as_they_are() -> None:
    net = Net(FORWARDS["modules"], conv2=Standardised(6, 6, 3, padding=1))
    before, after = net.state_dict(), convert(net, images()).net.state_dict()
    for name in ("conv2.weight", "conv2.bias"):
        assert torch.equal(after[name], before[name])
    assert not torch.equal(after["fc.weight"], before["fc.weight"])  # which is corrected


# What is refused --------------------------------------------------------------------------------------------------------


class Lengthened(nn.ReLU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


@pytest.mark.parametrize(
    ("ann", "message"),
    [
        (Net(lambda m, x: head(m, m.conv(x))), "Net has no ReLU, in whose place"),
        (Net(lambda m, x: head(m, F.gelu(m.act(m.conv(x))))), "gelu in the network's forward: gelu is no ReLU"),
        (Net(lambda m, x: head(m, m.act(m.conv(x)).sigmoid())), "sigmoid in the network's forward: sigmoid is no ReLU"),
        (Net(FORWARDS["modules"], act2=nn.SiLU()), "layer 'act2': SiLU is no ReLU: lbq.convert.with_relus"),
        (Net(FORWARDS["modules"], act=Lengthened()), "layer 'act': Lengthened is no ReLU"),
        (Net(lambda m, x: head(m, m.act(m.conv(x))).softmax(1)), "leave out a last softmax"),
        (Net(lambda m, x: (m.act(m.conv(x)), x)), "must return one tensor"),  # type: ignore[arg-type, return-value]
        (Net(lambda m, x: m.act(m.conv(x)) if x.sum() > 0 else x), "cannot be traced by torch.fx"),
        (models.create("resnet8w2", neuron="relu", timesteps=1), "knows time already.*calibrate"),
        ("resnet18", "net must be a torch.nn.Module, got str"),
        (Net(lambda m, x: head(m, m.act(m.conv(x.mul_(0.5)).flatten(0, 1).unsqueeze(0)))), "does not run on images"),
        (Net(lambda m, x: head(m, m.act(m.conv(x)).view(64, -1, 8, 8))), "on images .*, or not on fewer of them"),
        (Net(lambda m, x: head(m, m.act(m.conv2(x)))), "not run on images of shape .64, 3, 8, 8. and torch.float32"),
        (Net(lambda m, x: m.wide(F.relu(m.conv(x).transpose(0, 1)).transpose(0, 1).flatten(1))), "batch in front"),
        (Net(lambda m, x: head(m, m.act(m.conv(x)).sigmoid_())), "sigmoid is no ReLU"),
        (Net(aliased), "gives other outputs as torch.fx traces it: something is computed in place"),
        (Net(changed), "gives other outputs with time in front: write what comes before its first ReLU out of place"),
        (Net(lambda m, x: head(m, F.dropout(m.act(m.conv(x))))), "for the same images: something in it is random"),
    ],
)
def test_what_cannot_be_converted(ann: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        convert(ann, images())


def test_hooks_are_refused() -> None:
    ann = Net(FORWARDS["modules"])
    ann.conv.register_forward_hook(lambda m, i, o: o + 1)
    with pytest.raises(GraphError, match="layer 'conv' has a forward hook"):
        convert(ann, images())


@pytest.mark.parametrize("wrong", [images(1), torch.zeros(4, 3, 8, 8, dtype=torch.uint8), [1, 2], torch.zeros(4)])
def test_images_are_checked(wrong: Any) -> None:
    with pytest.raises(GraphError, match="images must be a floating-point tensor of two inputs or more"):
        convert(Net(FORWARDS["modules"]), wrong)


def test_what_is_not_finite_is_refused() -> None:
    ann, x = Net(FORWARDS["modules"]), images()
    x[3, 0, 0, 0] = float("nan")
    with pytest.raises(GraphError, match="images must be finite"):
        convert(ann, x)
    with torch.no_grad():
        ann.bn2.weight[0] = float("inf")
    with pytest.raises(GraphError, match="layer 'bn2' of the ANN gives NaN or infinity"):
        convert(ann, images())


def test_arguments_are_checked() -> None:
    ann = Net(FORWARDS["modules"])
    shared = BurstNeuron()
    with pytest.raises(GraphError, match="layer 'act2': its neuron stands elsewhere too"):
        convert(ann, images(), neuron=lambda: shared)
    with pytest.raises(GraphError, match="layer 'act': ReLU has no step to choose"):
        convert(ann, images(), neuron="relu")
    with pytest.raises(GraphError, match="timesteps must be an integer >= 1, got 0"):
        convert(ann, images(), timesteps=0)
    with pytest.raises(ConfigError, match="unknown neuron 'lqb'; did you mean"):
        convert(ann, images(), neuron="lqb")
    for neuron in ("lif", "ternary"):
        with pytest.raises(GraphError, match="layer 'act': .* has no step to choose for activations from 0 up"):
            convert(ann, images(), neuron=neuron)
    with pytest.raises(GraphError, match="layer '1' of the spiking network.*the ANN must have one of that name"):
        calibrate(nn.Sequential(nn.Linear(4, 4), BurstNeuron()), nn.Sequential(nn.Linear(4, 4)), images(4, 4))
    with pytest.raises(GraphError, match="Sequential has no spiking neuron"):
        calibrate(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4)), images(4, 4))
