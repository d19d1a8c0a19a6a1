"""Figures in README and the guides are those of the benchmarks' files: see tools/figures.py."""

import functools
import re
import runpy

import pytest

from helpers.pages import FENCE, ROOT

pytestmark = pytest.mark.quick

FIGURES = runpy.run_path(str(ROOT / "tools" / "figures.py"))
HELP = "`python tools/figures.py` writes the numbers of the files into the pages"

# Pages whose figures are of something else than a benchmark.
OF_THEIR_OWN = {
    "docs/notes.md": "measured by hand, no command kept",
    "docs/install.md": "the results of test runs, with the command",
    "docs/migrating.md": "test_migrating*.py run every line on both sides",
    "docs/tutorial.md": "test_tutorial.py compares what the scripts print",
}
# Figures of guides that no benchmark has measured.
NOT_MEASURED = {
    ("README.md", "|1 worker|1,250|1.46|"): "tests/test_pages.py",
    ("README.md", "|4 workers, same learning rate|315|1.72|"): "tests/test_pages.py",
    ("README.md", "|4 workers, learning rate × 4|315|1.51|"): "tests/test_pages.py",
    ("README.md", "|4 workers, AdaScale|410|1.43|"): "tests/test_pages.py",
    ("docs/check.md", "at least 45 %"): "a constant of `manyhands check --resume`",
    ("docs/plan.md", "a margin of 10 to 20 %"): "advice",
    ("docs/plan.md", "within 2 %"): "tests/planning/test_plan.py",
    ("docs/plan.md", "within 1 %; within 5 %; equal"): "tests/planning/test_plan.py",
}
MEASURED = re.compile(
    r"±|\d\s?%|\d\s+times\s+(?!the\s+batch)|\d\s?×|\d\.\d\d|\d\.\d\s+s\b|\d\s?(?:ms|µs)\b"
)
NO_FIGURES = re.compile(  # code, targets of links, versions
    r"`[^`\n]*`|<!--.*?-->|\]\([^)\s]*\)|arXiv:\S+|\b\d+\.\d+\.\d+\b"
    r"|\b(?:Python|torch|fairscale|adaptdl|fairseq|accelerate|transformers|trl|Ray|Lightning)"
    r" \d+\.\d+(?: (?:and|or) \d+\.\d+)?",
    re.DOTALL | re.IGNORECASE,
)


@functools.cache
def figures():
    return [figure for benchmark in FIGURES["BENCHMARKS"] for figure in benchmark()]


@pytest.mark.parametrize("benchmark", FIGURES["BENCHMARKS"], ids=lambda each: each.__name__)
def test_pages_have_the_figures_of_the_benchmark(benchmark):
    for page, sentence, numbers in benchmark():
        found = FIGURES["pattern"](sentence).findall((ROOT / page).read_text(encoding="utf-8"))
        assert len(found) == 1, f"{page} has {len(found)} times, and should have once: {sentence}"
        said = found[0] if isinstance(found[0], tuple) else (found[0],)
        assert said == numbers, f"{page}, {sentence!r}: {HELP}"


def guides():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    names = (str(page.relative_to(ROOT)) for page in sorted(pages))
    return [n for n in names if not n.startswith("docs/benchmarks/") and n not in OF_THEIR_OWN]


def uncovered(page):
    """Sentences of a page with a measured figure that neither a row nor an exception covers."""
    text = FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    for where, sentence, _ in figures():
        if where == page:
            text = FIGURES["pattern"](sentence).sub("", text)
    for where, phrase in NOT_MEASURED:
        if where == page:
            text = text.replace(phrase, "")
    text = NO_FIGURES.sub("", text)
    sentences = re.split(r"(?<=[.:;])\s+(?=[A-Z*`\[])|\n\s*\n|\n(?=\s*[-|])", text)
    return [each for each in sentences if MEASURED.search(each)]


@pytest.mark.parametrize("page", guides())
def test_every_measured_figure_has_a_benchmark(page):
    assert uncovered(page) == [], "add a row to tools/figures.py, or a reason to NOT_MEASURED"


def test_exceptions_are_still_on_their_pages():
    for page, phrase in NOT_MEASURED:
        assert phrase in (ROOT / page).read_text(encoding="utf-8"), (
            f"{page} no longer says {phrase}"
        )
