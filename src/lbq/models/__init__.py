"""Networks by id: `create("resnet20w128")`. The width is part of the id, because public code calls at least three different
nets "ResNet-20". `ids` lists what there is; `register` gives your own network an id.
"""

from lbq.models.ids import IDS as IDS
from lbq.models.neuron_choice import NeuronChoice as NeuronChoice
from lbq.models.neuron_choice import neuron_maker as neuron_maker
from lbq.models.registry import OWN as OWN
from lbq.models.registry import create as create
from lbq.models.registry import register as register
from lbq.models.resnet import BurstNet as BurstNet
from lbq.models.time import fire as fire
from lbq.models.time import fold_time as fold_time
from lbq.models.time import over_time as over_time
from lbq.models.time import unfold_time as unfold_time
from lbq.system.lazy import submodules as _submodules

_submodules(__name__)
