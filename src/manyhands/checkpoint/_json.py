"""Read JSON from a file that may have a forged length.

A sparse file can claim any length, and unallocated bytes read as zeros. JSON text contains no zero
bytes. So text is read in blocks of doubling length up to the first zero, and memory is bounded by
the real data.
"""

from __future__ import annotations

import json
from typing import Any

from manyhands.checkpoint._folder import OpenFile

FIRST = 2**20  # bytes of the first block


def read_text(source: OpenFile, start: int, length: int) -> bytes:
    """Return `length` bytes of text. Raise ValueError if the bytes are missing or not text."""
    text = bytearray()
    while len(text) < length:
        block = bytearray(min(max(FIRST, len(text)), length - len(text)))
        if source.read_into(start + len(text), memoryview(block)) < len(block):
            raise ValueError("it ends too early")
        if b"\0" in block:
            raise ValueError(f"byte {start + len(text) + block.index(0):,} is not text")
        text += block
    return bytes(text)


def parse_json(text: bytes | memoryview) -> Any:
    """Return the value of a JSON text. Raise ValueError if it is not valid."""
    try:
        return json.loads(str(text, "utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
