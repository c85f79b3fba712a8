"""Networks as C: compiled, they give the engine's logits, under sanitizers and without a warning; how a user meets them."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lbq import engine, models
from lbq.deploy import deploy
from lbq.engine import Network
from lbq.export import export
from lbq.export.c99 import Sources, distinct
from lbq.export.schedule import Schedule
from lbq.graph import INPUT, Pool, Shape, Synapse
from lbq.graph.integer import (
    MEMBRANE_BOUND,
    IntegerLayer,
    IntegerNetwork,
    IntegerNeuron,
    Reset,
    membrane_bound,
    readout_bound,
)
from lbq.models.resnet import ResNet
from lbq.neuron import BurstNeuron
from tests.support.commands import call
from tests.support.paths import ROOT
from tests.support.small_nets import CASES, Branches, deployed, pixels, warmed

STRICT = ["-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror"]
SANITIZE = ["-O0", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


@functools.cache
def compiler() -> str:
    found = shutil.which(os.environ.get("CC", "cc"))
    if found is None:
        pytest.skip("no C compiler: install one, or name it in CC")
    return found


@functools.cache
def sanitizers() -> tuple[str, ...]:
    """Flags, or none where the compiler has no such libraries."""
    command = [compiler(), *SANITIZE, "-x", "c", "-", "-o", os.devnull]
    done = subprocess.run(command, input="int main(void) { return 0; }", capture_output=True, text=True)
    return tuple(SANITIZE) if done.returncode == 0 else ("-O0",)


def compile_(folder: Path, sources: list[str], flags: tuple[str, ...], out: str = "program") -> Path:
    done = subprocess.run(
        [compiler(), *STRICT, *flags, *sources, "-o", out], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[:2000]
    return folder / out


def write(folder: Path, sources: Sources) -> None:
    for name, text in sources.files().items():
        (folder / name).write_text(text)


MAIN = """
static void show(const char *what, const int64_t *logits, int classes)
{
    printf("%s:", what);
    for (int c = 0; c < classes; c++) printf(" %" PRId64, logits[c]);
    printf("\\n");
}

int main(void)
{
"""
RUN = """    for (int i = 0; i < @images@; i++) {
        int64_t logits[NET_CLASSES + 1];
        if (fread(net_x, 1, sizeof net_x, stdin) != sizeof net_x) return 2;
        memset(&net, 85 * i, sizeof net);
        if (net_run(net_x, logits, &net) != 0) return 3;
        show("net", logits, NET_CLASSES);
        memset(&net_now, 85 * i, sizeof net_now);
        net_step_reset(&net_now);
        for (int t = 0; t < NET_TIMESTEPS; t++) {
            if (net_step_step(&net_now, net_x + @stride@ * t, logits) != 0) return 4;
            show("net after a step", logits, NET_CLASSES);
        }
        net_before = net_now;
        logits[0] = 77;
        if (net_step_step(&net_now, net_x, logits) != 2 || logits[0] != 77) return 5;
        if (memcmp(&net_now, &net_before, sizeof net_now) != 0) return 6;
    }
"""


def after_each_step(net: Network, x: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Logits `[B, T, classes]` by definition: the same network, of which the input has had fewer timesteps."""
    shorter = [Network(replace(net.network, timesteps=t + 1)) for t in range(net.network.timesteps)]
    found = [n.run(x if n.network.static else x[: n.network.timesteps], "dense").logits for n in shorter]
    np.testing.assert_array_equal(found[-1], net.run(x, "dense").logits)
    return np.stack(found, 1)


def run_together(folder: Path, nets: dict[str, tuple[Network, NDArray[np.uint8]]], *flags: str) -> None:
    """Link networks in both forms into one program, which reads all inputs and prints their logits, at the end and after
    every step; they must be the engine's, and another step refused.

    Memories and states are filled with rubbish between runs: nothing may be left over from one to the next."""
    head, body = ["#include <inttypes.h>", "#include <stdio.h>", "#include <string.h>"], []
    stdin, expected = b"", []
    for name, (net, x) in nets.items():
        write(folder, Sources(net.network, name))
        write(folder, Sources(net.network, f"{name}_step", form="step"))
        images = x if net.network.static else x.swapaxes(0, 1)
        stdin += np.ascontiguousarray(images).tobytes()
        for row in after_each_step(net, x).tolist():
            expected.append(f"{name}: {' '.join(map(str, row[-1]))}")
            expected += [f"{name} after a step: {' '.join(map(str, logits))}" for logits in row]
        head += [f'#include "{name}.h"', f'#include "{name}_step.h"']
        head += [f"static {name}_memory {name};\nstatic uint8_t {name}_x[{name.upper()}_INPUT_BYTES];"]
        head += [f"static {name}_step_state {name}_now, {name}_before;"]
        stride = "0" if net.network.static else f"{name.upper()}_STEP_INPUT_BYTES"
        run = RUN.replace("@images@", str(len(images))).replace("@stride@", stride)
        body.append(re.sub(r"\bnet(?=\b|_)", name, run).replace("NET_", f"{name.upper()}_"))
    (folder / "main.c").write_text("\n".join([*head, MAIN, *body, "    return 0;\n}\n"]))
    sources = ["main.c", *(f"{name}{part}.c" for name in nets for part in ("", "_data", "_step", "_step_data"))]
    program = compile_(folder, sources, flags)
    done = subprocess.run([program], input=stdin, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[:2000]
    assert done.stdout.decode().splitlines() == expected


def branched() -> Network:
    torch.manual_seed(4)
    return deploy(warmed(Branches(), 3, 6, 6), (3, 6, 6), mean=[0.5] * 3, std=[0.25] * 3)


def eventful() -> Network:
    torch.manual_seed(0)
    made = warmed(models.create("resnet8w2", in_channels=2, num_classes=3), 2, 4, 4, static=False)
    return deploy(made, (2, 4, 4), timesteps=3, static=False)


def with_a_hidden_layer() -> Network:
    """The last of CASES, narrower: a compiler takes half a minute for its twelve million weights."""
    torch.manual_seed(0)
    made = ResNet(
        lambda _: BurstNeuron(), blocks=(3, 3, 2), widths=(4, 8, 16), stem_width=2, hidden=8,
        num_classes=5, timesteps=2, in_channels=3,
    )  # fmt: skip
    return deploy(warmed(made, 3, 4, 4), (3, 4, 4), mean=[0.5] * 3, std=[0.25] * 3)


def test_networks_give_the_engines_logits(tmp_path: Path) -> None:
    nets = {
        f"case{i}": (deployed(id, neuron, shape, **options), pixels(5, *shape, seed=3))
        for i, (id, neuron, shape, options) in enumerate(CASES[:-1])
    }
    nets["hidden"] = with_a_hidden_layer(), pixels(3, 3, 4, 4)
    nets["branches"] = branched(), pixels(4, 3, 6, 6, seed=5)
    nets["events"] = eventful(), pixels(3, 4, 2, 4, 4) // 32
    nets["wide"] = deployed(shape=(3, 4, 4), bits=16), pixels(4, 3, 4, 4)
    run_together(tmp_path, nets, *sanitizers())


# Networks of random integers: every kind of neuron, synapse and pool ---------------------------------------------------


def random_network(seed: int, reset: Reset, decay_reset: bool, signed: bool) -> IntegerNetwork:
    random = np.random.default_rng(seed)
    static, timesteps = bool(random.integers(2)), int(random.integers(2, 5))
    input_shape = (2, int(random.integers(5, 8)), int(random.integers(5, 8)))
    shapes: dict[str, Shape] = {INPUT: input_shape}

    def conv(name: str, source: str, kind: Any, kernel: tuple[int, int], **options: Any) -> Synapse:
        pools, groups = options.pop("pools", ()), options.get("groups", 1)
        shape = shapes[source]
        for p in pools:
            shape = p.output(shape)
        most = 9 if kind == np.int8 else 300
        weight = random.integers(-most, most, (4, shape[0] // groups, *kernel), kind, endpoint=True)
        stride, padding, dilation = (options.setdefault(k, v) for k, v in GEOMETRY.items())
        height, width = (
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, p, d, k, s in zip(shape[1:], padding, dilation, kernel, stride, strict=True)
        )
        return Synapse(name, source, "conv", weight, shape, (4, height, width), pools, absorbed=True, **options)

    def identity(name: str, source: str, pools: tuple[Pool, ...] = ()) -> Synapse:
        shape = shapes[source]
        for p in pools:
            shape = p.output(shape)
        return Synapse(name, source, "identity", random.integers(-90, 90, 4, np.int32), shape, shape, pools)

    def layer(name: str, *synapses: Synapse, pixels: bool = False) -> IntegerLayer:
        shape, n_max, fraction = synapses[0].out_shape, int(random.integers(1, 7)), int(random.integers(0, 5))
        step = random.integers(64, 90 if not pixels else 900, (4, 1)) << (fraction if pixels else 0)
        ladder = np.sort(step * random.uniform(1, 4, (4, n_max)), 1).astype(np.int32)
        leak = [None, (1, 1), (3, 2), (40000, 16), (0, 1)][int(random.integers(5))]
        drop = (step[:, 0] * random.uniform(0, 1.5)).astype(np.int32)
        neuron = IntegerNeuron(n_max, signed, ladder, drop, reset, leak, decay_reset)
        bias = random.integers(-99, 200, shape if pixels and static else 4, np.int32)
        shapes[name] = shape
        return IntegerLayer(name, synapses, bias, shape, fraction, neuron, np.ones(4))

    a = layer("a", conv("a1", INPUT, np.int8, (3, 3), padding=(1, 1)), pixels=True)
    b = layer(
        "b",
        conv("b1", "a", np.int8, (3, 2), padding=(2, 1), dilation=(2, 2), groups=2),
        conv("b2", "a", np.int16, (1, 3), padding=(0, 1), pools=(Pool("max", (3, 3), (1, 1), (1, 1)),)),
        conv("b3", INPUT, np.int8, (1, 3), padding=(0, 1)),
    )
    c = layer(
        "c", identity("c1", "b"), conv("c2", "b", np.int8, (1, 1), groups=4)
    )  # cannot take b's place: it is read again
    d = layer("d", conv("d1", "a", np.int8, (1, 3), padding=(0, 1)), identity("d2", "c"))  # takes c's
    twice = (Pool("max", (2, 2), (2, 1), (1, 0)), Pool("sum", (2, 3), (1, 2), (0, 1)))
    e = layer(
        "e", identity("e1", "d", twice), identity("e2", "b", twice), conv("e3", "a", np.int8, (2, 2), stride=(2, 2))
    )
    f = layer("f", identity("f1", "e"), conv("f2", "e", np.int8, (3, 3), padding=(1, 1)))  # nor e's: neighbours read it
    whole = (Pool("sum", shapes["d"][1:], (1, 1)),)
    end = (*twice, Pool("sum", e.shape[1:], (1, 1)))
    synapses = (
        conv("r1", "f", np.int16, f.shape[1:]),
        conv("r2", "d", np.int8, (1, 1), pools=whole),
        identity("r3", "b", end),
    )
    bias = random.integers(-(2**40), 2**40, 4, np.int64)
    readout = IntegerLayer("readout", synapses, bias, (4, 1, 1), 0, None, np.ones(4))
    return IntegerNetwork(input_shape, timesteps, static, (a, b, c, d, e, f), readout, 1.0)


GEOMETRY = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)}
KINDS: list[tuple[Reset, bool, bool]] = list(itertools.product(("once", "level", "hard"), (True, False), (True, False)))


def random_networks() -> dict[str, tuple[Network, NDArray[np.uint8]]]:
    found = {}
    for seed, kind in enumerate(KINDS):
        made = random_network(seed, *kind)
        largest = {s.name: made.largest(s) for s in made.synapses}
        assert max(membrane_bound(layer, largest, made.timesteps) for layer in made.layers) < MEMBRANE_BOUND
        assert readout_bound(made) < 2**53
        lead = (4,) if made.static else (made.timesteps, 4)
        found[f"net{seed}"] = Network(made), pixels(*lead, *made.input_shape, seed=seed)
    return found


def reset_beyond_the_last_timestep() -> tuple[Network, NDArray[np.uint8]]:
    """A file may hold it: taken off at the timestep after, which there is not, it leaves every bound as it was."""
    made = random_network(len(KINDS), "level", decay_reset=False, signed=False)
    neurons = {layer.name: made.spec(layer.name) for layer in made.layers}
    huge = {name: replace(n, reset=np.full_like(n.reset, 2**31 - 1)) for name, n in neurons.items()}
    layers = tuple(replace(layer, neuron=huge[layer.name]) for layer in made.layers)
    made = replace(made, timesteps=1, layers=layers)
    largest = {s.name: made.largest(s) for s in made.synapses}
    assert max(membrane_bound(layer, largest, 1) for layer in layers) < MEMBRANE_BOUND
    lead = (4,) if made.static else (1, 4)
    return Network(made), pixels(*lead, *made.input_shape)


def test_random_networks_give_the_engines_logits(tmp_path: Path) -> None:
    nets = random_networks()
    busy = set()
    for net, x in nets.values():
        levels = net.run(x, "dense", trace=True).levels
        assert levels is not None
        busy |= {name for name, level in levels.items() if len(np.unique(level)) > 2}
    assert busy == {"a", "b", "c", "d", "e", "f"}
    assert {net.network.static for net, _ in nets.values()} == {True, False}
    nets["last"] = reset_beyond_the_last_timestep()
    run_together(tmp_path, nets, *sanitizers())


# Memory ----------------------------------------------------------------------------------------------------------------


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


# The files -------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**32), st.tuples(*[st.integers(1, 6)] * 5))
def test_a_map_is_a_table_of_its_distinct_rows_and_columns(seed: int, sizes: tuple[int, ...]) -> None:
    random = np.random.default_rng(seed)
    height, width, row_kinds, column_kinds, channels = sizes
    values = random.integers(-2, 3, (row_kinds, column_kinds, channels), np.int32)
    values = values[random.integers(0, row_kinds, height)][:, random.integers(0, column_kinds, width)]
    table, rows, columns = distinct(values)
    np.testing.assert_array_equal(table[rows][:, columns], values)
    assert len(table) == len({row.tobytes() for row in values}) <= row_kinds
    assert table.shape[1] == len({values[:, x].tobytes() for x in range(width)}) <= column_kinds


def bias_written(bias: NDArray[np.int32]) -> tuple[str, int]:
    """Of a network whose first layer has this bias: the row of that layer, and the bytes of all constants."""
    net = deployed(shape=(3, 8, 8)).network
    made = Sources(replace(net, layers=(replace(net.layers[0], bias=bias), *net.layers[1:])))
    (row,) = re.findall(r"bias_0, .*reset_0", made.files()["model_data.c"])
    return row, made.constant_bytes


def test_a_bias_map_is_written_whole_where_a_table_is_no_smaller() -> None:
    random = np.random.default_rng(0)
    channels = deployed(shape=(3, 8, 8)).network.layers[0].shape[0]
    one = random.integers(-9, 9, channels, np.int32)
    row, least = bias_written(one)
    assert row == "bias_0, 0, NULL, NULL, thresholds_0, reset_0"
    differing = random.integers(-(2**20), 2**20, (channels, 8, 8), np.int32)
    assert bias_written(differing) == (
        "bias_0, 8, NULL, NULL, thresholds_0, reset_0", least - one.nbytes + differing.nbytes
    )  # fmt: skip
    differing[:, 1:] = differing[:, :1]  # rows alike, columns not
    row, size = bias_written(differing)
    assert row == "bias_0, 8, bias_rows_0, bias_columns_0, thresholds_0, reset_0"
    assert size == least - one.nbytes + differing[:, :1].nbytes + 8 + 8


def test_the_same_network_gives_the_same_files_whatever_others_are_called() -> None:
    net = deployed().network
    one, again, other = (Sources(net, name).files() for name in ("model", "model", "Digits2"))
    assert one == again
    assert list(one) == ["model.h", "model.c", "model_net.h", "model_data.c", "example.c", "Makefile"]
    for mine, theirs in zip(other.items(), one.items(), strict=True):
        assert tuple(re.sub("(?i)digits2(?=[_.])", "model", text) for text in mine) == tuple(
            re.sub("MODEL(?=_)", "model", text) for text in theirs
        )
        assert not re.search(r"model[_.]", mine[1], re.I)


def test_names_from_a_file_are_only_text(tmp_path: Path) -> None:
    """Whatever they are: they end no comment and no string, and nothing in them is renamed."""
    hostile = 'model_a "??/ \\', "*/ MODEL_b /*\n#error", "grün @0@", "%s%n", ""
    net = replace(deployed().network, classes=hostile, facts={"model": hostile[1], "data": {"name": "??/model_x"}})
    head = net.readout
    renamed = tuple(replace(s, name=hostile[1]) for s in head.synapses)
    text = Sources(replace(net, readout=replace(head, synapses=renamed)), "two").files()
    for name, content in text.items():
        (tmp_path / name).write_text(content)
    assert "* / MODEL_b / *.#error" in text["two.h"]
    assert "* / MODEL_b / *.#error" in text["two_data.c"]
    show = '#include <stdio.h>\n#include "two.h"\nint main(void) { for (int i = 0; i < TWO_CLASSES; i++) '
    (tmp_path / "show.c").write_text(
        show + 'printf("%s|", two_class_names[i]); return two_run(NULL, NULL, NULL) != 1; }\n'
    )
    program = compile_(tmp_path, ["show.c", "two.c", "two_data.c"], ("-O0",))
    done = subprocess.run([program], capture_output=True, check=True)
    assert done.stdout.decode().split("|")[:-1] == list(hostile)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "net.lbq"
    engine.save(path, deployed())
    return path


@pytest.mark.parametrize(("format", "memory"), [("c", "MEMORY"), ("c-step", "STATE")])
def test_the_command_writes_a_folder_that_builds_and_checks_itself(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path, format: str, memory: str
) -> None:
    out = tmp_path / "new" / "c"
    code, text, _ = call(capsys, "export", model, "-o", out, "--format", format, "--json")
    facts = json.loads(text)
    assert (code, facts["path"], facts["examples"]) == (0, str(out), 8)
    assert sorted(facts["files"]) == sorted(p.name for p in out.iterdir())
    assert facts["bytes"] == sum(p.stat().st_size for p in out.iterdir())
    header = (out / "model.h").read_text()
    assert f"#define MODEL_{memory}_BYTES {facts['memory_bytes']} " in header
    assert "#define MODEL_INPUT_SHAPE {1, 3, 8, 8}" in header
    network = engine.load(model).network
    assert facts["weights"] == network.parameters
    arrays = [a for layer in network.all_layers for a in (layer.bias, *(s.weight for s in layer.synapses))]
    arrays += [a for n in (layer.neuron for layer in network.layers) if n for a in (n.thresholds, n.reset)]
    stem = network.layers[0].bias  # padded by one: corners, edges and middle are nine positions; a byte says which
    assert facts["constant_bytes"] == sum(a.nbytes for a in arrays) - stem.nbytes + stem[:, :3, :3].nbytes + 8 + 8
    if shutil.which("make") is None:
        pytest.skip("no make")
    command = ["make", "-C", str(out), f"CC={compiler()}", f"CFLAGS={' '.join([*STRICT, '-O2'])}", "check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    assert "8 of 8 inputs give the expected logits" in done.stdout
    example = (out / "example.c").read_text()
    (out / "example.c").write_text(re.sub(r"(\d)\n}\n};\n\nstatic model_", r"\g<1>1\n}\n};\n\nstatic model_", example))
    program = compile_(out, ["example.c", "model.c", "model_data.c"], ("-O0",))
    done = subprocess.run([program], capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "7 of 8 inputs give the expected logits")


def test_the_documentations_c_compiles(model: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "howto" / "export-c.md").read_text()
    blocks = re.findall(r"```c\n(.*?)```", page, re.S)
    for block, format in zip(blocks, ("c", "c-step"), strict=True):
        export(model, tmp_path, format)
        (tmp_path / "page.c").write_text(block)
        compile_(tmp_path, ["-c", "page.c"], (), "page.o")


def test_the_command_names_the_network_and_says_what_it_wrote(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    code, text, _ = call(capsys, "export", model, "-o", tmp_path / "c", "--name", "eyes")
    assert code == 0
    assert "6 files" in text.replace("\n", " ")
    assert f"`make -C '{tmp_path}/a b' check` runs" in export(model, tmp_path / "a b")["text"]
    assert (tmp_path / "c" / "eyes_data.c").exists()
    assert "int eyes_run(const uint8_t *input" in (tmp_path / "c" / "eyes.h").read_text()
    assert call(capsys, "export", model, "-o", tmp_path / "c", "--name", "eyes")[0] == 0  # its own files are replaced


@pytest.mark.parametrize("name", ["size", "int32", "INTMAX", "run"])
def test_names_that_c_or_the_runtime_has_already(model: Path, tmp_path: Path, name: str) -> None:
    for format in ("c", "c-step"):
        export(model, tmp_path, format, name)
        compile_(tmp_path, [f"{name}.c", f"{name}_data.c", "example.c"], ())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--name", "2nd"], "--name '2nd' cannot begin the names of C"),
        (["--name", "a-b"], "--name 'a-b' cannot begin the names of C"),
        (["--name", "_a"], "--name '_a' cannot begin the names of C"),
        (["--name", "example"], "--name example is the name of a file beside it"),
        (["--name", "Makefile"], "--name Makefile is the name of a file beside it"),
        (["--name", "stdint"], "--name stdint: stdint.h would stand before C's own <stdint.h>"),
        (["-o", "mine"], "mine/Makefile is there already and was not written by lbq export: give another folder"),
        (["-o", ""], "export: say where to with -o"),
        (["--format", "cc"], "--format 'cc' is not known; did you mean 'c'?"),
        (["--format", "c_step"], "--format 'c_step' is not known; did you mean 'c-step'?"),
        (["--format", "c-step", "-o", "mine"], "mine/Makefile is there already and was not written by lbq export"),
        (["-o", "file"], "cannot write file: it is a file, give a folder"),
        (["-o", "file/in"], "cannot write file/in: file is not a folder"),
        (["-o", "taken"], "cannot write taken/model.c: it is a folder"),
    ],
)
def test_what_cannot_be_written_is_one_line(
    capsys: pytest.CaptureFixture[str],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    (tmp_path / "taken" / "model.c").mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "Makefile").write_text("all:\n")
    code, out, err = call(capsys, "export", model, "-o", "c", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"lbq: {message}")
    assert err.count("\n") == 1
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["Makefile", "file", "mine", "model.c", "taken"]


def test_a_missing_model_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = call(capsys, "export", tmp_path / "none.lbq", "-o", tmp_path / "c")
    assert code == 2
    assert err.startswith(f"lbq: {tmp_path / 'none.lbq'} cannot be read")
    assert not (tmp_path / "c").exists()


def test_it_needs_no_torch(model: Path, tmp_path: Path) -> None:
    code = f"import sys; sys.modules['torch'] = None\nfrom lbq.export import export\nexport({str(model)!r}, {str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], check=True)
    export(model, tmp_path / "again")
    for path in (tmp_path / "again").iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()
