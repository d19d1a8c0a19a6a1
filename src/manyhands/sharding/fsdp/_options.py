"""What a user of FullyShardedDataParallel asks for, and what torch's `fully_shard` is told.

The options are the documented ones of fairscale. Those that say *how* the original did its work,
and change no result, are kept as attributes and have no further effect here:

    flatten_parameters, bucket_cap_mb      the engine always sends a wrap's parameters together
    process_group_reduce_scatter           gradients travel apart from parameters anyway
    no_broadcast_optim_state               every worker takes part in gathering the state
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from manyhands._core.ranks import RankGroup
from manyhands.sharding.wrapping._dummy_group import DummyProcessGroup


@dataclass(frozen=True)
class Precision:
    """Types in which a wrap works; None is the parameters' own."""

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    buffers: torch.dtype | None = None

    @classmethod
    def of(
        cls,
        mixed_precision: bool,
        compute_dtype: torch.dtype | None,
        buffer_dtype: torch.dtype | None,
        fp32_reduce_scatter: bool,
    ) -> Precision:
        for name, dtype in (("compute_dtype", compute_dtype), ("buffer_dtype", buffer_dtype)):
            if dtype is not None and not dtype.is_floating_point:
                raise ValueError(f"{name} must be a floating type such as torch.bfloat16: {dtype}.")
        if fp32_reduce_scatter and not mixed_precision:
            raise ValueError(
                "fp32_reduce_scatter=True requires mixed_precision=True: without it gradients are "
                "reduced in the type of the parameters."
            )
        compute = compute_dtype or (torch.float16 if mixed_precision else None)
        return cls(compute, torch.float32 if fp32_reduce_scatter else None, buffer_dtype or compute)


def workers_of(process_group: Any) -> RankGroup:
    """The workers among whom parameters are sharded.

    A stand-in for a process group, which has only `rank()` and `size()`, may stand for one.
    """
    if process_group is None or isinstance(process_group, dist.ProcessGroup):
        return RankGroup.of(process_group)
    if not callable(getattr(process_group, "size", None)):
        raise TypeError(
            "process_group must be a torch.distributed process group (or None for all workers), "
            f"got {type(process_group).__name__}."
        )
    if process_group.size() != 1:
        raise ValueError(
            f"a {type(process_group).__name__} of {process_group.size()} workers cannot send "
            "anything. Make a group with torch.distributed.new_group, or a stand-in of size 1."
        )
    return RankGroup()


def group_of(process_group: Any) -> Any:
    """The group that a wrap shows: the given one, else that of all workers, or a stand-in."""
    if process_group is not None:
        return process_group
    return dist.group.WORLD if dist.is_initialized() else DummyProcessGroup(rank=0, size=1)


def device_of(
    module: nn.Module, workers: RankGroup, compute_device: torch.device | str | None
) -> torch.device:
    """Where a wrap computes: as asked, where its parameters are, or on the group's accelerator."""
    if compute_device is not None:
        return torch.device(compute_device)
    tensors = [*module.parameters(), *module.buffers()]
    there = next((t.device for t in tensors if t.device.type not in ("cpu", "meta")), None)
    if there is not None:
        return there
    if workers.size > 1 and torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None and workers.has_backend(accelerator):
            return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return torch.device("cpu")


def check_offload(device: torch.device, params: bool, grads: bool | None) -> bool:
    """Whether the engine is to keep shards in the host's memory."""
    if device.type == "cpu":
        return False  # they are there already
    if grads is not None and grads != params:
        raise ValueError(
            f"move_grads_to_cpu={grads} with move_params_to_cpu={params}: the optimizer needs a "
            "parameter and its gradient in the same place. Set both, or neither."
        )
    return params
