"""Without a CUDA device the Triton kernels run under Triton's interpreter, which must be asked for before its import."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
