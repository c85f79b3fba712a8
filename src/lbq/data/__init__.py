"""Datasets: readers of images and events, NumPy only. Any file may be hostile: nothing is unpickled unverified.

Imports `graph`, `config` and what stands below them. `batches` makes training batches of what comes out.
"""

from lbq.data.dataset import Dataset as Dataset
from lbq.data.dataset import Samples as Samples
from lbq.data.digits import load_digits as load_digits
from lbq.system.lazy import submodules as _submodules

_submodules(__name__)
