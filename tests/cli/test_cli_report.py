"""`manyhands report`, as it is called from a shell."""

import subprocess
import sys

import pytest

from manyhands.record import Record

MISSING = '{} is missing: pip install "manyhands[cli]"'


@pytest.fixture
def manyhands():
    pytest.importorskip("typer", reason=MISSING.format("typer"))
    pytest.importorskip("plotly", reason=MISSING.format("plotly"))
    from typer.testing import CliRunner

    from manyhands.cli import app

    return lambda *arguments: CliRunner().invoke(app(), [str(argument) for argument in arguments])


@pytest.fixture
def run(tmp_path):
    with Record(tmp_path / "a.jsonl", name="mine") as record:
        record.step(loss=0.5)
    return tmp_path / "a.jsonl"


def test_a_page_is_written_where_it_was_asked_for(manyhands, run, tmp_path):
    page = tmp_path / "new" / "page.html"
    result = manyhands("report", run, run, "--out", page, "--title", "Today's runs")
    assert (result.exit_code, result.output) == (0, f"wrote {page}\n")
    assert "<title>Today&#x27;s runs</title>" in page.read_text(encoding="utf-8")


def test_the_page_is_report_html_if_nothing_is_said(manyhands, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert manyhands("report", run).output == "wrote report.html\n"
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize(("flag", "opened"), [("--open", 1), ("--no-open", 0)])
def test_the_page_is_opened_on_request(manyhands, run, tmp_path, monkeypatch, flag, opened):
    pages = []
    monkeypatch.setattr("webbrowser.open", pages.append)
    manyhands("report", run, "--out", tmp_path / "page.html", flag)
    assert pages == [(tmp_path / "page.html").as_uri()] * opened


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.jsonl", "No such file"),
        ("notes.txt", "notes.txt is not a record of manyhands"),
        ("picture.png", "picture.png is not a record of manyhands"),
        (".", "is not a regular file"),
    ],
)
def test_what_is_no_record_is_one_line_and_exit_code_2(manyhands, run, tmp_path, name, message):
    (tmp_path / "notes.txt").write_text("notes\n")
    (tmp_path / "picture.png").write_bytes(bytes(range(256)))
    result = manyhands("report", run, tmp_path / name, "--out", tmp_path / "page.html")
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "page.html").exists()


def test_a_run_is_not_overwritten_by_the_page(manyhands, run):
    before = run.read_bytes()
    result = manyhands("report", run, "--out", run)
    assert result.exit_code == 2
    assert "would be overwritten" in result.stderr
    assert run.read_bytes() == before


def test_without_typer_the_way_out_is_said():
    code = "import sys; sys.modules['typer'] = None; from manyhands.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert 'pip install "manyhands[cli]"' in result.stderr
    assert result.stderr.count("\n") == 1
    version = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True)
    assert version.stdout.startswith(b"manyhands ")
