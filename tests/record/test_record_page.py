"""What docs/record.md and the docstrings say, done."""

import doctest
import re

import pytest

from helpers.pages import ROOT, run_page
from manyhands import Record
from manyhands.tools.report import write_report
from manyhands.tools.report._curves import choose_scale, running_mean, thin

PAGE = ROOT / "docs" / "record.md"


def test_the_page_runs_from_top_to_bottom(tmp_path):
    for needed in ("typer", "plotly", "pandas", "tensorboard"):
        pytest.importorskip(needed, reason=f"{needed} is missing")
    names = run_page(PAGE, in_folder=tmp_path)
    assert (tmp_path / "runs" / "report.html").exists()
    assert names["run"].column("step") == list(range(1, 26))
    assert set(names["run"].header["keys"]) < set(re.findall(r"`(\w+)`", PAGE.read_text("utf-8")))


@pytest.mark.parametrize("documented", [Record, thin, running_mean, choose_scale, write_report])
def test_docstrings_run(documented):
    if documented is write_report:
        pytest.importorskip("plotly", reason="plotly is missing")
    runner = doctest.DocTestRunner()
    for example in doctest.DocTestFinder().find(documented, module=False, globs=globals()):
        runner.run(example)
    assert runner.summarize().attempted
    assert not runner.summarize().failed
