"""Hypotheses about learning rates that differ from a run without interruption."""

import math

from manyhands.tools.check._report import Finding, finding
from manyhands.tools.check.resume._case import ResumeCase, ResumeHypothesis
from manyhands.tools.check.resume._state_causes import optimizer_state

FIT = 4  # number of learning rates that identify a position in the schedule


def schedules(case: ResumeCase) -> Finding | None:
    counters: list[tuple[list[int], list[int]]] = []
    for whole, resumed in case.pairs(0):
        if len(whole.schedules) != len(resumed.schedules):
            return None
        counters.append((whole.schedules, resumed.schedules))
    for number, (expected, found) in enumerate(counters):
        if found == expected or (number and not case.same_ranks):
            continue
        i = [a == b for a, b in zip(expected, found, strict=True)].index(False)
        text = f"a schedule made {found[i]} steps before step {case.at + number + 1}, "
        text += f"not {expected[i]}"
        if number:
            first, other = counters[0]
            if found[i] - other[i] == 2 * (expected[i] - first[i]):
                return finding("schedule stepped twice", f"{text}: two per step")
        elif found[i] <= case.whole[0].steps[0].schedules[i]:
            return finding("schedule not restored", f"{text}: the schedule restarts")
        return finding("schedule off", text)
    return None


def learning_rates(case: ResumeCase) -> Finding | None:
    """Compare learning rates, which may follow a schedule of the script."""
    if schedules(case) is not None:
        return None
    whole = [step.rates for step in case.whole[0].steps]
    resumed = [step.rates for step in case.resumed[0].steps]
    number = first_unequal(whole[case.at :], resumed)
    if number is None or (number and not case.same_ranks):
        return None
    before = case.at + number
    text = f"the learning rate of step {before + 1} is {shown(resumed[number])}, not "
    text += shown(whole[before])
    after = resumed[number:]
    if fits(whole, after):
        return finding("schedule not restored", f"{text}: the schedule restarts")
    for shift in range(1, len(whole)):
        if fits(whole[before + shift :], after[:FIT]):
            return finding("schedule off", f"{text}: the schedule is {shift} steps ahead")
        if shift <= before and fits(whole[before - shift :], after[:FIT]):
            return finding("schedule off", f"{text}: the schedule is {shift} steps behind")
    if fits(whole[before::2], after[:FIT]) or fits(whole[before + 1 :: 2], after[:FIT]):
        return finding("schedule stepped twice", f"{text}: the schedule steps twice per step")
    if optimizer_state(case) is not None:
        return None  # the optimizer's state has the learning rate
    return finding("learning rate", text)


def first_unequal(whole: list[list[float]], resumed: list[list[float]]) -> int | None:
    for number, (expected, found) in enumerate(zip(whole, resumed, strict=False)):
        if not close(expected, found):
            return number
    return None


def close(a: list[float], b: list[float]) -> bool:
    if len(a) != len(b):
        return False
    return all(math.isclose(x, y, rel_tol=1e-6, abs_tol=1e-12) for x, y in zip(a, b, strict=True))


def fits(whole: list[list[float]], resumed: list[list[float]]) -> bool:
    """Return whether one list of rates is the start of the other."""
    count = min(len(whole), len(resumed))
    return count > 0 and first_unequal(whole[:count], resumed[:count]) is None


def shown(rates: list[float]) -> str:
    return ", ".join(f"{rate:.4g}" for rate in dict.fromkeys(rates))


RATE_CAUSES: list[ResumeHypothesis] = [schedules, learning_rates]
