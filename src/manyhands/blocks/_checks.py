"""Checks before training begins: arguments that exclude each other, and workers that disagree.

All of them come before the first tensor is sent, and raise on every worker.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands._core.agreement import agree, describe_tensors, names_in
from manyhands._core.ranks import RankGroup
from manyhands._core.sharded import is_dtensor, local_shard
from manyhands._core.shared_memory import check_on_cpu
from manyhands._core.wrappers import unwrap
from manyhands.blocks._arguments import flag
from manyhands.blocks._outer import Outer
from manyhands.blocks._schedule import Every
from manyhands.blocks.crew._transport import CrewBase


def check_optimizer(class_name: str, optimizer: object, blocks: type[Optimizer]) -> Optimizer:
    """Return the optimizer if it can be wrapped, or raise."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"{class_name} wraps a torch.optim.Optimizer, got {type(optimizer).__name__}: write "
            f"{class_name}(SGD(parameters, lr=...))."
        )
    if any(isinstance(each, blocks) for each in unwrap(optimizer)):
        raise TypeError(f"{class_name} got an optimizer that is in blocks already: wrap it once.")
    return optimizer


def check_outer(outer: object) -> None:
    if not isinstance(outer, Outer):
        raise TypeError(
            f"outer must be an outer step (a subclass of manyhands.Outer), got {outer!r}. "
            "LocalSGD, BMUF, SlowMo and DiLoCo have one already."
        )


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")


def check_overlap_and_fragments(overlap: int, fragments: int, every: Every) -> None:
    if overlap >= every.least:
        raise ValueError(
            f"overlap must be less than the steps between two sync rounds ({every.least}), got "
            f"{overlap}. It is the number of steps for which a mean may be in flight."
        )
    if fragments > every.least:
        raise ValueError(
            f"{fragments} fragments need at least as many steps in a block, and every={every} "
            f"may have {every.least}. Each fragment is synchronized once in a block."
        )


def check_groups(
    class_name: str,
    crew: CrewBase | None,
    process_group: object,
    inner: RankGroup,
    every: Every,
) -> None:
    if crew is not None and process_group is not None:
        raise ValueError(
            f"{class_name} takes a process_group or a crew, and got both. A crew makes its "
            "own group: leave process_group out."
        )
    ranks_per_worker = inner.size if crew is None else crew.inner.size
    if inner.size > 1 and inner.size != ranks_per_worker:
        raise ValueError(
            f"inner_group has {inner.size} processes, and a worker of the crew {ranks_per_worker}. "
            "Give the crew the same group when it is made: Crew(inner_group=...)."
        )
    if ranks_per_worker > 1 and type(every) is not Every:
        raise ValueError(
            f"every={every} follows from each sync round's result, and the ranks of an inner_group "
            "have separate sync rounds. Give a number of steps."
        )


def check_shared_memory(
    wanted: bool | None, codec: str, crew: object, optimizer: Optimizer
) -> bool | None:
    """Return whether memory is to be shared; None: where it is possible."""
    wanted = None if wanted is None else flag("shared_memory", wanted)
    if not wanted:
        return wanted
    if codec != "float32":
        raise ValueError(
            f"codec={codec!r} has no effect with shared_memory=True: nothing is sent. "
            "Give only one of the two."
        )
    if crew is not None:
        raise ValueError(
            "shared_memory=True is for a process group: a crew's workers come and go, and may be "
            "on other hosts. Leave it out."
        )
    for device in {p.device for group in optimizer.param_groups for p in group["params"]}:
        check_on_cpu(device)
    return wanted


def fingerprint(options: object) -> float:
    """Return a checksum of the options as a float, which all collectives can carry exactly."""
    return float(zlib.crc32(repr(options).encode()))


def check_agreement(
    class_name: str,
    workers: RankGroup,
    inner: RankGroup,
    options: Mapping[str, object],
    params: Sequence[Tensor],
    buffers: Sequence[Tensor],
    modules: Sequence[nn.Module],
) -> None:
    """Raise on every worker if their options or models differ, before anything is sent."""
    facts = {
        "options": {name: str(value) for name, value in options.items()},
        "shards (process_group= must be of ranks with the same shard)": _shards(params),
        "size of inner_group": inner.size,
        "rank in inner_group (process_group= must be of ranks with the same)": inner.rank,
        "parameters": describe_tensors(params, frozen=True),
        "buffers": describe_tensors(buffers),
    }
    names = {"parameters": names_in(modules, params), "buffers": names_in(modules, buffers)}
    advice = f"Build the same model, and the same {class_name}, on every rank."
    agree(workers, facts, advice, names=names)


def memory_order(params: Sequence[Tensor]) -> float:
    """Return a checksum of the strides: elements are averaged in the order of memory."""
    parts = [local_shard(param) for param in params]
    return fingerprint([(i, p.stride()) for i, p in enumerate(parts) if not p.is_contiguous()])


def _shards(params: Sequence[Tensor]) -> list[str]:
    """Describe which shards of DTensors are on this rank."""
    return [
        f"{tuple(p.placements)} at {p.device_mesh.get_coordinate()}"
        for p in params
        if is_dtensor(p)
    ]
