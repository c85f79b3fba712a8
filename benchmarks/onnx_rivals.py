"""The same architecture in onnxruntime: the ANN in int8 as its own tools quantise it, and our SNN run densely on int8 levels.

The SNN is written out operation by operation, the neuron in float32 (currents scaled to steps, clipped, rounded down), and its
convolutions in two ways: `exact`, ConvInteger on uint8 levels with int32 currents, and as onnxruntime quantises a float
graph, with currents rounded to 8 bits, which is another network but the usual way.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import onnxscript  # noqa: F401  which torch.onnx.export needs: the caller leaves these rivals out where one is missing
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import quantization

from lbq import models
from lbq.graph import INPUT, Synapse
from lbq.graph.integer import IntegerLayer, IntegerNetwork


def session(model: bytes | str, threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def ann_int8(id: str, threads: int, images: np.ndarray[Any, Any]) -> ort.InferenceSession:
    """The ANN of that architecture, exported, quantised statically (QDQ, per channel) and optimised by onnxruntime."""

    net = models.create(id, neuron="relu", timesteps=1).eval()
    with tempfile.TemporaryDirectory() as folder:
        plain, quantised = Path(folder) / "ann.onnx", Path(folder) / "int8.onnx"
        torch.onnx.export(
            Folded(net).eval(), (torch.zeros(1, 3, 32, 32),), plain, input_names=["x"], dynamo=True, verbose=False
        )
        quantization.shape_inference.quant_pre_process(plain, plain)
        quantise(plain, quantised, [{"x": images[i : i + 1].astype(np.float32) / 64 - 2} for i in range(4)])
        return session(str(quantised), threads)


class Folded(torch.nn.Module):
    """The ANN with BatchNorm folded into its convolutions and no time, as any exporter of ANNs would see it."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        from torch.nn.utils.fusion import fuse_conv_bn_eval

        self.net = net
        for module in list(net.modules()):
            for conv, bn in (("conv1", "bn1"), ("conv2", "bn2"), ("0", "1")):
                pair: Any = getattr(module, conv, None), getattr(module, bn, None)
                if isinstance(pair[0], torch.nn.Conv2d) and isinstance(pair[1], torch.nn.BatchNorm2d):
                    setattr(module, conv, fuse_conv_bn_eval(*pair))
                    setattr(module, bn, torch.nn.Identity())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        net: Any = self.net
        x = torch.relu(net.conv1(x))
        for stage in range(1, net.stages + 1):
            for block in getattr(net, f"layer{stage}"):
                inner = block.conv2(torch.relu(block.conv1(x)))
                x = torch.relu(inner + (x if block.downsample is None else block.downsample(x)))
        out: torch.Tensor = net.fc(x.mean((2, 3)))
        return out


class _Writer:
    def __init__(self, network: IntegerNetwork, exact: bool) -> None:
        self.network, self.exact, self.count = network, exact, 0
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def constant(self, value: Any, dtype: Any = np.float32) -> str:
        self.count += 1
        name = f"c{self.count}"
        self.constants.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def node(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        self.count += 1
        names = [f"v{self.count}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(kind, list(inputs), names, **attributes))
        return names[0] if outputs == 1 else names

    def conv(self, s: Synapse, levels: str) -> str:
        """Currents in float32."""
        options = {
            "strides": list(s.stride),
            "pads": [*s.padding, *s.padding],
            "dilations": list(s.dilation),
            "group": s.groups,
        }
        if not self.exact:
            return str(self.node("Conv", levels, self.constant(s.weight), **options))
        return self.real(self.node("ConvInteger", levels, self.constant(s.weight, np.int8), **options))

    def real(self, value: str) -> str:
        return str(self.node("Cast", value, to=TensorProto.FLOAT))

    def layer(self, layer: IntegerLayer, levels: dict[str, list[str]]) -> list[str]:
        """Levels of each timestep. All timesteps of a convolution are one batch, as in our engine."""
        neuron, steps = layer.neuron, self.network.timesteps
        assert neuron is not None
        step = neuron.thresholds[:, 0].astype(np.float64)[:, None, None]
        scale = self.constant(2.0**layer.fraction / step)
        bias = self.constant((layer.bias if layer.bias.ndim == 3 else layer.bias[:, None, None]) / step)
        total: list[str] | None = None
        for s in layer.synapses:
            static = s.source == INPUT
            read = levels[s.source][0] if static else self.node("Concat", *levels[s.source], axis=0)
            if s.kind == "identity":
                weight = self.constant(s.weight[:, None, None] / step)
                parts = [self.node("Mul", self.real(one) if self.exact else one, weight) for one in levels[s.source]]
            else:
                current = self.node("Mul", self.conv(s, read), scale)
                parts = (
                    [current] * steps
                    if static
                    else self.node("Split", current, outputs=steps, axis=0, num_outputs=steps)
                )
                parts = [parts] if isinstance(parts, str) else parts
            total = parts if total is None else [self.node("Add", a, b) for a, b in zip(total, parts, strict=True)]
        assert total is not None
        m, k = neuron.leak or (1, 0)
        leak, out, v = self.constant(m / 2**k), [], None
        for part in total:
            u = self.node("Add", part, bias)
            if v is not None:
                u = self.node("Add", u, self.node("Mul", v, leak))
            clipped = self.node("Clip", u, self.constant(0.0), self.constant(float(neuron.n_max)))
            if self.exact:
                out.append(self.node("Cast", clipped, to=TensorProto.UINT8))  # towards zero: floor
                fired = self.real(self.node("Cast", out[-1], to=TensorProto.BOOL))
            else:
                out.append(self.node("Floor", clipped))
                fired = self.node("Sign", out[-1])
            v = self.node("Sub", u, fired)
        return out


def snn_int8(network: IntegerNetwork, threads: int, exact: bool, images: np.ndarray[Any, Any]) -> ort.InferenceSession:
    """A deployed network of burst neurons, run densely by onnxruntime; input `x` [1, C, H, W], uint8 where `exact`."""
    writer = _Writer(network, exact)
    levels = {INPUT: ["x"]}
    for layer in network.layers:
        levels[layer.name] = writer.layer(layer, levels)
    head = network.readout.synapses[0]
    summed = [writer.real(one) if exact else one for one in levels[head.source]]
    mean = writer.node("GlobalAveragePool", writer.node("Sum", *summed))
    logits = writer.node("Conv", mean, writer.constant(head.weight))
    out = helper.make_tensor_value_info(logits, TensorProto.FLOAT, [1, len(head.weight), 1, 1])
    kind = TensorProto.UINT8 if exact else TensorProto.FLOAT
    given = helper.make_tensor_value_info("x", kind, [1, *network.input_shape])
    graph = helper.make_graph(writer.nodes, "snn", [given], [out], writer.constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model)
    if exact:
        return session(model.SerializeToString(), threads)
    with tempfile.TemporaryDirectory() as folder:
        plain, quantised = Path(folder) / "snn.onnx", Path(folder) / "int8.onnx"
        onnx.save(model, plain)
        quantise(plain, quantised, [{"x": images[i : i + 1].astype(np.float32)} for i in range(2)])
        return session(str(quantised), threads)


class _Reader(quantization.CalibrationDataReader):
    def __init__(self, inputs: list[dict[str, Any]]) -> None:
        self.left = iter(inputs)

    def get_next(self) -> Any:
        return next(self.left, None)


def quantise(plain: Path, quantised: Path, inputs: list[dict[str, Any]]) -> None:
    """Statically, per channel, weights int8 and activations uint8, with quantise and dequantise nodes that are then fused."""
    quantization.quantize_static(
        plain, quantised, _Reader(inputs), quant_format=quantization.QuantFormat.QDQ, per_channel=True,
        activation_type=quantization.QuantType.QUInt8, weight_type=quantization.QuantType.QInt8,
        op_types_to_quantize=["Conv", "Relu", "Add", "MaxPool", "Gemm"] if plain.name == "ann.onnx" else ["Conv"],
    )  # fmt: skip
