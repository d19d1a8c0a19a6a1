"""The plain oracle of a `Cursor`: one process, one permutation, global batches in order.

The permutation is computed here a second time, one position at a time, in Python's own integers.
"""

import hashlib
import math


def permutation(samples, seed, epoch):
    """The samples of an epoch in their order."""
    rows = math.isqrt(samples - 1) + 1 if samples > 1 else 1
    columns = -(-samples // rows)
    text = f"manyhands order 1: {seed} {epoch}".encode()
    digest = hashlib.blake2b(text, digest_size=32).digest()
    keys = [int.from_bytes(digest[i : i + 4], "little") for i in range(0, 32, 4)]

    def stir(cell):
        row, column = divmod(cell, columns)
        for number, key in enumerate(keys):
            if number % 2 == 0:
                row = (row + mix(column ^ key)) % rows
            else:
                column = (column + mix(row ^ key)) % columns
        return row * columns + column

    order = []
    for position in range(samples):
        cell = stir(position)
        while cell >= samples:
            cell = stir(cell)
        order.append(cell)
    return order


def mix(bits):
    bits = (bits ^ bits >> 16) * 0x21F0AAAD & 0xFFFFFFFF
    bits = (bits ^ bits >> 15) * 0x735A2D97 & 0xFFFFFFFF
    return bits ^ bits >> 15


def global_batches(samples, batch_size, seed=0, epoch=0, drop_last=False):
    """The samples of each step, of all ranks together."""
    order = permutation(samples, seed, epoch)
    steps = [order[i : i + batch_size] for i in range(0, samples, batch_size)]
    return [step for step in steps if len(step) == batch_size or not drop_last]
