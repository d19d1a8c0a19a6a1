"""Records to one page with figures.

    record(s) ── _panels.py: what to draw ── _panels.py: which points
                                │
                 _page.py: the table      _page.py: plotly figures and one HTML file

The page is one file with everything in it, plotly's JavaScript too (4.8 MB of it), so that it opens
without a network and can be sent by mail. Only `write_report` needs plotly, and only when it
is called.
"""

from manyhands.report._page import write_report

__all__ = ["write_report"]
