"""A network as plain numbers: its layers and synapses (`graph`), the rewrites that absorb the steps, and its integer form.

NumPy only. `deploy` makes these networks, `engine` runs them, `counting` counts.
"""

from lbq.graph.graph import INPUT as INPUT
from lbq.graph.graph import Array as Array
from lbq.graph.graph import Gate as Gate
from lbq.graph.graph import Graph as Graph
from lbq.graph.graph import Layer as Layer
from lbq.graph.graph import Layered as Layered
from lbq.graph.graph import NeuronSpec as NeuronSpec
from lbq.graph.graph import Pool as Pool
from lbq.graph.graph import Shape as Shape
from lbq.graph.graph import Synapse as Synapse
from lbq.graph.graph import output_size as output_size
from lbq.graph.graph import shortest as shortest
from lbq.graph.graph import with_sides as with_sides
from lbq.graph.layout import Layout as Layout
from lbq.system.lazy import submodules as _submodules

_submodules(__name__)
