"""Present several optimizers as one: each has separate parameters, and a step is a step of all.

    param_groups    those of the first optimizer, then the second's, and so on: the same dicts, so
                    that a scheduler of one of them works
    state           a parameter's is in the optimizer that has it
    state_dict      as of one optimizer with all groups; its entry "several" says whose they are

All state is in the optimizers.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from manyhands._optimizers.wrappers import ParamGroup, params_of

SEVERAL = "several"  # the entry of a state dict
AND = " and "  # between the classes of a list
ONE = "one optimizer"


class SeveralOptimizers(Optimizer):
    """Optimizers without a parameter in common, as one optimizer.

    >>> import torch
    >>> layer = torch.nn.Linear(2, 2)
    >>> muon = torch.optim.Muon([layer.weight])
    >>> both = SeveralOptimizers([muon, torch.optim.AdamW([layer.bias])])
    >>> both.names, len(both.param_groups)
    (['Muon', 'AdamW'], 2)
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        # Not `Optimizer.__init__`, which would make further groups, state and hooks.
        self.optimizers = list(optimizers)
        self.defaults = {}
        self._groups: list[ParamGroup] = []
        self._state = _StateOfSeveral(self.optimizers)
        self._optimizer_state_dict_pre_hooks = OrderedDict()
        self._optimizer_state_dict_post_hooks = OrderedDict()
        self._optimizer_load_state_dict_pre_hooks = OrderedDict()
        self._optimizer_load_state_dict_post_hooks = OrderedDict()

    @property
    def names(self) -> list[str]:
        """The optimizers' classes, with the position in the list where a class comes twice."""
        names = [type(each).__name__ for each in self.optimizers]
        kinds = list(names)
        for number, kind in enumerate(kinds):
            if kinds.count(kind) > 1:
                names[number] = f"{kind}_{number}"
        return names

    def describe(self) -> list[dict[str, Any]]:
        """Return each optimizer's class, and the number of parameters of each of its groups."""
        described = []
        for each in self.optimizers:
            lengths = [len(group["params"]) for group in each.param_groups]
            described.append({"class": type(each).__name__, "groups": lengths})
        return described

    def __str__(self) -> str:
        return describe_saved({SEVERAL: self.describe()})

    # An optimizer that loads a state has new groups. The list is always the same one: by that
    # `unwrap` knows that a layer shows the groups of the one inside.
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
                f"these optimizers have {len(self.param_groups)} parameter groups, in this order, "
                f"and got {len(groups)}. Give as many."
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

    # A hook is called once a step: before the first optimizer's, or after the last one's.
    @property
    def _optimizer_step_pre_hooks(self) -> Any:  # type: ignore[override]
        return self.optimizers[0]._optimizer_step_pre_hooks

    @property
    def _optimizer_step_post_hooks(self) -> Any:  # type: ignore[override]
        return self.optimizers[-1]._optimizer_step_post_hooks

    def step(self, closure: Callable[[], object] | None = None) -> Any:
        """Step all optimizers in order. The first evaluates the closure, once for all of them."""
        first, *others = self.optimizers
        step: Callable[..., object] = first.step
        arguments = () if closure is None else (closure,)
        loss = step(*arguments)
        for each in others:
            each.step()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # torch must not run step hooks twice

    def zero_grad(self, *args: Any, **named: Any) -> None:
        for each in self.optimizers:
            each.zero_grad(*args, **named)

    def add_param_group(self, param_group: ParamGroup) -> None:
        raise RuntimeError(
            f"these parameters could be for any of the optimizers ({', '.join(self.names)}). Give "
            "them all parameters when they are made."
        )

    def state_dict(self) -> StateDict:
        """Return the state dict of one optimizer that has all groups, and in "several" the rest."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
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
        found: StateDict = {"state": state, "param_groups": groups, SEVERAL: several}
        for after in self._optimizer_state_dict_post_hooks.values():
            found = after(self, found) or found
        return found

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load each optimizer's part. A state dict of other optimizers is refused before that."""
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
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
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __repr__(self) -> str:
        return "\n".join(map(repr, self.optimizers))


def _shifted(group: ParamGroup, by: int) -> ParamGroup:
    return {**group, "params": [number + by for number in group["params"]]}


class _StateOfSeveral(MutableMapping[Tensor, Any]):
    """The state of several optimizers, by parameter."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    def _with(self, param: Tensor) -> MutableMapping[Tensor, Any]:
        """Return the state of the optimizer that has a parameter, or any state of it."""
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
    """Return the optimizers that an optimizer presents as one; itself, if it is a single one."""
    if isinstance(optimizer, SeveralOptimizers):
        return optimizer.optimizers
    return [optimizer]


def check_same_optimizers(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Raise unless a state dict is of the same list of optimizers, or of one as here."""
    here = ONE
    if isinstance(optimizer, SeveralOptimizers):
        here = str(optimizer)
    there = describe_saved(saved)
    if there != here:
        raise ValueError(
            f"this state dict is of {there}, and the optimizer here is {here}. Make the same "
            "optimizers, in the same order."
        )


def describe_saved(state_dict: Mapping[str, Any]) -> str:
    """Return in words which optimizers a state dict is of."""
    if SEVERAL not in state_dict:
        return ONE
    try:
        parts = [f"{each['class']} (parameters: {each['groups']})" for each in state_dict[SEVERAL]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"the state dict's entry {SEVERAL!r} makes no sense: {error}.") from error
    return AND.join(parts)
