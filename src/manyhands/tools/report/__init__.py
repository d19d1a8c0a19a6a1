"""Draw records on one page with figures.

    _follow.py   growing records → runs, and the state of each worker
    _curves.py   a run's columns → curves: numbers, thinned out, smoothed, on a scale
    _panels.py   runs → figures with curves and scales
    _page.py     figures and tables → one HTML file
    page.html, page.css, page.js   the page's frame, style, and reaction to clicks

The page contains everything, also plotly's JavaScript (4.8 MB), so that it opens without a network
and can be sent by mail. Only `write_report` imports plotly, when it is called.
"""

from manyhands.tools.report._page import write_report

__all__ = ["write_report"]
