"""A real browser without a window: Debian's chromium, driven by its chromedriver over plain HTTP.

    with Browser(folder) as browser:
        browser.open(page.as_uri())
        browser.wait("return document.title === 'Training runs'")
        browser.screenshot(folder / "page.png")

The driver speaks WebDriver: JSON over HTTP, so nothing but the standard library is needed here.
"""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    BROWSER is None or DRIVER is None,
    reason="chromium and chromedriver are missing: apt-get install chromium chromium-driver",
)
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--window-size=1400,1600", "--hide-scrollbars"),
)
NETWORK = ("http", "https", "ws", "wss", "ftp")  # not the browser's own pages, and not data:
PATIENCE = 60.0  # seconds; a machine that runs other tests starts a browser slowly


class Browser:
    """One browser with one page."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self._flags = [*FLAGS, f"--user-data-dir={folder / 'browser'}", *flags]

    def __enter__(self) -> Browser:
        assert BROWSER is not None and DRIVER is not None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._base = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            self._wait_for_driver()
            options = {"binary": BROWSER, "args": self._flags}
            logs = {"browser": "ALL", "performance": "ALL"}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": logs}
            made = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
            self._session = f"/session/{made['sessionId']}"
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._ask("DELETE", self._session)
        finally:
            self._process.terminate()
            self._process.wait(PATIENCE)

    def open(self, url: str) -> None:
        """Load a page."""
        self._ask("POST", f"{self._session}/url", {"url": url})

    def run(self, script: str) -> Any:
        """Return what a script returns."""
        return self._ask("POST", f"{self._session}/execute/sync", {"script": script, "args": []})

    def wait(self, script: str, seconds: float = PATIENCE) -> Any:
        """Run a script until it returns something true, and return that."""
        until = time.monotonic() + seconds
        while not (found := self.run(script)):
            if time.monotonic() > until:
                text = self.run("return document.body.innerText")
                raise AssertionError(f"still not after {seconds:.0f} s: {script}\n{text}")
            time.sleep(0.1)
        return found

    def screenshot(self, path: Path) -> None:
        """Write what the window shows as a PNG."""
        image = self._ask("GET", f"{self._session}/screenshot")
        path.write_bytes(base64.b64decode(image))

    def complaints(self) -> list[str]:
        """Return what the browser wrote to its console since the last call."""
        log = self._ask("POST", f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in log]

    def requested(self) -> list[str]:
        """Return the addresses on a network that were asked for since the last call."""
        log = self._ask("POST", f"{self._session}/se/log", {"type": "performance"})
        events = (json.loads(entry["message"])["message"] for entry in log)
        return [
            event["params"]["request"]["url"]
            for event in events
            if event["method"] == "Network.requestWillBeSent"
            and event["params"]["request"]["url"].partition(":")[0] in NETWORK
        ]

    def _wait_for_driver(self) -> None:
        until = time.monotonic() + PATIENCE
        while True:
            try:
                if self._ask("GET", "/status")["ready"]:
                    return
            except OSError:
                if time.monotonic() > until or self._process.poll() is not None:
                    raise
            time.sleep(0.05)

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._base + path, data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from error
