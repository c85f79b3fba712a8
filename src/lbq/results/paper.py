"""Numbers published in the paper: accuracies of Tables 2-5, counts of Tables 6 and 7, means of Fig. 4. NumPy only.

D. Bai, H. Peng, H. Qu, D. Xia: Learnable Burst Quantization for Expressive and Efficient Spiking Neural Networks.
Other methods' rows are as that paper quotes them, with the venue it names. The counts are of CIFAR-10, "ResNet-20" (here
`resnet20w128`), T = 2; MACs of the network and of its first layer follow from its shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lbq.counting.operations import Operations

CITATION = (
    "D. Bai, H. Peng, H. Qu, D. Xia: Learnable Burst Quantization for Expressive and Efficient Spiking Neural Networks"
)

ANN_MACS = 2587.235328e6
STEM_MACS = 3.538944e6

# method: accuracy in percent, then in millions per image: unary-equivalent and bit-sparse accumulations, formations
COSTS: dict[str, tuple[float, float, float, float]] = {
    "Binary": (91.81, 79.59, 79.59, 0.0),
    "Ternary": (94.11, 1693.84, 1693.84, 0.0),
    "LBQ (2)": (96.73, 727.58, 542.72, 0.385),
    "LBQ (5)": (97.45, 1589.90, 945.69, 0.695),
    "LBQ (10)": (97.44, 2577.73, 1203.80, 0.938),
    "LBQ (20)": (97.35, 2828.76, 1163.20, 0.983),
}
ACCUMULATIONS = {method: (unary, bit_sparse) for method, (_, unary, bit_sparse, _) in COSTS.items()}


def cost_rows() -> list[tuple[str, float, Operations]]:
    """Method, accuracy and operations per image of the rows of the paper's cost table, ANN first."""
    rows = [("ANN", 97.52, Operations(ANN_MACS))]
    for method, (accuracy, _, bit_sparse, formations) in COSTS.items():
        rows.append((method, accuracy, Operations(STEM_MACS, bit_sparse * 1e6, formations * 1e6)))
    return rows


@dataclass(frozen=True)
class Published:
    """One published row. table: its number in the paper; accuracy: percent, by timesteps.

    group: `conversion` from an ANN or direct `training`; reproduced: run by the paper's authors, not quoted.
    """

    table: int
    dataset: str
    group: str
    method: str
    venue: str
    architecture: str
    accuracy: dict[int, float]
    reproduced: bool = False


@dataclass(frozen=True)
class Ablation:
    """One row of Table 5: CIFAR-10, ResNet-20, N_max = 5. variant: what our records call it."""

    method: str
    variant: str
    output: str
    step: str
    surrogate: str
    timesteps: int
    accuracy: float


# table | datasets | group | method | venue | architecture | timesteps:accuracy ... for each dataset
# († reproduced by the paper's authors)
_ACCURACIES = """
2 | CIFAR-10,CIFAR-100 | conversion | RMP-SNN | CVPR-2020 | ResNet-20 | 2048:91.36,2048:67.82
2 | CIFAR-10,CIFAR-100 | conversion | Burst+LIPooling | IJCAI-2022 | ResNet-20 | 64:96.49,256:80.57
2 | CIFAR-10,CIFAR-100 | training | GLIF | NeurIPS-2022 | ResNet-19 | 2:94.44 4:94.85,2:71.87 4:72.57
2 | CIFAR-10,CIFAR-100 | training | TET | ICLR-2022 | ResNet-19 | 2:94.16 4:94.44,2:75.48 4:77.05
2 | CIFAR-10,CIFAR-100 | training | RecDis-SNN | CVPR-2022 | ResNet-19 | 2:93.64 4:95.53,2:76.64 4:78.53
2 | CIFAR-10 | training | MLF | IJCAI-2022 | ResNet-19 | 4:94.25
2 | CIFAR-10,CIFAR-100 | training | LT-SNN | IJCNN-2024 | ResNet-19 | 2:94.19,2:72.78
2 | CIFAR-10,CIFAR-100 | training | Ternary Spike | AAAI-2024 | ResNet-20 | 2:94.48 4:94.96,2:73.41 4:74.02
2 | CIFAR-10,CIFAR-100 | training | DA-LIF | ICASSP-2025 | ResNet-20 | 1:92.89 2:93.65 4:94.16,1:69.37 2:72.07 4:73.25
2 | CIFAR-10,CIFAR-100 | training | FSTA-SNN | AAAI-2025 | ResNet-20 | 1:93.01 2:94.18 4:94.72,1:69.64 2:72.15 4:73.44
2 | CIFAR-10,CIFAR-100 | training | STAA-SNN | CVPR-2025 | ResNet-20 | 1:93.08 2:94.35 4:95.03,1:70.14 2:73.20 4:75.10
2 | CIFAR-10,CIFAR-100 | training | LM-HT (L = 2)† | NeurIPS-2024 | ResNet-20 | 1:95.93 2:96.40 4:96.13,1:78.74 2:79.96 4:80.67
2 | CIFAR-10,CIFAR-100 | training | LBQ | - | ResNet-20 | 1:97.28 2:97.45 4:97.49,1:82.38 2:82.82 4:82.71
3 | ImageNet-1K | conversion | Burst+LIPooling | IJCAI-2022 | VGG-16 | 256:74.25
3 | ImageNet-1K | conversion | Hybrid Training | ICLR-2020 | ResNet-34 | 250:61.48
3 | ImageNet-1K | conversion | RMP-SNN | CVPR-2020 | ResNet-34 | 4096:68.89
3 | ImageNet-1K | conversion | Adaptive Calibration | AAAI-2025 | ResNet-34 | 8:72.96
3 | ImageNet-1K | training | SEW | NeurIPS-2021 | ResNet-18 | 4:63.18
3 | ImageNet-1K | training | Real Spike | ECCV-2022 | ResNet-18 | 4:63.68
3 | ImageNet-1K | training | RMP-Loss | ICCV-2023 | ResNet-18 | 4:63.03
3 | ImageNet-1K | training | MPBN | ICCV-2023 | ResNet-18 | 4:63.14
3 | ImageNet-1K | training | LBQ | - | ResNet-18 | 1:67.50 2:68.23
3 | ImageNet-1K | training | GLIF | NeurIPS-2022 | ResNet-34 | 4:67.52
3 | ImageNet-1K | training | RecDis-SNN | CVPR-2022 | ResNet-34 | 4:67.33
3 | ImageNet-1K | training | LT-SNN | IJCNN-2024 | ResNet-34 | 4:68.46
3 | ImageNet-1K | training | Ternary Spike | AAAI-2024 | ResNet-34 | 4:70.74
3 | ImageNet-1K | training | FSTA-SNN | AAAI-2025 | ResNet-34 | 4:70.23
3 | ImageNet-1K | training | LM-HT (L = 2) | NeurIPS-2024 | ResNet-34 | 2:70.90
3 | ImageNet-1K | training | LBQ | - | ResNet-34 | 1:72.45 2:73.67
4 | CIFAR10-DVS | training | SEW | NeurIPS-2021 | SEW-ResNet | 16:74.40
4 | CIFAR10-DVS | training | GLIF | NeurIPS-2022 | 7B-wideNet | 16:78.10
4 | CIFAR10-DVS | training | RecDis-SNN | CVPR-2022 | ResNet-19 | 10:72.42
4 | CIFAR10-DVS | training | MLF | IJCAI-2022 | ResNet-14 | 10:70.36
4 | CIFAR10-DVS | training | MPBN | ICCV-2023 | ResNet-20 | 10:78.70
4 | CIFAR10-DVS | training | IMLIF | TETCI-2024 | VGG-13 | 40:80.50
4 | CIFAR10-DVS | training | LT-SNN | IJCNN-2024 | VGG-9 | 10:79.10
4 | CIFAR10-DVS | training | Ternary Spike | AAAI-2024 | ResNet-20 | 10:79.80
4 | CIFAR10-DVS | training | LM-HT (L = 2)† | NeurIPS-2024 | ResNet-20 | 10:78.20
4 | CIFAR10-DVS | training | LBQ | - | ResNet-20 | 10:80.50
4 | DVS128-Gesture | training | STBP-tdBN | AAAI-2021 | ResNet-17 | 40:96.87
4 | DVS128-Gesture | training | IMLIF | TETCI-2024 | ResNet-19 | 40:97.33
4 | DVS128-Gesture | training | PLIF | ICCV-2021 | PLIFNet | 20:97.57
4 | DVS128-Gesture | training | MLF | IJCAI-2022 | ResNet-20 | 40:97.29
4 | DVS128-Gesture | training | MA-SNN | TPAMI-2023 | 5-layer SCNN | 20:98.23
4 | DVS128-Gesture | training | ASA-SNN | ICCV-2023 | 5-layer SCNN | 20:97.70
4 | DVS128-Gesture | training | SEW | NeurIPS-2021 | 7B-wideNet | 16:97.92
4 | DVS128-Gesture | training | LBQ | - | ResNet-19 | 16:98.28
"""


def _published(line: str) -> Iterator[Published]:
    table, datasets, group, method, venue, architecture, values = (cell.strip() for cell in line.split("|"))
    name, reproduced = method.rstrip("†"), method.endswith("†")
    for dataset, pairs in zip(datasets.split(","), values.split(","), strict=True):
        accuracy = {int(t): float(a) for t, a in (pair.split(":") for pair in pairs.split())}
        yield Published(int(table), dataset, group, name, venue.strip("-"), architecture, accuracy, reproduced)


ACCURACIES = tuple(row for line in _ACCURACIES.strip().splitlines() for row in _published(line))

BURST = "0 .. N_max"
ABLATION: tuple[Ablation, ...] = (
    Ablation("ANN", "ann", "real-valued", "N/A", "N/A", 1, 97.52),
    Ablation("Binary LIF", "lif", "0, 1", "N/A", "Arctan", 2, 91.81),
    Ablation("Ternary Spike", "ternary_fixed", "-1, 0, 1", "Fixed", "Box-ET", 2, 94.11),
    Ablation("Ternary Spike", "ternary_learned", "-1, 0, 1", "Learnable", "Box-ET", 2, 95.55),
    Ablation("V1 (Fixed + Box)", "v1", BURST, "Fixed", "Box-ET", 2, 96.44),
    Ablation("V2 (Fixed + ReLSG-ET)", "v2", BURST, "Fixed", "ReLSG-ET", 2, 96.74),
    Ablation("V3 (Learnable + Box)", "v3", BURST, "Learnable", "Box-ET", 2, 97.30),
    Ablation("LBQ (Learnable + ReLSG-ET)", "lbq", BURST, "Learnable", "ReLSG-ET", 2, 97.45),
)


NETWORK = "resnet20w128"  # the paper's "ResNet-20"
LEVELS = {"real-valued": 0, "0, 1": 1, "-1, 0, 1": 1, BURST: 5}  # N_max in records, by what neurons put out
SURROGATES = {  # in records
    "N/A": ["none"],
    "Arctan": ["arctan"],
    "Box-ET": ["box", "box_et"],
    "ReLSG-ET": ["relsg_et"],
}


def ablation_row(record: Mapping[str, Any]) -> Ablation | None:
    """The row of Table 5 that a record belongs to, by dataset, network, variant, surrogate, levels and timesteps alone."""
    if record["dataset"] != "cifar10" or record["model"] != NETWORK:
        return None
    facts = (record["variant"], record.get("n_max"), record["timesteps"])
    for row in ABLATION:
        like = facts == (row.variant, LEVELS[row.output], row.timesteps)
        if like and record.get("surrogate") in SURROGATES[row.surrogate]:
            return row
    return None


@dataclass(frozen=True)
class LayerWise:
    """Means over layers that the paper's text gives for Fig. 4; None where it gives none."""

    active: float
    entropy: float
    first: float  # P(k = 1 | k > 0)
    steps: tuple[float, float] | None = None  # range
    variation: float | None = None  # coefficient of variation of the steps


LAYER_WISE: dict[str, LayerWise] = {
    "v1": LayerWise(0.173, 0.751, 0.530),
    "v2": LayerWise(0.100, 0.557, 0.697),
    "v3": LayerWise(0.236, 0.899, 0.382, variation=0.31),
    "lbq": LayerWise(0.180, 0.753, 0.498, (0.036, 0.461), 0.74),
}
