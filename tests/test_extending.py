"""The diffs of docs/extending.md, applied to a copy of the source: the contracts run on each."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "extending.md"
COPIED = ("src", "tests", "docs", "examples", "pyproject.toml", "CITATION.cff", "README.md")

SECTIONS = ("A scaling rule", "An outer step", "A codec")

pytestmark = pytest.mark.skipif(
    shutil.which("git") is None, reason="git is missing, which applies diffs"
)


def diff_of(section):
    """Return the diff under a heading of the page."""
    _, _, rest = PAGE.read_text().partition(f"\n## {section}\n")
    found = re.search(r"^```diff\n(.*?)^```$", rest, re.DOTALL | re.MULTILINE)
    assert found, f"{PAGE} has no diff under {section!r}"
    return found.group(1)


def run_tests(folder, *arguments):
    """Run pytest in a copy of the repository; return its last line."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu"]
    done = subprocess.run(
        [*command, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder / "src")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.fixture
def copy(tmp_path):
    for name in COPIED:
        source, target = ROOT / name, tmp_path / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        else:
            shutil.copy(source, target)
    return tmp_path


@pytest.mark.parametrize("section", SECTIONS)
def test_the_diff_of_the_page_applies_to_the_source(section):
    """The contract of the result takes longer: the test below, which is marked `long`."""
    command = ["git", "apply", "--check", "--verbose"]
    done = subprocess.run(
        command, input=diff_of(section), cwd=ROOT, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("section", "tests", "name"),
    [
        ("A scaling rule", ["tests/scaling/test_contract.py"], "PowerScale"),
        ("An outer step", ["tests/blocks/test_outer.py"], ""),
        ("A codec", ["codec", "averaged", "finite"], "float8 or mistakes"),
    ],
)
def test_the_diff_of_the_page_makes_a_part_that_passes_its_contract(section, tests, name, copy):
    diff = diff_of(section)
    subprocess.run(["git", "apply"], input=diff, text=True, cwd=copy, check=True)
    paths = [t if "/" in t else f"tests/blocks/test_{t}.py" for t in tests]
    assert "passed" in run_tests(copy, *paths, "-k", name)
    if "api.md" in diff:  # a public name
        assert "passed" in run_tests(copy, "tests/test_house.py", "tests/test_public.py")
