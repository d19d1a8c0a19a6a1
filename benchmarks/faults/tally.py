"""What a run's log and the list of its faults say. Plain values: no process, no clock.

counts          a worker's block counts if the worker held the meeting at its end, and brought
                to it all steps from the meeting before
work            worker-steps that count: the sum over meetings of steps x workers that count
missing         blocks (one worker's) that do not count. A victim's: there was a fault of the
                worker from one block before until it counts again. A survivor's: all others
delay           of a fault: the longer of the two blocks after it, over the usual one. Of two,
                for a worker may be hit when the others have all that they need of it
back            of a fault: until the worker's block counts again
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from faults.harm import ALL, Fault, LogLine, Trial

GUESTS = ("newcomer", "leave")


@dataclass(frozen=True)
class Meeting:
    """One that was kept."""

    number: int
    time: float  # when the first worker had its result
    steps: int
    length: int  # steps of its block
    counted: frozenset[int]  # workers


def meetings(log: list[LogLine]) -> list[Meeting]:
    """Those in which anything counts, in order."""
    by_number: dict[int, list[LogLine]] = defaultdict(list)
    for line in log:
        if line["event"] in ("met", "left"):
            by_number[line["rounds"]].append(line)
    found, before = [], 0
    for number, lines in sorted(by_number.items()):
        steps = min(line["steps"] for line in lines)
        length, before = steps - before, steps
        counted = frozenset(line["number"] for line in lines if line["own"] == length > 0)
        if counted:
            when = min(line["time"] for line in lines)
            found.append(Meeting(number, when, steps, length, counted))
    return found


def usual_block(held: list[Meeting], every: int) -> float:
    """Seconds."""
    return median(b.time - a.time for a, b in pairwise(held) if b.length == every)


def tally(trial: Trial, usual: float) -> dict[str, Any]:
    """The figures of a run; `usual` is the time of a block where nothing happens."""
    plan = trial.plan
    log = [line for line in trial.log if line["number"] < plan.workers]
    held = meetings(log)
    seconds = held[-1].time - held[0].time
    work = sum(m.length * len(m.counted) for m in held[1:])
    victims, survivors = missing(held, trial.faults, plan.workers)
    states = differing([line for line in trial.log if line["event"] != "gone"])
    left = [line for line in log if line["event"] == "left"]
    result: dict[str, Any] = {
        "interval": plan.interval,
        "seconds": seconds,
        "meetings": len(held),
        "undone": undone(log),
        "rate": work / seconds,
        "missing": {"victims": victims, "survivors": survivors},
        "thrown_away": thrown_away(log, trial.faults),
        "compared": sum(line["event"] not in ("loss", "gone") for line in trial.log),
        "differing": states,
        "finished": len({line["number"] for line in left}),
        "finals": len({line["final"] for line in left}),
        "loss": next((line["loss"] for line in log if line["event"] == "loss"), None),
        "steps": held[-1].steps,
        "code": trial.code,
        "tracebacks": trial.output.count("Traceback (most recent"),
        "cores": trial.cpu / trial.seconds,
    }
    for kind in ALL:
        faults = [fault for fault in trial.faults if fault.kind == kind]
        result[kind] = {
            "count": len({fault.time for fault in faults}),
            "outcomes": dict(Counter(fault.outcome for fault in faults if kind in GUESTS)),
            "delays": _known([delay(fault, held, usual) for fault in faults]),
            "back": _known([back(fault, held) for fault in faults]),
            "asleep": [f.woken - f.time for f in faults if f.woken],
        }
    return result


def missing(held: list[Meeting], faults: list[Fault], workers: int) -> tuple[float, float]:
    """Blocks that do not count: of workers that were hit, and of others."""
    full = max(m.length for m in held)
    victims = survivors = 0.0
    for place, meeting in enumerate(held):
        for number in set(range(workers)) - meeting.counted:
            before = [p for p in range(place) if number in held[p].counted]
            since = held[max(before[-1] - 1, 0)].time if before else 0.0
            later = (m.time for m in held[place:] if number in m.counted)
            until = next(later, float("inf"))
            if any(f.number == number and since <= f.time <= until for f in faults):
                victims += meeting.length / full
            else:
                survivors += meeting.length / full
    return victims, survivors


def thrown_away(log: list[LogLine], faults: list[Fault]) -> int:
    """Steps that workers took for nothing without having been hit."""
    hit = {(fault.number, fault.pid) for fault in faults}
    given = [line for line in log if line["event"] == "in" and line["own"] > 0]
    return sum(line["own"] for line in given if (line["number"], line["pid"]) not in hit)


def undone(log: list[LogLine]) -> int:
    """Meetings that had to be held again, or not at all, as far as anybody wrote it down."""
    seen: set[int] = set()
    before: dict[int, int] = {}
    for line in log:
        if line["undone"] > before.get(line["pid"], 0):
            seen.add(line["rounds"])
        before[line["pid"]] = line["undone"]
    return len(seen)


def differing(log: list[LogLine]) -> int:
    """Meetings after which not all had the same bits: who held it, who was given its result."""
    states = defaultdict(set)
    for line in log:
        states[line["rounds"]].add((line["steps"], line["state"]))
    return sum(len(seen) > 1 for seen in states.values())


def delay(fault: Fault, held: list[Meeting], usual: float) -> float | None:
    after = [p for p, m in enumerate(held) if m.time > fault.time][:2]
    blocks = [held[p].time - held[p - 1].time for p in after if p]
    return max(blocks) - usual if blocks else None


def back(fault: Fault, held: list[Meeting]) -> float | None:
    """Seconds until it counts again; a meeting that it missed lies between."""
    after = [m for m in held if m.time > fault.time]
    missed = next((p for p, m in enumerate(after) if fault.number not in m.counted), None)
    if missed is None:
        return None
    counts = (m.time for m in after[missed:] if fault.number in m.counted)
    until = next(counts, None)
    return None if until is None else until - fault.time


def _known(values: list[float | None]) -> list[float]:
    return [value for value in values if value is not None]
