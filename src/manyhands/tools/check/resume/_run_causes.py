"""Find random numbers that were not restored, and runs with another number of steps."""

from manyhands.tools.check._report import Finding
from manyhands.tools.check.resume._case import (
    ResumeCase,
    ResumeHypothesis,
    finding,
    unequal_keys,
)
from manyhands.tools.check.resume._state_causes import saved_states


def number_of_steps(case: ResumeCase) -> Finding | None:
    resumed = case.resumed[0]
    if resumed.steps and not case.same_ranks:
        return None
    left = len(case.whole[0].steps) - case.at
    made = len(resumed.steps)
    if resumed.ended and made < left:
        return finding("number of steps", f"the resumed run ends after {made} steps; more are left")
    if case.whole[0].ended and made > left:
        return finding(
            "number of steps", f"the resumed run makes {made} steps, where {left} are left"
        )
    return None


def random_state(case: ResumeCase) -> Finding | None:
    """Explain a difference that nothing else explains by the random state."""
    for rank in range(case.ranks):
        saved, restored = case.states(rank)
        wrong = [
            key for key in unequal_keys(saved.random, restored.random) if is_used(case, rank, key)
        ]
        if not wrong:
            continue
        for other, state in enumerate(saved_states(case)):
            if other != rank and all(state.random[key] == restored.random[key] for key in wrong):
                text = f"rank {rank} has the random state of rank {other}"
                return finding("random state of another rank", text)
        which = " and ".join(wrong)
        return finding("random state", f"the random state of {which} was not restored")
    return None


def is_used(case: ResumeCase, rank: int, key: str) -> bool:
    """Return whether a run draws numbers from a library's generator."""
    return len({state.random[key] for state in case.whole[rank].states.values()}) > 1


RUN_CAUSES: list[ResumeHypothesis] = [number_of_steps]
