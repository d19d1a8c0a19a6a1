"""The options of FullyShardedDataParallel, and what they mean for torch's `fully_shard`.

`FSDPOptions` names every option once, with its default and its description. The wrapper takes its
signature and the "Args" of its docstring from there (`takes_options`), and `resolve` replaces
defaults such as None by the values in effect.

The options are those documented by fairscale, and three of ours: `sync_module_states`, `overlap`
and `codec`.
Four options say *how* fairscale did its work. They change no result, so they are kept as attributes
and have no effect here:

    flatten_parameters, bucket_cap_mb      the engine always sends a wrap's parameters together
    process_group_reduce_scatter           gradients travel apart from parameters anyway
    no_broadcast_optim_state               every rank takes part in gathering the state

The option `process_group` may be a `DummyProcessGroup`, which stands for one rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from manyhands._core.ranks import RankGroup
from manyhands.sharding._agreement import GroupLike

P = ParamSpec("P")
W = TypeVar("W", bound=nn.Module)

# Ranks may set these differently, or they cannot be compared as text (process groups). All other
# options must be equal on every rank, and are shown by `print(model)` with `verbose=True`.
NOT_COMPARED = {
    *("process_group", "process_group_reduce_scatter", "no_broadcast_optim_state"),
    *("verbose", "cpu_offload", "allow_reset_parameters"),
    "codec",  # is compared, but is no attribute of the wrap
}


@dataclass(frozen=True)
class FSDPOptions:
    """Options of one wrap.

    Args:
        process_group: the ranks that shard the parameters; by default all. A group of one rank
            inside a wrap of several keeps its parameters whole and private to the rank, as an
            expert of a mixture needs.
        process_group_reduce_scatter: has no effect; gradients travel apart anyway.
        reshard_after_forward: free the full parameters after each forward and gather them again
            in backward. Uses less memory and sends 1.5 times the bytes.
        disable_reshard_on_root: the root keeps its own full parameters until backward even so.
        mixed_precision: compute with parameters and inputs in `compute_dtype`, by default
            float16 (bfloat16 needs no loss scaling). The optimizer's parameters keep their type.
        fp32_reduce_scatter: with mixed precision, average gradients in float32.
        flatten_parameters: has no effect; a wrap's parameters always travel together.
        move_params_to_cpu: keep shards of parameters, gradients and optimizer state in CPU memory.
        compute_dtype: type to compute in.
        buffer_dtype: type of floating-point buffers, by default `compute_dtype`.
        move_grads_to_cpu: must have the value of `move_params_to_cpu`.
        bucket_cap_mb: has no effect.
        compute_device: by default the parameters' device, or the group's accelerator.
        no_broadcast_optim_state: has no effect; the state of a group of one stays with its rank.
        state_dict_device: device on which `state_dict()` puts full parameters.
        clear_autocast_cache: clear autocast's cache of casts after each forward.
        force_input_to_fp32: cast inputs to float32 in a wrap without mixed precision.
        verbose: show every option in `print(model)`.
        cpu_offload: older name of `move_params_to_cpu`.
        state_dict_on_rank_0_only: make `state_dict()` empty on all other ranks.
        gradient_predivide_factor: divide gradients by this factor before they are summed, and by
            N / factor after. By default they are divided after.
        allow_reset_parameters: let `reset_parameters()` call the wrapped module's method.
        sync_module_states: start from rank 0's parameters and buffers.
        overlap: gather the next wrap's parameters, and send the previous wrap's gradients, while
            one wrap computes. False needs about two wraps' memory less, and is slower.
        codec: send gradients as codes: "int8", "int4" or "fp4" (signs and powers of two). They are
            summed in float32. What rounding leaves out is added to the next gradient, and takes
            (N - 1)/N of the full gradients' size in float32 on each rank. It is not saved.
            Parameters travel as they are.
    """

    process_group: GroupLike | None = None
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
    sync_module_states: bool = field(default=True, kw_only=True)
    overlap: bool = field(default=True, kw_only=True)
    codec: str | None = field(default=None, kw_only=True)

    def precision(self) -> Precision:
        """Return the types to compute, reduce and keep buffers in, or raise a ValueError."""
        for name in ("compute_dtype", "buffer_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not dtype.is_floating_point:
                raise ValueError(f"{name} must be a floating type such as torch.bfloat16: {dtype}.")
        if self.fp32_reduce_scatter and not self.mixed_precision:
            raise ValueError(
                "fp32_reduce_scatter=True requires mixed_precision=True: without it gradients are "
                "reduced in the type of the parameters."
            )
        compute = self.compute_dtype or (torch.float16 if self.mixed_precision else None)
        reduce = torch.float32 if self.fp32_reduce_scatter else None
        return Precision(compute, reduce, self.buffer_dtype or compute)

    def check_divide_factor(self) -> None:
        """Raise a ValueError unless gradients can be divided by the factor."""
        factor = self.gradient_predivide_factor
        if factor is not None and not factor > 0:  # also refuses nan
            raise ValueError(f"gradient_predivide_factor must be positive, got {factor}.")

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
    """Let an `__init__` of (module, options) take each option as an argument of its own.

    `inspect.signature`, editors and type checkers see the names and defaults of `options`.
    """

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


def add_options_to(text: str | None) -> str | None:
    """Return the wrapper's docstring with the "Args" of the options' docstring at its end."""
    if text is None or FSDPOptions.__doc__ is None:  # python -OO
        return text
    _, args = inspect.cleandoc(FSDPOptions.__doc__).split("Args:\n")
    module = "    module: the module to shard, in place."
    return f"{inspect.cleandoc(text)}\n\nArgs:\n{module}\n{args}"


class DummyProcessGroup:
    """Stands in for a process group where only its rank and size are needed.

    >>> import manyhands as mh
    >>> group = mh.DummyProcessGroup(rank=0, size=1)
    >>> group.rank(), group.size()
    (0, 1)

    Use it in tests and experiments with one rank, without a launcher or `init_process_group`.
    Nothing can be sent through it, so with a larger size only code that sends nothing works.
    """

    def __init__(self, rank: int, size: int) -> None:
        if not 0 <= rank < size:
            raise ValueError(
                f"rank must be from 0 to size - 1, got rank {rank} and size {size}. "
                "For one rank use DummyProcessGroup(rank=0, size=1)."
            )
        self._rank = rank
        self._size = size

    # Methods, not attributes, as on torch's ProcessGroup.

    def rank(self) -> int:
        """Return the rank given to the constructor."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks given to the constructor."""
        return self._size

    def __repr__(self) -> str:
        return f"DummyProcessGroup(rank={self._rank}, size={self._size})"


def find_ranks(process_group: GroupLike | None) -> RankGroup:
    """Return the ranks among which parameters are sharded.

    A stand-in for a process group, with only `rank()` and `size()`, may stand for one rank.
    """
    if process_group is None or isinstance(process_group, dist.ProcessGroup):
        return RankGroup.of(process_group)
    if not callable(getattr(process_group, "size", None)):
        raise TypeError(
            "process_group must be a torch.distributed process group (or None for all ranks), "
            f"got {type(process_group).__name__}."
        )
    if process_group.size() != 1:
        raise ValueError(
            f"a {type(process_group).__name__} of {process_group.size()} ranks cannot send "
            "anything. Make a group with torch.distributed.new_group, or a stand-in of size 1."
        )
    return RankGroup()


def find_group(process_group: GroupLike | None) -> GroupLike | None:
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


def check_offload(device: torch.device, params: bool, grads: bool | None) -> bool:
    """Return whether the engine keeps shards in CPU memory, or raise a ValueError."""
    if device.type == "cpu":
        return False  # they are in CPU memory already
    if grads is not None and grads != params:
        raise ValueError(
            f"move_grads_to_cpu={grads} with move_params_to_cpu={params}: the optimizer needs a "
            "parameter and its gradient in the same place. Set both, or neither."
        )
    return params
