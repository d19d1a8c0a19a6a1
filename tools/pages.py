"""Generate files from the pages of the documentation.

    python tools/pages.py

    docs/llms.txt       title, address and first sentence of each page, in the order of navigation
    docs/tutorial/*.py  the scripts of docs/tutorial.md, with all diffs applied

`tests/test_pages.py` fails if a file is outdated.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(ROOT / "tests"))

from helpers.pages import FENCE, blocks, write_file  # noqa: E402


def first_sentence(page: str) -> str:
    """Return the first sentence of a page, without links, emphasis and comments."""
    text = FENCE.sub("", (DOCS / page).read_text(encoding="utf-8"))
    text = re.sub(r"<!--.*?-->", "", text)
    paragraphs = [part for part in text.split("\n\n") if re.match(r"[A-Za-z`*\[]", part)]
    if not paragraphs:
        return ""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraphs[0].split()))
    return re.split(r"(?<=[.:?])\s", plain.replace("**", ""))[0].rstrip(":")


def entries(nav: list[Any], depth: int) -> Iterator[str]:
    for title, inside in (pair for entry in nav for pair in entry.items()):
        if isinstance(inside, list):
            yield f"\n{'#' * depth} {title}\n"
            yield from entries(inside, depth + 1)
        else:
            yield f"- [{title}]({inside.removesuffix('.md')}.html): {first_sentence(inside)}"


def llms() -> str:
    """Return llms.txt (https://llmstxt.org), an overview of the pages for programs."""
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    head = f"# manyhands\n\n> {first_sentence('index.md')}\n\nIn the repository: .md, not .html.\n"
    return head + "\n".join(entries(nav, 2)) + "\n"


def made() -> dict[Path, str]:
    """Return the text of each file."""
    files = {DOCS / "llms.txt": llms()}
    with TemporaryDirectory() as folder:
        for block in blocks(DOCS / "tutorial.md"):
            if block.title is not None:
                write_file(block, Path(folder))
                files[DOCS / "tutorial" / block.title] = (Path(folder) / block.title).read_text()
    return files


if __name__ == "__main__":
    for path, text in made().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
