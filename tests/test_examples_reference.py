"""examples/reference: the scripts run, stay short and plain, and are what the pages show.

tests/scaling/test_reference_adascale.py and tests/blocks/test_reference_diloco.py compare the
library with them.
"""

import ast
import re
import sys
import textwrap

import pytest

from helpers.pages import ROOT, blocks, in_forks

FOLDER = ROOT / "examples" / "reference"
SCRIPTS = {path.stem: path for path in sorted(FOLDER.glob("*.py"))}
PAGES = {"adascale": ROOT / "docs" / "how-adascale-works.md", "diloco": ROOT / "docs" / "blocks.md"}


def rows_of(script):
    """Run a script; return the rows of the table that it prints."""
    code, output = in_forks(None, str(script))
    assert code == 0, output
    numbers = re.compile(r"\s*\d+(\s+[\d.]+)+")
    lines = filter(numbers.fullmatch, output.splitlines())
    return [[float(number) for number in line.split()] for line in lines]


def test_adascale_trains_in_fewer_steps_to_the_loss_of_as_many_small_steps():
    rows = rows_of(SCRIPTS["adascale"])
    steps, gain, _, progress, error, small_steps, small_error = rows[-1]
    assert steps < small_steps / 2
    assert progress == pytest.approx(small_steps, abs=1.0)
    assert error < 2 * small_error
    assert gain > 1.5 * rows[0][1]


def test_diloco_trains_to_less_loss_than_a_single_worker():
    _, _, _, loss, loss_of_single_worker = rows_of(SCRIPTS["diloco"])[-1]
    assert loss < loss_of_single_worker


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_reference_is_short_and_needs_torch_only(name):
    text = SCRIPTS[name].read_text()
    assert len(text.splitlines()) <= 150
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported.update(alias.name.split(".")[0] for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            imported.add(node.module.split(".")[0])
    assert imported - set(sys.stdlib_module_names) == {"torch"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_page_starts_with_code_of_the_reference(name):
    page = PAGES[name]
    first = next(blocks(page))
    imports, *functions = first.code.strip().split("\n\n\n")
    assert imports == "import torch\nfrom torch import Tensor"
    assert len(functions) >= 3
    source = SCRIPTS[name].read_text()
    for function in functions:
        method = textwrap.indent(function, "    ")
        assert f"\n{function}\n" in source or f"\n{method}\n" in source, first.where
    assert str(SCRIPTS[name].relative_to(ROOT)) in page.read_text()
