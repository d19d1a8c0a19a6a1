"""What docs/record.md and the docstrings say, done."""

import doctest
import re
import shlex
from pathlib import Path

import pytest

from manyhands.record import Record
from manyhands.report import write_report
from manyhands.report._smooth import running_mean
from manyhands.report._thin import thin

PAGE = Path(__file__).parents[2] / "docs" / "record.md"


def test_the_page_runs_from_top_to_bottom(tmp_path, monkeypatch):
    for needed in ("typer", "plotly", "pandas", "tensorboard"):
        pytest.importorskip(needed, reason=f"{needed} is missing")
    from typer.testing import CliRunner

    from manyhands.cli import app

    monkeypatch.chdir(tmp_path)
    names = {}
    for language, code in re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL):
        if language == "python":
            exec(code, names)
        else:
            program, *arguments = shlex.split(code)
            assert program == "manyhands"
            result = CliRunner().invoke(app(), arguments)
            assert (result.exit_code, result.output) == (0, "wrote runs/report.html\n")
    assert names["run"].column("step") == list(range(1, 26))
    assert set(names["run"].header["keys"]) < set(re.findall(r"`(\w+)`", PAGE.read_text("utf-8")))


@pytest.mark.parametrize("documented", [Record, thin, running_mean, write_report])
def test_docstrings_run(documented):
    if documented is write_report:
        pytest.importorskip("plotly", reason="plotly is missing")
    runner = doctest.DocTestRunner()
    for example in doctest.DocTestFinder().find(documented, module=False, globs=globals()):
        runner.run(example)
    assert runner.summarize().attempted
    assert not runner.summarize().failed
