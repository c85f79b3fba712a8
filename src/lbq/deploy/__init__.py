"""From a trained network to integers: lower it (trace, fold BatchNorm), absorb the steps, quantise, and compare with training.

`unfold` goes the way back. Imports `runs`, `counting`, `graph` and what stands below them. A network of `engine` comes out.
"""

from lbq.deploy.lowering.lower import lower as lower
from lbq.deploy.pipeline import deploy as deploy
from lbq.deploy.pipeline import deploy_run as deploy_run
from lbq.deploy.pipeline import graph_of as graph_of
from lbq.deploy.unfolding import unfold as unfold
from lbq.graph.quantise import quantise as quantise
from lbq.graph.rewrites import absorb as absorb
from lbq.graph.rewrites import fold_gain as fold_gain
from lbq.graph.rewrites import on_pixels as on_pixels
from lbq.system.lazy import submodules as _submodules

_submodules(__name__)
