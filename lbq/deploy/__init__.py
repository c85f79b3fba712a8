"""From a trained network to plain numbers: trace, fold BatchNorm, collect synapses."""

from lbq.deploy.lower import lower as lower
