"""Limits for the word choice and the length of documentation and source (tools/prose.py)."""

import runpy

import pytest

from helpers.pages import ROOT

pytestmark = pytest.mark.quick

prose = runpy.run_path(str(ROOT / "tools" / "prose.py"))

# Phrases over the reference, of 49. Lower these limits after each improvement.
DOCS_PHRASES = 5  # README, CONTRIBUTING and docs
SOURCE_PHRASES = 8  # src/manyhands
# Words of README.md and docs/**/*.md, including code and tables (`wc -w`).
DOCS_WORDS = 45_000
# Words of docstrings, without examples, and comments.
SOURCE_WORDS = 69_000

ADVICE = "Run `python tools/prose.py` for the phrases, and `--lines FILE` for their lines."


def test_phrases_of_the_documentation():
    over = prose["usage_of"](prose["DOCS"]).over()
    assert len(over) <= DOCS_PHRASES, f"{over}. {ADVICE}"


def test_phrases_and_words_of_the_source():
    usage = prose["usage_of"]([ROOT / "src" / "manyhands"])
    assert len(usage.over()) <= SOURCE_PHRASES, f"{usage.over()}. {ADVICE}"
    assert usage.words <= SOURCE_WORDS


def test_words_of_the_documentation():
    assert prose["markdown_words"]([ROOT / "README.md", ROOT / "docs"]) <= DOCS_WORDS


def test_markdown_is_prose_without_code_and_tables():
    text = "Its `own` [words](its.md).\n\n| its | table |\n\n```python\nits = 1\n```\n"
    usage = prose["count"](prose["markdown_prose"](text))
    assert usage.words == 2
    assert usage.sequences["its"] == 1


def test_python_is_docstrings_and_comments_without_examples():
    source = '"""One idea.\n\n>>> one = 1\n"""\n\none = "one"  # its reason\n"""one"""\n'
    usage = prose["count"](prose["python_prose"](source))
    assert usage.words == 4
    assert usage.over() == ["its", "one"]


def test_sequences_do_not_cross_punctuation():
    usage = prose["count"]("the others. The others, of\nits kind; of (its) own")
    assert usage.sequences["the others"] == 2
    assert usage.sequences["of its"] == 1
