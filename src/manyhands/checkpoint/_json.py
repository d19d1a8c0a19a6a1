"""Read JSON from a file whose length may be forged.

A sparse file claims any number of bytes, of which the disk has a few. The others read as zeros, and
no JSON text has a zero byte. So text is read in blocks, each as long as all before it, and no
further than to the first zero: what it takes in memory is bounded by what is really there.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

FIRST = 2**20  # bytes of the first block


def read_text(read: Callable[[int, int], bytes], start: int, length: int) -> bytes:
    """Return `length` bytes of text; `read` returns bytes by their first one and their number."""
    blocks: list[bytes] = []
    done = 0
    while done < length:
        expected = min(max(FIRST, done), length - done)
        block = read(start + done, expected)
        if len(block) < expected:
            raise ValueError("it ends too early")
        if b"\0" in block:
            raise ValueError(f"byte {start + done + block.index(0):,} is no text")
        blocks.append(block)
        done += len(block)
    return b"".join(blocks)


def parse_json(text: bytes | memoryview) -> Any:
    """Return the value of a JSON text, or raise ValueError."""
    # Strictly: Python also takes NaN, and the last of two entries that have the same name.
    try:
        return json.loads(
            str(text, "utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_unique
        )
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the name {twice!r:.80} is there twice")
    return result
