"""From a trained network to plain numbers: trace, fold BatchNorm, collect synapses. `lbq.graph.absorb` then moves the steps."""

from lbq.deploy.lower import lower as lower
