"""Blocks written out plainly: all workers in one process, one float64 vector each.

Overlap and fragments included; no codec, no groups, nothing of the library. (But an outer step can
be one of the library's, whose formula is tested by itself.) DiLoCo's outer step is that of
examples/reference/diloco.py.
"""

import torch

from manyhands.blocks import Outer
from reference import diloco


def gradient(x, rank, step):
    """Of a bowl whose middle each worker sees elsewhere, and elsewhere at each step."""
    target = torch.sin(torch.arange(len(x), dtype=x.dtype) * (rank + 1) + step)
    return x * 0.3 - target


def outer_step(name, options, anchor, mean_difference, memory):
    """Return the next anchor and memory, by the papers' formulas, or by an `Outer`."""
    g = mean_difference
    if isinstance(name, Outer):  # its memories are the columns of `memory`
        anchor, memories = anchor.clone(), [each.clone() for each in memory.unbind(1)]
        name.step(anchor, g.clone(), memories)
        return anchor, torch.stack(memories, dim=1) if memories else memory
    if name == "LocalSGD":
        return anchor - g, memory
    if name == "DiLoCo":
        return diloco.outer_step(anchor, g, memory, **options)
    if name == "BMUF":
        memory = options["block_momentum"] * memory + options["block_lr"] * g
        return anchor - memory, memory
    if name == "SlowMo":
        memory = options["slow_momentum"] * memory + g / options["inner_lr"]
        return anchor - options["slow_lr"] * options["inner_lr"] * memory, memory
    raise AssertionError(name)


def train(start, gradient, workers, steps, lr, name, options, *, every, overlap=0, fragments=1):
    """Return each worker's vector after every step of plain gradient descent."""
    xs = [start.clone() for _ in range(workers)]
    anchor, memory = start.clone(), torch.zeros_like(start)
    n = len(start)
    if isinstance(name, Outer):
        memory = start.new_zeros(n, name.memories)
    fragment_slices = [
        slice(n * f // fragments, n * (f + 1) // fragments) for f in range(fragments)
    ]
    in_flight: list[tuple] = []
    seen = []
    for step in range(1, steps + 1):
        xs = [x - lr * gradient(x, rank, step) for rank, x in enumerate(xs)]
        while in_flight and in_flight[0][0] <= step:
            merge(in_flight.pop(0), xs, anchor, memory, name, options)
        for f, where in enumerate(fragment_slices):
            if every * (f + 1) // fragments == (step - 1) % every + 1:
                differences = [anchor[where] - x[where] for x in xs]
                in_flight.append((step + overlap, where, differences))
                if not overlap:
                    merge(in_flight.pop(0), xs, anchor, memory, name, options)
        seen.append(torch.stack(xs))
    return torch.stack(seen)


def merge(arrived, xs, anchor, memory, name, options):
    _, where, differences = arrived
    mean = torch.stack(differences).mean(dim=0)
    before = anchor[where].clone()
    anchor[where], memory[where] = outer_step(name, options, before, mean, memory[where])
    for x, difference in zip(xs, differences, strict=True):
        sent = before - difference  # where the worker was then; it keeps its steps since
        x[where] = anchor[where] + (x[where] - sent)


def train_own(start, gradient, rounds, lr, name, options, *, overlap=0, samples=None):
    """Return each worker's vector after every step, where each takes steps of its own in a block.

    `rounds` are the workers' numbers of steps in each block. The mean of a sync round is weighted
    by them, or by the samples of all steps: `samples(rank, step)`. The last one is merged at once.
    """
    workers = range(len(rounds[0]))
    xs = [start.clone() for _ in workers]
    anchor, memory = start.clone(), torch.zeros_like(start)
    seen: list[list] = [[] for _ in workers]
    taken = [0 for _ in workers]
    moved = None  # by how much each worker's vector changes when it merges the last round
    for block, counts in enumerate(rounds):
        weights = []
        for rank, count in enumerate(counts):
            weight = 0.0
            for number in range(1, count + 1):
                taken[rank] += 1
                xs[rank] = xs[rank] - lr * gradient(xs[rank], rank, taken[rank])
                weight += 1.0 if samples is None else samples(rank, taken[rank])
                if moved is not None and number == overlap:
                    xs[rank] = xs[rank] + moved[rank]
                seen[rank].append(xs[rank].clone())
            weights.append(weight)
        differences = [anchor - x for x in xs]
        mean = sum(w * d for w, d in zip(weights, differences, strict=True)) / sum(weights)
        before = anchor
        anchor, memory = outer_step(name, options, before.clone(), mean, memory)
        moved = [anchor - before + difference for difference in differences]
        if overlap == 0 or block == len(rounds) - 1:
            for rank in workers:
                xs[rank] = xs[rank] + moved[rank]
                seen[rank][-1] = xs[rank].clone()
            moved = None
    return [torch.stack(steps) for steps in seen]
