"""Watch jobs while they run: their records, read as they grow, on a page of this machine.

    _points.py  any number of lines → a few hundred points, while they arrive
    _jobs.py    records → jobs: their state, their speed, the time left, what happened
    page.html, page.css, page.js   the page: it loads nothing from elsewhere

A job knows nothing of its watcher. It writes its record, and the watcher reads what was added
(`record/_run.py`). So a job pays nothing for being watched, and a job of yesterday can be watched,
too.

This file has the server of the page, and the numbers that the page asks for:

    /            the page; page.css and page.js beside it
    /jobs        every job's state, in JSON
    /curves/2    the curves of the third job; the page asks again when its version has changed

The server listens on 127.0.0.1 and nowhere else, and only reads. A page of the web must not read
through it either: a stranger's host name may be made to mean 127.0.0.1 (DNS rebinding). So a
request whose Host is not this machine's own name is refused. Nothing on the page may be loaded from
elsewhere.
"""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from dataclasses import asdict
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files

from manyhands.report import describe_column
from manyhands.watch._jobs import Jobs, JobState, WatchedJob

__all__ = ["JobState", "Jobs", "WatchedJob", "serve"]

ADDRESS = "127.0.0.1"
PORT = 8642  # unless another is asked for; if it is taken, a free one
OWN_NAMES = ("127.0.0.1", "localhost")
READ_EVERY = 0.2  # seconds; requests in between are answered with what was read last
DIGITS = 6
FILES = {"/": ("page.html", "text/html"), "/page.css": ("page.css", "text/css")}
FILES["/page.js"] = ("page.js", "text/javascript")
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class WatchServer(ThreadingHTTPServer):
    """The page's server; `serve_forever()` runs it, and leaving a `with` block closes its port."""

    daemon_threads = True

    def __init__(self, jobs: Jobs, port: int) -> None:
        super().__init__((ADDRESS, port), WatchHandler)
        self._jobs = jobs
        self._lock = threading.Lock()
        self._read = -math.inf

    def handle_error(self, request: object, client_address: object) -> None:
        """Show what went wrong, unless the browser has only closed its connection."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    @property
    def url(self) -> str:
        """The page's address."""
        return f"http://{ADDRESS}:{self.server_address[1]}/"

    def answer(self, path: str) -> tuple[bytes, str] | None:
        """Return what is at a path, and its type; None if there is nothing."""
        if path in FILES:
            name, kind = FILES[path]
            return (files(__package__) / name).read_bytes(), kind
        with self._lock:  # each request has a thread, and a job may be used by one at a time
            now = time.monotonic()
            if now - self._read >= READ_EVERY:
                self._jobs.read()
                self._read = time.monotonic()
            found = self._numbers(path)
        if found is None:
            return None
        return json.dumps(to_strict_json(found), allow_nan=False).encode(), "application/json"

    def _numbers(self, path: str) -> dict[str, object] | None:
        """Return what the page's script asks for: all jobs, or one job's curves."""
        jobs = self._jobs.all
        if path == "/jobs":
            states = [{**asdict(job.state()), "version": job.version} for job in jobs]
            own = {key for state in states for key in state["own"]}
            columns = {key for state in states for key in state["latest"]}
            panels = {key: describe_column(key, own=key in own) for key in sorted(columns | own)}
            return {"now": time.time(), "jobs": states, "panels": panels}
        start, _, number = path.rpartition("/")
        known = start == "/curves" and number.isascii() and number.isdecimal() and len(number) < 6
        if not known or int(number) >= len(jobs):
            return None
        job = jobs[int(number)]
        return {"version": job.version, **job.curves()}


class WatchHandler(BaseHTTPRequestHandler):
    """Answer GET and HEAD, for this machine's own browser only."""

    timeout = 10.0  # seconds for a request to arrive
    server: WatchServer
    server_version, sys_version = "manyhands", ""

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        """Answer a request; not if it names another host, as a foreign page's script would."""
        host = self.headers.get("Host", "")
        if host.partition(":")[0].lower() not in OWN_NAMES:
            text = f"This page answers to {' and '.join(OWN_NAMES)} only.\n"
            self._send(HTTPStatus.MISDIRECTED_REQUEST, text.encode(), "text/plain")
            return
        found = self.server.answer(self.path.partition("?")[0])
        if found is None:
            self._send(HTTPStatus.NOT_FOUND, b"There is nothing here.\n", "text/plain")
        else:
            self._send(HTTPStatus.OK, *found)

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        """Send one answer, with headers that allow the page nothing from elsewhere."""
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing: a page asks every second."""


def serve(jobs: Jobs, port: int | None = None) -> WatchServer:
    """Return a server of the page, which listens already. Port 0 is any free one.

    Raise `OSError` if the port is taken. Without a port it is `PORT`, or a free one.
    """
    if port is not None:
        return WatchServer(jobs, port)
    try:
        return WatchServer(jobs, PORT)
    except OSError:
        return WatchServer(jobs, 0)


def to_strict_json(value: object) -> object:
    """Return `value` with short numbers, and names in place of those that are not finite.

    >>> to_strict_json({"loss": [0.123456789, float("nan")]})
    {'loss': [0.123457, 'nan']}
    """
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: to_strict_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_strict_json(entry) for entry in value]
    return value
