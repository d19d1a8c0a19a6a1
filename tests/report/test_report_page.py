"""The report in a real browser: what a reader can choose."""

import math

import pytest

from helpers.browser import Browser, needs_browser
from manyhands import Record
from manyhands.tools.report import write_report

pytest.importorskip("plotly", reason='plotly is missing: pip install "manyhands[cli]"')
pytestmark = [needs_browser, pytest.mark.long]


class Training:
    step = 0

    def snapshot(self):
        gain = 3.0 + math.sin(self.step / 30)
        return {
            **{"step": self.step, "progress": 3.0 * self.step, "scale": 8.0, "gain": gain},
            **{"distance": 1.0 + gain / 10, "spread": 0.1 * gain, "cosine": 0.5 / gain},
            **{"workers": 4, "every": 10, "undone": 0, "left_out": 0, "rounds": self.step // 10},
        }


@pytest.fixture
def page(tmp_path):
    paths = []
    for name, size in (("small", 8), ("large", 64)):
        training = Training()
        paths.append(tmp_path / f"{name}.jsonl")
        config = {"lr": 0.1 * size, "model": "a transformer of 12 layers"}
        with Record(paths[-1], training, batch_size=size, config=config) as record:
            for step in range(500):
                training.step += 1
                loss = 3.0 * math.exp(-step / 60) + 0.004 + 0.01 * math.sin(step) ** 2
                record.step(loss=loss, accuracy=1.0 - loss / 4)
    return write_report(paths, tmp_path / "page.html")


def traces(browser, title):
    """What plotly draws in a figure: (number of points, opacity) of each trace."""
    return browser.run(
        "const figure = [...document.querySelectorAll('figure')].find((each) => "
        f"each.querySelector('h2').textContent === '{title}').querySelector('.plot');"
        "return figure.data.map((trace) => [trace.y.length, trace.opacity])"
    )


def layout(browser, title, what):
    return browser.run(
        "const figure = [...document.querySelectorAll('figure')].find((each) => "
        f"each.querySelector('h2').textContent === '{title}');"
        f"return figure.querySelector('.plot').layout.{what}"
    )


def choose(browser, name, value):
    browser.run(f"document.querySelector('input[name={name}][value=\"{value}\"]').click()")


def test_the_reader_chooses_smoothing_axis_and_scale(page, tmp_path):
    with Browser(tmp_path) as browser:
        browser.open(page.as_uri())
        browser.wait("return document.querySelectorAll('.plot .main-svg').length > 4")
        assert layout(browser, "loss", "yaxis.type") == "log"  # over more than two decades
        assert layout(browser, "accuracy", "yaxis.type") != "log"
        assert traces(browser, "loss") == [[500, 0.25]] * 2 + [[500, 1]] * 2

        choose(browser, "smoothing", "0.0")
        assert traces(browser, "loss") == [[500, 1]] * 2
        choose(browser, "smoothing", "0.1")
        assert traces(browser, "loss") == [[500, 0.25]] * 2 + [[500, 1]] * 2

        choose(browser, "axis", "samples")
        assert layout(browser, "Gain", "xaxis.title.text") == "Samples"
        assert layout(browser, "Gain", "yaxis.type") != "log"
        browser.run(
            "[...document.querySelectorAll('figure')].find((each) => "
            "each.querySelector('h2').textContent === 'Gain').querySelector('.log input').click()"
        )
        assert layout(browser, "Gain", "yaxis.type") == "log"
        assert layout(browser, "accuracy", "yaxis.type") != "log"

        text = browser.run("return document.body.innerText")
        for said in ("lowest loss", "highest accuracy", "samples/s", "always the same", "Workers"):
            assert said in text, said
        assert "transformer" not in text  # folded away
        browser.run("document.querySelector('details').open = true")
        assert "transformer" in browser.run("return document.body.innerText")
        browser.screenshot(tmp_path / "report.png")
        assert browser.complaints() == []
        assert browser.requested() == []
