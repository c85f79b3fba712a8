"""ONNX nodes, and products of levels made of them: attention, gates, and sums over channels. No torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from lbq.graph import Gate, Shape, Synapse


class Nodes:
    """Nodes and constants of one model. Every value has a name; `scope` is in front of the names that are made."""

    def __init__(self, onnx: Any) -> None:
        self.onnx, self.helper = onnx, onnx.helper
        self.nodes: list[Any] = []
        self.constants: dict[str, Any] = {}
        self.name_uses: dict[str, int] = {}
        self.scope = ""

    def _node(self, kind: str, inputs: list[Any], name: str = "", **attributes: Any) -> str:
        """Add a node with one output; `name`, or its kind, in the scope is the output's name."""
        if self.scope:
            base = f"{self.scope}/{name or kind}"
            count = self.name_uses[base] = self.name_uses.get(base, -1) + 1
            out = f"{base}.{count}" if count else base
        else:
            out = name or f"input/{kind}.{len(self.nodes)}"
        self.nodes.append(self.helper.make_node(kind, inputs, [out], name=f"{kind}:{out}", **attributes))
        return out

    def _cast(self, value: str, kind: type, name: str = "") -> str:
        return self._node("Cast", [value], name, to=self.helper.np_dtype_to_tensor_dtype(np.dtype(kind)))

    def _constant(self, name: str, value: Any) -> str:
        if name not in self.constants:
            array = np.ascontiguousarray(value).reshape(np.shape(value))
            self.constants[name] = self.onnx.numpy_helper.from_array(array, name)
        return name

    def _number(self, value: Any) -> str:
        """A small constant, which all nodes share."""
        array = np.asarray(value)
        return self._constant(f"{array.dtype}/{array.tolist()}", array)

    def _reshaped(self, value: str, *shape: int, name: str = "") -> str:
        """A value `[B, *shape]`."""
        return self._node("Reshape", [value, self._number(np.array([0, *shape], np.int64))], name)  # 0: as it is


class Products(Nodes):
    """levels: of each layer and gate at this timestep, as float32 and as int32."""

    levels: dict[str, tuple[str, str]]

    def _attended(self, s: Synapse, exact: bool) -> str:
        """A product in each head, int32 as the synapse gives it. (Q K^T) V is in the order with fewer products.

        exact: whether all sums are below 2^24, so that float32 holds them. Else matrices are int32, which holds them as proved.
        """
        whole, square = (s.heads, s.per_head, s.tokens), (s.heads, s.tokens, s.tokens)

        def levels(name: str, shape: tuple[int, ...] = whole) -> str:
            return self._reshaped(self.levels[name][0 if exact else 1], *shape)

        if not s.values:
            product = self._node("MatMul", [self._turned(levels(s.source)), levels(s.keys)])
        elif not s.keys:
            product = self._node("MatMul", [levels(s.values), self._turned(levels(s.source, square))])
        else:
            q, k, v = levels(s.source), self._turned(levels(s.keys)), levels(s.values)
            if s.linear:
                product = self._node("MatMul", [self._node("MatMul", [v, k]), q])
            else:
                product = self._node("MatMul", [v, self._node("MatMul", [k, q])])
        product = self._reshaped(product, *s.out_shape)
        return self._cast(product, np.int32) if exact else product

    def _turned(self, matrices: str) -> str:
        """Of each head, rows and columns exchanged."""
        return self._node("Transpose", [matrices], perm=[0, 1, 3, 2])

    def _gate(self, gate: Gate, factor: Shape) -> None:
        """Levels times the levels of a factor of this shape, in float32: at most 255."""
        channels, height, width = gate.shape
        a, k = (self.levels[name][0] for name in gate.operands)
        if factor[0] not in (1, channels):
            a = self._reshaped(a, factor[0], 1, *factor[1:])
            k = self._reshaped(k, factor[0], channels // factor[0], height, width)
            level = self._reshaped(self._node("Mul", [a, k]), *gate.shape, name="S")
        else:
            level = self._node("Mul", [a, k], "S")
        self.levels[gate.name] = level, self._cast(level, np.int32)

    def _channel_sums(self, levels: str, count: int, shape: Shape) -> str:
        """Sums of so many neighbouring channels, of levels of this shape."""
        parts = self._reshaped(levels, shape[0] // count, count, *shape[1:])
        return self._node("ReduceSum", [parts, self._number(np.array([2], np.int64))], keepdims=0)
