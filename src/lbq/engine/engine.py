"""A deployed network as its user sees it: load it, run it, check it against its golden vectors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lbq.engine import cuda, exits, published
from lbq.engine.convolution import BACKENDS, Backend
from lbq.engine.execution import OnLevels, OnMembranes
from lbq.engine.file import artefact
from lbq.engine.file.artefact import level_digests
from lbq.engine.file.container import Mapped
from lbq.engine.file.reading import Golden
from lbq.engine.output import Output
from lbq.engine.runner import Runner
from lbq.engine.stream import Stream
from lbq.errors import ArtefactError, LbqError
from lbq.graph import shortest, with_sides
from lbq.graph.integer import MOST_TIMESTEPS, IntegerNetwork, is_name
from lbq.native import cpus

Engine = Literal["auto", "dense", "bitplane", "cuda"]
ENGINES: tuple[Engine, ...] = ("auto", "dense", "bitplane", "cuda")
MOST_THREADS = 256
GOLDEN_INPUTS = 8  # that a file carries
GOLDEN_REMEDY = "the file is wrong, or this engine is; compare it with another, lbq run --against"


def thread_count(threads: int | None = None) -> int:
    """CPU threads of the engines: `threads`, or else all processors of this process, up to the engines' limit."""
    if threads is None:
        return min(cpus(), MOST_THREADS)
    if type(threads) is not int or not 1 <= threads <= MOST_THREADS:
        raise LbqError(f"threads must be a whole number in 1..{MOST_THREADS}, got {threads!r}")
    return threads


class Network:
    """A deployed network, ready to run: its integers, and golden inputs with the results that it must give for them."""

    def __init__(self, network: IntegerNetwork, golden: Golden | None = None, file: Mapped | None = None) -> None:
        self.network, self.golden, self._file = network, golden, file
        self._runner: Runner | None = None
        self._on_device: dict[str, Any] = {}
        self._stages: tuple[Network, ...] | None = None

    def __copy__(self) -> Network:
        return Network(self.network, self.golden, self._file)

    def __getstate__(self) -> dict[str, Any]:
        """The state of copies and of other processes. They prepare their own kernels, and their weights are in no file."""
        state = {"network": self.network, "golden": self.golden}
        if self._file is None:
            return state
        with self.unchanged():
            return copy.deepcopy(state)

    def __setstate__(self, state: dict[str, Any]) -> None:
        Network.__init__(self, **state)

    def __repr__(self) -> str:
        return f"Network({self.network})"

    def run(
        self,
        images: NDArray[np.uint8],
        engine: Engine = "auto",
        trace: bool | OnLevels = False,
        threads: int | None = None,
        backend: Backend = "horner",
        progress: Callable[[int], None] | None = None,
        exit: bool = False,
    ) -> Output:
        """Classify uint8 images `[B, C, H, W]`, one image `[C, H, W]`, or event frames `[T, B, C, H, W]`.

        Signals may be `[B, C, L]` or `[T, B, C, L]`, features `[B, F]` or `[T, B, F]`.

        engine: `dense` multiplies everything in BLAS, `bitplane` adds weights for set bits only, `cuda` runs densely on a GPU.
            `auto` takes a GPU where there is one and images are many, else for every layer the fastest native kernel.
            All give the same bits.
        trace: True also gives every layer's levels. A function is called with a layer's name and the levels
            `[T, B, C, H, W]` of some images, and must not keep them. With several threads, any of them may call it.
        threads: of the CPU; default all processors of this process, as in the commands, and one where `trace` is a function.
        backend: how planes are weighted. `horner` doubles sums from plane to plane, `preshifted` keeps shifted copies of
            the weights, `fused` scales a weight as it is added, `explicit` shifts it first.
        progress: a function that is called with the number of images done since its last call.
        exit: stop inputs early by the margins in the network's file (`lbq exits`). What stops, and its class, is the same for
            every engine, batch and number of threads. There is no trace then.
        """
        x = self._checked(images)
        if engine not in ENGINES:
            raise LbqError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}")
        if backend not in BACKENDS:
            raise LbqError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        if not isinstance(trace, bool) and not callable(trace):
            raise LbqError(f"trace must be True, False or a function of a layer's name and levels, got {trace!r}")
        threads = 1 if threads is None and callable(trace) else thread_count(threads)
        if exit:
            exits.margins_of(self.network)  # refused before anything else where there are none
            if trace:
                raise LbqError(
                    "inputs that stop early have no levels at later timesteps: run with exit=False for a trace"
                )
            stages = self.stages()
            out = exits.run(self.network, x, lambda t, some: stages[t - 1].run(some, engine, False, threads, backend))
            if progress is not None:
                progress(len(out.logits))
            return out
        with self.unchanged():
            if cuda.takes(engine, x.shape[self.network.batch_axis]):
                return self.on_device("cuda").run(x, trace, progress)
            assert engine != "cuda"
            return self._on_cpu().run(x, engine, trace, threads, backend, progress)

    def stages(self) -> tuple[Network, ...]:
        """The network over 1, 2, ... of its timesteps, the last one over all of them."""
        if self._stages is None:
            net = self.network
            exits.check(net)
            self._stages = tuple(Network(net.first(t), None, self._file) for t in range(1, net.timesteps + 1))
        return self._stages

    def with_exits(
        self, inputs: NDArray[np.uint8], shares: Sequence[float], source: str, threads: int | None = None
    ) -> Network:
        """The network with margins by which about these shares of `inputs` go on after timesteps 1, 2, ...

        Choose inputs that the network has not fitted exactly: augmented training images, never test images. source: says in
        the file what they were.
        """
        exits.check(self.network)
        if not is_name(source):
            raise LbqError(
                f"source must say what the inputs are, in one line of at most 200 characters, got {source!r:.80}"
            )
        count = self.network.timesteps - 1
        if len(shares) != count or not all(0 <= share <= 1 for share in shares):
            asked = f"{count} share{'s' * (count > 1)} from 0 to 1, one for each timestep but the last"
            raise LbqError(f"give {asked}, got {list(shares)}")
        stages = self.stages()
        chosen = exits.choose(
            self.network,
            self._checked(inputs),
            shares,
            source,
            lambda t, some: stages[t - 1].run(some, threads=threads),
        )
        return Network(chosen, self.golden, self._file)

    def over(self, timesteps: int) -> Network:
        """The same network over other timesteps: bounds are proved again, and golden inputs get the results they give now."""
        net = self.network
        if not net.static:
            raise LbqError(f"the network reads event frames, {net.timesteps} of a sample: deploy its run over others")
        if type(timesteps) is not int or not 1 <= timesteps <= MOST_TIMESTEPS:
            raise LbqError(f"timesteps must be a whole number above 0 and at most {MOST_TIMESTEPS}, got {timesteps!r}")
        if timesteps != net.timesteps and (mixed := net.mixed_layers):
            raise LbqError(
                f"layer {mixed[0]!r} mixes {net.timesteps} timesteps: train another network over {timesteps}"
            )
        with self.unchanged():
            network = net.over(timesteps)
            try:
                artefact.proved(network)
            except ArtefactError as error:
                raise ArtefactError(f"over {timesteps} timesteps {error}: deploy its run over so many") from error
            other = Network(network, None, self._file)
            return other if self.golden is None else other.with_golden(self.golden.inputs)

    def stream(
        self,
        window: int | None = None,
        restart: int | None = None,
        engine: Literal["auto", "dense", "bitplane"] = "auto",
        threads: int | None = 1,
    ) -> Stream:
        """The network on frames that never end: `stream.step(frame)` takes one, and membranes are kept from frame to frame.

        It is refused where a membrane is not proved to fit, however many frames come: where a layer has no leak, by its name.

        window: logits are of so many of the latest frames; default the network's timesteps, or `restart` if that is less.
        restart: begin anew after so many frames, for which alone membranes are then proved to fit. None: never.
        threads: of the CPU; None takes all processors of this process, which pays for large frames only.
        """
        return Stream(self.network, self.unchanged, window, restart, engine, thread_count(threads))

    def with_golden(self, inputs: NDArray[np.uint8]) -> Network:
        """The network with golden vectors: these inputs, and what its dense engine gives for them."""
        output = self.run(inputs, "dense", trace=True)
        assert output.levels is not None
        golden = Golden(np.ascontiguousarray(inputs), output.logits, level_digests(output.levels))
        return Network(self.network, golden, self._file)

    def with_noise(self) -> Network:
        """The network with random golden inputs, so that its file carries no image of a dataset."""
        network = replace(self.network, facts={**self.network.facts, "golden": "noise"})
        return Network(network, None, self._file).with_golden(noise_for(network))

    def watch(self, images: NDArray[np.uint8], on_membranes: OnMembranes, trace: bool | OnLevels = False) -> Output:
        """As `run`, and call on_membranes(layer, timestep, membranes) with int32 membranes `[B, H, W, C]` before emission."""
        x = self._checked(images)
        with self.unchanged():
            return self._on_cpu().run(x, trace=trace, watch=on_membranes)

    def _on_cpu(self) -> Runner:
        if self._runner is None:
            self._runner = Runner(self.network)
        return self._runner

    def on_device(self, device: str) -> Any:
        """The network in PyTorch on a device: `cuda`, or `cpu` for the same arithmetic without a GPU."""
        self.check_file()
        try:
            from lbq.engine.cuda.runner import GpuRunner
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise LbqError(
                f"engine {device} needs PyTorch, which is not installed: pip install torch, or take engine auto"
            ) from error
        with cuda.turn:
            if device not in self._on_device:
                self._on_device[device] = GpuRunner(self.network, device)
            return self._on_device[device]

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Refuse results where the file that holds the weights was written to before or inside this block."""
        self.check_file()
        yield
        self.check_file()

    def check_file(self) -> None:
        """Refuse to go on where the file that holds the weights was written to."""
        if self._file is not None:
            self._file.check()

    def _checked(self, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
        net = self.network
        x = np.asarray(images)
        if x.dtype != np.uint8:
            raise LbqError(f"images must be uint8, as they are stored, got {x.dtype}")
        lead = () if net.static else (net.timesteps,)
        one = x.shape[len(lead) :] == net.input_shape
        x = np.expand_dims(x, len(lead)) if one else with_sides(x, net.input_shape, len(lead) + 1)
        if x.shape != (*lead, x.shape[len(lead)] if x.ndim > len(lead) else 0, *net.input_shape):
            expected = ", ".join(map(str, (*lead, "B", *shortest(net.input_shape))))
            raise LbqError(f"images must be [{expected}], got {list(np.shape(images))}")
        if not x.size:
            raise LbqError("images must not be empty")
        if (most := int(x.max())) > net.input_max:
            raise LbqError(
                f"images have values up to {most}, the network was trained on 0 to {net.input_max}: scale them to that"
            )
        return x

    def verify(self, engine: Engine = "auto") -> int:
        """Run the golden inputs and compare logits and every layer's levels; return the number of inputs."""
        if self.golden is None:
            raise ArtefactError("the network has no golden vectors to compare with")
        self.check_file()  # before its inputs are read, which are in the file too
        output = self.run(self.golden.inputs, engine, trace=True)
        assert output.levels is not None
        for name, digests in level_digests(output.levels).items():
            for t, (digest, golden) in enumerate(zip(digests, self.golden.digests[name], strict=True)):
                if digest != golden:
                    raise ArtefactError(
                        f"layer {name!r}: its levels at timestep {t} are not the golden ones: {GOLDEN_REMEDY}"
                    )
        if not np.array_equal(output.logits, self.golden.logits):
            raise ArtefactError(f"the logits are not the golden ones: {GOLDEN_REMEDY}")
        return len(output.logits)


def noise_for(net: IntegerNetwork) -> NDArray[np.uint8]:
    """Random inputs: images of any pixels; event frames, each with counts twice as high as the one before."""
    size, random = (GOLDEN_INPUTS, *net.input_shape), np.random.default_rng(0)
    if net.static:
        return random.integers(0, net.input_max + 1, size, np.uint8)
    highest = np.maximum(net.input_max >> np.arange(GOLDEN_INPUTS)[::-1], 1)[:, None, None, None]
    return random.integers(0, highest + 1, (net.timesteps, *size), np.uint8)


def load(name_or_path: Path | str) -> Network:
    """Load a deployed network and check every statement in its file.

    name_or_path: its file, a name that `lbq models` lists, or a folder that `lbq models export` wrote. Nothing is fetched.
    """
    return Network(*artefact.load(published.resolve(name_or_path)))


def save(path: Path | str, network: Network) -> int:
    """Write a network's file; return its size in bytes."""
    if not isinstance(network, Network):
        raise ValueError(f"network must be what lbq.deploy or lbq.engine.load gives, got {type(network).__name__}")
    network.check_file()
    return artefact.save(path, network.network, network.golden)
