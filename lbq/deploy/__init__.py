"""From a trained network to integers: lower (trace, fold BatchNorm), rewrite (absorb the steps), quantise, export."""

from lbq.deploy.export import deploy as deploy
from lbq.deploy.export import deploy_run as deploy_run
from lbq.deploy.export import graph_of as graph_of
from lbq.deploy.lower import lower as lower
from lbq.deploy.quantise import quantise as quantise
from lbq.deploy.rewrites import absorb as absorb
from lbq.deploy.rewrites import fold_gain as fold_gain
from lbq.deploy.rewrites import on_pixels as on_pixels
