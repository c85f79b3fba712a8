"""The ids of networks: what each letter and number of an id stands for.

| id | what |
|---|---|
| `resnet18`, `resnet34` | the ImageNet nets: 7x7/2 stem, max-pool, stages 64/128/256/512 |
| `resnet18w64`, `resnet34w64`, any width | the same stages with a CIFAR stem (3x3, no pool) |
| `resnet20w128`, any of 8, 14, 20, 32, 44, 56 and any width | CIFAR stem, three stages w/2w/4w of (depth - 2) / 6 blocks; `resnet20w128` is the paper's "ResNet-20" |
| `resnet19w128` | stem and stages 128/256/512 of 3, 3, 2 blocks, one linear layer |
| `resnet19w64fc256` | the other published ResNet-19: stem 64, the same stages, linear 256, neuron, linear |
| `vgg11`, `vgg13`, `vgg16`, or `vgg11w32` and so on | VGG with BatchNorm, global average pool and one linear layer; base width 64 |
| `spikformer4x384`, any depth and any width that 32 divides (below 32, 8) | transformer: Spikformer's |
| `qkformer4x384`, any depth from 3 and any width that 32 divides | transformer: QKFormer's, with token attention in its first two blocks |

Transformers merge residuals in front of neurons. `-sew` and `-membrane` behind the id choose other shortcuts, as in
`spikformer4x384-sew`; `-scores`, last, puts a neuron on the scores Q K^T.
"""  # noqa: E501

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal, cast

from lbq.errors import YOUR_OWN, ConfigError, nearest
from lbq.models.resnet import ResNet
from lbq.models.transformer import QKFormer, Spikformer
from lbq.models.vgg import STAGES as VGG_STAGES
from lbq.models.vgg import VGG

IDS: tuple[str, ...] = (
    "resnet18",
    "resnet34",
    "resnet18w64",
    "resnet34w64",
    "resnet19w128",
    "resnet19w64fc256",
    "resnet20w128",
    "resnet20w16",
    "resnet8w16",
    "vgg11",
    "vgg13",
    "vgg16",
    "spikformer4x384",
    "spikformer2x64",
    "qkformer4x384",
)
FOUR_STAGES: dict[int, tuple[int, ...]] = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}
THREE_STAGE_DEPTHS = (8, 14, 20, 32, 44, 56)


def built_in(id: str) -> partial[Any] | None:
    """What builds the network of an id; None where no network of lbq has it."""
    if match := re.fullmatch(r"resnet(18|34)(?:w([1-9]\d{0,3}))?", id):
        depth, base = int(match[1]), int(match[2] or 64)
        stem: Literal["cifar", "imagenet"] = "cifar" if match[2] else "imagenet"
        widths = [base * 2**i for i in range(4)]
        return partial(ResNet, blocks=FOUR_STAGES[depth], widths=widths, stem_width=base, stem=stem)
    if id == "resnet19w128":
        return partial(ResNet, blocks=(3, 3, 2), widths=(128, 256, 512), stem_width=128)
    if id == "resnet19w64fc256":
        return partial(ResNet, blocks=(3, 3, 2), widths=(128, 256, 512), stem_width=64, hidden=256)
    if (match := re.fullmatch(r"resnet(\d+)w([1-9]\d{0,3})", id)) and int(match[1]) in THREE_STAGE_DEPTHS:
        count, base = (int(match[1]) - 2) // 6, int(match[2])
        return partial(ResNet, blocks=(count,) * 3, widths=(base, 2 * base, 4 * base), stem_width=base)
    if (match := re.fullmatch(r"vgg(\d+)(?:w([1-9]\d{0,3}))?", id)) and int(match[1]) in VGG_STAGES:
        return partial(VGG, depth=int(match[1]), width=int(match[2] or 64))
    if match := re.fullmatch(r"(spikformer|qkformer)([1-9]\d?)x([1-9]\d{0,3})(?:-(sew|membrane))?(-scores)?", id):
        network = Spikformer if match[1] == "spikformer" else QKFormer
        options = {"shortcut": match[4] or "neuron", "score_neurons": match[5] is not None}
        return partial(network, depth=int(match[2]), width=int(match[3]), **cast(Any, options))
    return None


def unknown(id: str, own: Iterable[str]) -> ConfigError:
    """What to say of an id that no network has. own: the ids of users' networks."""
    if (match := re.fullmatch(r"resnet(\d+)", id)) and int(match[1]) in (19, *THREE_STAGE_DEPTHS):
        return ConfigError(
            f"model: unknown id {id!r}: several networks have this name; give a width too, as in {id}w128"
        )
    if match := re.match(r"(?:spikformer|qkformer)[1-9]\d?x[1-9]\d{0,3}(?!\d)", id):
        return ConfigError(
            f"model: unknown id {id!r}: behind {match[0]} may stand -sew or -membrane, and then -scores, as in "
            f"{match[0]}-sew-scores"
        )
    return ConfigError(f"model: unknown id {id!r}{nearest(id, (*IDS, *own))}{YOUR_OWN}")
