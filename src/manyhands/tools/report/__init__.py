"""Draw records as an HTML page with figures.

    _follow.py   read growing records, and determine the state of each worker
    _curves.py   convert columns to curves: thin, smooth, choose a scale
    _panels.py   choose the figures
    _page.py     write the HTML file, from page.html, page.css and page.js

The page includes plotly's JavaScript (4.8 MB), so it opens offline.
"""

from manyhands.tools.report._page import write_report

__all__ = ["write_report"]
