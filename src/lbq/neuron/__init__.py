"""Neurons as modules over the kernels, and the registry that names them in configurations.

Imports `kernels` and what stands below it. `models` builds networks of them.
"""

from lbq.kernels.reference import BurstState as BurstState
from lbq.neuron.base import SpikingNeuron as SpikingNeuron
from lbq.neuron.baselines import ILIF as ILIF
from lbq.neuron.baselines import LIF as LIF
from lbq.neuron.baselines import LMHT as LMHT
from lbq.neuron.baselines import MLF as MLF
from lbq.neuron.baselines import QuantReLU as QuantReLU
from lbq.neuron.baselines import ReLU as ReLU
from lbq.neuron.baselines import Ternary as Ternary
from lbq.neuron.burst import BurstNeuron as BurstNeuron
from lbq.neuron.burst import LadderNeuron as LadderNeuron
from lbq.neuron.registry import NEURONS as NEURONS
from lbq.neuron.registry import create as create
from lbq.neuron.registry import register as register
from lbq.neuron.registry import share_tail as share_tail
from lbq.system.lazy import submodules as _submodules

_submodules(__name__)
