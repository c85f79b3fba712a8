"""Burst transformers: Spikformer's and QKFormer's networks with residuals that merge in front of a neuron.

- Spikformer (Zhou et al. 2023, arXiv 2209.15425): four 3x3 convolutions with two max-pools make 8x8 tokens of 32x32 pixels,
  and attention is (Q K^T) V without softmax. Position information is a 3x3 convolution on the token grid behind the stem, as
  there; Chu et al. 2023 (arXiv 2102.10882) show that such a convolution takes the place of a table of positions.
- QKFormer (Zhou et al. 2024, arXiv 2403.16552): three stages with D/4, D/2 and D channels on 32x32, 16x16 and 8x8 tokens. The
  first two have one block of token attention each: a neuron reads the sum of Q over a head's channels and gates K. The rest
  is Spikformer's attention. Position information comes from the 3x3 convolutions in front of each stage.

Both papers add outputs of neurons, x + neuron(BN(proj(.))). Here a branch ends in neuron(BN(proj(.)) + x), as our ResNets'
do, unless `shortcut` says otherwise. Tokens `[T, B, N, D]` stand as `[T, B, D, H, W]`: see `lbq.models.attention`.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from lbq.errors import ConfigError, TooSmall
from lbq.models.attention import attend, gate, head_sums, score_scales, scores, unit_scale, weigh
from lbq.models.resnet import BasicBlock, BurstNet, MakeNeuron, conv3x3, initialise
from lbq.models.time import fire, over_time
from lbq.models.vgg import ConvUnit

Shortcut = Literal["neuron", "sew", "membrane"]
HEAD_CHANNELS = 32  # Spikformer-4-384 has 12 heads
QKFORMERS_HEADS = 8  # in every stage
MLP_RATIO = 4
PATCH = 4  # pixels along a side of the last stage's tokens
TOKEN_BLOCKS = 2  # of QKFormer: one in each of its first two stages


class Branch(nn.Module):
    """A residual branch over tokens `[T, B, D, H, W]`: `inner`, a projection with BatchNorm, a neuron and the identity.

    shortcut: `neuron` merges in front of the neuron, sn(BN(proj(inner(x))) + x). `sew` adds behind it,
        sn(BN(proj(inner(x)))) + x (Fang et al. 2021). `membrane` hands currents on, BN(proj(inner(sn(x)))) + x (Hu et al.
        2024, arXiv 2112.08954).
    """

    def __init__(self, inner: int, width: int, neuron: MakeNeuron, shortcut: Shortcut, kernel: int = 1) -> None:
        super().__init__()
        self.shortcut = shortcut
        self.proj = nn.Conv2d(inner, width, kernel, padding=kernel // 2, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.sn = neuron(width)

    def inner(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        if self.shortcut == "membrane":
            return over_time(self.inner(self.sn(x)), self.proj, self.bn) + x
        if self.shortcut == "sew":
            return fire(self.inner(x), self.proj, self.bn, self.sn) + x
        return fire(self.inner(x), self.proj, self.bn, self.sn, residual=x)


class MLP(Branch):
    """Two linear layers of each token, the hidden one `MLP_RATIO` times as wide."""

    def __init__(self, width: int, neuron: MakeNeuron, shortcut: Shortcut) -> None:
        super().__init__(MLP_RATIO * width, width, neuron, shortcut)
        self.hidden = ConvUnit(width, MLP_RATIO * width, neuron, kernel=1)

    def inner(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.hidden(x)
        return hidden


class SelfAttention(Branch):
    """Spikformer's attention: a neuron reads scale / N * (Q K^T) V.

    score_scale: where it is given, a neuron `sn_scores` reads score_scale * Q K^T. V is weighed by its output A: the current
        is scale / N * A V.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        scale: float,
        neuron: MakeNeuron,
        shortcut: Shortcut,
        score_scale: float | None = None,
    ) -> None:
        super().__init__(width, width, neuron, shortcut)
        self.heads, self.scale, self.score_scale = heads, scale, score_scale
        self.q, self.k, self.v = (ConvUnit(width, width, neuron, kernel=1) for _ in range(3))
        self.sn_attention = neuron(width)
        if score_scale is not None:
            self.sn_scores = neuron(heads)

    def inner(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.score_scale is None:
            current = attend(q, k, v, self.heads, self.scale)
        else:
            current = weigh(self.sn_scores(scores(q, k, self.heads, self.score_scale)), v, self.scale)
        out: Tensor = self.sn_attention(current)
        return out


def attention_blocks(
    neuron: MakeNeuron, timesteps: int, depth: int, width: int, heads: int, scale: float | None, shortcut: Shortcut,
    score_neurons: bool,
) -> list[Branch]:  # fmt: skip
    """So many blocks of attention and MLP. Where `scale` is not given, attention's currents begin at the size of one."""
    per_head, score_scale = width // heads, None
    if score_neurons:
        score_scale, usual = score_scales(neuron, timesteps, per_head)
        scale = usual if scale is None else scale
    elif scale is None:
        scale = unit_scale(neuron, timesteps, per_head, factors=3)
    branches: list[Branch] = []
    for _ in range(depth):
        attention = SelfAttention(width, heads, scale, neuron, shortcut, score_scale)
        branches += [attention, MLP(width, neuron, shortcut)]
    return branches


class TokenAttention(Branch):
    """QKFormer's token attention: a neuron reads the sum of Q over a head's channels, and its output gates K."""

    def __init__(self, width: int, heads: int, scale: float, neuron: MakeNeuron, shortcut: Shortcut) -> None:
        super().__init__(width, width, neuron, shortcut)
        self.heads, self.scale = heads, scale
        self.q, self.k = (ConvUnit(width, width, neuron, kernel=1) for _ in range(2))
        self.sn_attention = neuron(heads)

    def inner(self, x: Tensor) -> Tensor:
        return gate(self.sn_attention(head_sums(self.q(x), self.heads, self.scale)), self.k(x))


class Stage(nn.Sequential):
    """Residual branches one after another; where these hand on currents, a last neuron `sn` makes levels of them."""

    def __init__(self, branches: list[Branch], width: int, neuron: MakeNeuron, shortcut: Shortcut) -> None:
        super().__init__(*branches)
        if shortcut == "membrane":
            self.add_module("sn", neuron(width))


class Transformer(BurstNet):
    """What both have: the check of the input, and a head that averages tokens, then logits over time."""

    def __init__(self, timesteps: int) -> None:
        super().__init__()
        self.timesteps = timesteps
        self.avgpool = nn.AdaptiveAvgPool2d(1)

    def tokens(self, x: Tensor) -> Tensor:
        """Outputs of the last stage's neurons, `[T, B, D, H / 4, W / 4]`."""
        raise NotImplementedError

    def features(self, x: Tensor) -> Tensor:
        shape = x.shape
        sides = tuple(shape)[-2:] if isinstance(shape, tuple) else ()  # torch.fx alone does not know them
        if any(isinstance(side, int) and side % PATCH for side in sides):
            raise TooSmall(
                f"tokens of {PATCH}x{PATCH} pixels do not fit images of {' x '.join(map(str, sides))}: crop or pad them to "
                f"sides that {PATCH} divides"
            )
        return over_time(self.tokens(x), self.avgpool).flatten(2)


class Spikformer(Transformer):
    """Stem of four convolutions, position, `depth` blocks of attention and MLP with `width` channels."""

    def __init__(
        self,
        neuron: MakeNeuron,
        *,
        depth: int,
        width: int,
        heads: int | None = None,
        scale: float | None = None,
        shortcut: Shortcut = "neuron",
        score_neurons: bool = False,
        num_classes: int,
        timesteps: int,
        in_channels: int,
    ) -> None:
        super().__init__(timesteps)
        id = f"spikformer{depth}x{width}"
        check_width(id, width, 8, "a stem that begins with width / 8 channels")
        if heads is None:
            heads = max(width // HEAD_CHANNELS, 1)
            check_width(id, width, min(HEAD_CHANNELS, width), f"heads of {HEAD_CHANNELS} channels")
        check_width(id, width, heads, f"{heads} heads")
        widths = (in_channels, width // 8, width // 4, width // 2, width)
        self.stem = nn.ModuleList(ConvUnit(widths[i], widths[i + 1], neuron) for i in range(4))
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)  # behind the last two
        position = Branch(width, width, neuron, shortcut, kernel=3)
        blocks = attention_blocks(neuron, timesteps, depth, width, heads, scale, shortcut, score_neurons)
        self.blocks = Stage([position, *blocks], width, neuron, shortcut)
        self.fc = nn.Linear(width, num_classes)
        initialise(self)

    def tokens(self, x: Tensor) -> Tensor:
        for i, unit in enumerate(self.stem):
            x = unit(x, self.timesteps)
            if i >= 2:
                x = over_time(x, self.maxpool)
        out: Tensor = self.blocks(x)
        return out


class QKFormer(Transformer):
    """Three stages; in front of each, convolutions with a shortcut make its tokens.

    Where QKFormer's patch embeddings max-pool a current and add neurons' outputs, these are BasicBlocks of stride 2, which
    merge in front of a neuron.
    """

    def __init__(
        self,
        neuron: MakeNeuron,
        *,
        depth: int,
        width: int,
        heads: int = QKFORMERS_HEADS,
        scale: float | None = None,
        shortcut: Shortcut = "neuron",
        score_neurons: bool = False,
        num_classes: int,
        timesteps: int,
        in_channels: int,
    ) -> None:
        super().__init__(timesteps)
        id = f"qkformer{depth}x{width}"
        if depth <= TOKEN_BLOCKS:
            raise ConfigError(
                f"model: {id}: at least {TOKEN_BLOCKS + 1} blocks are needed, because the first {TOKEN_BLOCKS} have token "
                f"attention: as in qkformer{TOKEN_BLOCKS + 1}x{width}"
            )
        check_width(id, width, 8, "a stem of width / 8 channels")
        check_width(id, width, 4 * heads, f"{heads} heads in a first stage of width / 4 channels")
        self.stem = ConvUnit(in_channels, width // 8, neuron)
        self.embeddings = nn.ModuleList((
            Embedding(width // 8, width // 4, neuron),
            BasicBlock(width // 4, width // 2, 2, neuron),
            BasicBlock(width // 2, width, 2, neuron),
        ))  # fmt: skip
        self.stages = nn.ModuleList()
        for channels in (width // 4, width // 2):
            gating = unit_scale(neuron, timesteps, channels // heads, factors=1)
            first = TokenAttention(channels, heads, gating, neuron, shortcut)
            self.stages.append(Stage([first, MLP(channels, neuron, shortcut)], channels, neuron, shortcut))
        left = depth - TOKEN_BLOCKS
        blocks = attention_blocks(neuron, timesteps, left, width, heads, scale, shortcut, score_neurons)
        self.stages.append(Stage(blocks, width, neuron, shortcut))
        self.fc = nn.Linear(width, num_classes)
        initialise(self)

    def tokens(self, x: Tensor) -> Tensor:
        x = self.stem(x, self.timesteps)
        for embedding, stage in zip(self.embeddings, self.stages, strict=True):
            x = stage(embedding(x))
        return x


class Embedding(nn.Module):
    """sn(BN(conv3x3(x)) + BN(conv1x1(x))) over `[T, B, C, H, W]`."""

    def __init__(self, inputs: int, outputs: int, neuron: MakeNeuron) -> None:
        super().__init__()
        self.conv, self.bn, self.sn = conv3x3(inputs, outputs), nn.BatchNorm2d(outputs), neuron(outputs)
        self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return fire(x, self.conv, self.bn, self.sn, residual=over_time(x, self.shortcut))


def check_width(id: str, width: int, multiple: int, reason: str) -> None:
    if width % multiple:
        raise ConfigError(f"model: {id}: {multiple} must divide the width, for {reason}, got {width}")
