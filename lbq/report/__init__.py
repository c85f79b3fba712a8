"""Results to tables, figures and one page. Nothing here needs torch, a network or a display."""

from lbq.report.formats import comma_separated as comma_separated
from lbq.report.formats import latex as latex
from lbq.report.formats import markdown as markdown
from lbq.report.page import render as render
from lbq.report.tables import all_tables as all_tables
