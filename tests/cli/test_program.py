"""The program `manyhands`: what it answers without torch, and which commands it lists."""

import inspect
import subprocess
import sys

import pytest

import manyhands as mh
from manyhands.tools.cli import COMMANDS, app

pytest.importorskip("typer", reason='typer is missing: pip install "manyhands[cli]"')
pytest.importorskip("plotly", reason='plotly is missing: pip install "manyhands[cli]"')


def test_python_m_prints_the_version():
    command = [sys.executable, "-m", "manyhands", "--version"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"manyhands {mh.__version__}\n", "")


WITHOUT_TORCH = """
import sys, time
from manyhands.tools.cli import main
try:
    main()
finally:
    assert "torch" not in sys.modules
    assert time.process_time() < 1, time.process_time()
"""


@pytest.mark.parametrize("arguments", [["--help"], [], ["--version"], ["pln"]])
def test_help_and_version_need_no_torch_and_take_less_than_a_second(arguments):
    command = [sys.executable, "-c", WITHOUT_TORCH, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "Assertion" not in done.stderr, done.stderr
    assert "plan" in done.stdout + done.stderr or "manyhands" in done.stdout


def test_the_list_of_commands_says_what_their_docstrings_say():
    listed = {command.name: command for command in app().registered_commands}
    for name, command in listed.items():
        assert " ".join(inspect.getdoc(command.callback).split("\n\n")[0].split()) == COMMANDS[name]
    (group,) = app().registered_groups
    assert group.typer_instance.info.help == COMMANDS[group.name]
    assert {*listed, group.name} == set(COMMANDS)
