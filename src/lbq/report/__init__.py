"""Tables, figures and one page of results. It needs no torch, no network and no display.

Imports `results`, `counting` and what stands below them. HTML, Markdown, LaTeX, CSV and SVG come out.
"""

from lbq.system.lazy import submodules as _submodules

_submodules(__name__)
