"""Collect facts that ranks must share to shard a model, and wait for all ranks.

`_ranks/agreement.py` compares the facts that are collected here.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands._ranks.agreement import Describer
from manyhands._ranks.ranks import RankGroup

Facts = dict[str, object]


class GroupLike(Protocol):
    """A process group, or a stand-in for one of a single rank."""

    def rank(self) -> int: ...

    def size(self) -> int: ...


PATIENCE = 120.0  # seconds that a rank waits for a call that all ranks have to make
SOON = 2.0  # seconds after which it warns that it waits
ADVICE = "Build the same model and optimizer on every rank."
IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}
"""Options that choose an implementation and change no number. Ranks may differ in them."""


def params_in(groups: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Return the parameters of all groups (or in a state dict, the numbers of parameters)."""
    found = []
    for group in groups:
        found += group["params"]
    return found


def facts_of_groups(
    groups: Sequence[Mapping[str, Any]], names: Mapping[int, str] | None = None, first: int = 0
) -> Facts:
    """Return facts about an optimizer's parameters, which ranks must have in common."""
    # `names` are by `id(param)`. `first` is the number of the first of these groups.
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
    """Return facts about a model, and its order in the optimizers, which ranks must share."""
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
    """Return facts about the options that change an optimizer's numbers.

    These are the ones that it has `declared` as its defaults. Other entries of a parameter group (a
    rank, a name, a logger) are the user's own. Left out are options in `IMPLEMENTATION`, and values
    that cannot be compared: functions, objects, devices.
    """
    compared = set(declared) - IMPLEMENTATION
    facts: Facts = {}
    for index, group in enumerate(groups, first):
        for name in sorted(compared & group.keys()):
            value = _comparable(group[name])
            if value is not None:
                facts[f"values of {name} in group {index}"] = value
    return facts


def _comparable(value: object) -> object:
    """Return a value in JSON's types, numbers as floats; None if it cannot be compared."""
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
    """Wait until every rank has called `what`: through the store, and not in a collective."""
    # A rank that is elsewhere would answer that collective with its own next one, of another size.
    if workers.size > 1:
        roll_call = workers.roll_call(what)
        if soon:
            roll_call.warn_after = SOON
        roll_call.give_up_after = PATIENCE
        roll_call.wait(what)


def check_same_frozen(workers: RankGroup, trained: Sequence[bool]) -> None:
    """Wait until every rank trains the same parameters; warn early, and raise if some do not."""
    # Freezing changes the sizes of buckets. A rank that did not freeze would wait for other sizes
    # until the process group's timeout.
    # With a checksum: ranks that train others never meet.
    what = f"requires_grad_() of the same parameters ({zlib.crc32(bytes(trained)):08x})"
    wait_for_all_ranks(workers, what, soon=True)
