"""ONNX models give the engine's integers: every logit, and the levels of every layer and timestep.

Models run in the package onnx's own evaluator, which is the operators' definition in NumPy, and in onnxruntime where that is
installed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lbq import engine
from lbq.engine import Network
from lbq.errors import GraphError, LbqError
from lbq.export.onnx import onnx_model, write_onnx
from lbq.export.split import Split, split
from lbq.graph import INPUT, Pool, Synapse
from lbq.graph.integer import FLOAT32_BOUND, IntegerLayer, IntegerNetwork, IntegerNeuron, rounded_leak
from lbq.graph.levels import row_sums
from tests.support.small_nets import CASES, branched, deployed, eventful, pixels

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed: pip install onnx onnxruntime")

Run = Callable[[dict[str, Any]], dict[str, Any]]
WITHOUT_RUNTIME = pytest.mark.skipif(
    importlib.util.find_spec("onnxruntime") is None, reason="onnxruntime is not installed: pip install onnx onnxruntime"
)
RUNTIMES = ["reference", pytest.param("onnxruntime", marks=WITHOUT_RUNTIME)]


def session(model: Any, runtime: str = "reference") -> Run:
    """Outputs by name."""
    names = [out.name for out in model.graph.output]
    if runtime == "reference":
        from onnx.reference import ReferenceEvaluator

        evaluator = ReferenceEvaluator(model)
        return lambda inputs: dict(zip(names, evaluator.run(None, inputs), strict=True))
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    loaded = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda inputs: dict(zip(names, loaded.run(None, inputs), strict=True))


def with_levels(model: Any, net: IntegerNetwork) -> Any:
    """The sequence form with every layer's levels among its outputs, float32."""
    for layer in net.layers:
        for t in range(net.timesteps):
            kind = onnx.TensorProto.FLOAT
            model.graph.output.append(onnx.helper.make_tensor_value_info(f"t{t}/{layer.name}/S", kind, None))
    return model


def zeros(model: Any, batch: int) -> dict[str, Any]:
    """All states of the step form at rest."""
    found = {}
    for given_input in model.graph.input[1:]:
        kind = onnx.helper.tensor_dtype_to_np_dtype(given_input.type.tensor_type.elem_type)
        sizes = [d.dim_value for d in given_input.type.tensor_type.shape.dim[1:]]
        found[given_input.name] = np.zeros((batch, *sizes), kind)
    return found


def stepped(net: IntegerNetwork, x: np.ndarray[Any, Any], runtime: str) -> np.ndarray[Any, Any]:
    """Logits by the step form, fed with its own states."""
    model = onnx_model(net, "step")
    run, state = session(model, runtime), zeros(model, x.shape[0 if net.static else 1])
    for t in range(net.timesteps):
        out = run({model.graph.input[0].name: x if net.static else x[t], **state})
        state = {name: out[f"next.{name}"] for name in state}
    return out["logits"]


def check(net: Network, x: np.ndarray[Any, Any], runtime: str) -> None:
    network = net.network
    expected = net.run(x, "dense", trace=True)
    assert expected.levels is not None
    out = session(with_levels(onnx_model(network), network), runtime)({"images" if network.static else "frames": x})
    for name, levels in expected.levels.items():
        for t, level in enumerate(levels):
            np.testing.assert_array_equal(out[f"t{t}/{name}/S"], level, err_msg=f"{name} at {t}")
    np.testing.assert_array_equal(out["logits"], expected.logits)
    assert out["logits"].dtype == np.int64
    np.testing.assert_array_equal(stepped(network, x, runtime), expected.logits)


@pytest.mark.no_cover  # the evaluator of onnx is Python, which coverage makes twice as slow
@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("case", CASES, ids=lambda c: str(c[1]))
def test_every_neuron_gives_the_engines_integers(case: Any, bits: int, runtime: str) -> None:
    id, neuron, shape, options = case
    net = deployed(id, neuron, shape, bits, **options)
    dark, bright = np.zeros((1, *shape), np.uint8), np.full((1, *shape), 255, np.uint8)
    check(net, np.concatenate([pixels(3, *shape, seed=1), dark, bright]), runtime)


@WITHOUT_RUNTIME
def test_a_large_network_is_as_small_as_its_weights(tmp_path: Path) -> None:
    shape = 3, 4, 4
    net = deployed("resnet19w64fc256", shape=shape)
    check(net, pixels(2, *shape), "onnxruntime")
    weights = sum(s.weight.nbytes for s in net.network.synapses)
    for form in ("sequence", "step"):
        size = write_onnx(net.network, tmp_path / "net.onnx", form)
        assert weights < size < 1.03 * weights


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_branches_pools_groups_and_dilation(runtime: str) -> None:
    for bits in (8, 16):
        check(branched(bits), pixels(4, 3, 6, 6, seed=3), runtime)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_events_are_read_at_every_timestep(runtime: str) -> None:
    net, x = eventful(), np.random.default_rng(0).integers(0, 9, (3, 4, 2, 4, 4), np.uint8)
    check(net, x, runtime)
    assert not np.array_equal(net.run(x).logits, net.run(x[::-1].copy()).logits)  # the order matters


# Networks by hand ------------------------------------------------------------------------------------------------------


def neuron_of(channels: int, n_max: int, step: int, **changes: Any) -> IntegerNeuron:
    thresholds = np.tile(step * np.arange(1, n_max + 1, dtype=np.int32), (channels, 1))
    given = {"signed": False, "reset_kind": "once", "leak": None, "decay_reset": True, **changes}
    return IntegerNeuron(n_max=n_max, thresholds=thresholds, reset=np.full(channels, step, np.int32), **given)


def by_hand(
    neuron: IntegerNeuron,
    weight: np.ndarray[Any, Any],
    *read: tuple[np.ndarray[Any, Any], tuple[Pool, ...]],
    size: int = 1,
) -> IntegerNetwork:
    """One layer of 1x1 weights `[C, 1, 1, 1]` on images `[1, size, size]`, read out by weights `[O, C, h, w]`, or `[C]` of an
    identity, after pools."""
    channels, classes = len(weight), len(read[0][0])
    shape = channels, size, size
    first = Synapse("conv", INPUT, "conv", weight, (1, size, size), shape, absorbed=True)
    heads = []
    for i, (head, pools) in enumerate(read):
        seen = shape
        for pool in pools:
            seen = pool.output(seen)
        kind: Any = "conv" if head.ndim == 4 else "identity"
        heads.append(Synapse(f"fc{i}", "sn", kind, head, seen, (classes, 1, 1), pools, absorbed=True))
    layer = IntegerLayer("sn", (first,), np.zeros(channels, np.int32), shape, 0, neuron, np.ones(channels))
    bias = np.arange(classes, dtype=np.int64) - 2**40
    readout = IntegerLayer("readout", tuple(heads), bias, (classes, 1, 1), 0, None, np.ones(classes))
    return IntegerNetwork((1, size, size), 2, True, (layer,), readout, scale=1.0)


@settings(max_examples=25)
@given(
    st.integers(1, 16).flatmap(lambda k: st.tuples(st.integers(0, 2**k), st.just(k))),
    st.lists(st.integers(-(2**30) + 1, 2**30 - 1), min_size=4, max_size=4),
)
def test_the_leak_rounds_half_up_for_either_sign(leak: tuple[int, int], values: list[int]) -> None:
    """Any membrane up to the proved bound; halves, and their neighbours, of both signs among them."""
    half = (1 << leak[1]) // 2
    membranes = np.array([*values, half, -half, half - 1, 1 - half, half + 1, -half - 1, 3 * half, -3 * half, 0, -1])
    neuron = neuron_of(len(membranes), 1, 2**30, leak=leak)
    weight = np.zeros((len(membranes), 1, 1, 1), np.int8)
    model = onnx_model(by_hand(neuron, weight, (np.ones((1, len(membranes), 1, 1), np.int8), ())), "step")
    state = {**zeros(model, 1), "membrane.sn": membranes.astype(np.int32).reshape(1, -1, 1, 1)}
    for runtime in ["reference"] + ["onnxruntime"] * (importlib.util.find_spec("onnxruntime") is not None):
        out = session(model, runtime)({"image": np.zeros((1, 1, 1, 1), np.uint8), **state})
        np.testing.assert_array_equal(out["next.membrane.sn"].ravel(), rounded_leak(membranes, leak))


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize(("channels", "signed"), [(400, False), (900, False), (2000, True)])
def test_sums_beyond_float32_are_exact(channels: int, signed: bool, runtime: str) -> None:
    """Weights are split into bytes and levels into digits, and what is put together is beyond int32."""
    random = np.random.default_rng(channels)
    n_max = 127 if signed else 255
    neuron = neuron_of(channels, n_max, 64, signed=signed)
    weight = random.integers(64, 128, (channels, 1, 1, 1), np.int8)
    weight[::2] *= -1 if signed else 1
    head = (32767 - random.integers(0, 100, (3, channels, 1, 1))).astype(np.int16)
    head[:, ::2] *= -1 if signed else 1  # all products have one sign
    net = by_hand(neuron, weight, (head, ()))
    synapse = net.readout.synapses[0]
    chosen = split(synapse, n_max, signed)
    assert chosen.weights == 2
    assert (chosen.digits > 1) == (channels > 500)
    x = np.array([255, 254, 1, 0], np.uint8).reshape(4, 1, 1, 1)
    logits = Network(net).run(x, "dense").logits
    assert (logits - net.readout.bias)[0].min() > 2**31
    np.testing.assert_array_equal(session(onnx_model(net), runtime)({"images": x})["logits"], logits)
    np.testing.assert_array_equal(stepped(net, x, runtime), logits)


@settings(max_examples=50)
@given(
    st.sampled_from([np.int8, np.int16]), st.integers(1, 4000), st.integers(1, 2000), st.booleans(), st.integers(0, 99)
)
def test_no_part_of_a_split_reaches_2_to_the_24(kind: Any, inputs: int, largest: int, signed: bool, seed: int) -> None:
    """Recomputed from the digits and bytes themselves; and whole where the whole is exact."""
    random = np.random.default_rng(seed)
    most = np.iinfo(kind).max
    weight = random.integers(-most, most, (2, inputs, 1, 1), kind, endpoint=True)
    synapse = Synapse("conv", INPUT, "conv", weight, (inputs, 1, 1), (2, 1, 1))
    chosen = split(synapse, largest, signed)
    whole = int(row_sums(weight).max()) * largest
    assert (chosen.parts == 1) == (whole < FLOAT32_BOUND)
    levels = np.arange(-largest if signed else 0, largest + 1)
    digits = []
    for _ in range(chosen.digits - 1):
        digits.append(levels % 2**chosen.bits)
        levels = levels // 2**chosen.bits
    digits.append(levels)
    high = np.floor_divide(weight.astype(np.int64) + 128, 256)
    parts = [weight.astype(np.int64)] if chosen.weights == 1 else [weight - 256 * high, high]
    heaviest = max(int(np.abs(part).sum((1, 2, 3)).max()) for part in parts)
    assert heaviest * max(int(np.abs(digit).max()) for digit in digits) < FLOAT32_BOUND


def test_the_highest_digit_of_a_negative_level_is_one_larger() -> None:
    """-65535 is -256 * 256 + 1, and 65535 is 255 * 256 + 255. Weights that add up to 65600 take 255, but not 256."""
    weight = np.full((1, 517, 1, 1), 127, np.int8)
    weight[0, -1] = 68
    synapse = Synapse("conv", "a", "conv", weight, (517, 1, 1), (1, 1, 1))
    assert 65600 * 255 < 2**24 < 65600 * 256
    assert split(synapse, 65535, signed=False) == Split(1, 2, 8)
    assert split(synapse, 65535, signed=True) == Split(1, 3, 6)


def test_what_float32_cannot_hold_is_refused_by_name() -> None:
    weight = np.full((1, 2**18, 1, 1), 127, np.int8)
    synapse = Synapse("wide", INPUT, "conv", weight, (2**18, 1, 1), (1, 1, 1))
    with pytest.raises(GraphError, match="synapse 'wide': its sums reach .* use model.lbq itself"):
        split(synapse, 255, False)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_sum_pools_that_overlap_and_a_readout_of_levels_themselves(runtime: str) -> None:
    neuron = neuron_of(2, 3, 64, leak=(3, 2))
    weight = np.array([1, -1], np.int8).reshape(2, 1, 1, 1)
    head = np.arange(1, 17, dtype=np.int8).reshape(2, 2, 2, 2)
    windows, all_of_it = Pool("sum", (4, 4), (2, 2), (1, 1)), Pool("sum", (4, 4), (4, 4))
    net = by_hand(neuron, weight, (head, (windows,)), (np.array([5, 7], np.int32), (all_of_it,)), size=4)
    check(Network(net), pixels(3, 1, 4, 4), runtime)


def test_pooled_levels_that_float32_cannot_hold_are_refused() -> None:
    """Levels up to 255 add up to less than 2^24 in a window of 256 x 256; with a row and a column more they may reach it."""

    def pooled(size: int) -> IntegerNetwork:
        neuron, weight = neuron_of(1, 255, 64, leak=None), np.full((1, 1, 1, 1), 64, np.int8)
        window = Pool("sum", (size, size), (size, size))
        return by_hand(neuron, weight, (np.ones(1, np.int32), (window,)), size=size)

    x = np.full((1, 1, 256, 256), 255, np.uint8)
    x[0, 0, 0, 0] = 254
    logits = Network(pooled(256)).run(x, "dense").logits
    np.testing.assert_array_equal(session(onnx_model(pooled(256)))({"images": x})["logits"], logits)
    with pytest.raises(GraphError, match="'fc0': its pooled levels may reach 16,842,495, .* use model.lbq itself"):
        onnx_model(pooled(257))


def test_a_layer_may_be_called_readout() -> None:
    """By another program's file, whose readout has another name."""
    neuron = neuron_of(2, 3, 64, leak=(3, 2))
    net = by_hand(
        neuron, np.array([1, -1], np.int8).reshape(2, 1, 1, 1), (np.eye(2, dtype=np.int8)[..., None, None], ())
    )
    (layer,) = net.layers
    heads = tuple(replace(s, source="readout") for s in net.readout.synapses)
    readout = replace(net.readout, name="logits", synapses=heads, bias=np.array([9, 5]))
    check(
        Network(replace(net, layers=(replace(layer, name="readout"),), readout=readout)),
        pixels(3, 1, 1, 1),
        "reference",
    )


# The file --------------------------------------------------------------------------------------------------------------


def test_the_file_says_where_it_comes_from(tmp_path: Path) -> None:
    net = deployed("resnet8w2", shape=(3, 4, 4))
    engine.save(tmp_path / "model.lbq", net)
    size = write_onnx(net.network, tmp_path / "a.onnx", source=tmp_path / "model.lbq")
    data = (tmp_path / "a.onnx").read_bytes()
    assert len(data) == size
    model = onnx.load(tmp_path / "a.onnx")
    onnx.checker.check_model(model, full_check=True)
    found = {p.key: p.value for p in model.metadata_props}
    assert found["lbq_sha256"] == hashlib.sha256((tmp_path / "model.lbq").read_bytes()).hexdigest()
    assert json.loads(found["facts"]) == net.network.facts
    assert (float(found["scale"]), int(found["timesteps"]), found["form"]) == (net.network.scale, 2, "sequence")
    assert {node.domain for node in model.graph.node} == {""}
    assert [v.name for v in (*model.graph.input, *model.graph.output)] == ["images", "logits"]
    write_onnx(net.network, tmp_path / "b.onnx", source=tmp_path / "model.lbq")
    assert (tmp_path / "b.onnx").read_bytes() == data  # the same network, the same bytes
    step = onnx_model(net.network, "step")
    names = [f"membrane.{layer.name}" for layer in net.network.layers]
    assert [v.name for v in step.graph.input] == ["image", "sums", *names]
    assert [v.name for v in step.graph.output] == ["logits", "next.sums", *(f"next.{name}" for name in names)]


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = deployed("resnet8w2", shape=(3, 4, 4)).network
    with pytest.raises(LbqError, match=r"network must be a deployed one, lbq.engine.load\(PATH\), got str"):
        onnx_model("model.lbq")  # type: ignore[arg-type]
    with pytest.raises(LbqError, match="form must be one of sequence, step, got 'loop'"):
        onnx_model(net, "loop")  # type: ignore[arg-type]
    with pytest.raises(
        LbqError, match="cannot read .*none.lbq: No such file or directory; give the model.lbq of the network"
    ):
        write_onnx(net, tmp_path / "a.onnx", source=tmp_path / "none.lbq")
    with pytest.raises(LbqError, match="it is a folder"):
        write_onnx(net, tmp_path)
    monkeypatch.setattr("lbq.export.onnx.MOST_WEIGHT_BYTES", 100)
    with pytest.raises(GraphError, match="bytes of weights, an ONNX file at most 2 GiB"):
        onnx_model(net)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(LbqError, match=r"needs the package onnx: pip install onnx"):
        onnx_model(net)
    assert not list(tmp_path.iterdir())
