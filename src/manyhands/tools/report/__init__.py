"""Records to one page with figures.

    _follow.py   growing records → runs, and which workers are silent
    _curves.py   a run's columns → curves: numbers, thinned out, smoothed, on a scale
    _panels.py   runs → figures: which there are, which curves are in each, on which scale
    _page.py     figures and a table → one HTML file
    page.html, page.css, page.js   the page's frame, its look, and what happens on a click

The page has everything in it, plotly's JavaScript too (4.8 MB of it), so that it opens without a
network and can be sent by mail. Only `write_report` needs plotly, and only when it is called.
"""

from manyhands.tools.report._page import write_report

__all__ = ["write_report"]
