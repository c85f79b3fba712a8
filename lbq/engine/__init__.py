"""Run deployed networks on integers, without PyTorch: `net = lbq.engine.load("model.lbq"); net.run(images)`."""

from lbq.engine.numpy_kernels import Counts as Counts
