"""Networks as C: compiled, they give the engine's logits, under sanitizers and without a warning; how a user meets them."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from lbq import engine
from lbq.engine import Network
from lbq.export import export
from lbq.export.c99 import Sources
from lbq.graph.integer import IntegerLayer
from tests.support.commands import Call
from tests.support.paths import ROOT
from tests.support.random_networks import random_networks, reset_beyond_the_last_timestep
from tests.support.small_nets import CASES, branched, deployed, eventful, pixels

STRICT = ["-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror"]
SANITIZE = ["-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


@functools.cache
def compiler() -> str:
    path = shutil.which(os.environ.get("CC", "cc"))
    if path is None:
        pytest.skip("no C compiler: install one, or name it in CC")
    return path


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
        for (int t = 0; NET_STEP_ENDLESS && t < 3 * NET_TIMESTEPS; t++) {
            if (net_step_step(&net_now, net_x + @stride@ * (t % NET_TIMESTEPS), logits) != 0) return 7;
            show("net goes on", logits, NET_CLASSES);
        }
        net_before = net_now;
        logits[0] = 77;
        if (!NET_STEP_ENDLESS && (net_step_step(&net_now, net_x, logits) != 2 || logits[0] != 77)) return 5;
        if (memcmp(&net_now, &net_before, sizeof net_now) != 0) return 6;
    }
"""


def after_each_step(net: Network, x: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Logits `[B, T, classes]` by definition: the same network, of which the input has had fewer timesteps."""
    shorter = [Network(replace(net.network, timesteps=t + 1)) for t in range(net.network.timesteps)]
    logits = [n.run(x if n.network.static else x[: n.network.timesteps], "dense").logits for n in shorter]
    np.testing.assert_array_equal(logits[-1], net.run(x, "dense").logits)
    return np.stack(logits, 1)


def going_on(net: Network, x: NDArray[np.uint8]) -> list[list[int]]:
    """Logits of one input `[T, C, H, W]` after its T frames, where the same frames come again and again, three times."""
    stream = net.stream(engine="dense")
    return [stream.step(frame).logits[0].tolist() for _ in range(4) for frame in x][len(x) :]


def run_together(folder: Path, nets: dict[str, tuple[Network, NDArray[np.uint8]]], *flags: str) -> None:
    """Link networks in both forms into one program, which reads all inputs and prints their logits, at the end and after
    every step; they must be the engine's. Another step is refused, or a stream of more frames gives what the engine's gives.

    Memories and states are filled with rubbish between runs: nothing may be left over from one to the next."""
    head, body = ["#include <inttypes.h>", "#include <stdio.h>", "#include <string.h>"], []
    stdin, expected = b"", []
    for name, (net, x) in nets.items():
        write(folder, Sources(net.network, name))
        stepwise = Sources(net.network, f"{name}_step", form="step")
        write(folder, stepwise)
        images = x if net.network.static else x.swapaxes(0, 1)
        stdin += np.ascontiguousarray(images).tobytes()
        for image, row in zip(images, after_each_step(net, x).tolist(), strict=True):
            expected.append(f"{name}: {' '.join(map(str, row[-1]))}")
            expected += [f"{name} after a step: {' '.join(map(str, logits))}" for logits in row]
            frames = image[None].repeat(net.network.timesteps, 0) if net.network.static else image
            more = going_on(net, frames) if stepwise.endless else []
            expected += [f"{name} goes on: {' '.join(map(str, logits))}" for logits in more]
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


def test_networks_give_the_engines_logits(tmp_path: Path) -> None:
    nets = {
        f"case{i}": (deployed(id, neuron, shape, **options), pixels(5, *shape, seed=3))
        for i, (id, neuron, shape, options) in enumerate(CASES)
    }
    nets["branches"] = branched(), pixels(4, 3, 6, 6, seed=5)
    nets["events"] = eventful(), pixels(3, 4, 2, 4, 4) // 32
    nets["wide"] = deployed(shape=(3, 4, 4), bits=16), pixels(4, 3, 4, 4)
    nets["nibbles"] = deployed(shape=(3, 4, 4), bits=4), pixels(4, 3, 4, 4)
    nets["edge"] = at_the_edge_of_16_bits(), pixels(2, 3, 4, 4)
    run_together(tmp_path, nets, "-DLBQ_WORDS=0", *sanitizers())


def test_something_can_be_done_before_each_layer(tmp_path: Path) -> None:
    net = deployed("resnet8w16", shape=(3, 8, 8))
    write(tmp_path, Sources(net.network))
    (tmp_path / "pause.h").write_text("void feed_watchdog(void);\n#define LBQ_BEFORE_LAYER() feed_watchdog()\n")
    main = """#include <stdio.h>
#include "model.h"
static int fed;
void feed_watchdog(void) { fed++; }
static model_memory memory;
static uint8_t input[MODEL_INPUT_BYTES];
int main(void) { int64_t logits[MODEL_CLASSES]; (void)model_run(input, logits, &memory); printf("%d", fed); return 0; }
"""
    (tmp_path / "main.c").write_text(main)
    program = compile_(tmp_path, ["main.c", "model.c", "model_data.c"], ("-include", "pause.h"))
    fed = int(subprocess.run([program], capture_output=True, check=True).stdout)
    assert fed >= len(net.network.layers)


def test_weights_are_packed_and_those_of_4_bits_take_half() -> None:
    sources = {bits: Sources(deployed("resnet8w16", shape=(3, 8, 8), bits=bits).network) for bits in (8, 4)}
    bits = {
        b: re.findall(r"NULL, NULL, NULL, weights_\d+, (\d),", s.files()["model_data.c"]) for b, s in sources.items()
    }
    assert bits == {8: ["8"] * 8, 4: ["4"] * 8}  # all but the first, which reads pixels, and the readout
    weights = sum(s.weight.size for layer in sources[8].network.layers[1:] for s in layer.convs)
    assert sources[8].constant_bytes - sources[4].constant_bytes == weights // 2


def at_the_edge_of_16_bits() -> Network:
    """All neurons of the first layer at their highest level, 5, then weights of 127 and -127: the largest sums of rows."""
    net = deployed("resnet8w16", shape=(3, 4, 4)).network

    def changed(layer: IntegerLayer, thresholds: list[int], weight: NDArray[np.int8] | None = None) -> IntegerLayer:
        assert layer.neuron is not None
        neuron = replace(layer.neuron, thresholds=np.array([thresholds] * layer.shape[0], np.int32))
        (conv,) = layer.synapses
        return replace(
            layer,
            synapses=(conv if weight is None else replace(conv, weight=weight),),
            neuron=neuron,
            bias=np.zeros_like(layer.bias),
            fraction=0,
        )

    stem, second = net.layers[:2]
    signs = np.where(np.arange(16) % 2, -127, 127).astype(np.int8)
    weight = np.broadcast_to(signs[:, None, None, None], (16, 16, 3, 3)).copy()
    layers = changed(stem, [-(2**29)] * 5), changed(second, [1, 30000, 50000, 70000, 16 * 9 * 127 * 5], weight=weight)
    return Network(replace(net, layers=(*layers, *net.layers[2:])))


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
    nets["nibbles"] = deployed(shape=(3, 4, 4), bits=4), pixels(4, 3, 4, 4)
    nets["edge"] = at_the_edge_of_16_bits(), pixels(2, 3, 4, 4)
    run_together(tmp_path, nets, "-DLBQ_WORDS=1", *sanitizers())


# The files -------------------------------------------------------------------------------------------------------------


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
    headers = [f"model_{part}.h" for part in ("levels", "net", "products", "rows")]
    assert list(one) == ["model.h", "model.c", *headers, "model_data.c", "example.c", "Makefile"]
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
    call: Call, model: Path, tmp_path: Path, format: str, memory: str
) -> None:
    out = tmp_path / "new" / "c"
    facts = call.json("export", model, "-o", out, "--format", format)
    assert (facts["path"], facts["examples"]) == (str(out), 8)
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


def test_networks_of_two_names_lie_in_one_folder_and_link_into_one_program(
    call: Call, model: Path, tmp_path: Path
) -> None:
    texts = []
    for name in ("one", "two"):
        call.printed("export", model, "-o", tmp_path, "--name", name)
        texts.append({p.name: p.read_text() for p in tmp_path.iterdir() if p.name not in ("example.c", "Makefile")})
    assert texts[0].items() < texts[1].items()
    assert len(texts[1]) == 2 * len(texts[0])
    assert "OBJECTS = example.o two.o two_data.o\n" in (tmp_path / "Makefile").read_text()
    program = compile_(tmp_path, ["example.c", *(f"{n}{part}.c" for n in ("one", "two") for part in ("", "_data"))], ())
    assert subprocess.run([program], capture_output=True).returncode == 0


def test_another_compiler_or_other_flags_build_all_objects_again(call: Call, model: Path, tmp_path: Path) -> None:
    if shutil.which("make") is None:
        pytest.skip("no make")
    call("export", model, "-o", tmp_path)
    objects = ["example.o", "model.o", "model_data.o"]

    def made(*goals: str) -> list[str]:
        """The objects that are compiled."""
        command = ["make", "-C", str(tmp_path), f"CC={compiler()}", *goals]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "clean" in goals or "8 of 8 inputs give the expected logits" in done.stdout
        return re.findall(r" -c -o (\S+)", done.stdout)

    quoted = "CFLAGS=-O0 -DNAME='\"a  b\"'"
    assert made("check") == objects
    assert made("check") == []
    assert made(quoted, "check") == objects
    assert made(quoted, "check") == []
    if (cross := shutil.which("aarch64-linux-gnu-gcc")) and (emulator := shutil.which("qemu-aarch64-static")):
        assert made(f"CC={cross}", f"RUN={emulator}", "LDFLAGS=-static", "CFLAGS=-O0", "check") == objects
    assert made("check") == objects
    assert call("export", model, "-o", tmp_path)[0] == 0
    made("clean")
    exported = call.json("export", model, "-o", tmp_path)["files"]
    assert sorted(exported) == sorted(path.name for path in tmp_path.iterdir())


def test_the_documentations_c_compiles(model: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "howto" / "export-c.md").read_text()
    blocks = re.findall(r"```c\n(.*?)```", page, re.S)
    early = tmp_path / "early.lbq"
    engine.save(early, deployed().with_exits(pixels(4, 3, 8, 8), (0.5,), "images"))
    for block, format, source in zip(blocks, ("c", "c-step", "c"), (model, model, early), strict=True):
        export(source, tmp_path, format)
        (tmp_path / "page.c").write_text(block)
        compile_(tmp_path, ["-c", "page.c"], (), "page.o")


def test_the_command_names_the_network_and_says_what_it_wrote(call: Call, model: Path, tmp_path: Path) -> None:
    text = call.printed("export", model, "-o", tmp_path / "c", "--name", "eyes")
    assert "9 files" in text.replace("\n", " ")
    assert f"`make -C '{tmp_path}/a b' check` runs" in export(model, tmp_path / "a b")["text"]
    assert (tmp_path / "c" / "eyes_data.c").exists()
    assert "int eyes_run(const uint8_t *input" in (tmp_path / "c" / "eyes.h").read_text()
    assert call("export", model, "-o", tmp_path / "c", "--name", "eyes")[0] == 0  # its own files are replaced


@pytest.mark.parametrize("name", ["size", "int32", "INTMAX", "run"])
def test_names_that_c_or_the_runtime_has_already(model: Path, tmp_path: Path, name: str) -> None:
    for format in ("c", "c-step"):
        export(model, tmp_path, format, name)
        compile_(tmp_path, [f"{name}.c", f"{name}_data.c", "example.c"], ())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--name", "2nd"], "--name '2nd' is no name in C"),
        (["--name", "_a"], "--name '_a' is no name in C"),
        (["--name", "example"], "--name example is the name of a file beside it"),
        (["--name", "Makefile"], "--name Makefile is the name of a file beside it"),
        (["--name", "stdint"], "--name stdint: stdint.h would stand before C's own <stdint.h>"),
        (["-o", "mine"], "mine/Makefile is there already and was not written by lbq export: give another folder"),
        (["-o", ""], "export: say where to with -o"),
        (["--format", "c-step", "-o", "mine"], "mine/Makefile is there already and was not written by lbq export"),
        (["-o", "file"], "cannot write file: it is a file, give a folder"),
        (["-o", "file/in"], "cannot write file/in: file is not a folder"),
        (["-o", "taken"], "cannot write taken/model.c: it is a folder"),
    ],
)
def test_what_cannot_be_written_is_one_line(
    call: Call,
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
    assert call.refused("export", model, "-o", "c", *arguments).startswith(f"lbq: {message}")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["Makefile", "file", "mine", "model.c", "taken"]
