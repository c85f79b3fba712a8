"""A trained network as a NIR graph (Neuromorphic Intermediate Representation), where that loses nothing. No torch.

NIR's neurons are differential equations that emit one kind of spike, and each reader chooses its own timesteps. A graph
is written only where one stated reading gives exactly the trained network's spikes; elsewhere the layer is refused by its
name. docs/howto/export-nir.md states the reading: dt = 1 by forward Euler, spikes strictly above the threshold, and a reset
that the caller names, because readers differ in it.

U[t] = beta V[t-1] + x[t] becomes a `LIF` with tau = r = 1 / (1 - beta), or an `IF` for beta = 1.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from lbq._version import __version__
from lbq.errors import GraphError, LbqError
from lbq.export.checks import refuse_unknown
from lbq.graph import INPUT, Array, Graph, Layer, NeuronSpec, Synapse
from lbq.graph.rules import threshold_shift
from lbq.system import files

if TYPE_CHECKING:
    import nir

Reset = Literal["subtract", "v_reset"]
RESETS: tuple[Reset, ...] = ("subtract", "v_reset")
REMEDY = "use model.lbq, or ONNX or C made of it"
RELATIVE_TOLERANCE = 1e-12  # a reset and a threshold this close are one number


def write_nir(graph: Graph, path: Path | str, reset: Reset, accept_ties: bool = False, dtype: type = np.float32) -> int:
    """Write a network as a .nir file (HDF5); return its size in bytes.

    graph: absorbed, as from `lbq.deploy.graph_of(net, input_shape)`.
    reset: what the reader does after a spike.
    accept_ties: also take neurons that differ only where U equals the threshold: they fire there, and NIR's do not.
    dtype: of all numbers in the file; readers mostly expect float32.
    """
    files.check_file(path)
    exported = nir_graph(graph, reset, accept_ties, dtype)
    buffer = io.BytesIO()
    _package().write(buffer, exported)
    return files.write(path, buffer.getvalue())


def nir_graph(graph: Graph, reset: Reset, accept_ties: bool = False, dtype: type = np.float32) -> nir.NIRGraph:
    """The same graph as an object of the package nir, which has checked its types."""
    if reset not in RESETS:
        raise LbqError(f"--reset must be one of {', '.join(RESETS)}, got {reset!r}")
    for layer in graph.layers:
        if layer.neuron is None:
            raise GraphError(f"layer {layer.name!r}: NIR has no such activation, its neurons spike: use another neuron")
    refuse_unknown(graph, "NIR")
    products = [*graph.gate_names, *(s.name for s in graph.synapses if s.kind == "matmul")]
    products += [s.name for s in graph.synapses if any(pool.channels > 1 for pool in s.pools)]
    if products:
        raise GraphError(
            f"{products[0]!r} multiplies levels with levels (attention or a gate), which has no form in NIR: deploy the "
            "network, and use model.lbq with lbq run, C or ONNX"
        )
    if not graph.absorbed or any(graph.spec(layer.name).gain != 1 for layer in graph.layers):
        raise GraphError("NIR needs weights that act on spikes: pass lbq.deploy.graph_of(net, input_shape)")
    if graph.offset is not None:
        raise GraphError("NIR has no pixels with an offset: pass the graph as it was before on_pixels")
    return _Writer(graph, reset, accept_ties, dtype).run()


def _package() -> Any:
    try:
        import nir
    except ImportError as error:
        raise LbqError("writing NIR needs the package nir: pip install nir") from error
    return nir


class _Writer:
    def __init__(self, graph: Graph, reset: Reset, accept_ties: bool, dtype: type) -> None:
        self.nir = _package()
        self.graph, self.reset, self.accept_ties, self.dtype = graph, reset, accept_ties, dtype
        self.nodes: dict[str, Any] = {}
        self.edges: list[tuple[str, str]] = []
        self.sources: dict[str, str] = {}  # layer or input -> the node that emits its spikes

    def run(self) -> nir.NIRGraph:
        nir, graph = self.nir, self.graph
        self.sources[INPUT] = self._add("input", nir.Input({"input": np.array(graph.input_shape)}))
        for layer in graph.layers:
            node = self._neuron(layer, graph.spec(layer.name))
            self.sources[layer.name] = self._add(layer.name, node)
            self._synapses(layer, self.sources[layer.name])
        output = self._add("output", nir.Output({"output": np.array(_size(graph.readout))}))
        self._synapses(graph.readout, output)
        metadata = {
            "producer": f"lbq {__version__}",
            "dt": 1.0,
            "discretisation": "forward Euler",
            "reset": self.reset,
            "timesteps": graph.timesteps,
            "input": "the same image at every timestep" if graph.static else "one frame at each timestep",
            "output": "mean over time: logits",
        }
        return nir.NIRGraph(self.nodes, self.edges, metadata)

    # Neurons -----------------------------------------------------------------------------------------------------------

    def _neuron(self, layer: Layer, spec: NeuronSpec) -> Any:
        where = f"layer {layer.name!r}"
        if spec.n_max > 1:
            raise GraphError(
                f"{where}: its bursts have up to {spec.n_max} levels, and NIR's neurons emit single spikes: {REMEDY}, or a "
                "neuron with one level"
            )
        if spec.signed:
            raise GraphError(f"{where}: its spikes have a sign, and NIR's have none: {REMEDY}, or an unsigned neuron")
        threshold = self._threshold(where, spec)
        ones: NDArray[Any] = np.ones(_size(layer), self.dtype)
        shaped = ones * threshold.reshape(-1, *[1] * (ones.ndim - 1)).astype(self.dtype)
        zeros = np.zeros_like(ones)
        if spec.leak == 1:
            return self.nir.IF(r=ones, v_threshold=shaped, v_reset=zeros)
        tau = self.dtype(1 / (1 - spec.leak)) * ones
        return self.nir.LIF(tau=tau, r=tau.copy(), v_leak=zeros, v_threshold=shaped, v_reset=zeros.copy())

    def _threshold(self, where: str, spec: NeuronSpec) -> Array:
        """v_threshold, a scalar or one per channel; an error where the reader's reset or comparison is another."""
        if spec.thresholds is not None:
            threshold: Array = np.asarray(spec.thresholds[0], np.float64)
        else:
            threshold = spec.step * (1.0 - threshold_shift(spec.rounding))
        if self.graph.timesteps > 1:
            self._check_reset(where, spec, threshold)
        if spec.rounding == "strict":
            return threshold
        if self.graph.timesteps == 1 or self.reset == "v_reset":
            # "above the number before it" is the same as "at or above it"
            rounded: NDArray[Any] = threshold.astype(self.dtype)
            return np.nextafter(rounded, np.zeros_like(rounded))
        if not self.accept_ties:
            raise GraphError(
                f"{where}: it fires where U equals the threshold, NIR's neurons only above it: use the neuron 'if', or accept "
                "the difference by accept_ties=True"
            )
        return threshold

    def _check_reset(self, where: str, spec: NeuronSpec, threshold: Array) -> None:
        if self.reset == "v_reset":
            if spec.reset != "hard" or spec.alpha != 1:
                raise GraphError(
                    f"{where}: its reset subtracts from the membrane, and the reader sets it to v_reset: write for one that "
                    f"subtracts (reset='subtract'), or {REMEDY}"
                )
            return
        if spec.reset == "hard":
            raise GraphError(
                f"{where}: its reset sets the membrane to 0, and the reader subtracts the threshold: write for one that sets "
                f"it to v_reset (reset='v_reset'), or {REMEDY}"
            )
        drop = spec.alpha * spec.step
        if spec.decay_reset or spec.leak == 1:
            if not np.allclose(drop, threshold, rtol=RELATIVE_TOLERANCE, atol=0):
                raise GraphError(
                    f"{where}: its reset subtracts {np.ravel(drop)[0]:g}, and a NIR neuron what it fires above, "
                    f"{np.ravel(threshold)[0]:g}: use alpha = 1, or {REMEDY}"
                )
        elif not np.allclose(drop, spec.leak * threshold, rtol=RELATIVE_TOLERANCE, atol=0):
            # beta (U - r) = beta U - drop needs r = drop / beta
            raise GraphError(
                f"{where}: its reset comes after the leak, where NIR's comes before it: use the neuron 'if', alpha = beta, or "
                f"{REMEDY}"
            )

    # Synapses ----------------------------------------------------------------------------------------------------------

    def _synapses(self, layer: Layer, target: str) -> None:
        """All synapses into a neuron or the output; the first convolution takes the bias."""
        convs = [s for s in layer.synapses if s.kind == "conv"]
        if not convs and layer.bias.any():
            raise GraphError(f"layer {layer.name!r}: it has a bias but no convolution, NIR's Scale has none: {REMEDY}")
        for s in layer.synapses:
            bias = layer.bias if convs and s is convs[0] else np.zeros_like(layer.bias)
            self._synapse(layer, s, bias, target)

    def _synapse(self, layer: Layer, s: Synapse, bias: Array, target: str) -> None:
        name, where = f"{layer.name}:{s.name}", f"layer {layer.name!r}"
        source = self.sources[s.source]
        shape = self.graph.input_shape if s.source == INPUT else self.graph[s.source].shape
        flat = s.source != INPUT and len(_size(self.graph[s.source])) == 1
        size = _size(layer)
        pools = [p for p in s.pools if (p.kernel, p.stride, p.padding) != ((1, 1), (1, 1), (0, 0))]
        if flat and (pools or len(size) > 1):
            raise GraphError(
                f"{where}: it reads {s.source!r}, which has one place only, with padding, and NIR's vectors have "
                f"none: {REMEDY}"
            )
        for i, pool in enumerate(pools):
            if pool.kind == "max":
                raise GraphError(f"{where}: NIR has no max-pooling: use average pooling, strides, or {REMEDY}")
            node = self.nir.SumPool2d(np.array(pool.kernel), np.array(pool.stride), np.array(pool.padding))
            source, shape = self._then(source, f"{name}:pool{i}", node), pool.output(shape)
        if len(size) == 1 and not flat:
            source = self._then(source, f"{name}:flatten", self.nir.Flatten({"input": np.array(shape)}, 0, -1))
        if s.kind == "identity":
            node = self.nir.Scale(np.ones(size, self.dtype) * self._array(s.weight).reshape(-1, *[1] * (len(size) - 1)))
        elif len(size) == 1:
            node = self.nir.Affine(self._array(_matrix(s)), self._array(bias))
        else:
            node = self._conv(layer, s, bias)
        self.edges.append((self._then(source, name, node), target))

    def _conv(self, layer: Layer, s: Synapse, bias: Array) -> Any:
        if s.weight.shape[2] != s.weight.shape[3]:
            raise GraphError(
                f"layer {layer.name!r}: its kernel is {s.weight.shape[2]} by {s.weight.shape[3]}, and the package nir takes "
                f"square ones only: {REMEDY}"
            )
        return self.nir.Conv2d(
            input_shape=s.in_shape[1:],
            weight=self._array(_ungrouped(s)),
            stride=np.array(s.stride),
            padding=np.array(s.padding),
            dilation=np.array(s.dilation),
            groups=1,
            bias=self._array(bias),
        )

    # Nodes -------------------------------------------------------------------------------------------------------------

    def _add(self, name: str, node: Any) -> str:
        """Add a node; return its name, without dots, which modules of PyTorch cannot have, and without HDF5's slashes."""
        base = unique = name.replace("->", ":").replace(".", "_").replace("/", "_")
        count = 1
        while unique in self.nodes:
            unique, count = f"{base}_{count}", count + 1
        self.nodes[unique] = node
        return unique

    def _then(self, source: str, name: str, node: Any) -> str:
        """Add a node that reads `source`; return its name."""
        added = self._add(name, node)
        self.edges.append((source, added))
        return added

    def _array(self, values: NDArray[Any]) -> NDArray[Any]:
        return np.ascontiguousarray(values).astype(self.dtype)


def _size(layer: Layer) -> tuple[int, ...]:
    """The size of a layer in NIR: a vector where height and width are 1, as after a linear layer."""
    return layer.shape[:1] if layer.shape[1:] == (1, 1) else layer.shape


def _ungrouped(s: Synapse) -> Array:
    """The weight of a grouped convolution with zeros between groups: the package nir derives shapes without groups."""
    outputs, per_group, *kernel = s.weight.shape
    full = np.zeros((outputs, per_group * s.groups, *kernel))
    step = outputs // s.groups
    for g in range(s.groups):
        full[g * step : (g + 1) * step, g * per_group : (g + 1) * per_group] = s.weight[g * step : (g + 1) * step]
    return full


def _matrix(s: Synapse) -> Array:
    """A convolution with one output place, as a matrix `[O, C * H * W]` on its flattened input."""
    weight = _ungrouped(s)
    channels, height, width = s.in_shape
    full = np.zeros((len(weight), channels, height, width))
    for ky, kx in np.ndindex(weight.shape[2:]):
        y, x = (k * d - p for k, d, p in zip((ky, kx), s.dilation, s.padding, strict=True))
        if 0 <= y < height and 0 <= x < width:
            full[:, :, y, x] = weight[:, :, ky, kx]
    return full.reshape(len(weight), -1)
