"""`manyhands watch`, as it is called from a shell."""

import doctest
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from manyhands.record import Record
from manyhands.record._record import KINDS


@pytest.fixture
def manyhands(tmp_path, monkeypatch):
    for package in ("typer", "rich"):
        pytest.importorskip(package, reason=f'{package} is missing: pip install "manyhands[cli]"')
    from typer.testing import CliRunner

    from manyhands.cli import app

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *arguments: CliRunner().invoke(app(), ["watch", *map(str, arguments)])


class Training:
    step, workers = 0, 4

    def snapshot(self):
        return {
            "step": self.step,
            "progress": 2.5 * self.step,
            "scale": 4.0,
            "gain": 2.5,
            "workers": self.workers,
            "members": "0 1 2 3",
            "rounds": self.step // 5,
            "undone": 0,
        }


def train(path, steps=20, **options):
    training = Training()
    with Record(path, training, batch_size=8, until=100, **options) as record:
        for step in range(steps):
            training.step = step + 1
            training.workers = 4 if step < 10 else 3
            record.step(loss=1.0 / (1 + step))
            time.sleep(0.002)


def test_once_shows_the_jobs_and_ends(manyhands, tmp_path):
    train("a.jsonl")
    train("b.jsonl", 8, name="b \x1b[31mred")
    result = manyhands(tmp_path, "later.jsonl", "--once")
    assert result.exit_code == 0
    said = result.output
    for words in ("a  ended", r"b \x1b[31mred  ended", "later  waiting  there is no record yet"):
        assert words in said, words
    assert "50% of 100" in said and "20% of 100" in said
    for words in ("loss 0.05", "step 20", "progress 50", "gain 2.5", "efficiency 62%", "rounds 4"):
        assert words in said, words
    assert "batch 32 samples" in said and "workers 3 0 1 2 3" in said
    assert "workers: 4 → 3" in said
    assert re.search(r"samples/s [\d,]+", said)


def test_once_tells_a_script_that_a_job_failed(manyhands):
    with pytest.raises(RuntimeError), Record("a.jsonl") as record:
        record.step(loss=1.0)
        raise RuntimeError("out of memory")
    result = manyhands("a.jsonl", "--once")
    assert result.exit_code == 1
    assert "failed  ended by RuntimeError: out of memory" in result.output


@pytest.mark.parametrize(
    "later",
    [
        {"progress": 5e-324},
        dict.fromkeys((f"{kind}_seconds" for kind in KINDS), 1e308),
    ],
    ids=["endless", "endless parts"],
)
def test_numbers_that_no_run_has_are_shown(manyhands, later):
    train("a.jsonl", 1)
    header = Path("a.jsonl").read_text().splitlines()[0]
    first = json.dumps({"step": 1, "time": 1.0, "progress": 0.0})
    second = json.dumps({"step": 2, "time": 2.0} | later)
    Path("a.jsonl").write_text("\n".join([header, first, second, ""]))
    result = manyhands("a.jsonl", "--once")
    assert isinstance(result.exception, SystemExit | None), result.exception
    assert "step 2" in result.output


def test_an_empty_folder_has_no_record_yet(manyhands, tmp_path):
    assert "There is no record yet." in manyhands(tmp_path, "--once").output


def test_a_port_that_is_taken_is_said(manyhands):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = manyhands("a.jsonl", "--port", taken.getsockname()[1])
    assert result.exit_code == 2
    assert "Leave --port out for a free one." in result.stderr


def start(tmp_path, *arguments, stdout=subprocess.PIPE, stderr=None):
    # Tests that run in the background of a shell inherit that Ctrl-C is ignored.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{heed}; from manyhands.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-u", "-c", code, "watch", *arguments],
        cwd=tmp_path,
        stdout=stdout,
        stderr=stderr,
        text=True,
        env={**os.environ, "COLUMNS": "120", "TERM": "xterm", "FORCE_COLOR": "1"},
    )


def test_the_page_is_served_until_it_is_interrupted(tmp_path):
    pytest.importorskip("typer", reason='typer is missing: pip install "manyhands[cli]"')
    train(tmp_path / "a.jsonl")
    with start(tmp_path, "a.jsonl", "--port", "0") as command:
        said = command.stdout.readline()
        url = re.search(r"http://127\.0\.0\.1:\d+/", said)[0]
        with urllib.request.urlopen(url + "jobs", timeout=60) as answer:
            (job,) = json.load(answer)["jobs"]
        assert (job["name"], job["step"], job["state"]) == ("a", 20, "ended")
        command.send_signal(signal.SIGINT)
        assert "the jobs go on" in command.stdout.read()
    assert command.returncode == 0


@pytest.mark.long
def test_a_page_is_served_though_its_address_cannot_be_printed(tmp_path):
    pytest.importorskip("typer", reason='typer is missing: pip install "manyhands[cli]"')
    train(tmp_path / "a.jsonl", 5)
    with (
        open("/dev/full", "w") as full,
        start(tmp_path, "a.jsonl", "--port", "0", stdout=full, stderr=subprocess.PIPE) as command,
    ):
        url = re.search(r"http://127\.0\.0\.1:\d+/", command.stderr.readline())[0]
        with urllib.request.urlopen(url + "jobs", timeout=60) as answer:
            assert len(json.load(answer)["jobs"]) == 1
        command.terminate()


@pytest.mark.long
def test_once_is_an_error_of_its_own_if_the_jobs_cannot_be_printed(tmp_path):
    pytest.importorskip("rich", reason='rich is missing: pip install "manyhands[cli]"')
    train(tmp_path / "a.jsonl", 5)
    with (
        open("/dev/full", "w") as full,
        start(tmp_path, "a.jsonl", "--once", stdout=full, stderr=subprocess.PIPE) as command,
    ):
        said = command.stderr.read()
    assert command.wait() not in (0, 1)  # 1: a job has died
    assert "the jobs cannot be shown" in said and "Traceback" not in said


def test_the_terminal_shows_a_job_while_it_trains(tmp_path):
    pytest.importorskip("rich", reason='rich is missing: pip install "manyhands[cli]"')
    train(tmp_path / "a.jsonl", 5)
    with start(tmp_path, "a.jsonl", "--terminal") as command:
        shown = ""
        while "step 5" not in shown:
            shown += command.stdout.readline()
        train(tmp_path / "a.jsonl", 30)
        while "step 30" not in shown:
            line = command.stdout.readline()
            assert line, shown
            shown += line
        command.send_signal(signal.SIGINT)
        command.stdout.read()
    assert command.returncode == 0


def test_examples_run():
    from manyhands.cli import watch

    assert doctest.testmod(watch).failed == 0
