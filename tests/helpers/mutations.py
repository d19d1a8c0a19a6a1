"""Checkpoints that are changed at random: what their files say, or the bytes of the files.

    change = signed(checkpoint, dice)      a value, name or number, under right checksums
    change = unsigned(checkpoint, dice)    bytes, lengths, holes; the checksums stay as they are

Both change a copy of a checkpoint in place, and return what they have done in words.
"""

import copy
import json
import math
import zlib
from collections.abc import Iterable
from typing import Any

import torch

from helpers.damage import harm
from helpers.forge import content, data_file, sign
from manyhands.checkpoint import _folder

CHECKED = 2**14  # bytes that have a checksum in common
HOLE = 2**33  # bytes of nothing in a sparse file
DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "U8", "BOOL", "F8_E4M3", "C64", "F4", "")
TYPES = ("float64", "float32", "int64", "uint8", "bool", "complex64", "complex128", "load", "")
NESTED = "[" * 2000 + "]" * 2000


class Raw(str):
    """Text that is written into the JSON as it is."""


VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2, 3, 10**6, 10**8, 10**12, 2**31, 2**63 - 1, 2**64, 2**70,
    -(2**63), 0.0, 1.0, -0.5, 1e300, -1e300, Raw("NaN"), Raw("Infinity"), Raw("1e999"), Raw(NESTED),
    Raw("9" * 4000), Raw("9" * 5000), Raw('{"a":1,"a":2}'), "", "x", "../x", "a/b", "\ud800", "\0",
    "NaN", "model", [], [1], [[1, 2]], [None], {}, {"a": 1}, {"$": "tensor", "key": "nowhere"},
    {"$": "tensor"}, {"$": "float", "value": "nan"}, {"$": "float", "value": []}, {"$": []},
    {"$": "dtype", "value": "load"}, {"$": "dtype", "value": 3}, {"$": "device", "value": "cuda:9"},
    {"$": "device", "value": []}, {"$": "complex", "value": "x"}, {"$": "bytes", "value": "x"},
    {"$": "torch.Size", "items": ["x"]}, {"$": "dict", "items": [[[], 1]]}, {"$": "tuple"},
    {"$": "set", "items": [[]]}, {"$": "Counter", "items": 3}, {"$": "module", "value": {}},
]  # fmt: skip


# -- JSON ------------------------------------------------------------------------------------------


def dump(value):
    """Return JSON in which `Raw` text stands for itself."""
    raw = []

    def replaced(value):
        if isinstance(value, Raw):
            raw.append(value)
            return f"raw text number {len(raw)} of this document"
        if isinstance(value, dict):
            return {key: replaced(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [replaced(each) for each in value]
        return value

    text = json.dumps(replaced(value), separators=(",", ":"))
    for number, each in enumerate(raw, 1):
        text = text.replace(f'"raw text number {number} of this document"', each)
    return text


def places(value, path=()):
    """Yield the path of everything in a JSON value."""
    entries: Iterable[tuple] = ()
    if isinstance(value, dict):
        entries = value.items()
    elif isinstance(value, list):
        entries = enumerate(value)
    for key, each in entries:
        yield (*path, key)
        yield from places(each, (*path, key))


def choose(value, dice):
    """Return a path: at each level one of the entries, so that small parts are met, too."""
    path: tuple = ()
    while isinstance(value, dict | list) and value and not (path and dice.random() < 0.2):
        key = dice.choice(list(value) if isinstance(value, dict) else range(len(value)))
        path = (*path, key)
        value = value[key]
    return path


def changed(value, dice):
    """Return a copy of a JSON value with one change, and the change in words."""
    value = copy.deepcopy(value)
    path = choose(value, dice)
    if not path:
        return dice.choice(VALUES), "all of it"
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    key, before = path[-1], holder[path[-1]]
    kind = dice.choice(("delete", "replace", "replace", "near", "near", "copy", "rename"))
    where = "/".join(map(str, path))
    if kind == "delete":
        del holder[key]
        return value, f"{where} deleted"
    if kind == "rename" and isinstance(holder, dict):
        name = dice.choice((f"{key}x", key[1:], f"../{key}", key.upper(), f"{key}@0", ""))
        items = [(name if other == key else other, each) for other, each in holder.items()]
        holder.clear()
        holder.update(items)
        return value, f"{where} renamed to {name!r}"
    new = dice.choice(VALUES)
    if kind == "near":
        new = near(before, dice)
    elif kind in ("copy", "rename"):
        other = dice.choice(list(places(value)))
        new = value
        for each in other:
            new = new[each]
        new = copy.deepcopy(new)
        if isinstance(holder, list) and dice.random() < 0.5:
            holder.insert(key, new)
            return value, f"{where} before it {new!r:.60}"
    holder[key] = new
    return value, f"{where} = {new!r:.60}"


def near(before, dice):
    """Return a value that is like another."""
    if isinstance(before, bool) or before is None:
        return dice.choice((not before, 0, 1))
    if isinstance(before, int | float):
        return dice.choice(
            (before + 1, before - 1, -before, float(before), str(before), [before], before * 10**9)
        )
    if isinstance(before, str):
        return dice.choice(
            (before + "x", before[:-1], before.upper(), *TYPES, *DTYPES, [before], "9" * 8)
        )
    if isinstance(before, list):
        return dice.choice((before[::-1], before[:-1], before * 2, [before], {"0": before}))
    return dice.choice(([before], list(before), {**before, "x": 1}, json.dumps(before)))


# -- files -----------------------------------------------------------------------------------------


def split(path):
    """Return the header of a data file as JSON, the tensors' bytes, and their checksums."""
    data = path.read_bytes()
    head = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:head])
    start, stop = header["manyhands.crc32"]["data_offsets"]
    return header, data[head : head + start], data[head + start : head + stop]


def seal(checkpoint, rank, header, data, sums):
    """Write a data file, and its sizes and checksum into the commit."""
    text = (header if isinstance(header, str) else dump(header)).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    path = data_file(checkpoint, rank)
    path.write_bytes(head + data + sums)
    meta = content(checkpoint)
    size = len(head) + len(data) + len(sums)
    meta["files"][rank] = [size, len(head), zlib.crc32(sums, zlib.crc32(head))]
    sign(checkpoint, meta)


def checksums(header, data):
    found = b""
    for name, meta in header.items():
        if name not in ("manyhands.crc32", "__metadata__"):
            start, stop = meta["data_offsets"]
            for at in range(start, stop, CHECKED):
                found += zlib.crc32(data[at : min(stop, at + CHECKED)]).to_bytes(4, "little")
    return found


def rewrite(checkpoint, rank, tensors):
    """Write a data file of these tensors: name, dtype, shape and bytes."""
    header, data = {}, b""
    for name, dtype, shape, raw in tensors:
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += raw
    sums = checksums(header, data)
    where = {"dtype": "U8", "shape": [len(sums)], "data_offsets": [len(data), len(data + sums)]}
    seal(checkpoint, rank, {**header, "manyhands.crc32": where}, data, sums)


def tensors_of(path):
    header, data, _ = split(path)
    return [
        [name, meta["dtype"], meta["shape"], data[slice(*meta["data_offsets"])]]
        for name, meta in header.items()
        if name != "manyhands.crc32"
    ]


# -- under right checksums -------------------------------------------------------------------------


def signed(checkpoint, dice):
    ways = (change_index, change_index, change_part, change_grid, change_header, change_tensor)
    return dice.choice(ways)(checkpoint, dice)


def change_index(checkpoint, dice):
    meta, words = changed(content(checkpoint), dice)
    sign(checkpoint, dump(meta))
    return f"index: {words}"


def change_part(checkpoint, dice):
    """Change what is described in the most detail."""
    meta = content(checkpoint)
    part = dice.choice([p for p in ("table", "model", "optimizers", "values") if meta[p]])
    meta[part], words = changed(meta[part], dice)
    sign(checkpoint, dump(meta))
    return f"index: {part}/{words}"


def change_grid(checkpoint, dice):
    """Cut tensors in more pieces, or list other pieces; sometimes of a grid that is added."""
    meta = content(checkpoint)
    table = meta["table"]
    if not table["grids"] or dice.random() < 0.3:
        members = dice.choice(({}, {"extra": [[4, 2], "float32", 0]}, [], 5))
        files = list(range(len(meta["files"])))
        table["grids"].append([len(files), files, members])
    grid = dice.choice(table["grids"])
    grid[0] = dice.choice((grid[0], -1, 0, 1, 3, 10**8, 10**12, 2**70, 2.0, True, None, "2"))
    if dice.random() < 0.5:
        grid[1].append(dice.choice((0, 1, 2, -1, 10**9, 2**70, 1.0, True, None)))
    words = f"{grid[0]} pieces in the files {grid[1]!r:.60}"
    sign(checkpoint, dump(meta))
    return f"index: grid of {words}"


def change_header(checkpoint, dice):
    rank = dice.randrange(len(content(checkpoint)["files"]))
    header, data, sums = split(data_file(checkpoint, rank))
    header, words = changed(header, dice)
    seal(checkpoint, rank, header, data, sums)
    return f"header {rank}: {words}"


def change_tensor(checkpoint, dice):
    """Change the elements, the type or the shape of a tensor; an index may say otherwise."""
    rank = dice.randrange(len(content(checkpoint)["files"]))
    tensors = tensors_of(data_file(checkpoint, rank))
    special = [t for t in tensors if "/json." in t[0] or t[0].startswith("rank/")]
    tensor = dice.choice(special if special and dice.random() < 0.7 else tensors)
    name, dtype, shape, raw = tensor
    kind = dice.choice(("json", "bytes", "dtype", "shape", "name", "drop", "twice"))
    if kind == "json":
        text = dump(dice.choice(VALUES)).encode()
        if dtype == "U8" and raw[:1] in (b"{", b"["):
            text = dump(changed(json.loads(raw), dice)[0]).encode()
        tensor[1:] = ["U8", [len(text)], text]
    elif kind == "bytes" and raw:
        byte = bytes([dice.randrange(256)])
        tensor[3] = dice.choice((bytes(len(raw)), b"\xff" * len(raw), byte + raw[1:]))
    elif kind == "dtype":
        tensor[1:3] = dice.choice((["U8", [len(raw)]], ["I64", [len(raw) // 8]], ["F64", []]))
        tensor[3] = (raw + b"\0\0\0\0\0\0\1\0")[: 8 * math.prod(tensor[2])]
        tensor[3] = raw if tensor[1] == "U8" else tensor[3]
    elif kind == "shape":
        tensor[2] = dice.choice(([*shape, 1], shape[::-1], [math.prod(shape)], [1, *shape]))
    elif kind == "name":
        tensor[0] = dice.choice((name + "x", name.upper(), "x", name.partition("/")[2], name + "@"))
    elif kind == "drop":
        tensors.remove(tensor)
    else:
        tensors.append([name + "2", *tensor[1:]])
    # The index follows, half of the time.
    meta = content(checkpoint)
    known = meta["table"]["slices"].get(name)
    if known is not None and dice.random() < 0.7:
        names = {"U8": "uint8", "I64": "int64", "F64": "float64", "F32": "float32"}
        entry = [
            tensor[2],
            names.get(tensor[1], known[1]),
            [[rank, [0] * len(tensor[2]), tensor[2]]],
        ]
        del meta["table"]["slices"][name]
        if kind != "drop":
            meta["table"]["slices"][tensor[0]] = entry
        sign(checkpoint, meta)
    rewrite(checkpoint, rank, tensors)
    return f"file {rank}: {kind} of {name}"


# -- under checksums that are wrong ----------------------------------------------------------------


def unsigned(checkpoint, dice):
    ways = (harm, harm, harm, cut_short, sparse_index, sparse_header, sparse_data, unsigned_index)
    return dice.choice(ways)(checkpoint, dice)


def any_file(checkpoint, dice):
    return dice.choice(sorted(path for path in checkpoint.iterdir() if path.is_file()))


def cut_short(checkpoint, dice):
    path = any_file(checkpoint, dice)
    size = path.stat().st_size
    left = dice.choice((0, 1, 7, 8, 9, size - 1, size - 4, dice.randrange(size)))
    with path.open("r+b") as file:
        file.truncate(left)
    return f"{path.name} cut to {left} bytes"


def sparse_index(checkpoint, dice):
    """Let the commit be gigabytes of nothing, perhaps after what it was, or as a number in it."""
    path = checkpoint / _folder.COMMIT
    text = path.read_bytes()
    kept = dice.choice((0, 10, 60, len(text) // 2, len(text)))
    with path.open("r+b") as file:
        file.truncate(kept)
        file.truncate(HOLE)
        if dice.random() < 0.5:
            file.seek(HOLE)
            file.write(b"}\n")
    return f"index of {HOLE} bytes after {kept}"


def sparse_header(checkpoint, dice):
    """Let the header of a file be gigabytes of nothing; the index says the same."""
    meta = content(checkpoint)
    rank = dice.randrange(len(meta["files"]))
    path = data_file(checkpoint, rank)
    with path.open("r+b") as file:
        kept = dice.choice((8, 9, meta["files"][rank][1]))
        file.truncate(kept)
        file.write((HOLE - 8).to_bytes(8, "little"))
        file.truncate(HOLE + dice.choice((0, 100)))
    if dice.random() < 0.7:
        meta["files"][rank][:2] = [path.stat().st_size, HOLE]
        sign(checkpoint, meta)
    return f"header {rank} of {HOLE} bytes after {kept}"


def sparse_data(checkpoint, dice):
    """Let a tensor have gigabytes of nothing."""
    meta = content(checkpoint)
    rank = dice.randrange(len(meta["files"]))
    path = data_file(checkpoint, rank)
    header, data, _ = split(path)
    name = dice.choice([name for name in header if name != "manyhands.crc32"])
    stop = HOLE
    for each in header:
        start, end = header[each]["data_offsets"]
        moved = start >= header[name]["data_offsets"][1] and each != name
        header[each]["data_offsets"] = [start + stop * moved, end + stop * (moved or each == name)]
    header[name] |= {"dtype": "U8", "shape": [header[name]["data_offsets"][1]]}
    header[name]["shape"][0] -= header[name]["data_offsets"][0]
    blocks = sum(
        -(-(m["data_offsets"][1] - m["data_offsets"][0]) // CHECKED)
        for each, m in header.items()
        if each != "manyhands.crc32"
    )
    first = header["manyhands.crc32"]["data_offsets"][0]
    header["manyhands.crc32"] |= {
        "shape": [4 * blocks],
        "data_offsets": [first, first + 4 * blocks],
    }
    text = dump(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    with path.open("r+b") as file:
        file.truncate(8 + len(text) + first + 4 * blocks)
    meta["files"][rank][:2] = [path.stat().st_size, 8 + len(text)]
    if name in meta["table"]["slices"]:
        shape = header[name]["shape"]
        meta["table"]["slices"][name] = [shape, "uint8", [[rank, [0], shape]]]
    sign(checkpoint, meta)
    return f"{name} of {HOLE} bytes"


def unsigned_index(checkpoint, dice):
    path = checkpoint / _folder.COMMIT
    meta, words = changed(content(checkpoint), dice)
    head = path.read_text().partition('"content": ')[0]
    path.write_text(head + '"content": ' + dump(meta) + "}\n", errors="surrogatepass")
    return f"index, without its checksum: {words}"


# -- an independent reader -------------------------------------------------------------------------

NUMBERS = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def read_plainly(checkpoint):
    """Return the tensors of a checkpoint by key: every slice in the index, put in its place."""
    table = content(checkpoint)["table"]
    files = {}
    for path in checkpoint.glob("worker-*"):
        files[int(path.name.split("-")[1])] = {name: rest for name, *rest in tensors_of(path)}
    slices = {key: (shape, several) for key, (shape, _, several) in table["slices"].items()}
    for count, holders, members in table["grids"]:
        for key, (shape, _, dim) in members.items():
            each = -(-shape[dim] // count)
            slices[key] = (shape, [])
            for piece, file in enumerate(holders):
                start, stop = min(shape[dim], piece * each), min(shape[dim], (piece + 1) * each)
                offsets, sizes = [0] * len(shape), list(shape)
                offsets[dim], sizes[dim] = start, stop - start
                if start < stop:
                    slices[key][1].append([file, offsets, sizes])
    found: dict[str, torch.Tensor] = {}
    for key, (shape, several) in slices.items():
        for file, offsets, sizes in several:
            where = "" if sizes == shape else "@" + ",".join(map(str, offsets))
            stored = files[file].get(key.replace("@", "@@") + where)
            if stored is None or stored[0] not in NUMBERS:
                continue  # a load does not need it, or has failed
            values = torch.frombuffer(bytearray(stored[2]) + bytes(8), dtype=NUMBERS[stored[0]])
            whole = found.setdefault(key, torch.zeros(shape, dtype=values.dtype))
            place = tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))
            whole[place] = values[: math.prod(sizes)].view(sizes)
    return found
