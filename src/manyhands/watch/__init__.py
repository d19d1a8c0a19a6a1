"""Watch jobs while they run: their records, read as they grow.

    _growing.py  a file that grows → its new lines, each read once
    _buckets.py  any number of lines → a few hundred points, while they arrive
    _job.py      one record: its state, its rates, its time left, what happened
    _jobs.py     several records, and the folders in which new ones appear
    _server.py   a page of 127.0.0.1 that shows them, and the numbers that it asks for
    page.html, page.css, page.js   the page: it loads nothing from elsewhere

A job knows nothing of its watcher. It writes its record, and the watcher reads what was added. So
watching costs a job nothing, and works for a job of yesterday as well.
"""

from manyhands.watch._job import JobState, WatchedJob
from manyhands.watch._jobs import Jobs
from manyhands.watch._server import serve

__all__ = ["JobState", "Jobs", "WatchedJob", "serve"]
