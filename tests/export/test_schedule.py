"""The memory plan of exported networks: tensors that live together lie apart, and no more memory than needed."""

from __future__ import annotations

import itertools

from lbq.export.schedule import Schedule
from tests.support.random_networks import random_networks
from tests.support.small_nets import branched, deployed, eventful


def test_tensors_that_live_together_lie_apart() -> None:
    nets = [net.network for net, _ in random_networks().values()]
    nets += [branched().network, eventful().network, deployed().network]
    shared = 0
    for network, stepwise in itertools.product(nets, (False, True)):
        plan = Schedule(network, stepwise)
        scratch = (2 if stepwise else 3) * max(layer.shape[0] for layer in network.layers)
        for i, one in enumerate(plan.tensors[1:], 1):
            limit = plan.words if one.kind == "sums" else plan.levels
            assert (scratch if one.kind == "sums" else 0) <= one.offset <= limit - one.size
            for j, other in enumerate(plan.tensors[1:i], 1):
                if (one.kind == "sums") != (other.kind == "sums") or one.born > other.dies or other.born > one.dies:
                    continue
                if one.offset >= other.offset + other.size or other.offset >= one.offset + one.size:
                    continue
                step = plan.layers[plan.steps[one.born][1]]  # only a layer and its shortcut, read for the last time
                assert (one.offset, one.size, step.target, other.dies) == (other.offset, other.size, i, one.born)
                readers = [s.kind for s, k in zip(step.layer.synapses, step.sources, strict=True) if k == j]
                assert readers == ["identity"] * len(readers) != []
                shared += 1
    assert shared > 2 * len(nets)


def test_a_residual_network_needs_two_maps_of_its_widest_stage() -> None:
    """Three would be the block's input, what is between, and its output."""
    net = deployed("resnet8w4", shape=(3, 8, 8)).network
    plan = Schedule(net)
    assert plan.levels == 2 * net.timesteps * net["layer1.0.sn1"].units
    assert plan.words == 3 * 16 + net.timesteps * 16 * (net.largest(net.readout.synapses[0]) > 255)


def test_stepwise_there_are_levels_of_one_timestep_and_all_membranes() -> None:
    net = eventful().network
    assert net.timesteps == 3
    plan, whole = Schedule(net, stepwise=True), Schedule(net)
    assert {tensor.frames for tensor in plan.tensors} == {1}
    assert 3 * plan.levels == whole.levels
    assert (plan.membranes, whole.membranes) == (net.units, 0)
    ends = [step.membranes + step.layer.units for step in plan.layers]
    assert [step.membranes for step in plan.layers] == [0, *ends[:-1]]
    assert ends[-1] == net.units
