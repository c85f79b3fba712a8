"""Counts published in the paper, as inputs to our accounting. NumPy only.

D. Bai, H. Peng, H. Qu, D. Xia: Learnable Burst Quantization for Expressive and Efficient Spiking Neural Networks.
CIFAR-10, "ResNet-20" (here `resnet20w128`), T = 2: tables "Synaptic accumulation counts" and "Accuracy and modeled
arithmetic-cost comparison". MACs of the network and of its first layer follow from its shapes.
"""

from __future__ import annotations

from lbq.account import CostRow, Operations

ANN_MACS = 2587.235328e6
STEM_MACS = 3.538944e6

# method -> unary-equivalent and bit-sparse accumulations, in millions per image
ACCUMULATIONS: dict[str, tuple[float, float]] = {
    "Binary": (79.59, 79.59),
    "Ternary": (1693.84, 1693.84),
    "LBQ (2)": (727.58, 542.72),
    "LBQ (5)": (1589.90, 945.69),
    "LBQ (10)": (2577.73, 1203.80),
    "LBQ (20)": (2828.76, 1163.20),
}
FORMATIONS = {"LBQ (2)": 0.385, "LBQ (5)": 0.695, "LBQ (10)": 0.938, "LBQ (20)": 0.983}
ACCURACY = {
    "ANN": 97.52,
    "Binary": 91.81,
    "Ternary": 94.11,
    "LBQ (2)": 96.73,
    "LBQ (5)": 97.45,
    "LBQ (10)": 97.44,
    "LBQ (20)": 97.35,
}


def cost_rows() -> list[CostRow]:
    """The rows of the paper's cost table, ANN first."""
    rows = [CostRow("ANN", ACCURACY["ANN"], Operations(ANN_MACS), spiking=False, bit_planes=False)]
    for method, (_, bit_sparse) in ACCUMULATIONS.items():
        formed = FORMATIONS.get(method)
        operations = Operations(STEM_MACS, bit_sparse * 1e6, (formed or 0.0) * 1e6)
        rows.append(CostRow(method, ACCURACY[method], operations, bit_planes=formed is not None))
    return rows
