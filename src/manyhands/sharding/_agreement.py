"""Collect facts that ranks must share to shard a model, and wait for all ranks.

`_ranks/agreement.py` compares the facts.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands._optimizers.state_parts import IMPLEMENTATION
from manyhands._ranks.agreement import Describer
from manyhands._ranks.ranks import RankGroup

Facts = dict[str, object]


class GroupLike(Protocol):
    """A process group, or a stand-in for a single rank."""

    def rank(self) -> int: ...

    def size(self) -> int: ...


PATIENCE = 120.0  # seconds to wait for a call that all ranks must make
SOON = 2.0  # seconds until the warning about such a wait
ADVICE = "Build the same model and optimizer on every rank."


def facts_of_groups(
    groups: Sequence[Mapping[str, Any]], names: Mapping[int, str] | None = None, first: int = 0
) -> Facts:
    # `names` maps `id(param)` to a name.
    facts: Facts = {"numbers of parameter groups": len(groups)}
    describer = Describer()
    names = names or {}
    for index, group in enumerate(groups, first):
        own = group.get("param_names")
        described = []
        for number, param in enumerate(group["params"]):
            name = own[number] if own else names.get(id(param), "")
            described.append(describer.describe(param, name, frozen=True))
        facts[f"parameters in group {index}"] = described
    return facts


def facts_of_model(module: nn.Module, optimizers: Sequence[Optimizer], with_buffers: bool) -> Facts:
    describer = Describer()
    names = {}
    params = []
    for name, param in module.named_parameters():
        names[id(param)] = name
        params.append(describer.describe(param, name, frozen=True))
    buffers = []
    if with_buffers:
        for name, buffer in module.named_buffers():
            buffers.append(describer.describe(buffer, name))
    facts: Facts = {"parameters in the module": params, "buffers in the module": buffers}
    for number, one in enumerate(optimizers):
        for title, value in facts_of_groups(one.param_groups, names).items():
            facts[f"{title} of optimizer {number}"] = value
    return facts


def facts_of_options(
    groups: Sequence[Mapping[str, Any]], declared: Iterable[str], first: int = 0
) -> Facts:
    """Return facts about the options in `declared`, the defaults of an optimizer.

    Other entries of a parameter group, options in `IMPLEMENTATION`, and values without a comparison
    (functions, objects) are omitted.
    """
    compared = set(declared).difference(IMPLEMENTATION)
    facts: Facts = {}
    for index, group in enumerate(groups, first):
        for name in sorted(compared & group.keys()):
            value = _comparable(group[name])
            if value is not None:
                facts[f"values of {name} in group {index}"] = value
    return facts


def _comparable(value: object) -> object:
    """Return a value in JSON's types; None if it cannot be compared."""
    if value is None or isinstance(value, bool | str | torch.dtype):
        return str(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Tensor):
        return _comparable(value.tolist())
    if isinstance(value, list | tuple):
        return list(map(_comparable, value))
    if isinstance(value, Mapping):
        return {str(key): _comparable(each) for key, each in sorted(value.items(), key=str)}
    return None


def wait_for_all_ranks(workers: RankGroup, what: str, *, soon: bool = False) -> None:
    """Wait until every rank has called `what`, through the store."""
    # A collective could match a different collective of another rank.
    if workers.size > 1:
        roll_call = workers.roll_call(what)
        if soon:
            roll_call.warn_after = SOON
        roll_call.give_up_after = PATIENCE
        roll_call.wait(what)


def check_same_frozen(workers: RankGroup, trained: Sequence[bool]) -> None:
    """Wait until every rank trains the same parameters; raise if some do not."""
    # Freezing changes bucket sizes, and different sizes would hang.
    what = f"requires_grad_() of the same parameters ({zlib.crc32(bytes(trained)):08x})"
    wait_for_all_ranks(workers, what, soon=True)
