"""The command, as docs/check.md shows it."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers.pages import ROOT
from manyhands.tools.cli import app

PAGE = (ROOT / "docs" / "check.md").read_text()
SCRIPT = re.search(r'```python title="train.py"\n(.*?)```', PAGE, re.DOTALL).group(1)
SHOWN = re.search(r"```console\n\$ manyhands (.*?)\n(.*?)```", PAGE, re.DOTALL)

RESUMING = re.search(r'```python title="resume.py"\n(.*?)```', PAGE, re.DOTALL).group(1)
RESUMED = re.search(r"\$ manyhands (check --resume.*?)\n(.*?)```", PAGE, re.DOTALL)


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
    result = run(["check", "--json", "--steps", "2", "train.py"], tmp_path, monkeypatch, right)
    assert result.exit_code == 0
    assert '"result": "equal"' in result.output


def test_resuming_prints_what_the_page_shows(tmp_path, monkeypatch):
    (tmp_path / "resume.py").write_text(RESUMING)
    result = run(RESUMED.group(1).split(), tmp_path, monkeypatch)
    assert result.exit_code == 1
    assert result.output == RESUMED.group(2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--then", "2", "train.py"], "--then: only with --resume."),
        (["--ranks", "1", "train.py"], "--ranks takes a number of at least 2, got '1'"),
        (["--allow", "batchnorm", "train.py"], "--allow takes some of batch-norm, schedule"),
        (["--rank=2", "train.py"], "there is no option --rank=2. Did you mean --ranks?"),
        (["-m", "--setps", "train"], "there is no option --setps. Did you mean --steps?"),
        (["train.py", "--ranks", "4"], "--ranks follows the script. Write it before the script"),
        (["trian.py"], "trian.py is not a file. Give a Python script."),
        ([], "give a Python script, or a module with -m."),
    ],
)
def test_wrong_options_are_named(arguments, said, tmp_path, monkeypatch):
    result = run(["check", *arguments], tmp_path, monkeypatch)
    assert result.exit_code == 2
    assert said in result.output


def test_an_option_of_the_script_may_follow_two_dashes(tmp_path, monkeypatch):
    text = 'import sys\nassert sys.argv[1:] == ["--ranks", "4"], sys.argv\nsys.exit("reached")\n'
    result = run(["check", "train.py", "--", "--ranks", "4"], tmp_path, monkeypatch, text)
    assert "reached" in result.output
    result = run(["check", "--resume", "--resume-args", "'", "train.py"], tmp_path, monkeypatch)
    assert "--resume-args cannot be split into words" in result.output


@pytest.mark.long
def test_the_resumed_run_gets_its_arguments(tmp_path, monkeypatch):
    head = 'import sys\nassert sys.argv[1:] in (["7"], ["7", "--from", "last.pt"])\n'
    text = head + RESUMING.replace('if os.path.exists("last.pt")', 'if "--from" in sys.argv')
    options = ["check", "--resume", "--json"]
    script = ["train.py", "7"]
    given = ["--resume-args", "--from {checkpoint}"]
    result = run([*options, *given, *script], tmp_path, monkeypatch, text)
    assert result.exit_code == 1, result.output
    assert '"cause": "schedule not restored"' in result.output
    result = run([*options, *script], tmp_path, monkeypatch, text)
    assert result.exit_code == 2
    assert "give --resume-args" in result.output.replace("\\n", " ")


def test_a_sitecustomize_of_the_user_still_runs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['OF_THE_USER'] = '1'\n")
    (tmp_path / "train.py").write_text("import os\nos.environ['OF_THE_USER']\n" + SCRIPT)
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ""), *sys.path])
    command = "from manyhands.tools.cli import main; main()"
    made = subprocess.run(
        [sys.executable, "-c", command, "check", "--steps", "2", "train.py"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True,
    )  # fmt: skip
    assert made.returncode == 1, made.stdout + made.stderr
    assert "0.5000 times" in made.stdout


def test_a_module_of_a_package_runs_as_under_torchrun(tmp_path, monkeypatch):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "rates.py").write_text("RATE = 0.01")
    own = "import sys\nfrom .rates import RATE\nassert sys.argv[1:] == ['-m', '9']\n"
    (tmp_path / "package" / "train.py").write_text(own + SCRIPT.replace("0.01", "RATE"))
    arguments = ["check", "--steps", "2", "-m", "package.train", "-m", "9"]
    result = run(arguments, tmp_path, monkeypatch, script="")
    assert result.exit_code == 1, result.output
    assert "0.5000 times" in result.output
    assert "train.py:18" in result.output


@pytest.mark.long
def test_a_check_that_is_stopped_ends_its_processes_and_puts_files_back(tmp_path):
    (tmp_path / "log").write_text("mine")
    text = "import os, time\nopen('log', 'a').write('.')\nopen(f'{os.getpid()}', 'w')\n"
    (tmp_path / "train.py").write_text(text + "while True: time.sleep(0.1)")
    command = "from manyhands.tools.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", command, "check", "train.py"], cwd=tmp_path
    ) as checking:
        while not (ranks := [path.name for path in tmp_path.glob("[0-9]*")]):
            assert checking.poll() is None
            time.sleep(0.05)
        checking.terminate()
        assert checking.wait(30) == 143
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "train.py"]
    assert (tmp_path / "log").read_text() == "mine"
    assert not any(os.path.exists(f"/proc/{rank}") for rank in ranks)


def test_ranks_of_a_killed_check_end(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import os\nopen(f'{os.getpid()}', 'w')\nwhile True: pass")
    command = "from manyhands.tools.cli import main; main()"
    with subprocess.Popen([sys.executable, "-c", command, "check", script], cwd=tmp_path) as check:
        while len(ranks := [path.name for path in tmp_path.glob("[0-9]*")]) < 2:
            assert check.poll() is None
            time.sleep(0.05)
        check.kill()
    deadline = time.monotonic() + 10
    while any(map(is_running, ranks)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
