"""What records of runs and results of training must hold. No torch."""

from __future__ import annotations

from lbq.system.schema import (
    ABOVE,
    COUNT,
    FLAG,
    NUMBER,
    PERCENT,
    POSITIVE,
    TEXT,
    Fields,
    Items,
    Kind,
    Maybe,
    Values,
    whole,
)

EPOCH = Fields(
    {"epoch": COUNT, "loss": Maybe(NUMBER)},
    dict.fromkeys(
        ("train_accuracy", "test_accuracy", "holdout_accuracy", "lr", "seconds", "step_min", "step_max"),
        Maybe(NUMBER),
    ),
)
RECORD = Fields(
    {
        **dict.fromkeys(("dataset", "model", "variant", "config_hash"), TEXT),
        "n_max": COUNT,
        "timesteps": POSITIVE,
        "epochs": COUNT,
        "seed": COUNT,
        "config": Fields(
            optional={
                **dict.fromkeys(("model", "data", "augment", "optim", "train", "neuron"), Fields()),
            }
        ),
        "log": Items(EPOCH),
    },
    {
        **dict.fromkeys(
            (
                "name",
                "step",
                "surrogate",
                "step_gradient",
                "split",
                "weights_sha256",
                "init_sha256",
                "hardware",
                "commit",
                "earlier",
            ),
            TEXT,
        ),
        **dict.fromkeys(("steps", "active"), Maybe(Values(NUMBER))),
        **dict.fromkeys(("train_loss", "wall_seconds", "lr"), Maybe(NUMBER)),
        **dict.fromkeys(("holdout_accuracy", "accuracy_as_trained", "holdout_accuracy_as_trained"), Maybe(PERCENT)),
        "tested_in": Maybe(TEXT),
        "batch_size": Maybe(POSITIVE),
        "versions": Values(TEXT),
        "unfinished": FLAG,
        "static": FLAG,
        "epochs_done": COUNT,
    },
)
INPUTS = Fields(
    {
        "name": TEXT,
        "shape": Kind(
            "three whole numbers above 0", lambda v: isinstance(v, list) and len(v) == 3 and all(map(whole(1), v))
        ),
        "static": FLAG,
        "classes": Items(TEXT),
        "mean": Items(NUMBER),
        "std": Items(ABOVE),
        "scale": POSITIVE,
    }
)
# of a run; what training wrote has the first two, and no accuracy where it was not tested
RESULT = Fields(
    optional={"accuracy": Maybe(PERCENT), "epoch": COUNT, "inputs": INPUTS, "weights_sha256": TEXT, "config_hash": TEXT}
)
TRAINED = Fields(
    {"accuracy": Maybe(PERCENT), "epoch": COUNT}, {"inputs": INPUTS, "weights_sha256": TEXT, "config_hash": TEXT}
)
FINISHED = Fields({"test_accuracy": Maybe(PERCENT)})  # null where it was not tested; an unfinished one has none
INTEGER_RECORD = Fields({"of": TEXT, "test_accuracy": PERCENT})
