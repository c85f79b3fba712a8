"""A deployed network as a folder that model hubs show: a card with front matter, config.json, model.lbq. No torch.

With the run that it was deployed from, the folder also holds weights.safetensors and config.toml: `lbq.load` then reads it
as a run folder, and the network can be trained further.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from lbq._version import __version__
from lbq.config import Config
from lbq.engine import Network, load, published
from lbq.errors import ArtefactError, ConfigError, RunError
from lbq.system import files

LICENSE = "apache-2.0"  # of the networks that come with lbq
WEIGHTS = "weights.safetensors"
IDENTIFIER = re.compile(r"[\w.-]{1,64}", re.ASCII)


def facts_of(name: str, path: Path, net: Network) -> dict[str, Any]:
    """What `lbq models` and a card say of a network, as JSON values."""
    network = net.network
    return {
        "name": name,
        "model": network.facts.get("model"),
        "dataset": network.dataset.get("name"),
        "test_accuracy": published.accuracy_of(published.card_of(path)),
        "input": list(network.input_shape),
        "frames": not network.static,
        "classes": network.readout.shape[0],
        "timesteps": network.timesteps,
        "weights": network.parameters,
        "bits": network.facts.get("bits"),
        "bytes": path.stat().st_size,
        "path": str(path),
    }


def config_of(net: Network, data: bytes) -> dict[str, Any]:
    """config.json: what a program must know to feed the network, without reading model.lbq."""
    network = net.network
    return {
        "library_name": "lbq",
        "lbq_version": __version__,
        "file": published.FILE,
        "sha256": hashlib.sha256(data).hexdigest(),
        "input": {
            "dtype": "uint8",
            "shape": list(network.input_shape),
            "max": network.input_max,
            "timesteps": network.timesteps,
            "frames": not network.static,
        },
        "id2label": {str(i): label for i, label in enumerate(network.classes)},
        "logit_scale": network.scale,
        "facts": dict(network.facts),
    }


def write_folder(
    name_or_path: Path | str, out: Path | str, run: Path | str | None = None, license: str | None = None
) -> dict[str, Any]:
    """Write the folder of a network, which must not exist yet; return facts about it, as JSON values.

    run: the run folder that the network was deployed from, for its weights. license: an identifier of SPDX; default
    Apache-2.0 for a network that comes with lbq, else none is named.
    """
    path, out = published.resolve(name_or_path), Path(out)
    name = path.stem if path.name != published.FILE else out.name
    if license is None and path.parent in (published.INSTALLED, published.CHECKOUT):
        license = LICENSE
    if license is not None and not IDENTIFIER.fullmatch(license):
        raise ArtefactError(f"--license {license!r} is no identifier: give one such as apache-2.0 or mit")
    if out.exists():
        raise ArtefactError(f"{out} exists already: choose another folder or remove it")
    net, data = load(path), path.read_bytes()
    verified = net.verify() if net.golden is not None else 0
    facts = facts_of(name, path, net)
    contents: dict[str, bytes | str] = {} if run is None else _trained(net, Path(run))
    contents[published.FILE] = data
    contents[published.CONFIG] = json.dumps(config_of(net, data), indent=1) + "\n"
    text = (published.card_of(path) or "").replace(f"models/{path.name}", published.FILE)
    contents["README.md"] = card(facts, net, text, license, run is not None)
    with files.new_folder(out, ArtefactError) as folder:
        size = files.write_all(folder, contents, ArtefactError)
    return {**facts, "path": str(out), "bytes": size, "files": sorted(contents), "verified": verified}


def _trained(net: Network, run: Path) -> dict[str, bytes | str]:
    """The weights and the configuration of the run that a network was deployed from; another run is refused."""
    stored = {}
    for key, name in (("weights_sha256", WEIGHTS), ("config_hash", "config.toml")):
        try:
            stored[name] = (run / name).read_bytes()
            value = hashlib.sha256(stored[name]).hexdigest() if name == WEIGHTS else Config.load(run / name).hash
        except OSError as error:
            raise RunError(f"{run / name} cannot be read: {error.strerror}; give a finished run folder") from error
        except ConfigError as error:
            raise RunError(str(error)) from error
        if net.network.facts.get(key) != value:
            raise RunError(
                f"{run} is not the run that the network was deployed from, its {name} differs: give that run, or deploy "
                "this one with lbq deploy"
            )
    config = Config.load(run / "config.toml", ["data.root="])  # the folder on one machine tells others nothing
    return {WEIGHTS: stored[WEIGHTS], "config.toml": config.to_toml()}


# The card
# ---------------------------------------------------------------------------------------------------------------------


def card(facts: dict[str, Any], net: Network, text: str, license: str | None, trained: bool) -> str:
    """README.md of the folder. text: what is said of the network beside its file."""
    network = net.network
    shape = " x ".join(map(str, network.input_shape))
    what = f"event frames [T = {network.timesteps}, B, {shape}]" if facts["frames"] else f"images [B, {shape}]"
    lines = [
        "---",
        *(f"{key}: {json.dumps(value)}" for key, value in front_matter(facts, license).items()),
        "---",
        "",
        f"# {facts['name']}",
        "",
        f"A spiking network of integers, {facts['weights']:,} weights over T = {network.timesteps} timesteps. It reads uint8 "
        f"{what} with values up to {network.input_max}, and knows {facts['classes']} classes. It runs on a CPU without "
        "PyTorch.",
        "",
        "```python",
        "import lbq.engine",
        "",
        'net = lbq.engine.load("PATH_OF_THIS_FOLDER")',
        *([] if net.golden is None else [f"net.verify()  # {len(net.golden.logits)} inputs give their golden levels"]),
        "out = net.run(images)",
        "out.predictions",
        "```",
        "",
    ]
    if trained:
        lines += ['`lbq.load("PATH_OF_THIS_FOLDER")` gives the trained network in PyTorch.', ""]
    return "\n".join(lines) + _without_links(text).strip() + "\n" * bool(text)


def front_matter(facts: dict[str, Any], license: str | None) -> dict[str, Any]:
    """What a hub reads of a card. A JSON value is a YAML value."""
    model, dataset, accuracy = facts["model"], facts["dataset"], facts["test_accuracy"]
    made: dict[str, Any] = {} if license is None else {"license": license}
    made["library_name"] = "lbq"
    image = not facts["frames"] and facts["input"][0] in (1, 3) and facts["input"][1] > 1
    if image:
        made["pipeline_tag"] = "image-classification"
    made["tags"] = ["spiking-neural-network", "burst-coding", "integer", *([model] if isinstance(model, str) else [])]
    if isinstance(dataset, str):
        made["datasets"] = [dataset]
    if accuracy is not None and isinstance(dataset, str) and image:
        metric = {"type": "accuracy", "value": accuracy, "name": "test accuracy on integers, %"}
        result = {
            "task": {"type": "image-classification"},
            "dataset": {"name": dataset, "type": dataset},
            "metrics": [metric],
        }
        made["model-index"] = [{"name": facts["name"], "results": [result]}]
    return made


def _without_links(text: str) -> str:
    """Links to files of the repository lead nowhere from a folder of its own: their words stay."""
    return re.sub(r"\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", text)
