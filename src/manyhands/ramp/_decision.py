"""The next number of passes: a pure function of what was measured, so all ranks decide the same.

    explore    the noise is not known (any more), or the time of a step for one number of passes
               only: try another number
    grow       towards the best number, by at most the factor `growth` at a time
    shrink     likewise
    stay       the best number is not better by more than `margin` (so the batch does not flutter)
    wait       no decision was taken yet

`goal` is what the best number of passes is the best for:

    "time"      the most progress in a second            `fastest_passes`
    "samples"   the largest batch whose samples are still worth `efficiency` each
    "steps"     the largest batch that is allowed
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from manyhands.ramp._goodput import (
    Noise,
    StepTime,
    fastest_passes,
    goodput,
    most_efficient_passes,
)

Goal = Literal["time", "samples", "steps"]
Reason = Literal["explore", "grow", "shrink", "stay", "wait"]


@dataclass(frozen=True)
class Limits:
    """What a decision is bound by."""

    goal: Goal = "time"
    efficiency: float = 0.5  # with goal="samples": the least worth of a sample
    most: int = 1  # passes
    growth: float = 1.5  # the largest factor by which a decision changes the passes
    margin: float = 0.01  # how much better the goodput must become


@dataclass(frozen=True)
class Decision:
    """The passes of the next steps, and why."""

    passes: int
    reason: Reason
    target: int  # the best number of passes, towards which `passes` moves


def decide(
    passes: int,
    noise: Noise | None,
    time: StepTime | None,
    scale_per_pass: float,
    limits: Limits,
    timed_here: bool = True,
) -> Decision:
    """Return the next number of passes after steps of `passes`.

    `noise` and `time` are None where they are not known. `timed_here` says whether enough steps of
    this number of passes were timed.

    >>> limits = Limits(most=64)
    >>> decide(1, Noise(1.0, 64.0), None, 1.0, limits).reason
    'explore'
    >>> decide(2, Noise(1.0, 64.0), StepTime(4.0, 1.0), 1.0, limits)
    Decision(passes=3, reason='grow', target=16)
    """
    passes_here = min(passes, limits.most)
    if limits.goal == "steps":
        target = limits.most
    elif limits.most == 1:
        target = 1
    elif noise is None:
        other = _neighbour(passes_here, limits.most)
        return Decision(other, "explore", other)
    elif limits.goal == "samples":
        target = most_efficient_passes(noise, limits.efficiency, scale_per_pass, limits.most)
    elif time is None:
        # Stay until there are enough times of this number, and then try another one.
        other = _neighbour(passes_here, limits.most) if timed_here else passes_here
        return Decision(other, "explore", other)
    else:
        target = fastest_passes(noise, time, scale_per_pass, limits.most)
        now, best = (goodput(noise, time, scale_per_pass, p) for p in (passes_here, target))
        if best < now * (1.0 + limits.margin):
            return Decision(passes_here, "stay", target)
    if target > passes_here:
        # at least one pass more: a factor of 1.5 does not change a single pass
        reachable = max(passes_here + 1, math.floor(passes_here * limits.growth))
        return Decision(min(target, reachable), "grow", target)
    if target < passes_here:
        reachable = min(passes_here - 1, math.ceil(passes_here / limits.growth))
        return Decision(max(target, reachable), "shrink", target)
    return Decision(passes_here, "stay", target)


def _neighbour(passes: int, most: int) -> int:
    """Return a number of passes that is far enough away to tell a pass's time from the rest."""
    more = max(passes + 1, round(passes * 1.25))
    return more if more <= most else max(1, min(passes - 1, round(passes / 1.25)))
