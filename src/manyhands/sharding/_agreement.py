"""Are all workers given the same parameters and options? If not, all of them say where not."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from manyhands._comm import Workers

Made = TypeVar("Made")
PATIENCE = 120.0  # seconds that a worker waits for others to do what all must

_calls: dict[str, int] = {}  # how often something was called


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def check_agreement(
    workers: Workers, groups: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]
) -> None:
    """Raise on every worker where they were not given the same parameter groups and `facts`."""
    devices = [param.device for group in groups for param in group["params"]]
    if not devices:
        return
    text = json.dumps([facts, [_description(group) for group in groups]])
    sums = workers.gather([float(zlib.crc32(text.encode()))], devices[0])
    if len({total[0] for total in sums}) > 1:
        _explain([json.loads(one) for one in workers.gather_text(text, devices[0])])


def all_or_none(
    workers: Workers, devices: Sequence[torch.device], make: Callable[[], Made]
) -> Made:
    """Make something on every worker; where one cannot, all raise. (`devices`: of parameters.)"""
    try:
        made, problem = make(), None
    except Exception as error:
        made, problem = None, error
    if workers.size > 1 and devices:
        failed = workers.gather([float(problem is not None)], devices[0])
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


def all_here(workers: Workers, what: str, seconds: float = PATIENCE) -> None:
    """Wait until every worker has called `what`; raise if some have not in so many seconds.

    Through the store, as a collective that some do not join would be taken for another.
    """
    if workers.size == 1:
        return
    store = dist.distributed_c10d._get_default_store()
    ranks = dist.get_process_group_ranks(workers.group or dist.group.WORLD)
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


def _description(group: Mapping[str, Any]) -> list[Any]:
    """What workers must have alike in a parameter group."""
    options = {
        k: v for k, v in options_of(group).items() if isinstance(v, int | float | str | tuple)
    }
    params = [
        f"{tuple(p.shape)} {p.dtype}{'' if p.requires_grad else ', frozen'}"
        for p in group["params"]
    ]
    return [params, json.loads(json.dumps(options, default=str))]


def _explain(each: list[list[Any]]) -> None:
    """Raise for the first thing that workers do not have alike."""
    advice = "Build the same model and optimizer on every worker."

    def differ(values: list[Any], what: str) -> None:
        if any(value != values[0] for value in values):
            listed = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values[:8]))
            raise ValueError(f"workers have different {what}: {listed}. {advice}")

    for name in each[0][0]:
        differ([facts[name] for facts, _ in each], f"values of {name}")
    differ([len(groups) for _, groups in each], "numbers of parameter groups")
    for index, groups in enumerate(zip(*(groups for _, groups in each), strict=True)):
        differ([len(params) for params, _ in groups], f"numbers of parameters in group {index}")
        for number, params in enumerate(zip(*(params for params, _ in groups), strict=True)):
            differ(list(params), f"parameters in group {index}: number {number} is")
        differ([options for _, options in groups], f"options in group {index}")
