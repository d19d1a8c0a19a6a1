"""The page of `manyhands report --follow` in a real browser, from a file, while workers train."""

import os
import signal
import sys
import time

import pytest

from helpers.browser import Browser, needs_browser
from manyhands import Record
from manyhands.tools.cli import main

pytest.importorskip("typer", reason='typer is missing: pip install "manyhands[cli]"')
pytest.importorskip("plotly", reason='plotly is missing: pip install "manyhands[cli]"')
pytestmark = [needs_browser, pytest.mark.long]


@pytest.fixture
def start():
    """Run a function in a process, which is killed in the end."""
    children = []

    def start(function):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                # Tests that run in the background of a shell inherit that Ctrl-C is ignored.
                signal.signal(signal.SIGINT, signal.default_int_handler)
                function()
                code = 0
            except SystemExit as end:
                code = end.code
            finally:
                os._exit(code)
        children.append(child)
        return child

    yield start
    for child in children:
        try:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        except (ProcessLookupError, ChildProcessError):
            pass  # the test has waited for it


@pytest.fixture
def folder(tmp_path, monkeypatch):
    from manyhands.tools.cli import report
    from manyhands.tools.report import _follow

    monkeypatch.setattr(report, "EVERY", 1.0)
    monkeypatch.setattr(report, "REST", 1.0)
    monkeypatch.setattr(_follow, "SILENT", 2.0)
    monkeypatch.setattr(_follow, "SILENT_TIMES", 2.0)
    monkeypatch.setattr(sys, "argv", ["manyhands", "report", "--follow", "runs"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def train(path, name):
    with Record(path, name=name, until=1e5) as record:
        for step in range(1, 10**5):
            record.step(loss=2.0 / step + 0.1)
            time.sleep(0.02)


def cell(name, number):
    """Return a script with the text of a cell in the row of a worker."""
    row = (
        "[...document.querySelectorAll('.workers tbody tr')].find((row) => "
        f"row.children[0].textContent === '{name}')"
    )
    return f"{row}?.children[{number}].textContent"


def state(name):
    return cell(name, 1)


def test_the_page_reloads_itself_and_marks_workers_that_are_silent(start, folder, tmp_path):
    follower = start(main)
    page = tmp_path / "report.html"
    until = time.monotonic() + 60
    while not page.exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    with Browser(tmp_path, "--window-size=1000,500") as browser:
        browser.open(page.as_uri())
        browser.wait("return document.body.innerText.includes('There are no steps yet.')")
        start(lambda: train(folder / "0.jsonl", "runs"))
        stopped = start(lambda: train(folder / "1.jsonl", "<b>stops"))
        browser.wait(f"return {state('runs')} === 'running' && {state('<b>stops')} === 'running'")

        # What the reader has chosen stays, although the page is loaded again.
        browser.run("document.querySelector('input[name=axis][value=time]').click()")
        browser.run("document.querySelector('tbody input[name=runs]').click()")
        browser.run("document.querySelector('.log input').click()")
        browser.run("window.scrollTo(0, 300)")
        loaded = browser.run("return performance.timeOrigin")
        os.kill(stopped, signal.SIGSTOP)
        browser.wait(f"return {state('<b>stops')} === 'silent'")
        assert browser.run("return performance.timeOrigin") > loaded
        # About 300: the browser holds its place in the text, and a table above has grown.
        assert 250 < browser.run("return window.scrollY") < 400
        assert browser.run("return document.querySelector('input[value=time]').checked")
        assert not browser.run("return document.querySelector('tbody input[name=runs]').checked")
        assert browser.run("return document.querySelector('.log input').checked")
        browser.wait(
            "const plot = document.querySelector('.plot');"
            "return plot.layout?.yaxis.type === 'log' && plot.data.some((each) => !each.visible)"
        )

        assert browser.run(f"return {state('runs')}") == "running"
        assert "the process runs" in browser.run(f"return {cell('<b>stops', 4)}")
        age = f"Number.parseFloat({cell('<b>stops', 2)})"
        first = browser.run(f"return {age}")
        assert first >= 2.0
        browser.wait(f"return {age} > {first}")
        colours = browser.run(
            "return ['running', 'silent'].map((name) => "
            "getComputedStyle(document.querySelector(`.workers tr.${name}`)).backgroundColor)"
        )
        assert colours[0] != colours[1]
        browser.screenshot(tmp_path / "page.png")

        os.kill(stopped, signal.SIGKILL)
        browser.wait(f"return {state('<b>stops')} === 'died'")
        browser.wait(
            "return /, [0-9]+ s ago/.test(document.querySelector('caption span').textContent)"
        )

        # After Ctrl-C the page is still there, and does not reload any more.
        os.kill(follower, signal.SIGINT)
        _, status = os.waitpid(follower, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        browser.wait("return document.querySelector('[data-reload]') === null")
        loaded = browser.run("return performance.timeOrigin")
        time.sleep(2.0)
        assert browser.run("return performance.timeOrigin") == loaded
        assert browser.complaints() == []
        assert browser.requested() == []  # from a network
        assert browser.run("return document.querySelectorAll('b').length") == 0
