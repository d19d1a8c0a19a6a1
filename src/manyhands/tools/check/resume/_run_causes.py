"""Hypotheses about random states and numbers of steps."""

from manyhands.tools.check._report import Finding, finding
from manyhands.tools.check.resume._case import ResumeCase, ResumeHypothesis, unequal_keys
from manyhands.tools.check.resume._state_causes import saved_states


def number_of_steps(case: ResumeCase) -> Finding | None:
    resumed = case.resumed[0]
    if resumed.steps and not case.same_ranks:
        return None
    left = len(case.whole[0].steps) - case.at
    made = len(resumed.steps)
    if resumed.ended and made < left:
        text = f"the resumed run ends after {made} steps, before the run without interruption"
        return finding("number of steps", text)
    if case.whole[0].ended and made > left:
        text = f"the resumed run makes {made} steps, but {left} remain"
        return finding("number of steps", text)
    return None


def random_state(case: ResumeCase) -> Finding | None:
    """Compare random state that later steps use."""
    for rank in range(case.ranks):
        saved, restored = case.states(rank)
        wrong = []
        for key in unequal_keys(saved.random, restored.random):
            # A run that draws numbers changes the random state of the library.
            if len({state.random[key] for state in case.whole[rank].states.values()}) > 1:
                wrong.append(key)
        if not wrong:
            continue
        for other, state in enumerate(saved_states(case)):
            if other != rank and all(state.random[key] == restored.random[key] for key in wrong):
                text = f"rank {rank} has the random state of rank {other}"
                return finding("random state of another rank", text)
        which = " and ".join(wrong)
        return finding("random state", f"the random state of {which} was not restored")
    return None


RUN_CAUSES: list[ResumeHypothesis] = [number_of_steps]
