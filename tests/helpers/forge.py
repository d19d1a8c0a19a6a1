"""Checkpoints whose commit says something else than was saved, under a right checksum.

text = content(checkpoint)     the commit's JSON, to be changed
sign(checkpoint, text)         write it back, with the checksum of what it says now
"""

import json
import zlib

from manyhands.checkpoint import _folder, _format


def only(path):
    """Return the only complete checkpoint in a folder."""
    (checkpoint,) = complete(path)
    return checkpoint


def complete(path):
    return [path / name for name in _folder.Folder(path).list_complete()]


def data_file(checkpoint, rank=0):
    (path,) = checkpoint.glob(f"worker-{rank:05d}-*.safetensors")
    return path


def content(checkpoint):
    text = (checkpoint / _folder.COMMIT).read_text()
    return json.loads(text)["content"]


def sign(checkpoint, meta):
    text = meta if isinstance(meta, str) else json.dumps(meta, separators=(",", ":"))
    head = _format.HEAD.format(_format.VERSION, zlib.crc32(text.encode()))
    (checkpoint / _folder.COMMIT).write_text(head + text + "}\n")
