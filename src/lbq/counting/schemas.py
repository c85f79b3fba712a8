"""What analyses, and the accounts in them, must hold. No torch."""

from __future__ import annotations

from dataclasses import fields

from lbq.counting.operations import Count, LayerActivity
from lbq.system.schema import (
    ABOVE,
    AMOUNT,
    BITS,
    COUNT,
    FLAG,
    INTEGER,
    LEVELS,
    NUMBER,
    PERCENT,
    PLACE,
    POSITIVE,
    TALLY,
    TEXT,
    Fields,
    Items,
    Maybe,
    Values,
)

COUNTS = Fields({f.name: AMOUNT for f in fields(Count)})
ACCOUNT = Fields(
    {
        "fp_macs": ABOVE,
        "ann_macs": ABOVE,
        "pool_adds": AMOUNT,
        "unit_events": FLAG,
        "timesteps": POSITIVE,
        "neurons": COUNT,
        "n_max": LEVELS,
        "outputs": COUNT,
        "layers": Values(Fields({f.name: AMOUNT for f in fields(LayerActivity)})),
        "formations": Values(AMOUNT),
        **dict.fromkeys(("synapses", "shortcuts", "stem"), Values(COUNTS)),
    },
    {"frames": POSITIVE, "level_bits": BITS, "horner": AMOUNT},  # which older files lack
)
LAYER = Fields(
    {
        "name": TEXT,
        "shape": Items(POSITIVE),
        "n_max": LEVELS,
        "step": Maybe(NUMBER),
        "step_range": Maybe(Items(NUMBER, 2)),
        "tail": Maybe(NUMBER),
        "levels": Items(Items(TALLY, 2), 1),
        "membrane": Maybe(Fields({"counts": Items(Items(TALLY, 1), 1), "thresholds": Items(PLACE, 1)})),
    }
)
TRACE = Fields(
    {
        "layer": TEXT,
        "unit": COUNT,
        "n_max": LEVELS,
        "step": ABOVE,
        **dict.fromkeys(("leak", "alpha"), NUMBER),
        **dict.fromkeys(("current", "before", "after"), Items(NUMBER, 1)),
        "levels": Items(INTEGER, 1),
    }
)
ANALYSIS = Fields(
    {
        "images": POSITIVE,
        "complete": FLAG,
        "accuracy": Maybe(PERCENT),
        "facts": Fields(
            optional={
                **dict.fromkeys(("name", "dataset", "model", "variant", "config_hash", "weights_sha256"), TEXT),
                **dict.fromkeys(("timesteps", "n_max", "epochs", "seed"), COUNT),
            }
        ),
        "layers": Items(LAYER),
        "accounts": Fields(optional={"exact": ACCOUNT, "rate": ACCOUNT}),
        "traces": Items(TRACE),
    }
)
