"""Count what a run has kept and lost, from its log and the list of its faults.

counts          a worker's block counts if the worker held the sync round at its end, and
                contributed all steps since the round before
work            worker-steps that count: the sum over rounds of steps x workers that count
missing         blocks (of one worker) that do not count. A victim's: there was a fault of the
                worker from one block before until it counts again. A survivor's: all others
delay           of a fault: the longer of the two blocks after it, over the usual one. Of two,
                because a worker may be hit when the others have all that they need of it
back            of a fault: until the worker's block counts again
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from faults.harm import KINDS, Fault, LogLine, Trial


@dataclass(frozen=True)
class KeptRound:
    """A sync round that was kept."""

    number: int
    time: float  # when the first worker had its result
    steps: int
    length: int  # steps of its block
    counted: frozenset[int]  # workers


def kept_rounds(log: list[LogLine]) -> list[KeptRound]:
    """Return the rounds in which any block counts, in order."""
    by_number: dict[int, list[LogLine]] = defaultdict(list)
    for line in log:
        if line["event"] in ("round", "left"):
            by_number[line["rounds"]].append(line)
    found, before = [], 0
    for number, lines in sorted(by_number.items()):
        steps = min(line["steps"] for line in lines)
        length, before = steps - before, steps
        counted = frozenset(line["number"] for line in lines if line["own"] == length > 0)
        if counted:
            when = min(line["time"] for line in lines)
            found.append(KeptRound(number, when, steps, length, counted))
    return found


def usual_block(held: list[KeptRound], every: int) -> float:
    """Return the seconds of a block without faults."""
    return median(b.time - a.time for a, b in pairwise(held) if b.length == every)


def tally(trial: Trial, usual: float) -> dict[str, Any]:
    """Return the figures of a run; `usual` is the time of a block without faults."""
    log = trial.log
    held = kept_rounds(log)
    seconds = held[-1].time - held[0].time
    victims, survivors = missing(held, trial.faults, trial.plan.workers)
    left = [line for line in log if line["event"] == "left"]
    result: dict[str, Any] = {
        "interval": trial.plan.interval,
        "seconds": seconds,
        "rounds": len(held),
        "rate": sum(m.length * len(m.counted) for m in held[1:]) / seconds,
        "missing": {"victims": victims, "survivors": survivors},
        "thrown_away": thrown_away(log, trial.faults),
        "compared": sum(line["event"] != "loss" for line in log),
        "differing": differing(log),
        "finished": len({line["number"] for line in left}),
        "finals": len({line["final"] for line in left}),
        "loss": next((line["loss"] for line in log if line["event"] == "loss"), None),
        "code": trial.code,
        "cores": trial.cpu / trial.seconds,
    }
    for kind in KINDS:
        faults = [fault for fault in trial.faults if fault.kind == kind]
        result[kind] = {
            "count": len(faults),
            "delays": _known([delay(fault, held, usual) for fault in faults]),
            "back": _known([back(fault, held) for fault in faults]),
        }
    return result


def missing(held: list[KeptRound], faults: list[Fault], workers: int) -> tuple[float, float]:
    """Return the blocks that do not count: of workers that were hit, and of others."""
    full = max(m.length for m in held)
    victims = survivors = 0.0
    for place, kept in enumerate(held):
        for number in set(range(workers)) - kept.counted:
            before = [p for p in range(place) if number in held[p].counted]
            since = held[max(before[-1] - 1, 0)].time if before else 0.0
            later = (m.time for m in held[place:] if number in m.counted)
            until = next(later, float("inf"))
            if any(f.number == number and since <= f.time <= until for f in faults):
                victims += kept.length / full
            else:
                survivors += kept.length / full
    return victims, survivors


def thrown_away(log: list[LogLine], faults: list[Fault]) -> int:
    """Return the steps that workers lost without having been hit."""
    hit = {(fault.number, fault.pid) for fault in faults}
    restored = [line for line in log if line["event"] == "in" and line["own"] > 0]
    return sum(line["own"] for line in restored if (line["number"], line["pid"]) not in hit)


def differing(log: list[LogLine]) -> int:
    """Return the rounds after which members or joiners had different bits."""
    states = defaultdict(set)
    for line in log:
        states[line["rounds"]].add((line["steps"], line["state"]))
    return sum(len(seen) > 1 for seen in states.values())


def delay(fault: Fault, held: list[KeptRound], usual: float) -> float | None:
    after = [p for p, m in enumerate(held) if m.time > fault.time][:2]
    blocks = [held[p].time - held[p - 1].time for p in after if p]
    return max(blocks) - usual if blocks else None


def back(fault: Fault, held: list[KeptRound]) -> float | None:
    """Return the seconds until the worker counts again, if it has missed a round."""
    after = [m for m in held if m.time > fault.time]
    missed = next((p for p, m in enumerate(after) if fault.number not in m.counted), None)
    if missed is None:
        return None
    counts = (m.time for m in after[missed:] if fault.number in m.counted)
    until = next(counts, None)
    return None if until is None else until - fault.time


def _known(values: list[float | None]) -> list[float]:
    return [value for value in values if value is not None]
