"""Datasets. Readers are NumPy-only; torch enters with augmentation."""

from lbq.data.digits import Split as Split
from lbq.data.digits import load_digits as load_digits
