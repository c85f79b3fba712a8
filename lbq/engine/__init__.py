"""Run a network from plain numbers on integer levels, without PyTorch: dense (the oracle) or by non-zero bit planes."""

from lbq.engine.execute import Result as Result
from lbq.engine.execute import execute as execute
