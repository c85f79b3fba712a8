"""Run deployed networks on integers, without PyTorch: `net = lbq.engine.load("model.lbq"); net.run(images)`.

Imports `graph`, `native` and the folders below them. `cuda` alone imports torch, and only when it is used. `file` holds
the artefact on disk. Logits, levels and executed counts come out.
"""

from lbq.engine.convolution import Counts as Counts
from lbq.engine.engine import ENGINES as ENGINES
from lbq.engine.engine import Engine as Engine
from lbq.engine.engine import Network as Network
from lbq.engine.engine import load as load
from lbq.engine.engine import save as save
from lbq.engine.output import Output as Output
from lbq.engine.stream import Stream as Stream
from lbq.system.lazy import submodules as _submodules

_submodules(__name__)
