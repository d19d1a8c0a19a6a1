"""Hypotheses about the ranks' records, which need no replay, cheapest first.

To add a cause, write a function that returns a finding or None, add it to `RANK_CAUSES`, and add a
script with the bug to tests/check.
"""

from collections import Counter
from typing import Any

from manyhands.tools.check._case import Case, Hypothesis
from manyhands.tools.check._compare import ROUNDING, largest_size, size
from manyhands.tools.check._records import SeenLoader
from manyhands.tools.check._report import Finding, describe, finding


def unequal_steps(case: Case) -> Finding | None:
    counts = [len(record.steps) for record in case.ranks]
    if len(set(counts)) > 1:
        return finding("unequal steps", f"the ranks end after {counts} steps")
    return None


def unequal_start(case: Case) -> Finding | None:
    trained = case.steps[0].params
    names = []
    for name in case.unequal_start:
        if name in trained and name not in case.untrained_copies:
            names.append(name)
    if names and case.unequal("params", 0):
        which = describe(names, len(trained))
        return finding("different start", f"the ranks start with different values of {which}")
    return None


def unequal_rates(case: Case) -> Finding | None:
    for number, step in enumerate(case.steps):
        rates = [record.steps[number].rates for record in case.ranks]
        if rates.count(step.rates) < len(rates):
            return finding("learning rate differs", f"the ranks' rates are {rates}", step.place)
    return None


def unequal_gradients(case: Case) -> Finding | None:
    for number, step in enumerate(case.steps):
        names = case.unequal("grads", number)
        moved = case.unequal("params", number)
        if moved and not names:
            return None  # a different cause
        if set(names).isdisjoint(moved):
            continue  # gradients of shards
        if step.before and not case.unequal("before", number):
            return finding("clipping norm", "each rank clips by a separate norm", step.place)
        least = ROUNDING * largest_size(step.grads)
        large = {name for name, gradient in step.grads.items() if size(gradient) > least}
        if large.issubset(names):
            text = f"in step {number + 1} each rank steps with a separate gradient"
            return finding("not averaged", text, step.last_pass)
        which = describe(names, len(step.params))
        text = f"in step {number + 1} each rank steps with a separate gradient of {which}"
        return finding("some not averaged", text, step.last_pass)
    return None


def clipped_early(case: Case) -> Finding | None:
    for number, step in enumerate(case.steps):
        if case.unequal("before", number) and not case.unequal("grads", number):
            return finding("clipping norm", "each rank clips before the average", step.place)
    return None


def drift(case: Case) -> Finding | None:
    for number, step in enumerate(case.steps):
        names = case.unequal("params", number)
        if names:
            text = f"the ranks' {describe(names, len(step.params))} differ since step {number + 1}"
            text += ", although gradients and rates are equal"
            return finding("drift", text, step.place)
    return None


def state_differs(case: Case) -> Finding | None:
    """Find unequal state, such as a teacher or a queue."""
    equal: set[str] = set()
    for number, step in enumerate(case.steps):
        for name in step.state:
            marks = {record.steps[number].state.get(name, "") for record in case.ranks}
            if len(marks) == 1:
                equal.add(name)
            elif name in equal and "" not in marks:
                text = f"the ranks have different values of {name} since step {number + 1}"
                return finding("state differs", f"{text}, and the loss depends on it")
    return None


def shared_samples(case: Case) -> Finding | None:
    """Find samples that ranks share, in a step or in the first epoch."""
    loaders: list[SeenLoader] = []
    for record in case.ranks:
        loaders += record.training_loaders().values()
    # Noise changes hashes. With equal data sets, compare indices.
    data_sets = {loader.data for loader in loaders}
    by_index = len(data_sets) == 1 and "" not in data_sets
    by_index = by_index and all(loader.indexed for loader in loaders)
    seen = [record.pass_samples(by_index) for record in case.ranks]
    if by_index and not all(seen):
        seen = [record.pass_samples(False) for record in case.ranks]
    if not all(seen):
        return None
    place = loaders[0].place if case.ranks[0].training_loaders() else ""
    if same_in_passes(seen):
        return finding("not sharded", "the ranks see the same samples in the same steps", place)
    for record in case.ranks:
        own = list(record.training_loaders().values())
        if len(own) != 1 or own[0].repeats:
            return None
        used = sum(map(len, record.pass_samples(False)))
        if used <= 0.6 * sum(map(len, own[0].orders(False))):
            return None  # each rank selects a part of the loader's batches
    if by_index and all(loader.shuffles_all for loader in loaders):
        text = f"each of {len(loaders)} ranks draws from all samples of the data set"
        return finding("seen twice", text, place)
    epochs = [loader.orders(by_index)[0] + loader.rest.samples(by_index) for loader in loaders]
    counts = Counter[Any]()
    for epoch in epochs:
        distinct = set(epoch)
        if len(distinct) < (1.0 if by_index else 0.5) * len(epoch):
            return None  # the data repeats samples
        counts.update(distinct)
    twice = len(counts) - list(counts.values()).count(1)
    if twice > max(len(epochs) - 1, 0.05 * len(counts)):
        text = f"more than one rank sees {twice} of {len(counts)} samples of an epoch"
        return finding("seen twice", text, place)
    return None


def same_in_passes(seen: list[list[list[Any]]]) -> bool:
    """Return whether passes of different ranks have equal samples."""
    first = seen[0][0]
    # Ranks with equal seeds may diverge later, for example if only rank 0 evaluates.
    if len(set(first)) > 1 and all(batches[0] == first for batches in seen):
        return True
    same = 0
    total = 0
    for batch, *others in zip(*seen, strict=False):
        for other in others:
            same += (Counter(batch) & Counter(other)).total()
            total += len(other)
    return same > 0.9 * total and len(set[Any]().union(*seen[0])) > 1


def carried_over(case: Case) -> Finding | None:
    if len({step.optimizer for step in case.steps}) > 1:
        return None
    for number, step in enumerate(case.steps):
        if number and step.carried:
            text = f"the gradient of step {number + 1} includes the gradient of step {number}"
            return finding("gradients not cleared", text, step.last_pass)
    return None


def same_order(case: Case) -> Finding | None:
    for loader in case.ranks[0].training_loaders().values():
        orders = list(filter(None, loader.orders(loader.indexed)))
        if not loader.reshuffles or len(orders) < 2 or len(set(orders[0])) <= 2:
            continue
        if orders[0][: len(orders[1])] == orders[1]:
            return finding("same order", "all epochs have one order of samples", loader.place)
    return None


def part_of_the_model_left_out(case: Case) -> Finding | None:
    """Find parameters that differ between ranks after a sync round of blocks."""
    # Omit the first step, in which Adam moves by the gradient's sign.
    unequal_ones = [case.unequal("params", number) for number in range(1, len(case.steps))]
    least = min(unequal_ones, key=len, default=[])
    if 0 < len(least) < len(case.steps[0].params):
        which = describe(least)
        text = f"the ranks' {which} differ after every step, unlike other parameters"
        return finding("some not averaged", text, case.steps[0].place)
    return None


RANK_CAUSES: list[Hypothesis] = [
    unequal_steps,
    unequal_start,
    unequal_rates,
    unequal_gradients,
    clipped_early,
    drift,
    shared_samples,
    carried_over,
    same_order,
    state_differs,
]
# For ranks in manyhands.blocks, which are equal only after a sync round.
BLOCK_CAUSES: list[Hypothesis] = [
    unequal_steps,
    shared_samples,
    same_order,
    part_of_the_model_left_out,
]
