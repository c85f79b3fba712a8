"""A training step as a CUDA graph: recorded once, then launched whole, so that small batches do not wait for Python."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch import Tensor

EAGER_STEPS = 3  # steps before recording, in which libraries choose algorithms and the optimiser makes its state

Step = Callable[..., Tensor]


class CapturedStep:
    """`step(*inputs) -> loss`, everything it does to weights, gradients and statistics included.

    The first calls run it as it is; then it is recorded on copies of its inputs, which later calls fill. Every call is one
    training step. Inputs must keep their shapes, and what the step reads besides them must stay where it is in memory.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *inputs: Tensor) -> Tensor:
        self.calls += 1
        if self.calls <= EAGER_STEPS:
            return self._run_eagerly(*inputs)
        if self.graph is None:
            self._record(*inputs)
        for recorded, value in zip(self.inputs, inputs, strict=True):
            recorded.copy_(value)
        assert self.graph is not None
        self.graph.replay()
        return self.loss

    def _run_eagerly(self, *inputs: Tensor) -> Tensor:
        """Run the step on a side stream: recording needs that no state belongs to the default stream."""
        stream, main = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            loss = self.step(*inputs)
        main.wait_stream(stream)
        return loss

    def _record(self, *inputs: Tensor) -> None:
        self.inputs = [torch.empty_like(value) for value in inputs]
        gc.collect()  # memory that is freed while recording, such as an earlier graph's, would spoil the record
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # of the eager steps: the graph has memory of its own
        collecting = gc.isenabled()
        gc.disable()
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.loss = self.step(*self.inputs)
        finally:
            if collecting:
                gc.enable()
        self.graph = graph
