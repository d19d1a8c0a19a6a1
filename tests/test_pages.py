"""Every example in the documentation, done: see pages.py."""

import pytest

from pages import ROOT, Block, blocks, has_examples, run_page

PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if has_examples(page)
]
NEEDED = ("typer", "plotly", "pandas", "tensorboard")  # by docs/record.md, all of them


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_page_runs_from_top_to_bottom(page, tmp_path):
    for name in NEEDED if page.name == "record.md" else ():
        pytest.importorskip(name, reason=f"{name} is missing")
    run_page(page, in_folder=tmp_path)


def test_the_pages_that_should_have_examples_have_them():
    found = {str(page.relative_to(ROOT)) for page in PAGES}
    assert {"README.md", "docs/scaling.md", "docs/migrating.md", "docs/record.md"} <= found


def test_every_script_on_a_page_is_also_run():
    """A titled block is only written down; some command must name it, or another block import it."""
    for page in PAGES:
        everything = list(blocks(page))
        for block in everything:
            if block.title is None:
                continue
            stem = block.title.removesuffix(".py")
            used = [
                b
                for b in everything
                if b is not block and (stem in b.code.split() or block.title in b.code)
            ]
            assert used, f"{block.where}: nothing runs {block.title}"


def test_one_side_of_a_diff():
    block = Block(ROOT / "x.md", 1, "diff", "x.py", "-a = 1\n+a = 2\n b = a\n")
    assert (block.side(), block.side(old=True)) == ("a = 2\nb = a\n", "a = 1\nb = a\n")
