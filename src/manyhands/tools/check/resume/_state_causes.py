"""Find state that the resumed run does not have as it was at the checkpoint."""

import re

from manyhands.tools.check._report import Finding
from manyhands.tools.check.resume._case import (
    ResumeCase,
    ResumeHypothesis,
    describe,
    finding,
    unequal_keys,
)
from manyhands.tools.check.resume._records import Digests, State


def parameters(case: ResumeCase) -> Finding | None:
    for rank in range(case.ranks):
        saved, restored = case.states(rank)
        wrong = unequal_keys(saved.parameters, restored.parameters)
        if not wrong:
            continue
        names = [saved.names.get(key, key) for key in wrong]
        start = case.start(rank).parameters
        as_at_start = all(restored.parameters[key] == start.get(key) for key in wrong)
        text = f"{describe(names, len(saved.parameters))} of the parameters"
        if as_at_start:
            text += " have their initial values"
        else:
            text += " are not those of the checkpoint"
        frozen = len(saved.trained) < len(saved.parameters)
        if frozen and set(wrong) <= set(saved.trained):
            return finding("adapter weights", f"{text}, and all frozen ones are restored")
        return finding("parameters", text)
    return None


def buffers(case: ResumeCase) -> Finding | None:
    saved, restored = case.states(0)
    wrong = unequal_keys(saved.buffers, restored.buffers)
    if not wrong:
        return None
    text = f"{describe(wrong, len(saved.buffers))} of the model's buffers"
    return finding("running statistics", f"{text} are not those of the checkpoint")


def averages(case: ResumeCase) -> Finding | None:
    saved, restored = case.states(0)
    wrong = unequal_keys(saved.averages, restored.averages)
    if not wrong:
        return None
    text = f"{describe(wrong, 0)}, which is no part of the model, is not as at the checkpoint"
    return finding("weight average", text)


def optimizer_state(case: ResumeCase) -> Finding | None:
    for rank in range(case.ranks):
        saved, restored = case.states(rank)
        wrong = unequal_keys(saved.optimizer, restored.optimizer)
        missing = [key for key in saved.optimizer if key not in restored.optimizer]
        if not case.same_ranks:
            missing = []  # another rank may have it
            if any(state.optimizer for state in restored_states(case)):
                wrong = [key for key in wrong if same_on_ranks(case, key)]
            elif saved.optimizer:
                missing = list(saved.optimizer)
        if not wrong and not missing:
            continue
        if len(missing) == len(saved.optimizer):
            return finding("optimizer state", "the optimizer starts without state")
        if missing:
            text = f"the optimizer starts without {describe(named(missing, saved), 0)}"
            return finding("optimizer state", text)
        for other, state in enumerate(saved_states(case)):
            if other != rank and holds(state.optimizer, restored.optimizer, wrong):
                text = f"rank {rank} has the optimizer's state of rank {other}"
                return finding("optimizer state of another rank", text)
        text = f"{describe(named(wrong, saved), 0)} in the optimizer's state"
        return finding("optimizer state", f"{text} is not that of the checkpoint")
    return None


def saved_states(case: ResumeCase) -> list[State]:
    return [case.saved(rank) for rank in range(len(case.killed))]


def restored_states(case: ResumeCase) -> list[State]:
    return [history.states[0] for history in case.resumed]


def same_on_ranks(case: ResumeCase, key: str) -> bool:
    return len({state.optimizer.get(key) for state in saved_states(case)}) == 1


def holds(saved: Digests, restored: Digests, keys: list[str]) -> bool:
    """Return whether two states have the same values."""
    return all(saved.get(key) == restored[key] for key in keys)


def named(keys: list[str], state: State) -> list[str]:
    """Replace the numbers of parameters by names."""

    def name(match: re.Match[str]) -> str:
        return state.names.get(match.group(), f"parameter {match.group()}")

    return [re.sub(r"\d+:\d+", name, key) for key in keys]


def scaler(case: ResumeCase) -> Finding | None:
    saved, restored = case.states(0)
    for key, value in saved.scaler.items():
        found = restored.scaler.get(key)
        if found != value:
            name = key.strip("_").replace("_", " ")
            text = f"the gradient scaler starts with the {name} {found}, and had {value}"
            return finding("gradient scaler", text)
    return None


STATE_CAUSES: list[ResumeHypothesis] = [
    parameters,
    buffers,
    averages,
    optimizer_state,
    scaler,
]
