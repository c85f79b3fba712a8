"""From an absorbed network to integers, as docs/explanation/integers.md defines. Rounding is to nearest, ties to even.

Each layer has one unit q_c per output channel, which all convolutions that lead to it share; without any, it is that of its
product of levels. Its membrane has f fractional bits: as many as the proved bound of |U| allows. A layer that cannot be
exact enough is refused by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq.errors import GraphError
from lbq.graph import INPUT, Array, Graph, Layer, NeuronSpec, Synapse
from lbq.graph.endless import endless_bound
from lbq.graph.integer import (
    FLOAT64_BOUND,
    LARGEST_MIXING,
    LARGEST_PIXEL,
    LEAST_THRESHOLD,
    MEMBRANE_BOUND,
    MOST_FRACTION,
    MOST_LEAK,
    MOST_MIXED_STEPS,
    MOST_SYNAPSES,
    MOST_TIMESTEPS,
    SUM_BOUND,
    IntegerLayer,
    IntegerNetwork,
    IntegerNeuron,
    Mixing,
    is_name,
    largest_read,
    membrane_bound,
    pooled_bound,
    readout_fits,
)
from lbq.graph.levels import highest_level
from lbq.graph.rules import threshold_shift

BITS = (2, 3, 4, 5, 6, 7, 8, 16)
STEM_BITS, HEAD_BITS = 8, 16  # at least so many: the first layer sees 8-bit pixels, and the last one decides
UNIT_BITS_BELOW_STEP = 8  # a unit is never finer than step / 2^(bits + 8), so that dead channels are harmless
RESERVED = (INPUT, "exit")  # names in a file: of what a network reads, and of the bias with which inputs stop early
NEGLIGIBLE_PART = 64  # weights that together move a membrane by less than this part of a step do not matter
CURRENT_BITS_WITHOUT_WEIGHTS = 20  # of the largest current, where no channel has weights that matter


def quantise(
    graph: Graph,
    bits: int = 8,
    classes: Sequence[str] = (),
    input_max: int = 255,
    facts: Mapping[str, Any] | None = None,
    stream: bool = False,
) -> IntegerNetwork:
    """The integer network of an absorbed graph whose gains are folded and whose input is uint8.

    bits: of the weights, 2 to 8 (int8) or 16 (int16). The first layer has at least 8, the readout 16.
    stream: bounds hold for any number of timesteps, not for the graph's alone.
    """
    if bits not in BITS:
        raise GraphError(f"bits must be 2 to 8, or 16, got {bits!r}")
    if not graph.absorbed:
        raise GraphError("the graph's steps are not absorbed yet: call lbq.deploy.absorb(graph) first")
    if not graph.layers:
        raise GraphError("the network has no spiking layer: there is nothing to deploy")
    check_names(graph, classes)
    check_gates(graph)
    sources = {source for s in graph.synapses for source in s.sources} - {INPUT}
    highest = {INPUT: LARGEST_PIXEL} | {source: graph.n_max(source) for source in sources}
    layers = []
    for layer in graph.layers:
        largest = {s.name: largest_read(s, highest) for s in layer.synapses}
        layers.append(_layer(layer, largest, graph.timesteps, bits, graph.offset, stream))
    readout, scale = quantise_readout(graph.readout, graph.timesteps)
    network = IntegerNetwork(
        input_shape=graph.input_shape,
        timesteps=graph.timesteps,
        static=graph.static,
        layers=tuple(layers),
        readout=readout,
        gates=graph.gates,
        scale=scale,
        classes=tuple(classes),
        input_max=input_max,
        facts=dict(facts or {}),
    )
    if not readout_fits(network):
        raise GraphError("readout: its sums may reach 2^53: use fewer timesteps or a smaller last layer")
    name, most = pooled_bound(network)
    if most >= SUM_BOUND:
        raise GraphError(
            f"synapse {name!r}: its pooled levels may reach {most}, beyond int32: use a smaller n_max or window"
        )
    return network


def check_gates(graph: Graph) -> None:
    """Refuse gates whose levels do not fit 8 bits."""
    for gate in graph.gates:
        most, levels = highest_level(graph.is_signed(gate.name)), graph.n_max(gate.name)
        if levels > most:
            raise GraphError(
                f"gate {gate.name!r}: {gate.factor!r} times {gate.source!r} may reach {levels}, but levels are 8-bit: use a "
                f"smaller n_max, so that the product is at most {most}"
            )


def check_names(graph: Graph, classes: Sequence[str]) -> None:
    """Refuse names and sizes that the file of a network cannot hold."""
    count = graph.readout.shape[0]
    names = list(classes) if not isinstance(classes, str) else [classes]
    if not all(isinstance(name, str) for name in names):
        raise GraphError(f"classes must be names, got {names[:3]!r}: give strings, or none")
    if len(names) not in (0, count):
        raise GraphError(f"classes must be {count} names, one for each output, or none, got {len(names)}")
    for name in names:
        if not is_name(name):
            raise GraphError(
                f"classes: {name[:40]!a} is no name: give 1 to 200 characters, none of them a control character"
            )
    for name in [s.name for s in graph.synapses] + [layer.name for layer in graph.layers] + list(graph.gate_names):
        if name in RESERVED or "/" in name or not is_name(name):
            others = " and ".join(map(repr, RESERVED))
            raise GraphError(
                f"layer {name!r}: a file has no room for this name: give it one other than {others}, without '/'"
            )
    for layer in graph.all_layers:
        if len(layer.synapses) > MOST_SYNAPSES:
            raise GraphError(
                f"layer {layer.name!r} has {len(layer.synapses)} synapses, at most {MOST_SYNAPSES}: put a neuron behind an "
                "addition in the chain of sums that it reads"
            )
    if graph.timesteps > MOST_TIMESTEPS:
        raise GraphError(f"timesteps must be at most {MOST_TIMESTEPS}, got {graph.timesteps}")


def _layer(
    layer: Layer, largest: Mapping[str, int], timesteps: int, bits: int, offset: Array | None, stream: bool
) -> IntegerLayer:
    """The integer form of a layer; largest: for each synapse, the largest level that it reads."""
    spec = layer.neuron
    if spec is None:
        raise GraphError(f"layer {layer.name!r} is not a spiking neuron: it has no integer levels; use a burst neuron")
    check_neuron(layer.name, spec)
    check_mixing(layer.name, spec, timesteps)
    check_finite(layer)
    if any(s.source == INPUT for s in layer.synapses):
        bits = max(bits, STEM_BITS)
    unit = shared_unit(layer, np.broadcast_to(spec.step, layer.shape[:1]), bits, largest)
    convs = {s.name: integer_weights(s, unit, bits) for s in layer.synapses if s.kind == "conv"}
    bias = bias_in_units(layer, convs, unit, offset)

    def with_fraction(fraction: int) -> IntegerLayer:
        fine = unit / 2**fraction
        return IntegerLayer(
            name=layer.name,
            synapses=tuple(convs.get(s.name) or integer_identity(s, fine) for s in layer.synapses),
            bias=_clipped(np.rint(bias * 2**fraction)),
            shape=layer.shape,
            fraction=fraction,
            neuron=integer_neuron(spec, fine),
            unit=unit,
        )

    def fits(candidate: IntegerLayer) -> bool:
        bound = endless_bound(candidate, largest) if stream else membrane_bound(candidate, largest, timesteps)
        return bound < MEMBRANE_BOUND

    quantised = next(filter(fits, map(with_fraction, range(MOST_FRACTION, -1, -1))), None)
    if quantised is None:
        in_steps = bias * (unit / spec.step).reshape(-1, *[1] * (bias.ndim - 1))
        refuse_bias(with_fraction(0), in_steps, fits)
        raise GraphError(
            f"layer {layer.name!r}: its membrane may reach 2^30: use fewer weight bits, a smaller n_max or fewer inputs "
            "(tokens, in attention)"
        )
    assert quantised.neuron is not None
    if (least := int(quantised.neuron.thresholds[:, 0].min())) < LEAST_THRESHOLD:
        raise GraphError(
            f"layer {layer.name!r}: its first threshold is {least} units, fewer than {LEAST_THRESHOLD}: the step "
            f"{float(np.min(spec.step)):.3g} is too small beside its currents; train with a larger step or smaller weights"
        )
    check_products(layer, quantised, largest, np.broadcast_to(spec.step, layer.shape[:1]))
    return quantised


def refuse_bias(layer: IntegerLayer, in_steps: Array, fits: Callable[[IntegerLayer], bool]) -> None:
    """Refuse a layer that would fit but for the bias of one channel, by its number. in_steps: the bias of each, or maps."""
    rows = in_steps.reshape(len(in_steps), -1)
    channel = int(np.abs(layer.bias.reshape(rows.shape).astype(np.int64)).max(1).argmax())
    bias = layer.bias.copy()
    bias[channel] = 0
    if fits(replace(layer, bias=bias)):
        most = float(rows[channel][np.abs(rows[channel]).argmax()])
        raise GraphError(
            f"layer {layer.name!r}: its membrane may reach 2^30 by the bias of channel {channel}, {most:.3g} steps: prune that "
            "channel or clip its bias"
        )


def check_products(layer: Layer, quantised: IntegerLayer, largest: Mapping[str, int], step: Array) -> None:
    """Refuse a product of levels whose factor is rounded too coarsely in the unit that it shares with convolutions."""
    fine = quantised.unit / 2**quantised.fraction
    for real, whole in zip(layer.synapses, quantised.synapses, strict=True):
        if real.kind != "matmul":
            continue
        factor = np.broadcast_to(np.abs(real.weight), len(fine))
        error = np.abs(np.abs(whole.weight) * fine - factor)
        if ((factor * largest[real.name] >= step / NEGLIGIBLE_PART) & (error > factor / NEGLIGIBLE_PART)).any():
            raise GraphError(
                f"layer {layer.name!r}: the product {real.name!r} is too small beside the weights that it is added to, so that "
                "integers would change it: put a neuron of its own behind the product"
            )


def check_levels(name: str, spec: NeuronSpec) -> None:
    """Refuse levels that take more than 8 bits, which can be known before anything is trained."""
    if spec.n_max > (most := highest_level(spec.signed)):
        raise GraphError(f"layer {name!r}: n_max is {spec.n_max}, but levels are 8-bit: use at most {most}")


def check_neuron(name: str, spec: NeuronSpec) -> None:
    """Refuse what a neuron's integer form cannot express."""
    thresholds = 1.0 if spec.thresholds is None else spec.thresholds
    constants = {"step": spec.step, "scale": spec.scale, "reset": spec.alpha, "leak": spec.leak, "gain": spec.gain}
    mixing = 1.0 if spec.mixing is None else spec.mixing
    for constant, value in {**constants, "thresholds": thresholds, "mixing": mixing}.items():
        if not np.isfinite(np.asarray(value)).all():
            raise GraphError(f"layer {name!r}: its {constant} is not finite: did training diverge?")
    if not (np.asarray(spec.step) > 0).all():
        raise GraphError(f"layer {name!r}: its step is {float(np.min(spec.step)):g}: a step is above 0")
    if not (0 <= spec.leak <= (1 if spec.mixing is None else 1.5) and spec.alpha >= 0):
        raise GraphError(
            f"layer {name!r}: its leak is {spec.leak:g} and its reset {spec.alpha:g}: a leak is in [0, 1], a reset at least 0"
        )
    if spec.gain != 1.0:
        raise GraphError(f"layer {name!r}: its gain is not folded yet: call lbq.deploy.fold_gain(graph) first")
    check_levels(name, spec)
    if spec.reset == "hard" and spec.alpha != 1.0:
        raise GraphError(f"layer {name!r}: a hard reset by alpha {spec.alpha:g} has no integer form: use alpha 1")


def check_mixing(name: str, spec: NeuronSpec, timesteps: int) -> None:
    """Refuse a mixing that is not of so many timesteps, or of too many for a file."""
    if spec.mixing is None:
        return
    if spec.mixing.shape != (timesteps, timesteps):
        raise GraphError(
            f"layer {name!r}: it mixes {len(spec.mixing)} timesteps, the network has {timesteps}: train it over so many"
        )
    if timesteps > MOST_MIXED_STEPS:
        raise GraphError(
            f"layer {name!r}: it mixes {timesteps} timesteps, at most {MOST_MIXED_STEPS} fit a file: use fewer timesteps"
        )
    if not (spec.mixing.min() >= 0 and spec.mixing.max() <= LARGEST_MIXING):
        raise GraphError(f"layer {name!r}: its mixing has values beyond 0..{LARGEST_MIXING}: 2 sigmoid(M) / T has none")


def check_finite(layer: Layer) -> None:
    for name, values in ((layer.name, layer.bias), *((s.name, s.weight) for s in layer.synapses)):
        if not np.isfinite(values).all():
            raise GraphError(f"layer {name!r}: its weights or bias are not finite: did training diverge?")


def shared_unit(layer: Layer, step: Array, bits: int, largest: Mapping[str, int]) -> Array:
    """q_c `[C]`: the largest weight of any convolution into channel c, over 2^(bits-1) - 1; where products of levels take the
    place of convolutions, the largest of their factors.

    It is no finer than step / 2^(bits + 8). Where pixels come in, that holds for a current: pixels count to 255, levels to
    a few only. A channel is pruned where its weights are below that and do not matter even together, or where it has none.
    Its unit makes its bias and shortcuts no larger than the currents of other channels: it must not take fractional bits
    from them.

    largest: for each synapse, the largest level that it reads.
    """
    whole = LARGEST_PIXEL if any(s.source == INPUT for s in layer.synapses) else 1
    least = step / (whole * 2 ** (bits + UNIT_BITS_BELOW_STEP))
    heaviest, weighted, steady = np.zeros(len(step)), np.zeros(len(step)), np.abs(layer.bias)
    kinds = [s.kind for s in layer.synapses]
    if "matmul" in kinds and "conv" not in kinds:
        return _unit_of_products(layer, step, largest, steady)
    for s in layer.synapses:
        magnitude = np.abs(s.weight).reshape(len(step), -1)
        if s.kind == "conv":
            heaviest = np.maximum(heaviest, magnitude.max(1, initial=0))
            weighted = weighted + magnitude.sum(1) * largest[s.name]
        else:
            steady = steady + magnitude.sum(1) * largest[s.name]
    unit = np.maximum(least, heaviest / largest_weight(bits))
    pruned = (heaviest / largest_weight(bits) < least) & (weighted < step / NEGLIGIBLE_PART)
    most = ((weighted + steady) / unit)[~pruned].max() if not pruned.all() else 2**CURRENT_BITS_WITHOUT_WEIGHTS
    return np.where(pruned, _halved_step(step, np.maximum(unit, steady / most)), unit)


def _halved_step(step: Array, least: Array) -> Array:
    """The smallest power of two times the step that is at least so much.

    Thresholds are then exact, and so are the constants of shortcuts from a neuron with the same step, whose levels often
    add up to a threshold: rounded apart, the sum would miss it.
    """
    return np.asarray(step * 2.0 ** np.ceil(np.log2(least / step)), np.float64)


def _unit_of_products(layer: Layer, step: Array, largest: Mapping[str, int], steady: Array) -> Array:
    """q_c = s, the factor of a product of levels: its constant is then 2^f, and nothing is rounded.

    In a channel that no product moves by even a part of a step, the unit makes all else no larger than in the others.
    """
    factors = np.zeros(len(step))
    for s in layer.synapses:
        if s.kind == "matmul":
            factors = np.maximum(factors, np.abs(s.weight))
        steady = steady + np.abs(s.weight) * largest[s.name]
    most = max(largest[s.name] for s in layer.synapses if s.kind == "matmul")
    pruned = factors * most < step / NEGLIGIBLE_PART
    unit = np.where(pruned, step, factors)
    top = (steady / unit)[~pruned].max() if not pruned.all() else 2**CURRENT_BITS_WITHOUT_WEIGHTS
    return np.where(pruned, _halved_step(step, np.maximum(step / LEAST_THRESHOLD, steady) / top), unit)


def largest_weight(bits: int) -> int:
    return 2 ** (bits - 1) - 1


def integer_weights(synapse: Synapse, unit: Array, bits: int) -> Synapse:
    """W = round(W_hat / q_c), int8 up to 8 bits, else int16."""
    most = largest_weight(bits)
    weight = np.clip(np.rint(synapse.weight / unit[:, None, None, None]), -most, most)
    return replace(synapse, weight=weight.astype(np.int8 if bits <= 8 else np.int16), absorbed=True)


def integer_identity(synapse: Synapse, fine: Array) -> Synapse:
    """The constant of each channel, in units of q_c / 2^f."""
    return replace(synapse, weight=_clipped(np.rint(synapse.weight / fine)), absorbed=True)


def bias_in_units(layer: Layer, convs: Mapping[str, Synapse], unit: Array, offset: Array | None) -> Array:
    """The bias in units of q_c: `[C]`, or a map `[C, H, W]` where pixels with an offset come in.

    The map contains the current of a mean image, with the integer weights and over valid taps only. So it cancels that
    current exactly, also at borders.
    """
    bias: Array = layer.bias / unit
    for s in convs.values():
        if s.source != INPUT or offset is None or not offset.any():
            continue
        per_group = s.weight.shape[1]
        channels = offset.reshape(s.groups, per_group).repeat(s.weight.shape[0] // s.groups, axis=0)  # [O, I / groups]
        taps = np.einsum("oiyx,oi->oyx", s.weight.astype(np.float64), channels)
        vertical, horizontal = (s.positions(axis)[1].astype(np.float64) for axis in (0, 1))
        drop = np.einsum("oyx,hy,wx->ohw", taps, vertical, horizontal)
        bias = (bias if bias.ndim == 3 else bias[:, None, None]) - drop
    return bias


def integer_neuron(spec: NeuronSpec, fine: Array) -> IntegerNeuron:
    """Thresholds and reset in units of `fine` = q_c / 2^f, and a dyadic leak."""
    channels, counts = len(fine), np.arange(1, spec.n_max + 1)
    step = np.broadcast_to(spec.step, channels)
    if spec.thresholds is not None:
        real = np.broadcast_to(spec.thresholds, (channels, spec.n_max))
    else:
        real = (counts - threshold_shift(spec.rounding)) * step[:, None]
    thresholds = np.rint(real / fine[:, None]) + (spec.rounding == "strict")
    return IntegerNeuron(
        n_max=spec.n_max,
        signed=spec.signed,
        thresholds=np.minimum(thresholds, MEMBRANE_BOUND).astype(np.int32),
        reset=np.minimum(np.rint(spec.alpha * step / fine), MEMBRANE_BOUND).astype(np.int32),
        reset_kind=spec.reset,
        leak=dyadic(spec.leak),
        decay_reset=spec.decay_reset,
        mixing=None if spec.mixing is None else fixed_point(spec.mixing),
    )


def fixed_point(mixing: Array) -> Mixing:
    """A mixing with as many fractional bits as leaks have."""
    return Mixing(np.rint(mixing * 2**MOST_LEAK).astype(np.int32), MOST_LEAK)


def dyadic(leak: float) -> tuple[int, int] | None:
    """(m, k) with leak = m / 2^k: the smallest k that is exact, or the nearest with 16 bits; None for a leak of 1."""
    if leak == 1.0:
        return None
    for k in range(1, MOST_LEAK + 1):
        if (leak * 2**k).is_integer():
            return int(leak * 2**k), k
    m = round(leak * 2**MOST_LEAK)
    return None if m == 2**MOST_LEAK else (m, MOST_LEAK)


def quantise_readout(readout: Layer, timesteps: int) -> tuple[IntegerLayer, float]:
    """The readout with one unit for all classes, and the logit that one unit of its sum over time stands for.

    There is one unit because the largest logit wins: with several, unlike numbers would be compared.
    """
    check_finite(readout)
    if readout.shape[1:] != (1, 1):
        raise GraphError(
            f"readout: it gives {readout.shape} and not one number for each class: outputs by pixel, as for segmentation, are "
            "not supported; pool before it"
        )
    if any(s.source == INPUT for s in readout.synapses):
        raise GraphError("readout: it reads the input itself, and not a spiking layer's levels")
    if any(s.kind == "matmul" for s in readout.synapses):
        raise GraphError("readout: it reads a product of levels (attention): put a neuron between the two")
    heaviest = max(float(np.abs(s.weight).max(initial=0)) for s in readout.synapses)
    unit = (heaviest or 1.0) / largest_weight(HEAD_BITS)
    units = np.full(readout.shape[0], unit)
    synapses = tuple(
        integer_weights(s, units, HEAD_BITS) if s.kind == "conv" else integer_identity(s, units)
        for s in readout.synapses
    )
    bias = np.clip(np.rint(readout.bias * timesteps / unit), -FLOAT64_BOUND, FLOAT64_BOUND).astype(np.int64)
    return IntegerLayer(readout.name, synapses, bias, readout.shape, 0, None, units), unit / timesteps


def _clipped(values: Array) -> NDArray[np.int32]:
    """Values as int32. A value that does not fit is far above the bound that is proved next, which refuses it."""
    most = 2**31 - 1
    return np.clip(values, -most, most).astype(np.int32)
