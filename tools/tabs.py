"""MkDocs hook: show the complete file beside each diff, in a second tab with a download link.

A copied diff does not run. The tab has the file that `tests/helpers/pages.py` writes and runs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from helpers.pages import FENCE, Block, blocks, write_file  # noqa: E402


def complete_files(page: Path) -> dict[str, str]:
    """Return the text of each file that the diffs of a page make, by title."""
    files = {}
    with TemporaryDirectory() as folder:
        for block in blocks(page):
            if block.title is not None:
                write_file(block, Path(folder))
                if block.language == "diff":
                    files[block.title] = (Path(folder) / block.title).read_text(encoding="utf-8")
    return files


def with_tabs(markdown: str, files: dict[str, str], folder: str) -> str:
    """Replace each diff that has a title by two tabs."""

    def tabs(match: Any) -> str:
        block = Block(ROOT, 0, *match.groups())
        if block.language != "diff" or block.title is None:
            return str(match[0])
        label, diff = "Changes", block.code
        if diff.startswith("--- "):
            header, _, diff = diff.partition("\n")
            label = f"Changes to {header.removeprefix('--- ')}"
        changes = f'```diff title="{block.title}"\n{diff}```'
        link = f"[Download {block.title}]({folder}/{block.title})"
        complete = f'{link}\n\n```python title="{block.title}"\n{files[block.title]}```'
        return f'=== "{label}"\n\n{indent(changes)}\n\n=== "Complete file"\n\n{indent(complete)}\n'

    return FENCE.sub(tabs, markdown)


def indent(text: str) -> str:
    return "".join(f"    {line}" if line.strip() else line for line in text.splitlines(True))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    from mkdocs.structure.files import File

    source = Path(page.file.abs_src_path)
    made = complete_files(source)
    folder = page.file.src_uri.removesuffix(".md")
    for title, text in made.items():
        if files.get_file_from_path(f"{folder}/{title}") is None:
            files.append(File.generated(config, f"{folder}/{title}", content=text))
    return with_tabs(markdown, made, source.stem)
