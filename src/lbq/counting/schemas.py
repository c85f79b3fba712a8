"""What analyses, and the accounts in them, must hold. No torch."""

from __future__ import annotations

from dataclasses import fields

from lbq.counting.operations import Count, LayerActivity
from lbq.counting.outcomes import OUTCOMES
from lbq.system import schema
from lbq.system.schema import Fields, Items, Maybe, Values

COUNTS = Fields({f.name: schema.AMOUNT for f in fields(Count)})
ACCOUNT = Fields(
    {
        "fp_macs": schema.ABOVE,
        "ann_macs": schema.ABOVE,
        "pool_adds": schema.AMOUNT,
        "unit_events": schema.FLAG,
        "timesteps": schema.POSITIVE,
        "neurons": schema.COUNT,
        "n_max": schema.LEVELS,
        "outputs": schema.COUNT,
        "layers": Values(Fields({f.name: schema.AMOUNT for f in fields(LayerActivity)})),
        "formations": Values(schema.AMOUNT),
        **dict.fromkeys(("synapses", "shortcuts", "stem"), Values(COUNTS)),
    },
    {  # which older files lack
        "frames": schema.POSITIVE,
        "level_bits": schema.BITS,
        "horner": schema.AMOUNT,
        "mixing_macs": schema.AMOUNT,
        "products": Items(schema.TEXT),
    },
)
LAYER = Fields(
    {
        "name": schema.TEXT,
        "shape": Items(schema.POSITIVE),
        "n_max": schema.LEVELS,
        "step": Maybe(schema.NUMBER),
        "step_range": Maybe(Items(schema.NUMBER, 2)),
        "tail": Maybe(schema.NUMBER),
        "levels": Items(Items(schema.TALLY, 2), 1),
        "membrane": Maybe(Fields({"counts": Items(Items(schema.TALLY, 1), 1), "thresholds": Items(schema.PLACE, 1)})),
    }
)
TRACE = Fields(
    {
        "layer": schema.TEXT,
        "unit": schema.COUNT,
        "n_max": schema.LEVELS,
        "step": schema.ABOVE,
        **dict.fromkeys(("leak", "alpha"), schema.NUMBER),
        **dict.fromkeys(("current", "before", "after"), Items(schema.NUMBER, 1)),
        "levels": Items(schema.INTEGER, 1),
    }
)
ANALYSIS = Fields(
    {
        "images": schema.POSITIVE,
        "complete": schema.FLAG,
        "accuracy": Maybe(schema.PERCENT),
        "facts": Fields(
            optional={
                **dict.fromkeys(("name", "dataset", "model", "variant", "config_hash"), schema.TEXT),
                **dict.fromkeys(("weights_sha256", "network_sha256"), schema.TEXT),
                **dict.fromkeys(("timesteps", "n_max", "epochs", "seed"), schema.COUNT),
            }
        ),
        "layers": Items(LAYER),
        "accounts": Fields(optional={"exact": ACCOUNT, "rate": ACCOUNT}),
        "traces": Items(TRACE),
    },
    {"outcomes": OUTCOMES},
)
