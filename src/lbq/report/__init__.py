"""Tables, figures and one page of results. It needs no torch, no network and no display.

Imports `results`, `counting` and what stands below them. HTML, Markdown, LaTeX, CSV and SVG come out.
"""

from lbq.report.formats import comma_separated as comma_separated
from lbq.report.formats import latex as latex
from lbq.report.formats import markdown as markdown
from lbq.report.page import render as render
from lbq.report.tables import all_tables as all_tables
