"""Every example in the documentation, done: see pages.py."""

import re
import runpy
import shutil

import pytest
import torch

import manyhands as mh
from helpers.pages import (
    ROOT,
    Block,
    blocks,
    has_examples,
    run_command,
    run_page,
    same_but_for_rounding,
    write_file,
)

# Pages with a test file: tests/record/test_record_page.py, tests/test_tutorial.py and
# tests/planning/test_plan.py. README has tests below.
OF_THEIR_OWN = {"plan.md", "record.md", "tutorial.md"}
SLOW = {"crew.md"}  # tens of seconds
README = ROOT / "README.md"
DOCUMENTS = [README, *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in DOCUMENTS if page.parent in (ROOT, ROOT / "docs") and has_examples(page)]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.long if page.name in SLOW else ())
        for page in PAGES
        if page.name not in OF_THEIR_OWN and page != README
    ],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_the_page_runs_from_top_to_bottom(page, tmp_path):
    run_page(page, in_folder=tmp_path)


def test_the_pages_that_should_have_examples_have_them():
    found = {str(page.relative_to(ROOT)) for page in PAGES}
    assert {"README.md", "docs/scaling.md", "docs/migrating.md", "docs/record.md"} <= found
    assert {"docs/checkpoints.md", "docs/how-adascale-works.md", "docs/tutorial.md"} <= found


def test_the_navigation_has_every_page():
    config = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"^ +(?:-.*: )?([\w/-]+\.md)$", config, re.MULTILINE)
    pages = (str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))
    assert sorted(listed) == sorted(pages)


def test_the_files_made_from_pages_are_those_that_the_program_writes():
    made = runpy.run_path(str(ROOT / "tools" / "pages.py"))["made"]()
    scripts = {path for path in made if path.suffix == ".py"}
    assert scripts == set((ROOT / "docs" / "tutorial").glob("*.py"))
    for path, text in made.items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run `python tools/pages.py`"


def test_a_diff_has_the_complete_file_beside_it():
    tools = runpy.run_path(str(ROOT / "tools" / "tabs.py"))
    page = ROOT / "docs" / "tutorial.md"
    files = tools["complete_files"](page)
    shown = tools["with_tabs"](page.read_text(), files, "tutorial")
    assert "--- plain.py" not in shown and '=== "Changes to plain.py"' in shown
    assert shown.count('=== "Complete file"') == len(files) == 6
    for title, text in files.items():
        compile(text, title, "exec")
        assert f"](tutorial/{title})" in shown


def test_code_fits_into_a_page():
    """A window of 1,280 pixels shows 102 columns: docs/wide.css. More is behind a scroll bar."""
    for block in (block for page in DOCUMENTS for block in blocks(page)):
        lines = [line for line in block.code.splitlines() if block.language not in ("text", "json")]
        assert [line for line in lines if len(line) > 102] == [], block.where


@pytest.fixture(scope="module")
def examples_of_readme(tmp_path_factory):
    """A folder with examples/ddp.py and the file that README's diff makes from it."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "examples").mkdir()
    shutil.copy(ROOT / "examples" / "ddp.py", folder / "examples")
    (diff,) = [block for block in blocks(README) if block.language == "diff"]
    write_file(diff, folder)
    return folder


def test_the_diff_of_readme_makes_the_example(examples_of_readme):
    made = (examples_of_readme / "examples" / "adascale.py").read_text()
    expected = (ROOT / "examples" / "adascale.py").read_text()
    one_line = expected.replace("if scheduler.done:\n            break", "if scheduler.done: break")
    assert made.splitlines()[1:] == one_line.splitlines()[1:]  # all but the docstring


def test_the_shown_command_prints_the_shown_line(examples_of_readme, monkeypatch):
    monkeypatch.chdir(examples_of_readme)
    (command,) = [block for block in blocks(README) if block.language == "sh"]
    (shown,) = [block for block in blocks(README) if block.language == "text"]
    same_but_for_rounding(run_command(command.code.strip(), command), shown)


@pytest.mark.parametrize(
    ("row", "workers", "script", "rate"),
    [
        ("1 worker", 1, "ddp.py", "0.016"),
        ("4 workers, same learning rate", 4, "ddp.py", "0.016"),
        ("4 workers, learning rate × 4", 4, "ddp.py", "0.064"),
        ("4 workers, AdaScale", 4, "adascale.py", "0.016"),
    ],
)
def test_the_rows_of_readme_are_printed(row, workers, script, rate, tmp_path, monkeypatch):
    text = (ROOT / "examples" / script).read_text()
    assert text.count("lr=0.016") == 1
    (tmp_path / "row.py").write_text(text.replace("lr=0.016", f"lr={rate}"))
    monkeypatch.chdir(tmp_path)
    command = f"torchrun --standalone --nproc-per-node {workers} row.py"
    printed = run_command(command, next(blocks(README)))
    steps, loss = re.search(r"(\d+) steps, test loss (\S+)", printed).groups()
    found = re.search(rf"^\|{re.escape(row)}\|([\d,]+)\|(\S+)\|$", README.read_text(), re.M)
    assert int(steps) == pytest.approx(int(found[1].replace(",", "")), rel=0.03)
    assert float(loss) == pytest.approx(float(found[2]), rel=0.03)


@pytest.mark.parametrize("call", ["mh.shard", "mh.DiLoCo", "mh.Cursor"])
def test_the_other_examples_of_readme_run(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = [b for b in blocks(README) if b.language == "python" and call in b.code]
    data = torch.utils.data.TensorDataset(torch.randn(64, 4))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    exec(block.code, {"mh": mh, "data": data, "model": model, "optimizer": optimizer})


def test_readme_shows_the_output_of_the_check_page():
    consoles = {
        block.code for block in blocks(ROOT / "docs" / "check.md") if block.language == "console"
    }
    assert {block.code for block in blocks(README) if block.language == "console"} <= consoles


def test_readme_is_short():
    assert len(README.read_text().split()) <= 900


def test_every_script_on_a_page_is_also_run():
    """A titled block is only written down: a command must name it, or another block import it."""
    for page in PAGES:
        everything = list(blocks(page))
        for block in filter(lambda block: block.title is not None, everything):
            names = {block.title, block.title.removesuffix(".py")}
            others = (other.code.split() for other in everything if other is not block)
            assert any(names & set(words) for words in others), f"{block.where}: not run"


def test_one_side_of_a_diff():
    block = Block(ROOT / "x.md", 1, "diff", "x.py", "-a = 1\n+a = 2\n b = a\n")
    assert (block.side(), block.side(old=True)) == ("a = 2\nb = a\n", "a = 1\nb = a\n")
