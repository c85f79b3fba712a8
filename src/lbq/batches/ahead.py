"""Prepare batches on a CUDA stream of their own: augmenting the next batch overlaps with training on this one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]


def ahead(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """The same batches. On a GPU each is computed beside the work that its receiver still has running."""
    if device.type != "cuda":
        yield from batches
        return
    main, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    side.wait_stream(main)  # until the data has been copied
    while True:
        with torch.cuda.stream(side):
            batch = next(batches, None)
        if batch is None:
            return
        main.wait_stream(side)
        for tensor in batch:
            tensor.record_stream(main)
        yield batch
