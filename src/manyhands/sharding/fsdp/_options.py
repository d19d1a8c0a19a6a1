"""The options of FullyShardedDataParallel, and what they mean for torch's `fully_shard`.

`FSDPOptions` names every option once, with its default. The wrapper takes its signature from there
(`takes_options`), and `resolve` replaces defaults such as None by the values in effect.

The options are those documented by fairscale, and one of ours, `overlap`. Four options say *how*
fairscale did its work. They change no result, so they are attributes without an effect here:

    flatten_parameters, bucket_cap_mb      the engine always sends a wrap's parameters together
    process_group_reduce_scatter           gradients travel apart from parameters anyway
    no_broadcast_optim_state               every rank takes part in gathering the state

The option `process_group` may be a `DummyProcessGroup`, which stands for one rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from manyhands._ranks.ranks import RankGroup
from manyhands.sharding._agreement import GroupLike

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

P = ParamSpec("P")
W = TypeVar("W", bound=nn.Module)

# Ranks may set these differently, or they cannot be compared as text (process groups). All other
# options must be equal on every rank, and are shown by `print(model)` with `verbose=True`.
NOT_COMPARED = {
    *("process_group", "process_group_reduce_scatter", "no_broadcast_optim_state"),
    *("verbose", "cpu_offload", "allow_reset_parameters"),
}


@dataclass(frozen=True)
class FSDPOptions:
    """Options of one wrap; the docstring of FullyShardedDataParallel describes them."""

    process_group: GroupLike | DeviceMesh | None = None
    process_group_reduce_scatter: GroupLike | None = None
    reshard_after_forward: bool = True
    disable_reshard_on_root: bool = True
    mixed_precision: bool = False
    fp32_reduce_scatter: bool = False
    flatten_parameters: bool = True
    move_params_to_cpu: bool = False
    compute_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    move_grads_to_cpu: bool | None = None
    bucket_cap_mb: int = 25
    compute_device: torch.device | str | None = None
    no_broadcast_optim_state: bool | None = False
    state_dict_device: torch.device | str | None = None
    clear_autocast_cache: bool = False
    force_input_to_fp32: bool = False
    verbose: bool = False
    cpu_offload: bool = False
    state_dict_on_rank_0_only: bool = False
    gradient_predivide_factor: float | None = None
    allow_reset_parameters: bool = False
    overlap: bool = field(default=True, kw_only=True)

    def precision(self) -> Precision:
        """Return the types to compute, reduce and keep buffers in, or raise a ValueError."""
        if self.fp32_reduce_scatter and not self.mixed_precision:
            raise ValueError(
                "fp32_reduce_scatter=True requires mixed_precision=True: without it gradients are "
                "reduced in the type of the parameters."
            )
        compute = self.compute_dtype or (torch.float16 if self.mixed_precision else None)
        reduce = torch.float32 if self.fp32_reduce_scatter else None
        return Precision(compute, reduce, self.buffer_dtype or compute)

    def resolve(self, precision: Precision, device: torch.device) -> FSDPOptions:
        """Replace defaults by the values in effect, as a wrap shows them in its attributes."""
        compute = precision.compute or torch.float32
        offload = self.move_params_to_cpu or self.cpu_offload
        return replace(
            self,
            process_group=find_group(self.process_group),
            move_params_to_cpu=offload,
            move_grads_to_cpu=offload if self.move_grads_to_cpu is None else self.move_grads_to_cpu,
            compute_dtype=compute,
            buffer_dtype=precision.buffers or compute,
            compute_device=device,
            state_dict_device=torch.device(self.state_dict_device or device),
        )


COMPARED = tuple(each.name for each in fields(FSDPOptions) if each.name not in NOT_COMPARED)


@dataclass(frozen=True)
class Precision:
    """Types in which a wrap works; None means the parameters' own type."""

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    buffers: torch.dtype | None = None


def takes_options(
    options: Callable[P, FSDPOptions],
) -> Callable[
    [Callable[[W, nn.Module, FSDPOptions], None]], Callable[Concatenate[W, nn.Module, P], None]
]:
    """Let an `__init__` of (module, options) take each option as an argument of its own."""
    # `inspect.signature`, editors and type checkers see the names and defaults of `options`.

    def decorate(
        init: Callable[[W, nn.Module, FSDPOptions], None],
    ) -> Callable[Concatenate[W, nn.Module, P], None]:
        def __init__(self: W, module: nn.Module, *args: P.args, **kwargs: P.kwargs) -> None:
            init(self, module, options(*args, **kwargs))

        # The options stand between (self, module) and the return type.
        own = inspect.signature(init)
        first = list(own.parameters.values())[:2]
        listed = inspect.signature(options).parameters.values()
        __init__.__signature__ = own.replace(parameters=[*first, *listed])  # type: ignore[attr-defined]
        __init__.__qualname__ = init.__qualname__
        __init__.__module__ = init.__module__
        # `module` may be passed by name as well, which Concatenate cannot express.
        return __init__  # type: ignore[return-value]

    return decorate


class DummyProcessGroup:
    """Stands in for a process group of one rank, without a launcher or `init_process_group`.

    >>> from manyhands.fairscale import DummyProcessGroup
    >>> group = DummyProcessGroup(rank=0, size=1)
    >>> group.rank(), group.size()
    (0, 1)

    Nothing can be sent through it, so with a larger size only code that sends nothing works.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size

    def rank(self) -> int:
        """Return the rank given to the constructor."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks given to the constructor."""
        return self._size


def find_ranks(process_group: GroupLike | DeviceMesh | None) -> RankGroup:
    """Return the ranks among which parameters are sharded."""
    from torch.distributed.device_mesh import DeviceMesh  # not needed to import manyhands

    if isinstance(process_group, DeviceMesh):
        return RankGroup.of_mesh(process_group)
    # A stand-in for a process group, with only `rank()` and `size()`, may stand for one rank.
    if process_group is None or isinstance(process_group, dist.ProcessGroup):
        return RankGroup.of(process_group)
    if process_group.size() != 1:
        raise ValueError(
            f"a {type(process_group).__name__} of {process_group.size()} ranks cannot send "
            "anything. Give a group of torch.distributed.new_group, or a stand-in of size 1."
        )
    return RankGroup()


def find_group(process_group: GroupLike | DeviceMesh | None) -> GroupLike | DeviceMesh | None:
    """Return the group that a wrap shows: its own, else that of all ranks, else a stand-in."""
    if process_group is not None:
        return process_group
    return dist.group.WORLD if dist.is_initialized() else DummyProcessGroup(rank=0, size=1)


def find_device(
    module: nn.Module, ranks: RankGroup, compute_device: torch.device | str | None
) -> torch.device:
    """Return the device to compute on: as asked, the parameters', or the group's accelerator."""
    if compute_device is not None:
        return torch.device(compute_device)
    tensors = [*module.parameters(), *module.buffers()]
    # One tensor on an accelerator decides, even if others are still on the CPU or on meta.
    used = next((t.device for t in tensors if t.device.type not in ("cpu", "meta")), None)
    if used is not None:
        return used
    if ranks.size > 1 and torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        # A gloo group on a machine with GPUs can send CPU tensors only, so ask the group.
        if accelerator is not None and ranks.has_backend(accelerator):
            return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return torch.device("cpu")
