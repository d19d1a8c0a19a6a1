"""`manyhands report`, as it is called from a shell."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from manyhands import Record
from manyhands.tools.cli import main

MISSING = '{} is missing: pip install "manyhands[cli]"'


@pytest.fixture
def manyhands():
    pytest.importorskip("typer", reason=MISSING.format("typer"))
    pytest.importorskip("plotly", reason=MISSING.format("plotly"))
    from typer.testing import CliRunner

    from manyhands.tools.cli import app

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


# -- while the runs go on --------------------------------------------------------------------------


@pytest.fixture
def follow(manyhands, tmp_path, monkeypatch):
    """Follow records until each of some functions was called between two pages, then Ctrl-C."""

    def follow(*arguments, between=()):
        steps = iter(between)

        def sleep(seconds):
            assert seconds >= report.EVERY
            step = next(steps, None)
            if step is None:
                raise KeyboardInterrupt
            step()

        monkeypatch.setattr(report.time, "sleep", sleep)
        return manyhands("report", "--follow", *arguments)

    from manyhands.tools.cli import report

    monkeypatch.chdir(tmp_path)
    return follow


def rows(page):
    """Return the cells of each worker's row: name, state, last line, time left, reason."""
    table = page.read_text(encoding="utf-8").partition('class="table workers"')[2]
    found = re.findall(r'<tr class="(\w+)">(.*?)</tr>', table.partition("</table>")[0])
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for _, row in found]
    assert [state for state, _ in found] == [row[1] for row in cells]
    return cells


def reload_of(page):
    found = re.search(r'data-reload="([\d.]+)"', page.read_text(encoding="utf-8"))
    return None if found is None else float(found[1])


def test_the_page_follows_the_records_until_it_is_interrupted(follow, run, tmp_path):
    page = tmp_path / "report.html"
    seen = []

    def a_worker_appears():
        assert [row[:2] for row in rows(page)] == [["mine", "ended"]]
        assert reload_of(page) == 5.0
        record = Record(tmp_path / "b.jsonl", until=4)
        for number in range(3):
            record.step(loss=1.0 + number)
        (tmp_path / "c.jsonl").touch()
        seen.append(record)

    def a_worker_is_silent():
        (_, running, waiting) = rows(page)
        assert running[:2] == ["b", "running"]
        assert re.fullmatch(r"[\d.]+ s", running[2]) and running[3].endswith(" s")
        assert waiting[1:] == ["waiting", "–", "–", "the record has no line yet"]
        long_ago = time.time() - 125
        os.utime(tmp_path / "b.jsonl", (long_ago, long_ago))

    def a_file_is_no_record():
        (_, silent, _) = rows(page)
        assert silent[:3] == ["b", "silent", "2 min 05 s"]
        assert "a line usually takes" in silent[4] and "the process runs" in silent[4]
        (tmp_path / "c.jsonl").write_text("notes\n")

    result = follow(".", between=[a_worker_appears, a_worker_is_silent, a_file_is_no_record])
    assert result.exit_code == 0, result.stderr
    assert result.output == (
        "following: report.html is rewritten until Ctrl-C\nwrote report.html\n"
    )
    assert [row[1] for row in rows(page)] == ["ended", "silent", "damaged"]
    assert reload_of(page) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.jsonl", "b.jsonl", "c.jsonl", "report.html"
    ]  # fmt: skip
    seen[0].close()


def test_an_empty_folder_has_a_page_too(follow, tmp_path):
    (tmp_path / "runs").mkdir()
    assert follow("runs").exit_code == 0
    page = tmp_path / "report.html"
    assert rows(page) == []
    assert "There are no steps yet." in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("missing",), "missing does not exist. --follow takes records, and folders"),
        (("notes",), "notes/b.jsonl is not a record of manyhands"),
        (("notes/b.jsonl",), "notes/b.jsonl is not a record of manyhands"),
        (("a.jsonl", "--out", "notes"), "--out notes is not a regular file"),
        (("a.jsonl", "--out", "/dev/null"), "--out /dev/null is not a regular file"),
        (("a.jsonl", "--out", "a.jsonl/page.html"), "the page cannot be written: "),
        ((".", "--out", "a.jsonl"), "a.jsonl is one of the runs, and would be overwritten"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_followed_is_one_line_and_exit_code_2(
    follow, run, tmp_path, arguments, message
):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "b.jsonl").write_text("notes\n")
    before = run.read_bytes()
    result = follow(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert run.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "notes"]


def test_a_page_that_cannot_be_written_leaves_the_page_before(follow, run, tmp_path, monkeypatch):
    page = tmp_path / "report.html"

    def the_disk_is_full():
        pages.append(page.read_bytes())
        monkeypatch.setattr(type(page), "replace", fail)

    def fail(path, target):
        assert target == page and path.parent == tmp_path and path.stat().st_size
        raise OSError(28, "No space left on device", str(path))

    pages = []
    result = follow("a.jsonl", between=[the_disk_is_full])
    assert result.exit_code == 2
    assert "the page cannot be written: [Errno 28] No space left" in result.stderr
    assert pages == [page.read_bytes()]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "report.html"]


def test_a_link_to_a_page_stays_a_link(follow, run, tmp_path):
    (tmp_path / "link.html").symlink_to("page.html")
    assert follow("a.jsonl", "--out", "link.html").exit_code == 0
    assert (tmp_path / "link.html").is_symlink() and rows(tmp_path / "page.html")


def test_ctrl_c_ends_the_command_with_exit_code_0(manyhands, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["manyhands", "report", "--follow", str(run)])
    page = tmp_path / "report.html"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            # Tests that run in the background of a shell inherit that Ctrl-C is ignored.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            main()
        except SystemExit as end:
            code = end.code
        finally:
            os._exit(code)
    until = time.monotonic() + 60
    while not page.exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    os.kill(child, signal.SIGINT)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert reload_of(page) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "report.html"]


# -- without the extra `cli` -----------------------------------------------------------------------


def test_without_typer_the_way_out_is_said():
    code = "import sys; sys.modules['typer'] = None; from manyhands.tools.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert 'pip install "manyhands[cli]"' in result.stderr
    assert result.stderr.count("\n") == 1
    version = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True)
    assert version.stdout.startswith(b"manyhands ")
