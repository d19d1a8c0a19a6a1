"""`manyhands demo` and the script it runs, shortened."""

import importlib
import os
import runpy
import sys
from itertools import islice
from pathlib import Path

import pytest

from helpers.pages import needs_sklearn
from manyhands.tools.cli import app
from manyhands.tools.record import read_record

MISSING = '{} is missing: pip install "manyhands[cli]"'
pytest.importorskip("plotly", reason=MISSING.format("plotly"))
testing = pytest.importorskip("typer.testing", reason=MISSING.format("typer"))
program = importlib.import_module("manyhands.tools.cli.demo")
pytestmark = needs_sklearn

SCRIPT = Path(__file__).parents[2] / "examples" / "digits.py"


@pytest.fixture
def demo(tmp_path):
    """Run the command, with its records in `tmp_path`."""
    arguments = ["demo", "--out", str(tmp_path), "--workers", "2", "--accumulate", "2"]
    return lambda *more: testing.CliRunner().invoke(app(), [*arguments, *more])


@pytest.fixture
def digits(tmp_path, monkeypatch):
    """Run the script in this process and read its record."""

    def run(*options):
        record = tmp_path / "digits.jsonl"
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options, "--record", str(record)])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        return read_record(record)

    return run


@pytest.fixture
def only_adascale(monkeypatch):
    """The baseline and AdaScale: starting workers takes seconds."""
    trainings = program._trainings
    monkeypatch.setattr(program, "_trainings", lambda *size: islice(trainings(*size), 2))


@pytest.fixture
def own_script(tmp_path, monkeypatch):
    """Let the demo start two workers of another script."""

    def use(text):
        script = tmp_path / "script.py"
        script.write_text(text)
        two = program.Training("two", "two workers", 2, ())
        monkeypatch.setattr(program, "_trainings", lambda *size: [two])
        monkeypatch.setattr(program, "_script_path", lambda: script)

    return use


@pytest.mark.long
def test_the_demo_trains_compares_and_draws(demo, only_adascale, tmp_path):
    result = demo("--steps", "40", "--step-cost", "500")
    assert result.exit_code == 0, result.output + result.stderr
    assert "\x1b" not in result.output  # no terminal, no control characters
    baseline, adascale = (read_record(tmp_path / f"{n}.jsonl") for n in ("baseline", "adascale"))
    assert (len(baseline.lines), baseline.lines[-1]["scale"]) == (40, 1.0)
    assert (adascale.lines[-1]["scale"], adascale.lines[-1]["workers"]) == (4.0, 2)
    assert adascale.lines[-1]["progress"] >= 40 > adascale.lines[-2]["progress"]
    for run in (baseline, adascale):
        (row,) = (line for line in result.output.splitlines() if line.startswith(f"│ {run.name}"))
        last = run.lines[-1]
        shown = [f"{last['accuracy']:.1%}", f"{last['step']}", f"{last['samples']:,.0f}"]
        assert all(value in row for value in shown), (row, shown)
    alone = baseline.lines[-1]["time"] / 40
    computed = adascale.lines[-1]["step"] * (alone + 0.5)  # half a second to average gradients
    assert f" {computed:.1f} s │" in result.output
    assert "AdaScale ×4" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_workers_traceback_is_shown(demo, own_script):
    own_script("import os\nif os.environ['RANK'] == '1':\n    raise ValueError('out of paper')\n")
    result = demo()
    assert result.exit_code == 1
    assert "ValueError: out of paper" in result.stderr
    assert "two workers ended with exit code 1" in result.stderr


def test_an_interrupt_stops_the_workers(demo, own_script, tmp_path, monkeypatch):
    own_script(
        "import os, pathlib, time\n"
        f"file = pathlib.Path({str(tmp_path)!r}, os.environ['RANK'] + '.pid')\n"
        "file.write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )

    def interrupt_once_they_run(_):
        if len([pid for pid in tmp_path.glob("*.pid") if pid.read_text()]) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(program.time, "sleep", interrupt_once_they_run)
    assert demo().exit_code != 0
    for pid in tmp_path.glob("*.pid"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)


def test_an_interrupt_leaves_the_page_of_what_there_is(demo, own_script, tmp_path, monkeypatch):
    """One training has ended, the second is under way, and an earlier demo had a third."""
    own_script(
        "import sys, time\n"
        "import manyhands as mh\n"
        "path, name = (option.split('=')[1] for option in sys.argv[-2:])\n"
        "with mh.Record(path, name=name) as record:\n"
        "    for _ in range(3):\n"
        "        record.step(accuracy=0.5, samples=4)\n"
        "    time.sleep(600 if name == 'second' else 0)\n"
    )
    both = [
        program.Training(*names, 1, ()) for names in (("baseline", "first"), ("ramp", "second"))
    ]
    monkeypatch.setattr(program, "_trainings", lambda *size: both)
    (tmp_path / "adascale.jsonl").write_text("an earlier demo's")
    second = tmp_path / "ramp.jsonl"

    def interrupt_once_it_has_three_steps(_):
        if second.exists() and second.read_text().count('"accuracy"') == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(program.time, "sleep", interrupt_once_it_has_three_steps)
    result = demo()
    assert result.exit_code == 130
    assert "│ first " in result.output and "│ second " in result.output
    assert "AdaScale took" not in result.output  # it has no results to conclude from
    assert "interrupted; the page shows all recorded steps" in result.stderr
    assert "second" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_script_takes_as_many_steps_as_it_is_told(digits):
    options = ("--rule", "linear", "--accumulate", "4", "--steps", "80")
    assert len(digits(*options).lines) == 20
    stretched = digits(*options, "--in-steps", "50", "--lr", "0.01")
    assert len(stretched.lines) == 50
    assert stretched.lines[24]["lr"] == [pytest.approx(0.005, rel=0.1)]  # half of the cosine


@pytest.mark.parametrize("package", ["sklearn", "plotly"])
def test_what_is_missing_is_said_before_anything_is_trained(demo, package, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, package, None)
    result = demo()
    assert result.exit_code == 1
    assert 'pip install "manyhands[cli]"' in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.sample("adascale-None", "none-1.0")
@pytest.mark.parametrize(
    ("rule", "factor"), [("adascale", None), ("linear", 8.0), ("sqrt", 8**0.5), ("none", 1.0)]
)
def test_the_script_trains_by_each_rule(digits, rule, factor, capsys):
    run = digits("--rule", rule, "--accumulate", "8", "--steps", "400", "--warmup", "0.1")
    last = run.lines[-1]
    assert last["accuracy"] > 0.5
    assert f"{rule} x8: {last['accuracy']:.1%} right" in capsys.readouterr().out
    if factor is not None:
        assert last["factor"] == [pytest.approx(factor)]
        assert last["step"] == 50  # as many samples as the baseline
    else:
        assert 50 < last["step"] < 400


def test_on_one_worker_the_script_trains_alike_by_every_rule(digits):
    losses = [
        digits("--rule", rule, "--steps", "50").column("loss")
        for rule in ("adascale", "linear", "sqrt", "none")
    ]
    assert losses.count(losses[0]) == 4
