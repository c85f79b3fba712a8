"""The file of a deployed network: round trips, determinism, and hundreds of damaged or hostile files, all refused."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lbq import engine, native
from lbq.engine.file import container
from lbq.engine.file.levelfile import load_levels, save_levels
from lbq.errors import ArtefactError, LbqError
from lbq.export.onnx import onnx_model
from lbq.graph import Pool, Synapse
from tests.support.attacks import CHANGES, attacks
from tests.support.commands import Call
from tests.support.small_nets import deployed, eventful, pixels


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("artefact") / "model.lbq"
    engine.save(path, deployed("resnet8w4"))
    return path


@pytest.mark.parametrize(
    ("neuron", "options"),
    [("lbq", {}), ({"name": "lbq", "n_max": 255}, {}), ("lif", {}), ("ternary_half", {}), ("ilif", {"timesteps": 1})],
)
def test_what_is_saved_is_what_is_loaded(tmp_path: Path, neuron: Any, options: dict[str, Any]) -> None:
    before = deployed("resnet8w4", neuron, **options)
    size = engine.save(tmp_path / "a.lbq", before)
    assert size == (tmp_path / "a.lbq").stat().st_size
    after = engine.load(tmp_path / "a.lbq")
    x = pixels(3, 3, 8, 8, seed=4)
    one, two = before.run(x, "dense", trace=True), after.run(x, "bitplane", trace=True)
    assert np.array_equal(one.logits, two.logits)
    assert one.scale == two.scale
    assert one.levels is not None
    assert two.levels is not None
    assert all(np.array_equal(one.levels[name], two.levels[name]) for name in one.levels)
    assert after.verify() == 8
    for again in (after, deployed("resnet8w4", neuron, **options)):  # the same network, the same bytes
        engine.save(tmp_path / "b.lbq", again)
        assert (tmp_path / "a.lbq").read_bytes() == (tmp_path / "b.lbq").read_bytes()


def test_the_file_is_safetensors_with_integers_only(good: Path) -> None:
    tensors = safetensors.numpy.load_file(good)
    assert {t.dtype.kind for t in tensors.values()} == {"i", "u"}
    with safetensors.safe_open(good, "numpy") as opened:
        metadata = opened.metadata()
    assert set(metadata) == {"lbq", "sha256"}
    tree = json.loads(metadata["lbq"])
    assert (tree["format"], tree["version"]) == ("lbq integer network", 1)
    assert tensors["golden/input"].shape == (8, 3, 8, 8)
    assert len(tree["golden"]["sn1"]) == 2


def refused(path: Path) -> str:
    """The one line with which a file is refused."""
    with pytest.raises(ArtefactError) as error:
        engine.load(path)
    line = str(error.value)
    assert line.startswith(str(path))
    assert line.isprintable()
    assert len(line) < 500
    return line


def test_all_attacks_are_refused(good: Path, tmp_path: Path) -> None:
    path, seen = tmp_path / "attack.lbq", set()
    for name, data in attacks(good.read_bytes()):
        assert data != good.read_bytes(), name
        path.write_bytes(data)
        try:
            line = refused(path)
        except BaseException as error:
            raise AssertionError(f"attack {name!r} was not refused in one line") from error
        if name in CHANGES:
            assert "damaged" not in line or "JSON" in line, name  # it is what it says that is wrong, not its checksum
        seen.add(name)
    assert len(seen) > 150


def test_every_flipped_bit_and_every_cut_is_noticed(good: Path) -> None:
    data = bytearray(good.read_bytes())
    random = np.random.default_rng(0)
    length = int.from_bytes(data[:8], "little")
    places = [*range(64), *random.integers(0, 8 + length, 300), *random.integers(0, len(data), 300)]
    for place in places:
        bit = 1 << int(random.integers(0, 8))
        data[place] ^= bit
        with pytest.raises(ArtefactError):
            container.decode(bytes(data))
        data[place] ^= bit
    container.decode(bytes(data))
    for cut in random.integers(0, len(data), 100):
        with pytest.raises(ArtefactError):
            container.decode(bytes(data[:cut]))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_forged_files_are_refused_or_run(good: Path, tmp_path: Path, data: st.DataObject) -> None:
    """Changed anywhere and sealed again: either refused in one line, or a network that runs without a fault."""
    tensors, text, _ = container.decode(good.read_bytes())
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(text) - 1))
        text = text[:at] + data.draw(st.sampled_from([*'0123456789-,."[]{}etn', "1e999", "-0", ""])) + text[at + 1 :]
    else:
        name = data.draw(st.sampled_from(sorted(tensors)))
        raw = bytearray(tensors[name].tobytes())
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        tensors[name] = np.frombuffer(bytes(raw), tensors[name].dtype).reshape(tensors[name].shape)
    path = tmp_path / "forged.lbq"
    path.write_bytes(container.encode(tensors, text))
    try:
        net = engine.load(path)
    except ArtefactError:
        refused(path)
        return
    shape = net.network.input_shape if net.network.static else (net.network.timesteps, 1, *net.network.input_shape)
    x = np.zeros(shape, np.uint8)
    assert np.array_equal(net.run(x, "dense").logits, net.run(x, "bitplane").logits)


def test_files_that_are_not_there_or_not_files(tmp_path: Path) -> None:
    assert "No such file" in refused(tmp_path / "nowhere.lbq")
    assert "is not a file" in refused(tmp_path)
    huge = tmp_path / "huge.lbq"
    with open(huge, "wb") as file:
        file.truncate(container.MOST_BYTES + 1)  # sparse
    assert "at most" in refused(huge)
    with pytest.raises(ArtefactError, match="cannot write"):
        container.write(huge / "no-folder.lbq", {}, "")


def test_the_command_line_refuses_attacks_with_code_2(good: Path, tmp_path: Path, call: Call) -> None:
    path = tmp_path / "attack.lbq"
    path.write_bytes(good.read_bytes()[:-1])
    for verb in (["run", str(path)], ["account", str(path)], ["predict", str(path), "x.png"]):
        assert "damaged" in call.refused(*verb)


def test_golden_frames_of_other_timesteps_are_refused(tmp_path: Path) -> None:
    net = eventful()
    assert net.golden is not None
    fewer = replace(net.golden, inputs=net.golden.inputs[:2])
    with pytest.raises(ArtefactError, match=r"golden: its inputs have the shape \[2, 8, 2, 4, 4\]"):
        engine.save(tmp_path / "a.lbq", engine.Network(net.network, fewer))


@settings(max_examples=20)
@given(st.integers(0, 255), st.booleans(), st.integers(0, 2**31))
def test_levels_survive_packing(most: int, signed: bool, seed: int) -> None:
    import tempfile

    most = min(most, 127) if signed else most
    random = np.random.default_rng(seed)
    levels = {
        "a": random.integers(-most if signed else 0, most + 1, (2, 3, 4, 3, 5)).astype(np.int8 if signed else np.uint8),
        "b": random.integers(0, 2, (1, 1, 1, 1, 1), np.uint8),
    }
    with tempfile.TemporaryDirectory() as folder:
        save_levels(Path(folder) / "levels", levels)
        stored = load_levels(Path(folder) / "levels")
    assert list(stored) == ["a", "b"]
    for name, level in levels.items():
        assert stored[name].dtype == level.dtype
        np.testing.assert_array_equal(stored[name], level)


def test_wrong_level_files_are_refused(tmp_path: Path, good: Path) -> None:
    path = tmp_path / "levels"
    with pytest.raises(ArtefactError, match="holds no levels: give a file that `lbq deploy --levels` wrote"):
        load_levels(good)
    for layers in (
        {"a": {"shape": [3], "signed": False}, "b": {}},
        {"a": {"shape": [99], "signed": False}},
        {"a": {"shape": [3], "signed": "no"}},
        {"a": {"shape": [-3], "signed": False}},
        {"a": 1},
    ):
        text = json.dumps({"format": "lbq levels", "version": 1, "layers": layers})
        container.write(path, {"a": np.zeros((2, 1), np.uint8)}, text)
        with pytest.raises(LbqError, match="holds no levels|not described as it is stored"):
            load_levels(path)
    for planes, signed in ((9, False), (9, True), (1, True), (0, False)):
        text = json.dumps({"format": "lbq levels", "version": 1, "layers": {"a": {"shape": [3], "signed": signed}}})
        container.write(path, {"a": np.zeros((planes, 1), np.uint8)}, text)
        with pytest.raises(LbqError, match="not described as it is stored"):
            load_levels(path)


def test_a_network_can_be_copied_and_sent_to_other_processes(good: Path) -> None:
    net = engine.load(good)
    x = pixels(2, *net.network.input_shape)
    expected = net.run(x).logits
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert np.array_equal(other.run(x).logits, expected)
        assert other.verify() == net.verify()
    assert "spiking layers, T = 2" in repr(net)


def test_a_file_may_be_replaced_while_its_network_runs(tmp_path: Path) -> None:
    path = tmp_path / "model.lbq"
    network = deployed("resnet8w4")
    engine.save(path, network)
    net = engine.load(path)
    x = pixels(2, 3, 8, 8)
    before = net.run(x, "auto")
    path.unlink()
    engine.save(path, network)
    again = net.run(x, "dense")
    assert np.array_equal(before.logits, again.logits)


def test_logits_beyond_2_to_the_53_are_refused(tmp_path: Path) -> None:
    """Also those that only reach it beyond what the stated bound tells apart."""
    net = replace(deployed().network, classes=())
    last = net.layers[-1]
    shape = (last.shape[0], 1, 1)

    def written(weight: int) -> Path:
        head = Synapse(
            "all", last.name, "identity", np.full(shape[0], weight, np.int32), shape, shape,
            (Pool("sum", last.shape[1:], last.shape[1:]),),
        )  # fmt: skip
        bias = np.full(shape[0], 2**53 - 2**36 - 1)
        readout = replace(net.readout, synapses=(head,), bias=bias, shape=shape, unit=np.ones(shape[0]))
        engine.save(tmp_path / "heavy.lbq", engine.Network(replace(net, readout=readout)))
        return tmp_path / "heavy.lbq"

    assert engine.load(written(2**20)).network.readout.shape == shape
    with pytest.raises(ArtefactError, match=r"the readout: its sums may reach 2\^53"):
        written(2**31 - 1)


def test_pooled_sums_beyond_int32_are_refused(tmp_path: Path) -> None:
    net = deployed("resnet8w4").network
    (synapse,) = net.readout.synapses
    wide = replace(synapse, pools=(Pool("sum", (2**16, 2**13), (2**16, 2**13), (2**15, 2**12)),))
    with pytest.raises(ArtefactError, match=r"synapse 'fc': its pooled levels may reach 5368709120, beyond int32"):
        engine.save(tmp_path / "a.lbq", engine.Network(replace(net, readout=replace(net.readout, synapses=(wide,)))))


@pytest.mark.parametrize("size", [0, 1000, None])
def test_a_file_that_is_written_to_gives_no_more_results(tmp_path: Path, size: int | None) -> None:
    path = tmp_path / "model.lbq"
    engine.save(path, deployed("resnet8w4"))
    net = engine.load(path)
    x = pixels(2, 3, 8, 8)
    net.run(x)
    with open(path, "r+b") as file:
        file.write(b"other bytes") if size is None else file.truncate(size)
    for engines in engine.ENGINES[:3]:
        with pytest.raises(
            ArtefactError, match=r"model\.lbq was written to while its network was in use: load it again"
        ):
            net.run(x, engines)
    for use in (
        lambda: net.watch(x, lambda *_: None),
        lambda: net.on_device("cpu"),
        lambda: engine.save(tmp_path / "other.lbq", net),
        lambda: copy.copy(net).run(x),
        lambda: copy.deepcopy(net),
        lambda: pickle.dumps(net),
        lambda: onnx_model(net),
        net.verify,
    ):
        with pytest.raises(ArtefactError, match="was written to"):
            use()
    assert not (tmp_path / "other.lbq").exists()


def test_forgotten_tensors_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "some.lbq"
    values = np.arange(100_000, dtype=np.int32)
    container.write(path, {"a": values, "b": values[:3].astype(np.int8)}, "{}")
    tensors, _, _ = container.read(path)
    for name, expected in (("a", values), ("b", values[:3])):
        container.forget(tensors[name])
        assert np.array_equal(tensors[name], expected)
    container.forget(values)  # of its own memory: nothing happens
    assert values[-1] == 99_999


MEMORY = """
import re, sys
import numpy as np
import lbq.engine
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
before = peak()
net = lbq.engine.load(sys.argv[1])
net.run(np.zeros(net.network.input_shape, np.uint8), sys.argv[2])
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_weights_are_in_memory_once(tmp_path: Path) -> None:
    """Loading and running takes one and a half times the weights and two layers' activations, no more. While `auto` times a
    layer, it may hold that layer's weights in two more forms."""
    if native.library() is None:
        pytest.skip(f"no native kernels: {native.report().reason}")
    path = tmp_path / "model.lbq"
    net = deployed("resnet20w128", shape=(3, 4, 4))
    engine.save(path, net)
    sizes = [s.weight.nbytes for s in net.network.synapses]
    for kind, timed in (("bitplane", 0), ("auto", 2 * max(sizes))):
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, str(path), kind], capture_output=True, text=True, check=True
        )
        assert int(done.stdout) < 1.5 * sum(sizes) + 2**21 + timed, kind


def test_a_file_whose_time_was_set_back_is_read_again(tmp_path: Path) -> None:
    """Its checksum tells a change in place from new rights and new names, which leave the network as it is."""
    path = tmp_path / "model.lbq"
    engine.save(path, deployed("resnet8w2", shape=(3, 4, 4)))
    net, x = engine.load(path), pixels(1, 3, 4, 4)
    logits = net.run(x).logits.tolist()
    before = path.stat()
    path.chmod(0o600)
    os.link(path, tmp_path / "other.lbq")
    assert net.run(x).logits.tolist() == logits
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ArtefactError, match="was written to while its network was in use"):
        net.run(x)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('"facts":{', '"facts":{"x":1e999,', "holds 1e999, which is not a number"),
        ('"facts":{', '"facts":{"x":NaN,', "holds NaN, which is not a number"),
    ],
)
def test_numbers_that_are_none_are_refused(tmp_path: Path, before: str, after: str, message: str) -> None:
    path = tmp_path / "model.lbq"
    engine.save(path, deployed("resnet8w2", shape=(3, 4, 4)))
    tensors, text, _ = container.decode(path.read_bytes())
    container.write(path, tensors, text.replace(before, after, 1))
    with pytest.raises(ArtefactError, match=message):
        engine.load(path)


def test_golden_vectors_without_inputs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.lbq"
    engine.save(path, deployed("resnet8w2", shape=(3, 4, 4)))
    tensors, text, _ = container.decode(path.read_bytes())
    none = {name: value[:0] if name.startswith("golden/") else value for name, value in tensors.items()}
    container.write(path, none, text)
    with pytest.raises(ArtefactError, match="golden: there are no inputs"):
        engine.load(path)


def test_a_shape_that_no_array_has_is_refused() -> None:
    data = container.encode({"a": np.zeros((2, 0), np.int8)}, "{}")
    huge = data.replace(b'"shape":[2,0]', b'"shape":[%s,0]' % b",".join([b"549755813888"] * 7))
    length = int.from_bytes(data[:8], "little") + len(huge) - len(data)
    forged = bytearray(length.to_bytes(8, "little") + huge[8:])
    at = forged.index(b'"sha256":"') + 10
    forged[at : at + 64] = b"0" * 64
    forged[at : at + 64] = hashlib.sha256(forged).hexdigest().encode()
    with pytest.raises(ArtefactError, match="tensor 'a' has a shape that no array can have"):
        container.decode(bytes(forged))
