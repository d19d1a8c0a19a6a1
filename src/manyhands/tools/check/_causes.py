"""Hypotheses about a difference, cheapest first: functions that yield a finding or nothing.

To add one, write a function and add it to `ALONE` (it looks at the ranks only) or to `BESIDE` (it
looks at the ranks beside one process), and add a script with the bug to tests/check.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.tools.check._compare import ROUNDING, Difference, Recording, SeenStep, apart, size
from manyhands.tools.check._report import Finding

LOOK = {
    "different start": "the seed before the model is made, and who sends rank 0's parameters",
    "not averaged": "DDP around what is called; no_sync() on the last pass; gradients made later",
    "some not averaged": "parameters outside the module that DDP wraps, or left out of the average",
    "drift": "optimizer state and settings of each rank; parameters changed outside step()",
    "not sharded": "a DistributedSampler, or a seed or an offset that depends on the rank",
    "same order": "sampler.set_epoch(epoch)",
    "clipping norm": "the order (average, then clip), and that the norm is of the whole gradient",
    "constant factor": "what the loss is divided by, and DDP's mean",
    "factor of some": "parameters that are averaged twice, summed, left out, or scaled by hand",
    "token weights": "dividing the summed loss by the tokens of all ranks and all passes",
    "passes weighted": "averaging again on every pass, and what each pass is divided by",
    "other update": "weight decay, momentum and other settings; parameters changed outside step()",
}


def finding(cause: str, text: str, place: str = "") -> Finding:
    return Finding(cause, text, place, LOOK.get(cause, ""))


def some(names: list[str], of: int) -> str:
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return "all parameters" if len(names) == of > 1 else "".join(names[:1]) + others


@dataclass
class Case:
    """What the hypotheses look at."""

    ranks: list[Recording]
    gradient_of: Callable[[int, int, int], dict[str, Tensor]]  # of a step, a rank and a pass alone
    one: Recording | None = None
    difference: Difference | None = None

    @property
    def steps(self) -> list[SeenStep]:
        return self.ranks[0].steps

    def apart(self, what: str, number: int) -> list[str]:
        """Return the tensors that are not the same on all ranks in a step."""
        first, *others = [getattr(record.steps[number], what) for record in self.ranks]
        far = [n for other in others for n, f in apart(other, first, {}).items() if f > 1e-6]
        return list(dict.fromkeys(far))

    def pair(self) -> tuple[SeenStep, SeenStep, Difference]:
        assert self.one is not None and self.difference is not None
        number = self.difference.step
        return self.steps[number], self.one.steps[number], self.difference


Found = Iterator[Finding]
Hypothesis = Callable[[Case], Found]


def unequal_steps(case: Case) -> Found:
    counts = [len(record.steps) for record in case.ranks]
    if len(set(counts)) > 1:
        yield finding("unequal steps", f"the ranks end after {counts} steps")


def unequal_start(case: Case) -> Found:
    first = case.ranks[0].start
    trained = case.steps[0].params
    others = [apart(record.start, first, {}) for record in case.ranks[1:]]
    names = [name for name in trained if any(far.get(name, 0.0) > 1e-9 for far in others)]
    if names and case.apart("params", 0):
        which = some(names, len(trained))
        yield finding("different start", f"the ranks begin with other values of {which}")


def own_rates(case: Case) -> Found:
    for number, step in enumerate(case.steps):
        rates = [record.steps[number].rates for record in case.ranks]
        if any(other != rates[0] for other in rates):
            yield finding("learning rate differs", f"the ranks' rates are {rates}", step.place)


def own_gradients(case: Case) -> Found:
    for number, step in enumerate(case.steps):
        names = case.apart("grads", number)
        moved = case.apart("params", number)
        if moved and not names:
            return  # something else
        if not set(names) & set(moved):
            continue  # each has the shard that it steps
        missing = [n for n in names if any(n not in r.steps[number].grads for r in case.ranks)]
        largest = max(map(size, step.grads.values()), default=0.0)
        every = {n for n, g in step.grads.items() if size(g) > ROUNDING * largest} <= set(names)
        if missing:
            text = f"in step {number + 1} only some ranks have a gradient of {some(missing, 0)}"
            yield finding("used by some ranks", text, step.made)
        elif step.before and not case.apart("before", number):
            yield finding("clipping norm", "each rank clips by a norm of its own", step.place)
        else:
            which = "" if every else f" of {some(names, len(step.params))}"
            text = f"in step {number + 1} each rank steps with a gradient{which} of its own"
            yield finding("not averaged" if every else "some not averaged", text, step.made)


def clipped_early(case: Case) -> Found:
    """Gradients are clipped while each rank still has its own, and averaged afterwards."""
    for number, step in enumerate(case.steps):
        if case.apart("before", number) and not case.apart("grads", number):
            yield finding("clipping norm", "each rank clips before the average", step.place)


def drift(case: Case) -> Found:
    for number, step in enumerate(case.steps):
        names = case.apart("params", number)
        if names:
            text = f"the ranks' {some(names, len(step.params))} differ since step {number + 1}"
            text += ", though their gradients and rates are equal"
            yield finding("drift", text, step.place)


def shared_samples(case: Case) -> Found:
    """Ranks see the same samples, in the same steps or elsewhere in the first epoch."""
    loaders = [record.training_loaders() for record in case.ranks]
    place = loaders[0][0].place if loaders[0] else ""
    every = [loader for own in loaders for loader in own]
    # Noise in the data set hides that two samples are one. Their indices show it, in equal sets.
    by_index = bool(every and every[0].data) and len({loader.data for loader in every}) == 1
    by_index = by_index and all(loader.indexed for loader in every)
    for what in ("indices", "samples")[not by_index :]:
        seen = [[one for step in r.steps for one in getattr(step, what) if one] for r in case.ranks]
        if all(seen):
            break
    else:
        return
    pairs = [(first, other) for first, *rest in zip(*seen, strict=False) for other in rest]
    same = sum(sum((Counter(a) & Counter(b)).values()) for a, b in pairs)
    distinct = len({h for batch in seen[0] for h in batch})
    alike = len({tuple(batches[0]) for batches in seen}) == 1 and len(set(seen[0][0])) > 1
    # Draws of rank 0 alone, say for an evaluation, part ranks of one seed after a batch or two.
    if alike or (distinct > 1 and same > 0.9 * sum(len(b) for _, b in pairs)):
        yield finding("not sharded", "the ranks see the same samples in the same steps", place)
    if any(len(own) != 1 or own[0].repeats for own in loaders):
        return
    for record, (loader,) in zip(case.ranks, loaders, strict=True):
        used = sum(len(one) for step in record.steps for one in step.samples)
        if used <= 0.6 * sum(len(batch) for epoch in loader.epochs for batch in epoch):
            return  # each rank takes its part of what the loader gives
    if by_index and all(loader.whole for loader in every):
        text = f"each of {len(every)} ranks draws from all samples of the data set"
        yield finding("seen twice", text, place)
    epochs = [own[0].orders(by_index)[0] for own in loaders]
    counts = Counter(h for epoch in epochs for h in set(epoch))
    twice = sum(n > 1 for n in counts.values())
    # In the data itself, or an iteration is several epochs.
    repeats = any(len(set(epoch)) < (1.0 if by_index else 0.5) * len(epoch) for epoch in epochs)
    if twice > max(len(case.ranks) - 1, 0.05 * len(counts)) and not repeats:
        text = f"{twice} of {len(counts)} samples of an epoch are seen by more than one rank"
        yield finding("seen twice", text, place)


def carried_over(case: Case) -> Found:
    for number, step in enumerate(case.steps):
        if number and step.carried and len({each.optimizer for each in case.steps}) == 1:
            text = f"the gradient of step {number + 1} still holds that of step {number}"
            yield finding("gradients not cleared", text, step.made)


def same_order(case: Case) -> Found:
    for loader in case.ranks[0].training_loaders():
        first, second = [*filter(None, loader.orders(loader.indexed)), [], []][:2]
        same = second and first[: len(second)] == second
        if loader.reshuffles and same and len(set(first)) > 2:
            yield finding("same order", "all epochs have the samples in one order", loader.place)


ALONE: list[Hypothesis] = [unequal_steps, unequal_start, own_rates, own_gradients, clipped_early]
ALONE += [drift, shared_samples, carried_over, same_order]


def part_of_the_model_left_out(case: Case) -> Found:
    """After a sync round of blocks, ranks are equal in some parameters only."""
    # Not after the first step, in which Adam moves by the gradient's sign.
    different = [case.apart("params", number) for number in range(1, len(case.steps))]
    least = min(different, key=len, default=[])
    if 0 < len(least) < len(case.steps[0].params):
        text = f"the ranks' {some(least, 0)} differ after every step, and others are equal at times"
        yield finding("some not averaged", text, case.steps[0].place)


IN_BLOCKS = [unequal_steps, shared_samples, same_order, part_of_the_model_left_out]


def clipped_otherwise(case: Case) -> Found:
    a, b, difference = case.pair()
    if difference.what == "grads" and a.before and b.before:
        yield finding("clipping norm", "equal gradients are clipped differently", a.place)


def rates_differ(case: Case) -> Found:
    a, b, difference = case.pair()
    if difference.what == "params" and a.rates != b.rates:
        if a.schedules != b.schedules:
            text = f"schedules are stepped {a.schedules} times before step {difference.step + 1}"
            yield finding("schedule", f"{text}, and {b.schedules} times in one process", a.place)
        text = f"the learning rates are {a.rates}, and {b.rates} in one process"
        yield finding("learning rate differs", text, a.place)


def other_update(case: Case) -> Found:
    a, _, difference = case.pair()
    if difference.what == "params":
        names = some(difference.names, len(difference.distances))
        text = f"the gradients are equal, but the optimizer moves {names} otherwise"
        yield finding("other update", text, a.place)


def a_factor(case: Case) -> Found:
    """All gradients, or some, are those of one process times a number, or left out."""
    a, b, difference = case.pair()
    x = getattr(a, difference.what)
    y = getattr(b, difference.what)
    y = {name: there for name, there in y.items() if name in a.own} or y  # not those of others
    least = ROUNDING * max(map(size, y.values()), default=0.0)
    factors = {}
    for name, there in y.items():
        here = x.get(name, torch.zeros_like(there))
        if here.shape == there.shape and size(there) > least:
            factors[name] = float((here * there).sum() / (there * there).sum())
            rest = size(here - factors[name] * there) / (size(here) or 1.0)
            if rest > max(1e-4, 10 * difference.tolerance):
                if name in difference.names:
                    return
                factors[name] = 1.0  # small, and full of rounding
    values = sorted(factors.values())
    if values and values[0] and values[-1] - values[0] <= 1e-3 * abs(values[-1]):
        yield constant_factor(values[len(values) // 2], len(case.ranks), len(a.passes), a.made)
    off = {name: factor for name, factor in factors.items() if name in difference.names}
    shown = ", ".join(dict.fromkeys(f"{factor:.4f}" for factor in list(off.values())[:4]))
    text = f"the gradient of {some(list(off), 0)} is {shown} times that of one process"
    if off:
        yield finding("factor of some" if any(off.values()) else "no gradient", text, a.made)


def constant_factor(factor: float, n: int, k: int, place: str) -> Finding:
    known = {  # the last that fits is told
        n * k: "the gradient is a sum over ranks and passes, not an average",
        1 / (n * k): "the loss is divided by the number of passes, and by the world size as well",
        k: "the loss is not divided by the number of passes",
        1 / k: "the loss is divided by the number of passes, once too often",
        n: "the gradient is summed over the ranks, not averaged",
        1 / n: "the loss is divided by the world size, or is a sum, and is averaged as well",
    }
    why = [f": {text}" for value, text in known.items() if abs(factor / value - 1) < 1e-3]
    text = f"the gradient of {n} ranks is {factor:.4f} times that of one process"
    return finding("constant factor", text + ", at every parameter" + "".join(why[-1:]), place)


def weights(case: Case) -> list[tuple[Tensor, float]]:
    """Return weights [ranks, passes], and what they leave over: of the ranks, of one process."""
    a, b, difference = case.pair()
    n = len(case.ranks)
    k = max(len(a.passes), 1)
    cells = [(rank, number) for rank in range(n) for number in range(k)] if n * k <= 16 else []
    alone = [case.gradient_of(difference.step, *cell) for cell in cells]
    x = a.before or a.grads
    y = b.before or b.grads
    shared = [name for name in y if alone and all(name in g for g in (x, *alone))]
    if not shared:
        return [(torch.ones(n, k), 1.0)] * 2
    flat = [torch.cat([t[n].double().reshape(-1) for n in shared]) for t in (x, y, *alone)]
    columns = torch.stack(flat[2:], 1)
    found = []
    for target in flat[:2]:
        solved = torch.linalg.lstsq(columns, target.unsqueeze(1), driver="gelsd").solution[:, 0]
        rest = float((columns @ solved - target).norm() / target.norm().clamp_min(1e-300))
        found.append((solved.reshape(n, k) * n * k, rest))
    return found


def weighted_otherwise(case: Case) -> Found:
    """Ranks and passes have other weights than in one process."""
    a, _, difference = case.pair()
    (here, rest), (there, unsolved) = weights(case)
    limit = max(1e-4, 10 * difference.tolerance)
    several = here.shape[1] > 1
    if rest > limit:
        return
    shown, theirs = ([[round(v, 3) for v in row] for row in w.tolist()] for w in (here, there))
    zero = here.abs() < 1e-3
    sizes = [float(len(s)) for r in case.ranks for s in r.steps[difference.step].samples]
    counts = torch.tensor(sizes) / max(sum(sizes), 1.0) * len(sizes)
    by_size = len(sizes) == there.numel() and one(there.reshape(-1) / counts) and not one(counts)
    if several and bool(zero.all(0).any()):
        text = f"some passes are not in the step's gradient: the weights are {shown}"
        yield finding("passes missing", text, a.made)
    elif bool(zero.all(1).any()):
        ranks = ", ".join(str(r) for r in range(len(here)) if bool(zero[r].all()))
        yield finding("ranks missing", f"the gradient of rank {ranks} is left out", a.made)
    elif unsolved < limit and one(here) and by_size:
        yield finding("uneven batches", "batches of unequal size count alike in the mean", a.made)
    elif unsolved < limit and not one(there):
        text = "the mean of the ranks' and passes' means is not that over all samples or tokens"
        text += f": their weights are {shown}, and in one process {theirs}"
        yield finding("token weights", text, a.made)
    elif unsolved < limit and not one(here):
        who = "passes" if several and one(1 + here.std(0, unbiased=False)) else "ranks"
        text = f"the {who} have the weights {shown}, and in one process all count alike"
        yield finding(f"{who} weighted", text, a.made)


def one(value: Tensor) -> bool:
    return bool((value - 1).abs().max() < 1e-3)


BESIDE = [clipped_otherwise, rates_differ, other_update, a_factor, weighted_otherwise]
