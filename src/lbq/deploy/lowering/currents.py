"""The layers of PyTorch that carry currents, on symbolic values: what each makes of levels or of a current.

A tensor of the network is one of three: the levels of one layer, perhaps pooled; a current, that is a sum of synapses and a
bias; or several levels joined along channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Literal, cast

import numpy as np
from torch import Tensor, nn

from lbq.errors import GraphError, TooSmall
from lbq.graph import INPUT, Array, Pool, Shape, Synapse, output_size

SEVERAL_HEADS = "of several heads return one alone, or make them one nn.Linear"

# [B, ...] of a static input; [1, B, ...], [T, B, ...] and [T * B, ...]; the same with time behind the batch: [B, 1, ...],
# [B, T, ...] and [B * T, ...]
Time = Literal["none", "one", "all", "folded", "one behind", "behind", "folded behind"]


@dataclass(frozen=True)
class Levels:
    """Outputs of the layer `source` (or the input), pooled.

    factor: the 1/n of average pools, times numbers by which the network multiplies. padding: zeros above and left, and as
    many below and right; `shape` includes them. averaged: over time.
    """

    source: str
    shape: Shape
    pools: tuple[Pool, ...] = ()
    factor: float = 1.0
    flat: bool = False
    time: Time = "none"
    averaged: bool = False
    padding: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Current:
    """A sum of synapses and a bias.

    averaged: the readout's mean over time. mixed: such a mean is a part of it, which no neuron can read. plain: it is a sum
    of levels.
    """

    synapses: tuple[Synapse, ...]
    bias: Array
    shape: Shape
    flat: bool = False
    averaged: bool = False
    mixed: bool = False
    time: Time = "none"
    plain: bool = False


@dataclass(frozen=True)
class Joined:
    """Levels, and plain sums of levels, one behind another along channels, as torch.cat joins them."""

    members: tuple[Levels | Current, ...]
    shape: Shape
    flat: bool = False
    time: Time = "none"
    averaged: bool = False

    def parts(self, where: str) -> tuple[Levels | Current, ...]:
        """The members as they are now: flattened, folded or averaged as the whole has been since."""
        if not self.flat and any(member.shape[1:] != self.shape[1:] for member in self.members):
            raise GraphError(f"{where}: it reads flattened tensors that were joined: give them to a linear layer")
        return tuple(replace(m, flat=self.flat, time=self.time, averaged=self.averaged) for m in self.members)


Value = Levels | Current | Joined


@dataclass(frozen=True)
class Numbers:
    """Weights in float64. Where the structure is enough they are not `known`: NaN in their shapes, which takes no memory."""

    known: bool

    def of(self, tensor: Tensor) -> Array:
        return tensor.detach().cpu().double().numpy() if self.known else np.broadcast_to(np.nan, tensor.shape)

    def scaled(self, weight: Array, factor: Array | float) -> Array:
        return weight * factor if self.known else weight


def conv(name: str, module: nn.Conv2d, value: Levels, numbers: Numbers) -> Current:
    if module.in_channels != value.shape[0]:
        raise GraphError(f"layer {name!r}: expects {module.in_channels} channels, gets {value.shape}")
    if value.flat:
        raise GraphError(f"layer {name!r}: it reads a flattened tensor: put it before the flatten")
    weight = numbers.of(module.weight)
    stride, dilation = _pair(name, module.stride, 1), _pair(name, module.dilation, 1)
    (above, left), (own_above, own_left) = value.padding, _padding(name, module)
    padding = (above + own_above, left + own_left)
    in_shape = (value.shape[0], value.shape[1] - 2 * above, value.shape[2] - 2 * left)
    height, width = output_size(in_shape[1:], weight.shape[2:], stride, padding, dilation)
    if min(height, width) < 1:
        raise TooSmall(f"layer {name!r}: {value.shape} is too small for its kernel: use larger images")
    out_shape = (weight.shape[0], height, width)
    synapse = Synapse(
        name, value.source, "conv", numbers.scaled(weight, value.factor), in_shape, out_shape, value.pools,
        stride, padding, dilation, module.groups,
    )  # fmt: skip
    bias = np.zeros(weight.shape[0]) if module.bias is None else numbers.of(module.bias)
    return Current((synapse,), bias, out_shape, time=value.time, averaged=value.averaged)


def _padding(name: str, module: nn.Conv2d) -> tuple[int, int]:
    if module.padding_mode != "zeros":
        raise GraphError(f"layer {name!r}: only padding_mode='zeros' is supported, not {module.padding_mode!r}")
    if not isinstance(module.padding, str):
        return _pair(name, module.padding)
    if module.padding == "valid":
        return 0, 0
    (high, odd), (wide, odd_too) = (
        divmod(d * (k - 1), 2) for d, k in zip(module.dilation, module.kernel_size, strict=True)
    )
    if odd or odd_too:
        raise GraphError(f"layer {name!r}: padding='same' of an even kernel pads its sides unequally: use an odd one")
    return high, wide


def padded(name: str, module: nn.ConstantPad2d, value: Levels) -> Levels:
    """Levels with zeros around them, which become the padding of the convolution that reads them next."""
    sides = tuple(module.padding)
    if len(sides) != 4 or sides[::2] != sides[1::2] or min(sides) < 0 or module.value != 0 or value.flat:
        raise GraphError(f"layer {name!r}: pad with zeros, as many on opposite sides, or let the convolution pad")
    left, above = sides[::2]
    channels, height, width = value.shape
    shape = (channels, height + 2 * above, width + 2 * left)
    return replace(value, shape=shape, padding=(value.padding[0] + above, value.padding[1] + left))


def _unpadded(where: str, value: Levels) -> None:
    if value.padding != (0, 0):
        raise GraphError(f"{where}: it reads a padded tensor: pad right in front of a convolution, or let that pad")


def linear(name: str, module: nn.Linear, value: Levels, numbers: Numbers) -> Current:
    _unpadded(f"layer {name!r}", value)
    channels, height, width = value.shape
    if not value.flat:
        raise GraphError(f"layer {name!r}: flatten {value.shape} before a linear layer")
    weight = numbers.of(module.weight)
    if weight.shape[1] != channels * height * width:
        raise GraphError(f"layer {name!r}: expects {weight.shape[1]} inputs, gets {value.shape}")
    weight = weight.reshape(weight.shape[0], *value.shape)
    out_shape = (weight.shape[0], 1, 1)
    synapse = Synapse(
        name, value.source, "conv", numbers.scaled(weight, value.factor), value.shape, out_shape, value.pools
    )
    bias = np.zeros(weight.shape[0]) if module.bias is None else numbers.of(module.bias)
    return Current((synapse,), bias, out_shape, flat=True, time=value.time, averaged=value.averaged)


def batch_norm(
    name: str, bn: nn.BatchNorm1d | nn.BatchNorm2d | nn.SyncBatchNorm, value: Value, numbers: Numbers
) -> Current:
    if bn.running_mean is None or bn.running_var is None:
        raise GraphError(f"layer {name!r}: BatchNorm without running statistics cannot be folded: train with them")
    current = as_current(f"layer {name!r}", value)
    if current.shape[0] != bn.num_features or (current.flat and current.shape[1:] != (1, 1)):
        raise GraphError(f"layer {name!r}: expects {bn.num_features} channels, gets {current.shape}")
    mean, var = numbers.of(bn.running_mean), numbers.of(bn.running_var)
    if (var + bn.eps <= 0).any():
        raise GraphError(f"layer {name!r}: a running variance is not positive: did training diverge?")
    scale = 1 / np.sqrt(var + bn.eps)
    shift = -mean * scale
    if bn.affine:
        scale = scale * numbers.of(bn.weight)
        shift = shift * numbers.of(bn.weight) + numbers.of(bn.bias)

    def fold(s: Synapse) -> Synapse:
        factor = scale[:, None, None, None] if s.kind == "conv" else scale
        return replace(s, weight=numbers.scaled(s.weight, factor))

    synapses = tuple(fold(s) for s in current.synapses)
    return replace(current, synapses=synapses, bias=current.bias * scale + shift, plain=False)


def pooled(name: str, module: nn.MaxPool2d | nn.AvgPool2d | nn.AdaptiveAvgPool2d, value: Levels) -> Levels:
    if value.source == INPUT:
        raise GraphError(f"layer {name!r}: pooling the raw input is not supported: a convolution must come first")
    _unpadded(f"layer {name!r}", value)
    size = value.shape[1:]
    if isinstance(module, nn.AdaptiveAvgPool2d):
        pool = _adaptive(name, module, size)
        if pool.output(value.shape) == value.shape:
            return value
    else:
        pool = _windowed(name, module, size)
    if pool.kind == "max" and value.pools and value.pools[-1].kind == "sum":
        raise GraphError(f"layer {name!r}: max-pooling an average is not supported: max-pool first, or average alone")
    if pool.kind == "max" and (value.averaged or value.factor < 0):
        what = "a mean over time" if value.averaged else "a negative multiple of levels"
        raise GraphError(f"layer {name!r}: max-pooling {what} is not supported: max-pool the levels before it")
    factor = 1.0 if pool.kind == "max" else 1.0 / (pool.kernel[0] * pool.kernel[1])
    shape = pool.output(value.shape)
    if min(shape[1:]) < 1:
        raise TooSmall(f"layer {name!r}: {value.shape} is too small to pool: use larger images")
    return replace(value, shape=shape, pools=(*value.pools, pool), factor=value.factor * factor)


def _adaptive(name: str, module: nn.AdaptiveAvgPool2d, size: tuple[int, int]) -> Pool:
    sides: Any = module.output_size
    sides = sides if isinstance(sides, (tuple, list)) else (sides, sides)
    outputs = _pair(name, [side if out is None else out for side, out in zip(size, sides, strict=False)])
    if any(out < 1 or side % out for side, out in zip(size, outputs, strict=True)):
        raise GraphError(
            f"layer {name!r}: adaptive pooling from {size} to {outputs} has windows of unequal size: choose sizes that "
            "divide the input's"
        )
    kernel = (size[0] // outputs[0], size[1] // outputs[1])
    return Pool("sum", kernel, kernel)


def _windowed(name: str, module: nn.MaxPool2d | nn.AvgPool2d, size: tuple[int, int]) -> Pool:
    if isinstance(module, nn.MaxPool2d) and _pair(name, module.dilation) != (1, 1):
        raise GraphError(f"layer {name!r}: dilated pooling is not supported: pool with dilation=1")
    kernel = _pair(name, module.kernel_size, 1)
    as_kernel = isinstance(module.stride, (tuple, list)) and not module.stride  # an empty stride
    stride = kernel if as_kernel else _pair(name, module.stride, 1)
    pool = Pool("max" if isinstance(module, nn.MaxPool2d) else "sum", kernel, stride, _pair(name, module.padding))
    if module.ceil_mode and _reaches_over(size, pool):
        raise GraphError(
            f"layer {name!r}: ceil_mode lets its last window reach over the edge of {size}, which is not supported: use "
            "sizes that its windows divide, or ceil_mode=False"
        )
    if isinstance(module, nn.AvgPool2d) and module.divisor_override:
        raise GraphError(f"layer {name!r}: divisor_override is not supported: multiply by a number instead")
    if isinstance(module, nn.AvgPool2d) and pool.padding != (0, 0) and not module.count_include_pad:
        raise GraphError(f"layer {name!r}: padded average pooling needs count_include_pad=True")
    return pool


def _reaches_over(size: tuple[int, int], pool: Pool) -> bool:
    """Whether ceil_mode would add a window: one that begins before the input's end and goes beyond the padding."""
    for side, kernel, stride, padding in zip(size, pool.kernel, pool.stride, pool.padding, strict=True):
        windows, rest = divmod(side + 2 * padding - kernel, stride)
        if rest and (windows + 1) * stride < side + padding:
            return True
    return False


def together(a: Time, b: Time) -> Time | None:
    """Where time stands in the sum of two tensors, as PyTorch broadcasts them; None where it would not pair time with time."""
    if a == b:
        return a
    for kinds in (("all", "one", "none"), ("behind", "one behind")):
        if a in kinds and b in kinds:
            return kinds[min(kinds.index(a), kinds.index(b))]
    return None


def add(where: str, left: Value, right: Value) -> Current:
    a, b = as_current(where, left), as_current(where, right)
    if a.shape != b.shape or a.flat != b.flat:
        raise GraphError(f"{where}: shapes {a.shape} and {b.shape} differ")
    if (time := together(a.time, b.time)) is None:
        raise GraphError(
            f"{where}: one of its operands has time in front, the other has it folded into the batch, or behind it: fold, "
            "unfold or transpose one of them"
        )
    means = a.averaged or b.averaged
    both = means and time == "none"  # the other is a mean as well, or does not change over time
    mixed = a.mixed or b.mixed or (means and not both)
    plain = a.plain and b.plain
    return Current((*a.synapses, *b.synapses), a.bias + b.bias, a.shape, a.flat, both, mixed, time, plain)


def scaled(value: Value, factor: float, numbers: Numbers) -> Value:
    """A value times a number."""
    if isinstance(value, Levels):
        return replace(value, factor=value.factor * factor)
    if isinstance(value, Joined):
        return replace(value, members=tuple(cast(Any, scaled(m, factor, numbers)) for m in value.members))
    synapses = tuple(replace(s, weight=numbers.scaled(s.weight, factor)) for s in value.synapses)
    return replace(value, synapses=synapses, bias=value.bias * factor)


def summands(value: Current) -> list[Levels]:
    """The levels that a current is the plain sum of; empty where it is anything else."""
    if not value.plain:
        return []
    return [
        Levels(s.source, value.shape, s.pools, float(s.weight[0]), value.flat, value.time, value.averaged)
        for s in value.synapses
    ]


def join(where: str, values: Sequence[Value]) -> Joined:
    """What torch.cat makes of values along channels, or along features where they are flat."""
    members: list[Levels | Current] = []
    for value in values:
        if isinstance(value, Current) and not value.plain:
            raise GraphError(
                f"{where}: only neurons' outputs can be joined: end each branch with a neuron; {SEVERAL_HEADS}"
            )
        members += value.parts(where) if isinstance(value, Joined) else [value]
    first = members[0]
    if len({(member.flat, member.time, member.averaged) for member in members}) > 1:
        raise GraphError(f"{where}: some of its tensors have time in front, are flattened or averaged, and others not")
    if len({member.shape[1:] for member in members}) == 1:
        shape = (sum(member.shape[0] for member in members), *first.shape[1:])
    elif first.flat:
        shape = (sum(math.prod(member.shape) for member in members), 1, 1)
    else:
        raise GraphError(f"{where}: heights and widths {[member.shape[1:] for member in members]} differ")
    return Joined(tuple(members), shape, first.flat, first.time, first.averaged)


def split(name: str, module: nn.Conv2d | nn.Linear, parts: Sequence[Levels | Current]) -> list[nn.Conv2d | nn.Linear]:
    """Layers that read one part each, and together give what `module` makes of all of them joined; the first has the bias."""
    sizes = [math.prod(part.shape) if isinstance(module, nn.Linear) else part.shape[0] for part in parts]
    if isinstance(module, nn.Conv2d) and module.groups > 1:
        raise GraphError(f"layer {name!r}: its groups cannot read joined tensors: give each branch its own layer")
    if module.weight.shape[1] != sum(sizes):
        raise GraphError(f"layer {name!r}: expects {module.weight.shape[1]} channels, gets {sum(sizes)} joined ones")
    layers: list[nn.Conv2d | nn.Linear] = []
    for size, weight in zip(sizes, module.weight.detach().split(sizes, 1), strict=True):
        layer: nn.Conv2d | nn.Linear
        if isinstance(module, nn.Linear):
            layer = nn.Linear(size, module.out_features, bias=False, device="meta")
        else:
            layer = nn.Conv2d(
                size, module.out_channels, cast(Any, module.kernel_size), cast(Any, module.stride),
                cast(Any, module.padding), cast(Any, module.dilation), bias=False, padding_mode=module.padding_mode,
                device="meta",
            )  # fmt: skip
        layer.weight = nn.Parameter(weight)
        layer.bias = None if layers else module.bias
        layers.append(layer)
    return layers


def as_current(where: str, value: Value) -> Current:
    """Levels by an identity synapse; a current as it is."""
    if isinstance(value, Current):
        return value
    if isinstance(value, Joined):
        raise GraphError(
            f"{where}: what torch.cat joined is read by convolutions, linear layers and pools alone: put BatchNorm, sums and "
            "neurons into the branches, before it"
        )
    if value.source == INPUT:
        raise GraphError(f"{where}: the raw input must pass a convolution or a linear layer first")
    _unpadded(where, value)
    channels = value.shape[0]
    synapse = Synapse(
        f"{value.source}->identity", value.source, "identity", np.full(channels, value.factor),
        value.shape, value.shape, value.pools,
    )  # fmt: skip
    return Current((synapse,), np.zeros(channels), value.shape, value.flat, value.averaged, time=value.time, plain=True)


def _pair(name: str, value: Any, least: int = 0) -> tuple[int, int]:
    """Height and width, for which PyTorch also takes one number, alone or in a list."""
    sides = value if isinstance(value, (tuple, list)) else (value,)
    if len(sides) not in (1, 2) or not all(isinstance(side, Integral) and int(side) >= least for side in sides):
        raise GraphError(
            f"layer {name!r}: {value!s:.40} is no height and width: use whole numbers from {least}, or x.shape"
        )
    return int(sides[0]), int(sides[-1])
