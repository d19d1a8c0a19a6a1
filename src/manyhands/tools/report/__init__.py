"""Draw records as an HTML page with figures.

    _follow.py   growing records → runs, and the state of each worker
    _curves.py   a run's columns → curves: thinned, smoothed, on a scale
    _panels.py   runs → figures with curves and scales
    _page.py     figures and tables → an HTML file
    page.html, page.css, page.js   the page's frame, style and scripts

The page includes plotly's JavaScript (4.8 MB), so it opens offline and can be mailed. plotly is
imported when a page is written.
"""

from manyhands.tools.report._page import write_report

__all__ = ["write_report"]
