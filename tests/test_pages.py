"""Every example in the documentation, done: see pages.py."""

import re
import runpy

import pytest

from helpers.pages import ROOT, Block, blocks, has_examples, run_command, run_page

# Pages with a test file: tests/record/test_record_page.py, tests/test_tutorial.py and
# tests/planning/test_plan.py.
OF_THEIR_OWN = {"plan.md", "record.md", "tutorial.md"}
SLOW = {"crew.md", "index.md"}  # tens of seconds; index.md has the script of README.md
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in DOCUMENTS if page.parent in (ROOT, ROOT / "docs") and has_examples(page)]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.long if page.name in SLOW else ())
        for page in PAGES
        if page.name not in OF_THEIR_OWN
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


def test_code_fits_into_a_page():
    """A window of 1,280 pixels shows 102 columns: docs/wide.css. More is behind a scroll bar."""
    for block in (block for page in DOCUMENTS for block in blocks(page)):
        lines = [line for line in block.code.splitlines() if block.language not in ("text", "json")]
        assert [line for line in lines if len(line) > 102] == [], block.where


def test_readme_and_landing_page_begin_with_the_same_script():
    readme, landing = (list(blocks(ROOT / page)) for page in ("README.md", "docs/index.md"))
    assert [block.code for block in readme[:5]] == [block.code for block in landing]


@pytest.mark.sample("0.016-1.72")
@pytest.mark.parametrize(("rate", "loss"), [("0.016", 1.72), ("0.064", 1.51)])
def test_the_old_loop_of_the_readme_ends_where_it_says(rate, loss, tmp_path, monkeypatch):
    page = ROOT / "README.md"
    script = next(blocks(page))
    assert f"{loss:.2f}" in page.read_text()
    (tmp_path / "old.py").write_text(script.side(old=True).replace("lr=0.016", f"lr={rate}"))
    monkeypatch.chdir(tmp_path)
    printed = run_command("torchrun --standalone --nproc-per-node 4 old.py", script)
    assert float(printed.split()[-1]) == pytest.approx(loss, rel=0.03)


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
