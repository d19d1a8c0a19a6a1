"""Checkpoints whose index says something else than was saved, under a right checksum.

text = content(checkpoint)     the index's JSON, to be changed
sign(checkpoint, text)         write it back, with the checksum of what it says now
"""

import json
import zlib

from manyhands.checkpoint import _folder, _index


def content(checkpoint):
    text = (checkpoint / _folder.INDEX).read_text()
    return json.loads(text)["content"]


def sign(checkpoint, meta):
    text = meta if isinstance(meta, str) else json.dumps(meta, separators=(",", ":"))
    head = _index.HEAD.format(_index.VERSION, zlib.crc32(text.encode()))
    (checkpoint / _folder.INDEX).write_text(head + text + "}\n")
