"""Are all ranks given the same parameters and options? If not, all of them say where not.

What one is given is described in words: a list of claims, each a title and what is claimed, one
value or a list of them. Ranks compare a checksum of the whole, in one number; only where that
differs do they send the words, to find the first that does.
"""

from __future__ import annotations

import json
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from numbers import Real
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands._core.agreement import Describer
from manyhands._core.ranks import RankGroup

Made = TypeVar("Made")
Claims = dict[str, Any]
PATIENCE = 120.0  # seconds that a worker waits for others to do what all must
SOON = 2.0  # seconds after which it says that it waits
NAMED = 8  # ranks that a message speaks of
HOW = {"foreach", "fused", "capturable", "differentiable"}
"""Options that say how a step is computed and not what it is. Machines may differ in them."""

_calls: dict[str, int] = {}  # how often something was called


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def check_agreement(workers: RankGroup, claims: Claims) -> None:
    """Raise on every rank where ranks claim different things."""
    device = workers.any_device
    text = json.dumps(claims)
    sums = workers.all_gather([float(zlib.crc32(text.encode()))], device)
    if len({total[0] for total in sums}) > 1:
        _explain([json.loads(one) for one in workers.all_gather_text(text, device)])


def claims_on_groups(
    groups: Sequence[Mapping[str, Any]], names: Mapping[int, str] | None = None, first: int = 0
) -> Claims:
    """What ranks must have alike in an optimizer's parameters; `names` are by `id`.

    The groups are those from the `first` on.
    """
    claims: Claims = {"numbers of parameter groups": len(groups)}
    describer = Describer()
    for index, group in enumerate(groups, first):
        own = group.get("param_names")
        claims[f"parameters in group {index}"] = [
            describer.describe(
                param, own[number] if own else (names or {}).get(id(param), ""), frozen=True
            )
            for number, param in enumerate(group["params"])
        ]
    return claims


def claims_on_options(
    groups: Sequence[Mapping[str, Any]], declared: Iterable[str], first: int = 0
) -> Claims:
    """What ranks must have alike in an optimizer's options: those that change its numbers.

    These are the ones that it has `declared` as its defaults. What it was given besides (a rank, a
    name, a logger) it does not look for in its parameter groups. Left out are options in `HOW`, and
    values without a meaning that could be compared: functions, objects, devices.
    """
    compared = set(declared) - HOW
    return {
        f"values of {name} in group {index}": value
        for index, group in enumerate(groups, first)
        for name in sorted(compared & group.keys())
        if (value := _comparable(group[name])) is not None
    }


def _comparable(value: Any) -> Any:
    """A value in JSON, numbers as floats; None for what cannot be compared."""
    if value is None or isinstance(value, bool | str | torch.dtype):
        return str(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Tensor):
        return _comparable(value.tolist())
    if isinstance(value, list | tuple):
        return [_comparable(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): _comparable(each) for key, each in sorted(value.items(), key=str)}
    return None


def all_or_none(workers: RankGroup, make: Callable[[], Made]) -> Made:
    """Make something on every worker; where one cannot, all raise."""
    try:
        made, problem = make(), None
    except Exception as error:
        made, problem = None, error
    if workers.size > 1:
        failed = workers.all_gather([float(problem is not None)], workers.any_device)
        ranks = ", ".join(str(rank) for rank, flag in enumerate(failed) if flag[0])
        if ranks and problem is None:
            raise ValueError(
                f"the optimizer does not take the parameters that rank(s) {ranks} would keep: see "
                "the error there."
            )
    if problem is not None:
        raise problem
    assert made is not None
    return made


def wait_for_all_ranks(workers: RankGroup, what: str, seconds: float = PATIENCE) -> None:
    """Wait until every worker has called `what`; raise if some have not in so many seconds.

    Through the store, as a collective that some do not join would be taken for another.
    """
    if workers.size == 1:
        return
    store = dist.distributed_c10d._get_default_store()
    ranks = workers.ranks
    key = f"manyhands {what} {ranks}"
    count = _calls[key] = _calls.get(key, 0) + 1
    store.set(f"{key} {count} {workers.rank}", "here")
    try:
        store.wait([f"{key} {count} {r}" for r in range(workers.size)], timedelta(seconds=seconds))
    except RuntimeError:
        absent = [r for r in range(workers.size) if not store.check([f"{key} {count} {r}"])]
        if not absent:
            raise
        store.delete_key(f"{key} {count} {workers.rank}")  # who calls later shall not find us here
        _calls[key] = count - 1
        raise RuntimeError(
            f"{what} must be called on every worker, and rank(s) {absent} have not called it "
            f"within {seconds:g} seconds."
        ) from None
    if count > 2:  # which nobody waits for any more
        store.delete_key(f"{key} {count - 2} {workers.rank}")


def all_freeze_alike(workers: RankGroup, trained: Sequence[bool]) -> None:
    """Wait until every worker trains these parameters; warn early, and raise if some do not.

    What follows are buckets of another size, for which the others would wait until the process
    group's timeout.
    """
    what = f"freezing or thawing parameters ({zlib.crc32(bytes(trained)):08x})"
    try:
        wait_for_all_ranks(workers, what, SOON)
    except RuntimeError as error:
        warnings.warn(
            f"{error} Set requires_grad alike on every worker. Waiting for {PATIENCE:g} seconds.",
            RuntimeWarning,
            stacklevel=5,
        )
        wait_for_all_ranks(workers, what)


def _explain(each: Sequence[Claims]) -> None:
    """Raise for the first thing that ranks claim differently."""
    for title in dict.fromkeys(title for claims in each for title in claims):
        values = [claims.get(title, "absent") for claims in each]
        if all(isinstance(value, list) for value in values):
            _check_same(f"numbers of {title}", [len(value) for value in values])
            for number, row in enumerate(zip(*values, strict=True)):
                _check_same(f"{title}: number {number} is", row)
        else:
            _check_same(title, values)


def _check_same(what: str, values: Sequence[Any]) -> None:
    """Raise, naming rank 0 and those that differ from it."""
    others = [rank for rank, value in enumerate(values) if str(value) != str(values[0])]
    if others:
        listed = ", ".join(f"rank {rank}: {values[rank]}" for rank in [0, *others][:NAMED])
        raise ValueError(
            f"workers have different {what}{'' if what.endswith(' is') else ':'} {listed}. "
            "Build the same model and optimizer on every worker."
        )
