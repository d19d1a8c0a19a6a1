"""Watch jobs while they run: their records, read as they grow.

    _points.py  any number of lines → a few hundred points, while they arrive
    _jobs.py     records → jobs: their state, their speed, the time left, what happened
    _server.py   a page of 127.0.0.1 that shows them, and the numbers that it asks for
    page.html, page.css, page.js   the page: it loads nothing from elsewhere

A job knows nothing of its watcher. It writes its record, and the watcher reads what was added
(`record/_run.py`). So a job pays nothing for being watched, and a job of yesterday can be watched,
too.
"""

from manyhands.watch._jobs import Jobs, JobState, WatchedJob
from manyhands.watch._server import serve

__all__ = ["JobState", "Jobs", "WatchedJob", "serve"]
