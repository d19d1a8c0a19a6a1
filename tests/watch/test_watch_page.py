"""The page as a person sees it, in a real browser: jobs that run, die and end."""

import json
import os
import signal
import threading
import time

import pytest

from helpers.browser import Browser, needs_browser
from manyhands.record import Record
from manyhands.watch import Jobs, serve

pytestmark = [needs_browser, pytest.mark.long]


class Training:
    def __init__(self):
        self.values = {"step": 0, "progress": 0.0, "scale": 8.0, "workers": 4, "gain": 4.0}
        self.values |= {"undone": 0, "members": "0 1 2 3", "loading_seconds": 0.001}
        self.values |= {"compute_seconds": 0.006, "sync_seconds": 0.002, "update_seconds": 0.001}

    def snapshot(self):
        return dict(self.values)

    def train(self, path, stop, name):
        with Record(path, self, name=name, batch_size=16, until=4e4, config={"lr": 0.1}) as record:
            while not stop():
                self.values["step"] += 1
                step = self.values["step"]
                self.values["progress"] += self.values["gain"]
                self.values["gain"] = 4.0 + (step % 10) / 10
                if step == 50:
                    self.values |= {"workers": 3, "undone": 1, "members": "0 1 3"}
                record.step(loss=2.0 / step + 0.1)
                time.sleep(0.01)


@pytest.fixture
def training(tmp_path):
    """Start a job in a process of its own."""
    children = []

    def start(name, until=None):
        child = os.fork()
        if child == 0:
            try:
                state = Training()
                path = tmp_path / f"{name}.jsonl"
                state.train(path, lambda: until and state.values["step"] >= until, f"<b>{name}")
            finally:
                os._exit(0)
        children.append(child)
        return child

    yield start
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.fixture
def url(tmp_path):
    with serve(Jobs([tmp_path]), port=0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server.url
        server.shutdown()
        thread.join()


@pytest.fixture
def browser(tmp_path):
    with Browser(tmp_path) as browser:
        yield browser


def card(name, part=""):
    return (
        "[...document.querySelectorAll('article')].find((each) => "
        f"each.querySelector('h2').textContent === {json.dumps(name)}){part}"
    )


def state(name):
    return f"return {card(name, '?.dataset.state')}"


def test_jobs_that_run_die_and_end_are_seen_while_the_page_is_open(
    training, url, browser, tmp_path
):
    training("ends", until=120)
    child = training("dies")
    training("runs")
    browser.open(url)
    browser.wait("return document.querySelectorAll('article').length === 3")
    browser.wait(f"{state('<b>ends')} === 'ended'")
    assert browser.run(state("<b>dies")) == "running"

    os.kill(child, signal.SIGKILL)
    browser.wait(f"{state('<b>dies')} === 'died'", seconds=20)
    text = browser.run(f"return {card('<b>dies', '.innerText')}")
    assert "its process is gone" in text
    assert "left" not in text.split("progress")[0]  # nobody waits for a dead job
    assert browser.run(state("<b>runs")) == "running"

    seen = browser.run(f"return {card('<b>runs', '.innerText')}")
    for said in ("loss", "of 8", "samples a second", "3 0 1 3", "1 undone", "min left", "compute"):
        assert said in seen, said
    step = (
        "Number("
        + card("<b>runs", ".querySelector('[data-name=step]').textContent")
        + ".replace(',', ''))"
    )
    first = browser.run(f"return {step}")
    browser.wait(f"return {step} > {first}", seconds=20)

    events = browser.run("return document.getElementById('events').innerText")
    assert "workers: 4 → 3 (0 1 3)" in events
    browser.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000

    # only our own server was asked, nothing was refused, and names are text
    requested = set(browser.requested())
    assert requested and all(address.startswith(url) for address in requested)
    assert browser.complaints() == []
    assert browser.run("return document.querySelectorAll('b').length") == 0


def test_figures_follow_the_reader(training, url, browser):
    training("a", until=100)
    training("b", until=100)
    browser.open(url)
    browser.wait(f"return {card('<b>a', '?.dataset.state')} === 'ended'")
    browser.wait(f"return {card('<b>b', '?.dataset.state')} === 'ended'")
    figure = "document.querySelector('figure[data-column=loss]')"
    browser.wait(f"return {figure}.querySelectorAll('path.curve').length === 2")
    linear = browser.run(f"return {figure}.querySelector('path.curve').getAttribute('d')")
    assert len(linear.split("L")) >= 50
    browser.run("document.getElementById('log').click()")
    logarithmic = browser.run(f"return {figure}.querySelector('path.curve').getAttribute('d')")
    assert logarithmic != linear
    axis = f"{figure}.querySelector('svg').textContent.includes"
    assert browser.run(f"return {axis}('progress')")
    for choice, title in (("step", "optimizer steps"), ("samples", "samples"), ("time", "seconds")):
        browser.run(
            f"const axis = document.getElementById('axis'); axis.value = '{choice}';"
            "axis.dispatchEvent(new Event('change'))"
        )
        assert browser.run(f"return {axis}('{title}')")
    browser.run("document.querySelector('article input').click()")
    assert browser.run(f"return {figure}.querySelectorAll('path.curve').length") == 1
    same = browser.run("return document.querySelector('figure[data-column=scale]').innerText")
    assert "always 8" in same


def test_a_watcher_that_stopped_is_said(tmp_path, browser):
    with Record(tmp_path / "a.jsonl") as record:
        record.step(loss=1.0)
    with serve(Jobs([tmp_path]), port=0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        browser.open(server.url)
        browser.wait("return document.querySelectorAll('article').length === 1")
        server.shutdown()
        thread.join()
    said = "return document.getElementById('connection').textContent"
    browser.wait(f"{said}.includes('does not answer')", seconds=30)
    assert browser.run("return document.querySelectorAll('article').length") == 1  # as it was
