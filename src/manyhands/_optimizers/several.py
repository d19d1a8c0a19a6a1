"""Combine optimizers with separate parameters into a single optimizer.

The optimizers store all state:

    param_groups    the groups of all optimizers, in order: the same dicts, so schedulers work
    state_dict      the format of a single optimizer, with an entry "several"
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from manyhands._optimizers.wrappers import ParamGroup, params_of

SEVERAL = "several"
AND = " and "  # between the classes of a list
ONE = "one optimizer"


class SeveralOptimizers(Optimizer):
    """Optimizers without common parameters, as a single optimizer.

    >>> import torch
    >>> layer = torch.nn.Linear(2, 2)
    >>> muon = torch.optim.Muon([layer.weight])
    >>> both = SeveralOptimizers([muon, torch.optim.AdamW([layer.bias])])
    >>> both.names, len(both.param_groups)
    (['Muon', 'AdamW'], 2)
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        # `Optimizer.__init__` would create further groups, state and hooks.
        self.optimizers = list(optimizers)
        self.defaults = {}
        self._groups: list[ParamGroup] = []
        self._state = _StateOfSeveral(self.optimizers)

    @property
    def names(self) -> list[str]:
        """The optimizers' classes, with a position for repeated classes."""
        names = [type(each).__name__ for each in self.optimizers]
        kinds = list(names)
        for number, kind in enumerate(kinds):
            if kinds.count(kind) > 1:
                names[number] = f"{kind}_{number}"
        return names

    def describe(self) -> list[dict[str, Any]]:
        described = []
        for each in self.optimizers:
            lengths = [len(group["params"]) for group in each.param_groups]
            described.append({"class": type(each).__name__, "groups": lengths})
        return described

    def __str__(self) -> str:
        return describe_saved({SEVERAL: self.describe()})

    # Always the same list object, because `unwrap` compares identities.
    @property
    def param_groups(self) -> list[ParamGroup]:
        self._groups.clear()
        for each in self.optimizers:
            self._groups += each.param_groups
        return self._groups

    @param_groups.setter
    def param_groups(self, groups: Sequence[ParamGroup]) -> None:
        groups = list(groups)
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"expected {len(self.param_groups)} parameter groups, in the order of these "
                f"optimizers, got {len(groups)}."
            )
        for each in self.optimizers:
            count = len(each.param_groups)
            each.param_groups = groups[:count]
            groups = groups[count:]

    @property  # type: ignore[override]
    def state(self) -> MutableMapping[Tensor, Any]:
        return self._state

    @state.setter
    def state(self, state: Mapping[Tensor, Any]) -> None:
        for each in self.optimizers:
            own = [param for param in params_of(each.param_groups) if param in state]
            each.state = defaultdict(dict, {param: state[param] for param in own})

    # Hooks run once per step: before the first optimizer's step, or after the last one's.
    @property
    def _optimizer_step_pre_hooks(self) -> Any:  # type: ignore[override]
        return self.optimizers[0]._optimizer_step_pre_hooks

    @property
    def _optimizer_step_post_hooks(self) -> Any:  # type: ignore[override]
        return self.optimizers[-1]._optimizer_step_post_hooks

    def step(self, closure: Callable[[], object] | None = None) -> Any:
        """Step all optimizers in order. The first evaluates the closure."""
        first, *others = self.optimizers
        step: Callable[..., object] = first.step
        arguments = () if closure is None else (closure,)
        loss = step(*arguments)
        for each in others:
            each.step()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # prevents torch from running hooks twice

    def zero_grad(self, *args: Any, **named: Any) -> None:
        for each in self.optimizers:
            each.zero_grad(*args, **named)

    def add_param_group(self, param_group: ParamGroup) -> None:
        raise RuntimeError(
            f"a parameter group could belong to any of the optimizers ({', '.join(self.names)}). "
            "Pass all parameters to their constructors."
        )

    def state_dict(self) -> StateDict:
        """Return a state dict with all groups; "several" has the remainder."""
        state: dict[object, object] = {}
        groups: list[ParamGroup] = []
        several: list[dict[str, object]] = []
        first = 0
        for described, each in zip(self.describe(), self.optimizers, strict=True):
            own = each.state_dict()
            count = sum(described["groups"])
            groups += [_shifted(group, first) for group in own.pop("param_groups")]
            unnumbered = {}
            for key, value in own.pop("state").items():
                if key in range(count):
                    state[first + key] = value
                else:
                    unnumbered[key] = value
            several.append({**described, "state": unnumbered, "other": own})
            first += count
        return {"state": state, "param_groups": groups, SEVERAL: several}

    def load_state_dict(self, state_dict: StateDict) -> None:
        check_same_optimizers(self, state_dict)
        groups = list(state_dict["param_groups"])
        first = 0
        parts = []
        for each, saved in zip(self.optimizers, state_dict[SEVERAL], strict=True):
            own = [_shifted(group, -first) for group in groups[: len(each.param_groups)]]
            groups = groups[len(each.param_groups) :]
            state = dict(saved["state"])
            count = sum(saved["groups"])
            for number in range(count):
                if state_dict["state"].get(first + number) is not None:
                    state[number] = state_dict["state"][first + number]
            parts.append({**saved["other"], "state": state, "param_groups": own})
            first += count
        for each, part in zip(self.optimizers, parts, strict=True):
            each.load_state_dict(part)

    def __repr__(self) -> str:
        return "\n".join(map(repr, self.optimizers))


def _shifted(group: ParamGroup, by: int) -> ParamGroup:
    return {**group, "params": [number + by for number in group["params"]]}


class _StateOfSeveral(MutableMapping[Tensor, Any]):
    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    def _with(self, param: Tensor) -> MutableMapping[Tensor, Any]:
        for each in self._optimizers:
            if param in each.state:
                return each.state
        for each in self._optimizers:
            if any(param is own for own in params_of(each.param_groups)):
                return each.state
        raise KeyError(param)

    def __contains__(self, param: object) -> bool:
        return any(param in each.state for each in self._optimizers)

    def __getitem__(self, param: Tensor) -> Any:
        return self._with(param)[param]

    def __setitem__(self, param: Tensor, value: object) -> None:
        self._with(param)[param] = value

    def __delitem__(self, param: Tensor) -> None:
        del self._with(param)[param]

    def __iter__(self) -> Iterator[Tensor]:
        for each in self._optimizers:
            yield from each.state

    def __len__(self) -> int:
        return sum(len(each.state) for each in self._optimizers)


def optimizers_in(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers in a combined optimizer, or a list of this optimizer."""
    if isinstance(optimizer, SeveralOptimizers):
        return optimizer.optimizers
    return [optimizer]


def check_same_optimizers(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    here = ONE
    if isinstance(optimizer, SeveralOptimizers):
        here = str(optimizer)
    there = describe_saved(saved)
    if there != here:
        raise ValueError(
            f"this state dict is from {there}, but the optimizer here is {here}. Create the same "
            "optimizers, in the same order."
        )


def describe_saved(state_dict: Mapping[str, Any]) -> str:
    if SEVERAL not in state_dict:
        return ONE
    try:
        parts = [f"{each['class']} (parameters: {each['groups']})" for each in state_dict[SEVERAL]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"the state dict's entry {SEVERAL!r} is invalid: {error}.") from error
    return AND.join(parts)
