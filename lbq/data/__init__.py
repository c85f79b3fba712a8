"""Datasets. Readers are NumPy-only; torch enters with augmentation (`augment`, `policies`, `mixing`) and `sources`."""

from lbq.data.base import Dataset as Dataset
from lbq.data.base import Images as Images
from lbq.data.digits import load_digits as load_digits
