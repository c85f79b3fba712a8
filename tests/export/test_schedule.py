"""The memory plan of exported networks: tensors that live together lie apart, and no more memory than needed."""

from __future__ import annotations

from lbq.export.schedule import Schedule
from tests.support.small_nets import deployed, eventful


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
