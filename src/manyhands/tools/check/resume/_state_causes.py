"""Hypotheses about state that differs from the checkpoint."""

import re

from manyhands.tools.check._report import Finding, describe, finding
from manyhands.tools.check.resume._case import ResumeCase, ResumeHypothesis, unequal_keys
from manyhands.tools.check.resume._records import State


def parameters(case: ResumeCase) -> Finding | None:
    for rank in range(case.ranks):
        saved, restored = case.states(rank)
        wrong = unequal_keys(saved.parameters, restored.parameters)
        if not wrong:
            continue
        names = [saved.names.get(key, key) for key in wrong]
        start = case.whole[rank].states[0].parameters
        as_at_start = all(restored.parameters[key] == start.get(key) for key in wrong)
        text = f"{describe(names)} ({len(wrong)} of {len(saved.parameters)} parameters)"
        if as_at_start:
            text += " have initial values"
        else:
            text += " differ from the checkpoint"
        frozen = len(saved.trained) < len(saved.parameters)
        if frozen and set(wrong) <= set(saved.trained):
            return finding("adapter weights", f"{text}, and all frozen parameters are restored")
        return finding("parameters", text)
    return None


def buffers(case: ResumeCase) -> Finding | None:
    saved, restored = case.states(0)
    wrong = unequal_keys(saved.buffers, restored.buffers)
    if not wrong:
        return None
    text = f"{describe(wrong)} ({len(wrong)} of {len(saved.buffers)} buffers)"
    return finding("running statistics", f"{text} differ from the checkpoint")


def averages(case: ResumeCase) -> Finding | None:
    saved, restored = case.states(0)
    wrong = unequal_keys(saved.averages, restored.averages)
    if not wrong:
        return None
    text = f"{describe(wrong)}, outside the model, differs from the checkpoint"
    return finding("weight average", text)


def optimizer_state(case: ResumeCase) -> Finding | None:
    for rank in range(case.ranks):
        saved, restored = case.states(rank)
        wrong = unequal_keys(saved.optimizer, restored.optimizer)
        missing = [key for key in saved.optimizer if key not in restored.optimizer]
        if not case.same_ranks:
            missing = []  # a different rank may have the state
            if any(history.states[0].optimizer for history in case.resumed):
                states = saved_states(case)
                # State that differs between ranks (shards) cannot be compared.
                wrong = [key for key in wrong if len({s.optimizer.get(key) for s in states}) == 1]
            else:
                missing = list(saved.optimizer)
        if not wrong and not missing:
            continue
        if len(missing) == len(saved.optimizer):
            return finding("optimizer state", "the optimizer starts without state")
        if missing:
            text = f"the optimizer starts without {describe(named(missing, saved))}"
            return finding("optimizer state", text)
        for other, state in enumerate(saved_states(case)):
            if other != rank and all(
                state.optimizer.get(key) == restored.optimizer[key] for key in wrong
            ):
                text = f"rank {rank} has the optimizer's state of rank {other}"
                return finding("optimizer state of another rank", text)
        text = f"{describe(named(wrong, saved))} in the optimizer's state"
        return finding("optimizer state", f"{text} differs from the checkpoint")
    return None


def saved_states(case: ResumeCase) -> list[State]:
    return [case.saved(rank) for rank in range(len(case.killed))]


def named(keys: list[str], state: State) -> list[str]:
    """Replace the numbers of parameters in keys by names."""

    def name(match: re.Match[str]) -> str:
        return state.names.get(match.group(), f"parameter {match.group()}")

    return [re.sub(r"\d+:\d+", name, key) for key in keys]


def scaler(case: ResumeCase) -> Finding | None:
    saved, restored = case.states(0)
    for key, value in saved.scaler.items():
        found = restored.scaler.get(key)
        if found != value:
            name = key.strip("_").replace("_", " ")
            text = f"the gradient scaler starts with the {name} {found}, not {value}"
            return finding("gradient scaler", text)
    return None


STATE_CAUSES: list[ResumeHypothesis] = [
    parameters,
    buffers,
    averages,
    optimizer_state,
    scaler,
]
