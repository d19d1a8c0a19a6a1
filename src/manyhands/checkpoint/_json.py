"""Read JSON from a file whose length may be forged.

A sparse file claims any number of bytes, of which the disk has a few. The others read as zeros, and
no JSON text has a zero byte. So text is read in blocks, each as long as all before it, and no
further than to the first zero. The memory for it is bounded by what is really there.
"""

from __future__ import annotations

import json
from typing import Any

from manyhands.checkpoint._folder import OpenFile

FIRST = 2**20  # bytes of the first block


def read_text(source: OpenFile, start: int, length: int) -> bytes:
    """Return `length` bytes of text; ValueError if they are not there, or are no text."""
    text = bytearray()
    while len(text) < length:
        block = bytearray(min(max(FIRST, len(text)), length - len(text)))
        if source.read_into(start + len(text), memoryview(block)) < len(block):
            raise ValueError("it ends too early")
        if b"\0" in block:
            raise ValueError(f"byte {start + len(text) + block.index(0):,} is no text")
        text += block
    return bytes(text)


def parse_json(text: bytes | memoryview) -> Any:
    """Return the value of a JSON text, or raise ValueError."""
    try:
        return json.loads(str(text, "utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
