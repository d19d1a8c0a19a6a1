"""The program `manyhands`: answers without torch, shell completion, and progress."""

import contextlib
import inspect
import os
import pty
import subprocess
import sys

import pytest

import manyhands as mh
from manyhands.tools.check import EXCEPTIONS

pytest.importorskip("typer", reason='typer is missing: pip install "manyhands[cli]"')
pytest.importorskip("plotly", reason='plotly is missing: pip install "manyhands[cli]"')

COMMANDS = ("check", "plan", "run", "demo", "report", "checkpoint")


def test_python_m_prints_the_version():
    command = [sys.executable, "-m", "manyhands", "--version"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"manyhands {mh.__version__}\n", "")


WITHOUT_TORCH = """
import sys, time
from manyhands.tools.cli import main
sys.argv[0] = "manyhands"
try:
    main()
finally:
    assert "torch" not in sys.modules
    assert time.process_time() < 1, time.process_time()
"""


def run_without_torch(*arguments, **environment):
    """Run the program, which must not import torch, and must take less than a second."""
    command = [sys.executable, "-c", WITHOUT_TORCH, *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert "Assertion" not in done.stderr and "Traceback" not in done.stderr, done.stderr
    return done


@pytest.mark.parametrize(
    "arguments",
    [
        *(("--help",), ()),
        *[(command, "--help") for command in COMMANDS],
        *(("checkpoint", "inspect", "--help"), ("checkpoint", "consolidate", "--help")),
    ],
    ids=" ".join,
)
def test_help_needs_no_torch_and_has_an_example(arguments):
    done = run_without_torch(*arguments)
    name = " ".join(["manyhands", *arguments]).removesuffix(" --help")
    assert f"Example: {name}" in " ".join(done.stdout.split())


def test_the_list_of_commands_is_complete():
    done = run_without_torch("--help")
    for command in COMMANDS:
        assert f"│ {command} " in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("pln",),
        ("check",),
        ("check", "missing.py"),
        ("check", "--allow", "batchnorm", __file__),
        ("check", "--ranks", "1", __file__),
        ("plan",),
        ("plan", "missing:build_model"),
        ("plan", "os:getcwd", "--mesh", "2"),
        ("plan", "os:getcwd", "--input", "8*16"),
        ("run",),
        ("run", "missing.py"),
        ("run", __file__),
        ("run", __file__, "--workers", "0"),
        ("demo", "--steps", "0"),
        ("report",),
        ("report", "missing.jsonl"),
        ("checkpoint",),
        ("checkpoint", "inspect"),
        ("checkpoint", "inspect", "missing"),
        ("checkpoint", "consolidate", "missing", "out", "--to", "gguf"),
        ("checkpoint", "consolidate", "missing", "out"),
    ],
    ids=lambda arguments: " ".join(arguments).replace(__file__, "train.py"),
)
def test_a_usage_error_needs_no_torch(arguments):
    done = run_without_torch(*arguments)
    assert done.returncode == 2
    assert done.stderr or arguments == ("checkpoint",)  # which prints its help


def test_a_report_needs_no_torch(tmp_path):
    with mh.Record(tmp_path / "a.jsonl") as record:
        record.step(loss=0.5)
    done = run_without_torch("report", tmp_path / "a.jsonl", "--out", tmp_path / "page.html")
    assert done.stdout == f"wrote {tmp_path / 'page.html'}\n"


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        (["re"], ["report"]),
        (["check"], ["check", "checkpoint"]),
        (["checkpoint", "con"], ["consolidate"]),
        (["plan", "--me"], ["--memory", "--mesh"]),
        (["run", "--workers", "4", "--st"], ["--store", "--stall"]),
        (["check", "train.py", "--resume-"], ["--resume-args"]),
    ],
)
def test_bash_completes_commands_and_options(words, completions):
    done = run_without_torch(
        _MANYHANDS_COMPLETE="complete_bash",
        COMP_WORDS=" ".join(["manyhands", *words]),
        COMP_CWORD=str(len(words)),
    )
    assert done.stdout.split() == completions


def test_the_script_for_bash_calls_the_program():
    done = run_without_torch(
        "--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1"
    )
    assert "_MANYHANDS_COMPLETE=complete_bash" in done.stdout


def test_the_help_of_check_lists_all_exceptions():
    from manyhands.tools.cli import check

    assert set(check.EXCEPTIONS) == set(EXCEPTIONS)


def test_the_defaults_of_run_are_those_of_crews():
    from manyhands.blocks.crew import _crew, _launcher, _store
    from manyhands.tools.cli import run

    defaults = inspect.signature(run.run).parameters
    assert run.SECRET_VARIABLE == _store.SECRET_VARIABLE
    assert float(defaults["patience"].default) == _crew.PATIENCE
    assert defaults["grace"].default == _launcher.STOP_GRACE


PROGRESS = """
import sys
from manyhands.tools.cli._terminal import show_progress
with show_progress("reading [a]", 2) as advance:
    advance(1)
print("done", file=sys.stderr)
"""


def test_progress_is_shown_on_a_terminal_only():
    command = [sys.executable, "-c", PROGRESS]
    assert subprocess.run(command, capture_output=True, text=True).stderr == "done\n"
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stderr=theirs, env={**os.environ, "TERM": "xterm"}):
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # Linux reports the end of the terminal as an error
            while chunk := os.read(ours, 4096):
                shown += chunk
    os.close(ours)
    assert b"reading [a]" in shown and b"done" in shown
