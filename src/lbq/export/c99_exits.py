"""Early exit in the C export: what a network with margins has more than others. No torch.

All timesteps in one call keep no membranes, so an input that goes on starts anew, as in the engine: memory stays as planned.
One timestep a call keeps them anyway, so there it goes on from where it is. Logits at a stop are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq.engine import Network
from lbq.engine.file.reading import Golden
from lbq.engine.output import Output
from lbq.graph.integer import Exits, IntegerNetwork

STOP_BYTES = 4  # of an int


def of_examples(network: IntegerNetwork, golden: Golden) -> Output | None:
    """Where the example's inputs stop, and their logits there; None for a network without margins."""
    return Network(network).run(golden.inputs, "dense", exit=True) if network.exits is not None else None


def constants(exits: Exits | None, array: Callable[[str, NDArray[Any]], str]) -> str:
    """The pointers to biases and margins, in C. array: writes an array and gives its name."""
    if exits is None:
        return "NULL, NULL"
    return f"{array('exit_bias', exits.bias)}, {array('exit_margins', np.array(exits.margins, np.int64))}"


def part(name: str, form: str) -> str:
    """What a file of `c/` gets besides: what both forms share, then the form's own."""
    folder = resources.files("lbq.export") / "c" / "exits"
    files = (folder / name, folder / f"{form}_{name}")
    return "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())


def in_the_example(early: Output | None, wrapped: Callable[[NDArray[Any]], str]) -> dict[str, str]:
    """Values for example.c. wrapped: writes numbers in lines."""
    if early is None or early.timesteps is None:
        return {"and_early": ""}
    return {
        "and_early": " && stops_as_expected()",
        "stops": ", ".join(map(str, early.timesteps.tolist())),
        "early": ",\n".join(f"{{\n{wrapped(one)}\n}}" for one in early.logits),
    }


def example_bytes(early: Output | None) -> int:
    """Of the constants that example.c has more."""
    return 0 if early is None else early.logits.nbytes + STOP_BYTES * len(early.logits)
