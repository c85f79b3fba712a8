"""Transformers: attention is what its definition says, counts come out exactly, and gradients reach every parameter."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lbq import models
from lbq.errors import ConfigError, TooSmall
from lbq.models.attention import attend, gate, head_sums, scores, unit_scale, weigh
from lbq.models.transformer import Branch, SelfAttention, Shortcut, Spikformer, TokenAttention
from lbq.native.choose import use
from lbq.neuron import BurstNeuron, SpikingNeuron
from lbq.neuron.base import neurons_of
from lbq.neuron.recorder import record_levels

# id -> (synaptic and BatchNorm parameters, spiking layers, neurons per timestep, MACs of weights, MACs of products)
FACTS: dict[str, tuple[int, int, int, int, int]] = {
    "spikformer4x384": (9_310_906, 33, 1_449_984, 921_456_384, 12_582_912),
    "spikformer2x64": (162_898, 19, 159_744, 19_489_408, 1_048_576),
    "qkformer4x384": (6_699_898, 32, 1_976_320, 746_868_480, 6_438_912),
}
SMALL = ("spikformer1x16", "qkformer3x32")


def counts(id: str) -> tuple[int, int, int, int, int]:
    with torch.device("meta"):
        net = models.create(id, timesteps=1).eval()
        x = torch.zeros(1, 3, 32, 32)
    neurons = [m for m in net.modules() if isinstance(m, SpikingNeuron)]
    inside = {p for neuron in neurons for p in neuron.parameters()}
    units, weights, products = [], [], []

    def count(module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        if isinstance(module, SpikingNeuron):
            units.append(out.numel())
        elif isinstance(module, nn.Conv2d | nn.Linear):
            weights.append(out.numel() * module.weight[0].numel())
        elif isinstance(module, SelfAttention):
            products.append(2 * out.shape[-1] ** 4 * out.shape[2])  # tokens^2 * D, twice
        elif isinstance(module, TokenAttention):
            products.append(out.numel())

    for module in net.modules():
        module.register_forward_hook(count)
    net(x)
    outside = sum(p.numel() for p in net.parameters() if p not in inside)
    return outside, len(neurons), sum(units), sum(weights), sum(products)


@pytest.mark.no_cover  # PyTorch's meta device is Python, which coverage makes twice as slow
@pytest.mark.parametrize("id", sorted(FACTS))
def test_counts_come_out_exactly(id: str) -> None:
    assert counts(id) == FACTS[id]


# Attention
# ---------------------------------------------------------------------------------------------------------------------


def levels(*shape: int, n_max: int = 5, seed: int = 0, signed: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-n_max if signed else 0, n_max + 1, shape, generator=generator).double()


@pytest.mark.parametrize("signed", [False, True])
def test_attention_is_its_definition(signed: bool) -> None:
    """Token by token and head by head, in integers; either order of the products is the same."""
    heads, size, shape = 3, 2, (2, 2, 6, 2, 3)
    q, k, v = (levels(*shape, seed=seed, signed=signed) for seed in range(3))
    out = attend(q, k, v, heads, 6.0).numpy()  # 6 tokens, so the current is the integer itself
    quick, late = np.zeros_like(out), np.zeros_like(out)
    Q, K, V = (x.flatten(3).numpy().astype(np.int64) for x in (q, k, v))
    for t, b, h in itertools.product(range(2), range(2), range(heads)):
        at = slice(h * size, (h + 1) * size)
        qh, kh, vh = (x[t, b, at].T for x in (Q, K, V))  # [tokens, size]
        late[t, b, at] = ((qh @ kh.T) @ vh).T.reshape(size, 2, 3)
        quick[t, b, at] = (qh @ (kh.T @ vh)).T.reshape(size, 2, 3)
    assert (out == late).all()
    assert (late == quick).all()


def test_a_neuron_on_scores_weighs_the_values() -> None:
    """Token by token: what query n reads is the sum of the values of keys m, times A[n, m] / tokens."""
    q, k, v = (levels(1, 1, 4, 1, 3, seed=seed) for seed in range(3))
    a = scores(q, k, 2, 0.5)
    assert a.shape == (1, 1, 2, 3, 3)
    assert a[0, 0, 1, 0, 2] == 0.5 * (q[0, 0, 2:, 0, 0] * k[0, 0, 2:, 0, 2]).sum()
    fired = BurstNeuron()(a)
    out = weigh(fired, v, 6.0)
    torch.testing.assert_close(out[0, 0, 3, 0, 1], 2 * (fired[0, 0, 1, 1] * v[0, 0, 3, 0]).sum())


def test_token_attention_gates_all_channels_of_a_head() -> None:
    q, k = levels(2, 1, 6, 2, 2), levels(2, 1, 6, 2, 2, seed=1)
    sums = head_sums(q, 3, 0.5)
    assert torch.equal(sums[:, :, 1], 0.5 * (q[:, :, 2] + q[:, :, 3]))
    out = gate(sums, k)
    assert torch.equal(out[:, :, 4], k[:, :, 4] * sums[:, :, 2])
    assert torch.equal(out[:, :, 1], k[:, :, 1] * sums[:, :, 0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x: attend(x[0], x[0], x[0], 2, 1.0),
            r"q must be tokens \[T, B, D, H, W\] with time in front, got shape",
        ),
        (lambda x: attend(x, x, x, 4, 1.0), "heads must divide the 6 channels of q, got 4"),
        (lambda x: attend(x, x[:, :, :3], x, 2, 1.0), r"k must have the shape of q, \(2, 1, 6, 2, 2\), got"),
        (lambda x: attend(x, x, x[..., :1], 2, 1.0), "v must have the shape of q"),
        (lambda x: head_sums(x, 0, 1.0), "heads must divide the 6 channels"),
        (lambda x: gate(x[:, :, :4], x), "heads must divide the 6 channels of k, got 4"),
        (lambda x: gate(x[:, :, :2, :1], x), "a must have the timesteps, batch and tokens of k"),
        (lambda x: gate(x[0], x), "a must be tokens"),
        (lambda x: scores(x, x[:, :, :3], 3, 1.0), "k must have the shape of q"),
        (
            lambda x: weigh(x[:, :, :2], x, 1.0),
            r"a must be \[2, 1, heads, 4, 4\], scores of the tokens of v, got \[2, 1, 2, 2",
        ),
        (lambda x: weigh(x[0], x, 1.0), "a must be tokens"),
    ],
)
def test_operands_that_do_not_fit_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        call(torch.zeros(2, 1, 6, 2, 2))


@pytest.mark.parametrize("id", ["spikformer2x64", "qkformer3x64", "spikformer1x32-scores"])
@pytest.mark.parametrize(
    ("neuron", "timesteps"), [("lbq", 1), ("lbq", 2), ("lif", 4), ("ternary", 2), ("ilif", 2), ("relu", 1)]
)
def test_currents_of_attention_begin_at_the_size_of_one(id: str, neuron: str, timesteps: int) -> None:
    torch.manual_seed(0)
    net = models.create(id, neuron=neuron, timesteps=timesteps)
    sizes: list[Tensor] = []
    for name, module in net.named_modules():
        if name.endswith(("sn_attention", "sn_scores")):
            module.register_forward_pre_hook(lambda m, x: sizes.append(x[0].square().mean().sqrt()))
    with torch.no_grad():
        net(torch.randn(8, 3, 32, 32))
    assert sizes
    least = 0.3 if "-scores" in id else 0.5  # behind two neurons estimates are coarser
    assert all(least < size < 2 for size in sizes), sizes


def test_the_scale_of_binary_spikes_is_spikformers() -> None:
    net = models.create("spikformer4x384", neuron="lif", timesteps=4)
    scales = [module.scale for module in net.modules() if isinstance(module, SelfAttention)]
    assert [scale / 64 for scale in scales] == [1 / 8] * 4  # 64 tokens
    assert unit_scale(lambda _: BurstNeuron(step=100.0), 2, 32, 3) == 1 / 8  # silent


# Networks
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("id", SMALL)
@pytest.mark.parametrize("shortcut", ["", "-sew", "-membrane", "-sew-scores"])
@pytest.mark.parametrize("timesteps", [1, 3])
def test_gradients_reach_every_parameter(id: str, shortcut: str, timesteps: int) -> None:
    torch.manual_seed(0)
    net = models.create(id + shortcut, timesteps=timesteps)
    net(torch.randn(4, 3, 16, 16)).square().sum().backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("id", SMALL)
@pytest.mark.parametrize("neuron", ["lbq", "lif", "ternary_learned", "ilif", {"name": "lbq", "per_channel": True}])
def test_kernels_agree(id: str, neuron: Any) -> None:
    """Levels in every layer, logits and gradients, by the CPU's kernel and by the reference."""
    outcomes = []
    for kernel in ("native", "reference"):
        torch.manual_seed(0)
        net = models.create(id, neuron=neuron, timesteps=3).double()
        with use(kernel), record_levels(net) as emitted:
            logits = net(torch.randn(4, 3, 8, 8).double())
        with use(kernel):
            net(torch.randn(4, 3, 8, 8).double()).square().sum().backward()
        outcomes.append((emitted, logits, [p.grad for p in net.parameters()]))
    (native, logits, grads), (reference, expected, expected_grads) = outcomes
    assert native.keys() == reference.keys()
    for name in native:
        np.testing.assert_array_equal(native[name], reference[name], err_msg=name)
    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(grads, expected_grads)


@pytest.mark.parametrize("id", SMALL)
def test_static_and_event_inputs(id: str) -> None:
    net = models.create(id, num_classes=7, timesteps=3).eval()
    x = torch.randn(2, 3, 16, 8)
    with torch.no_grad():
        static = net(x, per_step=True)
        assert static.shape == (3, 2, 7)
        torch.testing.assert_close(net(x), static.mean(0))
        torch.testing.assert_close(net(x.expand(3, *x.shape), per_step=True), static)
        torch.testing.assert_close(net(x.flip(0)), net(x).flip(0))  # samples stay apart
        assert net(torch.randn(5, 2, 3, 16, 16), per_step=True).shape == (5, 2, 7)


def test_position_matters() -> None:
    """The same patches in another order give other logits: without the convolutions they could not."""
    torch.manual_seed(0)
    net = models.create("spikformer1x16").eval()
    x = torch.rand(2, 3, 16, 16)
    with torch.no_grad():
        assert not torch.allclose(net(x), net(x.roll(8, -1)))


def test_shortcuts_are_their_formulas() -> None:
    x = levels(2, 3, 4, 2, 2).float()
    shortcuts: tuple[Shortcut, ...] = ("neuron", "sew", "membrane")
    branches = {shortcut: Branch(4, 4, lambda _: BurstNeuron(), shortcut).eval() for shortcut in shortcuts}
    branch = branches["neuron"]
    for other in branches.values():
        other.load_state_dict(branch.state_dict())

    def project(y: Tensor) -> Tensor:
        return models.over_time(y, branch.proj, branch.bn)

    torch.testing.assert_close(branch(x), branch.sn(project(x) + x))
    torch.testing.assert_close(branches["sew"](x), branch.sn(project(x)) + x)
    torch.testing.assert_close(branches["membrane"](x), project(branch.sn(x)) + x)


def test_options_reach_the_network() -> None:
    net = models.create("qkformer3x32", neuron={"name": "lbq", "per_channel": True}, share_tail=True, dropout=0.5)
    neurons = [m for m in net.modules() if isinstance(m, BurstNeuron)]
    assert len({id(neuron.eta) for neuron in neurons}) == 1
    gates = [neuron.step.numel() for name, neuron in neurons_of(net).items() if name.endswith("sn_attention")]
    assert gates == [8, 8, 32]  # token attention has a step for each head
    own = Spikformer(
        lambda _: BurstNeuron(), depth=1, width=16, heads=4, scale=0.5, num_classes=3, timesteps=2, in_channels=1
    )
    assert own(torch.rand(2, 1, 8, 8)).shape == (2, 3)
    assert [m.scale for m in own.modules() if isinstance(m, SelfAttention)] == [0.5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"id": "spikformer2x100"}, "model: spikformer2x100: 8 must divide the width, for a stem .*, got 100$"),
        (
            {"id": "spikformer2x72"},
            "model: spikformer2x72: 32 must divide the width, for heads of 32 channels, got 72$",
        ),
        ({"id": "qkformer2x64"}, "model: qkformer2x64: at least 3 blocks are needed, .* as in qkformer3x64$"),
        ({"id": "qkformer4x80"}, "model: qkformer4x80: 32 must divide the width, for 8 heads .*, got 80$"),
        ({"id": "spikformer4"}, "unknown id 'spikformer4'; did you mean 'spikformer"),
        ({"id": "spikformer0x64"}, "unknown id"),
        (
            {"id": "qkformer3x64-scores-sew"},
            "unknown id .*: behind qkformer3x64 may stand -sew or -membrane, and then -scores, as in qkformer3x64-sew-scores$",
        ),
        ({"id": "spikformer2x64_sew"}, "unknown id 'spikformer2x64_sew': behind spikformer2x64 may stand -sew or"),
        ({"id": "spikformer2x64", "stem_stride": 2}, "stem_stride applies to CIFAR-stem ResNets"),
    ],
)
def test_bad_requests(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        models.create(**arguments)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="spikformer1x16: 3 must divide the width, for 3 heads, got 16$"):
        Spikformer(lambda _: BurstNeuron(), depth=1, width=16, heads=3, num_classes=3, timesteps=2, in_channels=1)


def test_bad_inputs_are_one_line() -> None:
    net = models.create("spikformer1x16")
    with pytest.raises(TooSmall, match="^tokens of 4x4 pixels do not fit images of 30 x 32: crop or pad them to sides"):
        net(torch.rand(1, 3, 30, 32))
    with pytest.raises(ValueError, match=r"^x must be \[B, C, H, W\] or \[T, B, C, H, W\]"):
        net(torch.rand(3, 32, 32))
    blocks = net.get_submodule("blocks")
    with pytest.raises(ValueError, match="^timesteps must be given where a static batch, without time in front"):
        blocks(torch.rand(2, 16, 8, 8))
