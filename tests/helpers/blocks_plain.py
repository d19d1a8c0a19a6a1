"""Blocks written out plainly: all workers in one process, one float64 vector each.

Overlap and fragments included; no codec, no groups, nothing of the library.
"""

import torch


def outer_step(name, options, anchor, mean_difference, memory):
    """The next common point and memory, by the papers' formulas."""
    g = mean_difference
    if name == "LocalSGD":
        return anchor - g, memory
    if name == "DiLoCo":
        memory = options["momentum"] * memory + g
        return anchor - options["lr"] * (g + options["momentum"] * memory), memory
    if name == "BMUF":
        memory = options["block_momentum"] * memory + options["block_lr"] * g
        return anchor - memory, memory
    if name == "SlowMo":
        memory = options["slow_momentum"] * memory + g / options["inner_lr"]
        return anchor - options["slow_lr"] * options["inner_lr"] * memory, memory
    raise AssertionError(name)


def train(start, gradient, workers, steps, lr, name, options, *, every, overlap=0, fragments=1):
    """Each worker's vector after every step of plain gradient descent."""
    xs = [start.clone() for _ in range(workers)]
    anchor, memory = start.clone(), torch.zeros_like(start)
    n = len(start)
    parts = [slice(n * f // fragments, n * (f + 1) // fragments) for f in range(fragments)]
    flying, seen = [], []
    for step in range(1, steps + 1):
        xs = [x - lr * gradient(x, rank, step) for rank, x in enumerate(xs)]
        while flying and flying[0][0] <= step:
            merge(flying.pop(0), xs, anchor, memory, name, options)
        for f, part in enumerate(parts):
            if every * (f + 1) // fragments == (step - 1) % every + 1:
                differences = [anchor[part] - x[part] for x in xs]
                flying.append((step + overlap, part, differences))
                if not overlap:
                    merge(flying.pop(0), xs, anchor, memory, name, options)
        seen.append(torch.stack(xs))
    return torch.stack(seen)


def merge(landed, xs, anchor, memory, name, options):
    _, part, differences = landed
    mean = torch.stack(differences).mean(dim=0)
    before = anchor[part].clone()
    anchor[part], memory[part] = outer_step(name, options, before, mean, memory[part])
    for x, difference in zip(xs, differences, strict=True):
        sent = before - difference  # where it was then; what it has done since, it keeps
        x[part] = anchor[part] + (x[part] - sent)
