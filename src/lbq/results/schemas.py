"""What records of runs and results of training must hold. No torch."""

from __future__ import annotations

from lbq.counting.outcomes import OUTCOMES
from lbq.system import schema
from lbq.system.schema import Fields, Items, Kind, Maybe, Values, whole

EPOCH = Fields(
    {"epoch": schema.COUNT, "loss": Maybe(schema.NUMBER)},
    dict.fromkeys(
        ("train_accuracy", "test_accuracy", "holdout_accuracy", "lr", "seconds", "step_min", "step_max"),
        Maybe(schema.NUMBER),
    ),
)
RECORD = Fields(
    {
        **dict.fromkeys(("dataset", "model", "variant", "config_hash"), schema.TEXT),
        "n_max": schema.COUNT,
        "timesteps": schema.POSITIVE,
        "epochs": schema.COUNT,
        "seed": schema.COUNT,
        "config": Fields(optional=dict.fromkeys(("model", "data", "augment", "optim", "train", "neuron"), Fields())),
        "log": Items(EPOCH),
    },
    {
        **dict.fromkeys(("name", "step", "surrogate", "step_gradient", "split"), schema.TEXT),
        **dict.fromkeys(("weights_sha256", "init_sha256", "hardware", "commit", "earlier"), schema.TEXT),
        **dict.fromkeys(("steps", "active"), Maybe(Values(schema.NUMBER))),
        **dict.fromkeys(("train_loss", "wall_seconds", "lr"), Maybe(schema.NUMBER)),
        **dict.fromkeys(("holdout_accuracy", "accuracy_as_trained"), Maybe(schema.PERCENT)),
        "holdout_accuracy_as_trained": Maybe(schema.PERCENT),
        "tested_in": Maybe(schema.TEXT),
        "batch_size": Maybe(schema.POSITIVE),
        "versions": Values(schema.TEXT),
        "unfinished": schema.FLAG,
        "static": schema.FLAG,
        "outcomes": OUTCOMES,
        "epochs_done": schema.COUNT,
    },
)
INPUTS = Fields(
    {
        "name": schema.TEXT,
        "shape": Kind(
            "three whole numbers above 0", lambda v: isinstance(v, list) and len(v) == 3 and all(map(whole(1), v))
        ),
        "static": schema.FLAG,
        "classes": Items(schema.TEXT),
        "mean": Items(schema.NUMBER),
        "std": Items(schema.ABOVE),
        "scale": schema.POSITIVE,
    }
)
TRAINED = Fields(  # no accuracy where it was not tested
    {"accuracy": Maybe(schema.PERCENT), "epoch": schema.COUNT},
    {"inputs": INPUTS, "weights_sha256": schema.TEXT, "config_hash": schema.TEXT},
)
RESULT = Fields(optional={**TRAINED.needed, **TRAINED.optional})  # of a run
FINISHED = Fields({"test_accuracy": Maybe(schema.PERCENT)})  # null where it was not tested; an unfinished one has none
INTEGER_RECORD = Fields({"of": schema.TEXT, "test_accuracy": schema.PERCENT})
