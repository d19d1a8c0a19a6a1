"""The buffers and the inner optimizer's state at the end of a block.

Buffers             the buffers of the model whose parameters are trained
check_state_option  the option `state`: a word, or a period for each name
state_tensors       the tensors of the optimizer's state that are averaged
Extras              those of both that are due at the end of a block, as payloads
InitialState        the optimizer state to which state="reset" goes back

Periods count blocks: state={"exp_avg": 3, "exp_avg_sq": 6} averages

    blocks      1  2  3  4  5  6  7  8  9
    exp_avg           x        x        x
    exp_avg_sq                 x

A block counts once its round has taken place, with all fragments. So the number of the block that
ends next (`BlockState.blocks` + 1) is equal on all workers, also on those that have just joined.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands._core.modules import modules_holding
from manyhands._core.wrappers import unwrap
from manyhands.blocks._checks import whole
from manyhands.blocks.averaging._payload import (
    TensorPayload,
    are_finite,
    by_index,
    make_payloads,
)

STATES = ("keep", "average", "reset", "average_moments")
MOMENTS = ("exp_avg", "exp_avg_sq")  # Adam's: what fairseq's `average_sync` averages


def check_state_option(state: object) -> str | dict[str, int]:
    """Return the option `state` if it makes sense: periods in alphabetical order of the names."""
    if isinstance(state, str) and state in STATES:
        return state
    if not (isinstance(state, Mapping) and state and all(isinstance(name, str) for name in state)):
        raise ValueError(
            f"state must be one of {', '.join(map(repr, STATES))}, or say for tensors of the inner "
            "optimizer's state at which sync rounds they are averaged, such as "
            f'{{"exp_avg": 3, "exp_avg_sq": 6}}, got {state!r}.'
        )
    why = "1 averages at every sync round. Leave out what is never averaged."
    return {name: whole(f"state[{name!r}]", state[name], 1, why) for name in sorted(state)}


def state_tensors(optimizer: Optimizer, only: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Return the state tensors that have their parameter's shape, in one order on all workers.

    Steps and other scalars are not averaged: they are equal, or each worker's own.
    """
    found = {}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, param in enumerate(params):
        state = optimizer.state.get(param, {}) if param.requires_grad else {}
        for name in sorted(state):
            value = state[name]
            if not isinstance(value, Tensor) or value.shape != param.shape:
                continue
            if only is None or name in only:
                found[f"{number}.{name}"] = value
    return found


def drop_nonfinite_state(optimizer: Optimizer) -> bool:
    """Delete the state of each parameter whose state is not all finite; return if there was one."""
    dropped = False
    for param in [p for p in optimizer.state if isinstance(p, Tensor)]:
        values = [v for v in optimizer.state[param].values() if isinstance(v, Tensor)]
        numeric = [v for v in values if v.is_floating_point() or v.is_complex()]
        if not are_finite(numeric):
            del optimizer.state[param]
            dropped = True
    return dropped


class Buffers:
    """The buffers of the model that an optimizer trains.

    An optimizer does not know its model. Without `model`, the garbage collector is searched for
    the smallest module that has all of the parameters, or for those that have some of them.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module | None) -> None:
        params = [p for g in optimizer.param_groups for p in g["params"]]
        modules = [model] if model is not None else _find_modules(params)
        # Weak references: an optimizer must not keep the model's memory alive.
        self._modules = [weakref.ref(module) for module in modules]

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that the buffers belong to, as far as they still exist."""
        return [module for reference in self._modules if (module := reference()) is not None]

    def tensors(self) -> list[Tensor]:
        """Return all buffers, each once."""
        found: dict[int, Tensor] = {}
        for module in self.modules:
            found.update((id(buffer), buffer) for buffer in module.buffers())
        return list(found.values())


@dataclass
class Extras:
    """The buffers and the optimizer state that are averaged at the end of a block."""

    optimizer: Optimizer
    model_buffers: Buffers
    buffers: str  # the option: "average", "broadcast" or "keep"
    state: str | Mapping[str, int]  # the option, as `check_state_option` returns it

    @property
    def averages_state(self) -> bool:
        """Whether optimizer state is averaged at the end of some blocks."""
        return self.state not in ("keep", "reset")

    def buffer_tensors(self) -> list[Tensor]:
        """Return the model's buffers; none if each worker keeps its own."""
        return [] if self.buffers == "keep" else self.model_buffers.tensors()

    def buffer_payloads(self) -> list[TensorPayload]:
        first_only = self.buffers == "broadcast"
        return make_payloads(by_index(self.buffer_tensors()), first_only)

    def state_payloads(self, block: int | None = None) -> list[TensorPayload]:
        """Return the state that is averaged at the end of this block; None: of any block."""
        if not self.averages_state:
            return []
        return make_payloads(state_tensors(self.optimizer, self._due(block)))

    def _due(self, block: int | None) -> Sequence[str] | None:
        """Return the names of the state that is due at the end of this block; None: all."""
        if isinstance(self.state, str):
            return MOMENTS if self.state == "average_moments" else None
        return [name for name, period in self.state.items() if (block or 0) % period == 0]

    def has_unknown_names(self) -> bool:
        """Return whether a name has a period and is in no state, though all parameters have some.

        Until then a name may come with the first state of a parameter that has had no gradient yet.
        """
        if isinstance(self.state, str):
            return False
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        states = [self.optimizer.state.get(param) for param in params]
        if not all(states):
            return False
        return any(all(name not in state for state in states if state) for name in self.state)


def _find_modules(params: Sequence[Tensor]) -> list[nn.Module]:
    """Return the smallest module with all parameters, or the outermost ones with some of them."""
    candidates = list(modules_holding(params))
    complete = [module for module, found in candidates if len(found) == len(set(map(id, params)))]
    if complete:
        return [min(complete, key=lambda module: sum(1 for _ in module.modules()))]
    children = {id(child) for module, _ in candidates for child in module.children()}
    roots = [(module, found) for module, found in candidates if id(module) not in children]
    # The collector's order differs between workers; the parameters' order does not.
    roots.sort(key=lambda pair: min(pair[1]))
    return [module for module, _ in roots]


class InitialState:
    """The inner optimizer's state before its first step (Adagrad has some, most have none)."""

    def __init__(self, optimizer: Optimizer, needed: bool) -> None:
        self._optimizer = optimizer
        bare = self._bare()
        state = bare.state_dict()["state"] if needed and bare.state else {}
        self.state: dict[object, object] = copy.deepcopy(state)

    def _bare(self) -> Optimizer:
        # The innermost optimizer: a scaling rule around it keeps its own statistics.
        return unwrap(self._optimizer)[-1]

    def restore(self) -> None:
        """Reset the inner optimizer's state; options such as `lr` stay as they are."""
        bare = self._bare()
        bare.state.clear()
        if self.state:
            groups = bare.state_dict()["param_groups"]
            bare.load_state_dict({"state": copy.deepcopy(self.state), "param_groups": groups})
