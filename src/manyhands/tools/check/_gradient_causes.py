"""Hypotheses about the first difference between ranks and replay, cheapest first.

To add a cause, write a function that returns a finding or None, add it to `GRADIENT_CAUSES`, and
add a script with the bug to tests/check.
"""

import torch
from torch import Tensor

from manyhands.tools.check._case import Case, Hypothesis
from manyhands.tools.check._compare import ROUNDING, Difference, largest_size, size
from manyhands.tools.check._report import Finding, describe, finding

LEAST_LIMIT = 1e-4  # relative error of a factor or of weights that explain a gradient
EQUAL_FACTORS = 1e-3  # relative difference of equal factors or weights
MOST_RUNS = 16  # to measure gradients


def limit_of(difference: Difference) -> float:
    return max(LEAST_LIMIT, 10 * difference.tolerance)


def clipped_otherwise(case: Case) -> Finding | None:
    a, b, difference = case.pair()
    if difference.kind == "grads" and a.before and b.before:
        return finding("clipping norm", "clipping changes equal gradients differently", a.place)
    return None


def unequal_schedules_or_rates(case: Case) -> Finding | None:
    a, b, difference = case.pair()
    if difference.kind != "params" or a.rates == b.rates:
        return None
    if a.schedules != b.schedules:
        text = f"schedules make {a.schedules} steps before optimizer step {difference.step + 1}"
        return finding("schedule", f"{text}, and {b.schedules} in one process", a.place)
    text = f"the learning rates are {a.rates}, and {b.rates} in one process"
    return finding("learning rate differs", text, a.place)


def other_update(case: Case) -> Finding | None:
    a, _, difference = case.pair()
    if difference.kind != "params":
        return None
    names = describe(difference.names, len(difference.distances))
    text = f"the gradients are equal, but the optimizer changes {names} differently"
    return finding("other update", text, a.place)


def scaled(case: Case) -> Finding | None:
    """Find missing gradients, or multiples of the replay's gradients."""
    a, b, difference = case.pair()
    gradients = getattr(a, difference.kind)
    references = getattr(b, difference.kind)
    own = {name: references[name] for name in a.own if name in references}
    references = own or references
    least = ROUNDING * largest_size(references)
    factors: dict[str, float] = {}
    for name, reference in references.items():
        gradient = gradients.get(name, torch.zeros_like(reference))
        if gradient.shape != reference.shape or size(reference) <= least:
            continue
        factors[name] = float((gradient * reference).sum() / (reference * reference).sum())
        rest = size(gradient - factors[name] * reference) / (size(gradient) or 1.0)
        if rest > limit_of(difference):
            if name in difference.names:
                return None
            factors[name] = 1.0  # the gradient is small, with much rounding
    values = sorted(factors.values())
    if values and values[0] and values[-1] - values[0] <= EQUAL_FACTORS * abs(values[-1]):
        middle = values[len(values) // 2]
        return None if abs(middle - 1) < LEAST_LIMIT else constant_factor(case, middle)
    wrong = {name: value for name, value in factors.items() if name in difference.names}
    if not wrong:
        return None
    shown = ", ".join(dict.fromkeys(f"{value:.4f}" for value in list(wrong.values())[:4]))
    text = f"the gradient of {describe(list(wrong))} is {shown} times that of one process"
    cause = "factor of some" if any(wrong.values()) else "no gradient"
    return finding(cause, text, a.last_pass)


def constant_factor(case: Case, factor: float) -> Finding:
    """Describe a common factor of all gradients."""
    step = case.pair()[0]
    ranks = len(case.ranks)
    reason = ""
    if abs(factor / ranks - 1) < EQUAL_FACTORS:
        reason = ": the gradient is summed over the ranks, not averaged"
    elif abs(factor * ranks - 1) < EQUAL_FACTORS:
        reason = ": the loss is summed, or divided by the world size, before the average over ranks"
    text = f"the gradient of {ranks} ranks is {factor:.4f} times that of one process"
    return finding("constant factor", f"{text}, for every parameter{reason}", step.last_pass)


def weights(case: Case) -> tuple[Tensor, Tensor] | None:
    """Return the weight of each rank and pass, in the ranks' and in the replay's gradient.

    In a mean, all weights are 1. The weights are a least-squares solution for the gradients of
    single passes of single ranks. Return None if the ranks' gradient is no weighted sum of these.
    Weights are NaN if the replay's gradient is no such sum.
    """
    a, b, difference = case.pair()
    ranks = len(case.ranks)
    passes = max(len(a.passes), 1)
    if ranks * passes > MOST_RUNS:
        return None
    gradients = [a.before or a.grads, b.before or b.grads]
    for rank in range(ranks):
        for number in range(passes):
            gradients.append(case.gradient_of(difference.step, rank, number))
    names = set(gradients[0]).intersection(*gradients)
    if not names:
        return None
    flat = []
    for gradient in gradients:
        flat.append(torch.cat([gradient[name].double().reshape(-1) for name in sorted(names)]))
    columns = torch.stack(flat[2:], 1)
    targets = torch.stack(flat[:2], 1)
    solved = torch.linalg.lstsq(columns, targets, driver="gelsd").solution
    norms = targets.norm(dim=0).clamp_min(1e-300)
    errors = (columns @ solved - targets).norm(dim=0) / norms
    if errors[0] > limit_of(difference):
        return None
    if not errors[1] < limit_of(difference):
        solved[:, 1] = torch.nan
    here, there = solved.T.reshape(2, ranks, passes) * ranks * passes
    return here, there


def weighted_otherwise(case: Case) -> Finding | None:
    """Find ranks and passes with different weights than in the replay."""
    a, _, difference = case.pair()
    found = weights(case)
    if found is None:
        return None
    here, there = found
    place = a.last_pass
    zero = here.abs() < EQUAL_FACTORS
    if bool(zero.all(1).any()):
        ranks = ", ".join(map(str, zero.all(1).nonzero().flatten().tolist()))
        return finding("ranks missing", f"the gradient of rank {ranks} is omitted", place)
    if bool(there.isnan().any()):
        return None
    sizes = []
    for record in case.ranks:
        for batch in record.steps[difference.step].batches:
            sizes.append(len(batch.hashes))
    by_size = torch.tensor(sizes) / max(sum(sizes), 1) * len(sizes)
    uneven = len(sizes) == there.numel() and not all_ones(by_size)
    if uneven and all_ones(here) and all_ones(there.flatten() / by_size):
        return finding(
            "uneven batches", "batches of unequal size have equal weights in the mean", place
        )
    if not all_ones(there):
        text = (
            "the mean of the means of ranks and passes is not the mean over all samples or tokens"
        )
        text += f": the weights are {rounded(here)}, and in one process {rounded(there)}"
        return finding("token weights", text, place)
    if not all_ones(here):
        who = "ranks"
        if here.shape[1] > 1 and bool((here.std(0, unbiased=False) < EQUAL_FACTORS).all()):
            who = "passes"
        text = f"the {who} have the weights {rounded(here)}, and in one process equal weights"
        return finding(f"{who} weighted", text, place)
    return None


def all_ones(weights: Tensor) -> bool:
    return bool((weights - 1).abs().max() < EQUAL_FACTORS)


def rounded(weights: Tensor) -> list[list[float]]:
    return [[round(weight, 3) for weight in row] for row in weights.tolist()]


GRADIENT_CAUSES: list[Hypothesis] = [
    clipped_otherwise,
    unequal_schedules_or_rates,
    other_update,
    scaled,
    weighted_otherwise,
]
