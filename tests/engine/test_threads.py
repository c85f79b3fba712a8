"""One network, run by several threads of a user at a time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lbq.errors import LbqError
from tests.support.small_nets import deployed, pixels

THREADS, TURNS = 4, 12
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # of the GPU engine, which a CPU stands in for
WAYS: dict[str, Any] = {
    "auto": lambda net, x: net.run(x, threads=1),
    "dense": lambda net, x: net.run(x, "dense", threads=2),
    "bitplane": lambda net, x: net.run(x, "bitplane", threads=1),
    "on a GPU": lambda net, x: net.on_device(DEVICE).run(x),
}


@pytest.mark.parametrize("way", WAYS)
def test_threads_get_the_results_of_their_own_images(way: str) -> None:
    net = deployed("resnet8w2", shape=(3, 8, 8))
    batches = [pixels(1 + number % 3, 3, 8, 8, seed=number) for number in range(THREADS * TURNS)]
    expected = [deployed("resnet8w2", shape=(3, 8, 8)).run(x, "dense").logits for x in batches]

    def logits(x: NDArray[np.uint8]) -> NDArray[Any]:
        found: NDArray[Any] = WAYS[way](net, x).logits
        return found

    with ThreadPoolExecutor(THREADS) as pool:  # cold: the first ones also prepare it
        for ours, theirs in zip(pool.map(logits, batches), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_a_run_inside_a_run_on_a_gpu_is_refused() -> None:
    """Its memory holds the run that goes on; a function may run another network."""
    net, other, x = deployed("resnet8w2", shape=(3, 8, 8)), deployed("one-block", shape=(3, 8, 8)), pixels(2, 3, 8, 8)
    with pytest.raises(LbqError, match="called during a run on a GPU cannot run the same network"):
        net.on_device(DEVICE).run(x, lambda *_: net.on_device(DEVICE).run(x))
    out = net.on_device(DEVICE).run(x, lambda *_: other.on_device(DEVICE).run(x))
    np.testing.assert_array_equal(out.logits, net.run(x, "dense").logits)
