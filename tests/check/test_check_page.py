"""The command, as docs/check.md shows it."""

import re

import pytest
from typer.testing import CliRunner

from helpers.pages import ROOT
from manyhands.cli import app

PAGE = (ROOT / "docs" / "check.md").read_text()
SCRIPT = re.search(r'```python title="train.py"\n(.*?)```', PAGE, re.DOTALL).group(1)
SHOWN = re.search(r"```console\n\$ manyhands (.*?)\n(.*?)```", PAGE, re.DOTALL)


def run(arguments, tmp_path, monkeypatch, script=SCRIPT):
    (tmp_path / "train.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    return CliRunner().invoke(app(), arguments)


def test_the_command_prints_what_the_page_shows(tmp_path, monkeypatch):
    result = run(SHOWN.group(1).split(), tmp_path, monkeypatch)
    assert result.exit_code == 1
    assert result.output == SHOWN.group(2)


def test_the_right_script_ends_with_0(tmp_path, monkeypatch):
    right = SCRIPT.replace("(loss / dist.get_world_size())", "loss")
    result = run(["check", "--json", "train.py", "--steps", "2"], tmp_path, monkeypatch, right)
    assert result.exit_code == 0
    assert '"result": "equal"' in result.output


@pytest.mark.parametrize("arguments", [["check"], ["check", "missing.py"]])
def test_a_script_that_is_not_there_ends_with_2(arguments, tmp_path, monkeypatch):
    assert run(arguments, tmp_path, monkeypatch).exit_code == 2
