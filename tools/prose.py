#!/usr/bin/env python3
"""Compare the word choice of documentation and source with twelve well-known Python projects.

    python tools/prose.py                 README, CONTRIBUTING and docs; src
    python tools/prose.py PATH ...        each path separately
    python tools/prose.py --lines FILE    the lines of a file that contain listed phrases

Prose is Markdown without code, tables, link targets and tags, and in Python files the docstrings
(without examples) and comments.

REFERENCE maps a phrase to the highest frequency, in uses per 10,000 words, in any of torch
(distributed, optim, utils.data), accelerate, lightning, peft, transformers (trainer), torchft,
fairscale, httpx, optax, pydantic, rich and trio. A phrase is *over* the reference if it is more
frequent here than in all twelve. In other projects, 2 to 6 of the 49 phrases are over: typer,
datasets, numpy.lib, torchmetrics, jinja2, fsspec, aiohttp, torchdata. Common causes are clauses
with "what" in place of nouns, and pronouns ("its", "one", "those", "the others") in place of names.

tests/test_prose.py limits the phrases over the reference and the number of words.
"""

from __future__ import annotations

import argparse
import ast
import collections
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs"]
SOURCE = [ROOT / "src"]

REFERENCE = {
    "what": 9.5, "how many": 1.4, "so many": 0.4, "as many": 0.7, "of one": 0.5, "of its own": 0.3,
    "its own": 4.4, "of its": 0.8, "its": 26.4, "it has": 1.9, "of it": 1.3, "in it": 0.6,
    "those": 4.3, "those of": 1.1, "that of": 1.1, "one": 30.5, "another": 9.8, "the others": 0.5,
    "others": 1.6, "them": 14.2, "they": 15.4, "itself": 4.1, "whose": 2.6, "that is": 5.5,
    "that has": 1.4, "that are": 6.0, "without a": 2.1, "and a": 3.2, "and the": 9.5,
    "nothing": 4.8, "nobody": 0.3, "anew": 0.3, "whole": 3.8, "several": 7.0, "too": 5.8,
    "begin": 6.7, "begins": 1.9, "begun": 0.3, "come": 1.6, "comes": 1.9, "far": 1.2, "holds": 2.2,
    "keeps": 1.9, "kept": 1.2, "leaves": 8.9, "taken": 2.3, "at most": 0.7, "at once": 2.1,
    "the same": 19.0,
}  # fmt: skip

SPACE = (tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)


@dataclass
class Usage:
    """Word sequences of up to three words, and the number of words."""

    sequences: collections.Counter[str] = field(default_factory=collections.Counter)
    words: int = 0

    def add(self, other: Usage) -> None:
        self.sequences.update(other.sequences)
        self.words += other.words

    def rate(self, phrase: str) -> float:
        """Return the uses of a phrase per 10,000 words."""
        return self.sequences[phrase] / max(self.words, 1) * 1e4

    def over(self) -> list[str]:
        """Return the phrases over the reference, largest ratio first."""
        ratios = {phrase: self.rate(phrase) / limit for phrase, limit in REFERENCE.items()}
        found = [phrase for phrase, ratio in ratios.items() if ratio > 1]
        return sorted(found, key=lambda phrase: -ratios[phrase])

    def excess(self) -> float:
        """Return the number of uses of listed phrases beyond the reference."""
        total = 0.0
        for phrase, limit in REFERENCE.items():
            total += max(0.0, self.sequences[phrase] - limit * self.words / 1e4)
        return total


def markdown_prose(text: str) -> str:
    text = re.sub(r"```.*?```", " ", text, flags=re.DOTALL)
    text = re.sub(r"`[^`]*`", " CODE ", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = re.sub(r"<[^>]+>", " ", text)
    return re.sub(r"^\|.*$", " ", text, flags=re.MULTILINE)


def python_prose(source: str) -> str:
    """Return docstrings and comments. `ast` would take longer than tokens do."""
    parts = []
    starts_line = True
    expects_docstring = True  # at the start of a module, and after a line with `def` or `class`
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if not token.string.startswith(("#!", "# type", "# noqa")):
                parts.append(token.string[1:])
        elif token.type == tokenize.NEWLINE:
            starts_line = True
        elif starts_line and token.type not in SPACE:
            starts_line = False
            if token.type == tokenize.STRING and expects_docstring:
                text = inspect.cleandoc(ast.literal_eval(token.string))
                parts.append(re.sub(r"^\s*(>>>|\.\.\.).*$", "", text, flags=re.MULTILINE))
            expects_docstring = token.string in ("def", "class", "async")
    return markdown_prose("\n".join(parts))


def prose_of(path: Path) -> str:
    text = path.read_text(encoding="utf-8", errors="ignore")
    if path.suffix == ".py":
        return python_prose(text)
    return markdown_prose(text)


def count(text: str) -> Usage:
    """Count the words, and sequences of up to three words that do not cross punctuation."""
    usage = Usage()
    joined = re.sub(r"\n(?=[a-z])", " ", text)
    for part in re.split(r"[.!?:;()\n\[\]]|CODE|\*\*|  +", joined):
        words = re.findall(r"[a-z']+", part.lower())
        usage.words += len(words)
        for length in (1, 2, 3):
            starts = range(len(words) - length + 1)
            usage.sequences.update(" ".join(words[i : i + length]) for i in starts)
    return usage


def files_under(paths: Iterable[Path]) -> list[Path]:
    found = []
    for path in paths:
        if path.is_file():
            found.append(path)
        else:
            found.extend(file for file in path.rglob("*") if file.suffix in (".py", ".md"))
    return sorted(found)


def usage_of(paths: Iterable[Path]) -> Usage:
    total = Usage()
    for path in files_under(paths):
        total.add(count(prose_of(path)))
    return total


def markdown_words(paths: Iterable[Path]) -> int:
    """Return the number of words in Markdown files, including code and tables, like `wc -w`."""
    total = 0
    for path in files_under(paths):
        if path.suffix == ".md":
            total += len(path.read_text(encoding="utf-8").split())
    return total


def show_lines(path: Path) -> None:
    phrases = sorted(REFERENCE, key=len, reverse=True)
    pattern = re.compile(rf"\b({'|'.join(phrases)})\b", re.IGNORECASE)
    prose = prose_of(path)
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        start = line.strip().lstrip("#").strip().strip('"')[:30]
        if pattern.search(line) and (path.suffix == ".md" or start in prose):
            print(f"{path}:{number}: {line.strip()}")


def show_summary(name: str, paths: list[Path]) -> None:
    by_file = {file: count(prose_of(file)) for file in files_under(paths)}
    total = Usage()
    for usage in by_file.values():
        total.add(usage)
    over = total.over()
    print(
        f"{name}: {total.words} words of prose, {markdown_words(paths)} words in Markdown files, "
        f"{len(over)} of {len(REFERENCE)} phrases over the reference"
    )
    for phrase in over:
        rate = total.rate(phrase)
        print(
            f"  {phrase:12} {total.sequences[phrase]:5} uses, {rate:6.1f} per 10,000 words, "
            f"{rate / REFERENCE[phrase]:5.1f} times the highest reference"
        )
    worst = sorted(by_file, key=lambda file: -by_file[file].excess())
    for file in worst[:12]:
        print(f"  {by_file[file].excess():6.0f} uses too many: {file}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--lines", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.lines:
        show_lines(args.lines)
    elif args.paths:
        for path in args.paths:
            show_summary(str(path), [path])
    else:
        show_summary("docs", DOCS)
        show_summary("src", SOURCE)


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # the reader has closed the output, such as `head`
        sys.stderr.close()
