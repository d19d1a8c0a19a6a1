"""Shard an optimizer: each rank updates slices, then all ranks gather the parameters.

A step, in order
    options     copy learning rates etc. from `param_groups`, which schedulers change
    gradients   give each slice the matching part of `param.grad` (`_flat_params.py`)
    step        update this rank's slices with `optim`, an instance of the user's optimizer class
    gather      exchange slices of the flat parameters with all ranks

`_state.py` saves and loads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import ParamsT, StateDict

from manyhands._arguments import whole
from manyhands._optimizers.modules import ParallelModules
from manyhands._optimizers.optimizers import choose_layout
from manyhands._optimizers.state_parts import (
    OptimizerStatePart,
    SavedState,
    options_of,
)
from manyhands._optimizers.wrappers import ParamGroup, YieldingProperty, find_layer
from manyhands._ranks.agreement import agree
from manyhands._ranks.presence import count_step, explained
from manyhands._ranks.ranks import RankGroup
from manyhands._tensors.flat import is_dtensor, norm
from manyhands._warn import warn
from manyhands.sharding._agreement import (
    ADVICE,
    GroupLike,
    check_same_frozen,
    facts_of_groups,
)
from manyhands.sharding._divided import DividedOptimizer, check_params_and_class, copy_options
from manyhands.sharding._gradients import clip
from manyhands.sharding.zero import _state
from manyhands.sharding.zero._flat_params import Shards
from manyhands.sharding.zero._reducer import Reducer


@dataclass
class OSSRun:
    """The changing state of an OSS, shared with proxies around the OSS."""

    optim: Any = None
    # Parameters that were trained in any step, by index.
    trained: set[int] = field(default_factory=set)
    begun: bool = False  # whether optimizer state exists
    averaged: bool = False  # whether ranks had equal gradients in the first step
    consolidated: dict[int, _state.ParamState] | None = None
    recipient: int | None = None  # of the state collected since the last step
    # Weak, because the module references the OSS.
    reducer_ref: Callable[[], Reducer | None] = lambda: None

    def begin(self) -> None:
        """Discard the collected state, because `optim` now has newer state."""
        self.begun = True
        self.consolidated = None
        self.recipient = None

    @property
    def reducer(self) -> Reducer | None:
        return self.reducer_ref()


class OSS(DividedOptimizer):
    """Shard the optimizer state: each of N ranks stores 1/N.

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = mh.OSS(model.parameters(), optim=torch.optim.AdamW, lr=1e-3)
    >>> model(torch.ones(2, 3)).sum().backward()
    >>> optimizer.step()

    OSS replaces the optimizer, under `DistributedDataParallel` or, to shard gradients as well,
    `ShardedDataParallel`. After `step`, all ranks have the parameters that the plain optimizer
    would compute.

    The constructor turns parameters into views of flat memory: move the model to a device first.
    `state_dict` returns the plain optimizer's format. After the first step, call
    `consolidate_state_dict` on all ranks beforehand.

    Args:
        params: parameters or parameter groups, as for any optimizer.
        optim: class of the optimizer.
        group: the ranks that share the state; default: all.
        broadcast_buffer_size: fairscale's name for `bucket_size`; ignored unless positive.
        layout: "even" cuts parameters anywhere into equal slices, for elementwise optimizers;
            "whole" assigns each parameter to a single rank. The default depends on `optim`; see
            `.layout`.
        shared_memory: for CPU ranks of a single host: read gradients and parameters from the memory
            of other ranks. This takes half the CPU time of sending, or less.
        bucket_size: elements per message; default 4 Mi, more for many ranks, less for small models.
        gather_state: let `state_dict()` collect the state from all ranks, for trainers that call it
            on every rank, such as Accelerate. Each rank temporarily stores the full state in host
            memory. If some ranks do not call `state_dict()`, the other ranks raise an error.
        **defaults: arguments of `optim`. Options in the optimizer's `defaults` that change results
            must be equal on all ranks.

    Attributes:
        optim: the optimizer of this rank's shard.
        rank: this process's rank in `group`.
        global_rank: this process's rank among all processes.
        world_size: the number of ranks in `group`.
        backend: the name of the group's backend; None without a process group.
    """

    def __init__(
        self,
        params: ParamsT,
        optim: type[Optimizer] = SGD,
        group: GroupLike | None = None,
        broadcast_buffer_size: int = -1,
        *,
        layout: str | None = None,
        shared_memory: bool = False,
        bucket_size: int | None = None,
        gather_state: bool = False,
        **defaults: object,
    ) -> None:
        check_params_and_class(type(self).__name__, params, optim)
        if isinstance(group, float | str):
            raise TypeError(f"group must be a process group, got {group!r}. Give lr by name.")
        if bucket_size is None and broadcast_buffer_size > 0:
            bucket_size = broadcast_buffer_size
        if bucket_size is not None:
            bucket_size = whole("bucket_size", bucket_size, 1)
        self._workers = RankGroup.of(group)
        if shared_memory:
            own = self._workers.with_own_group(torch.device("cpu"), pairs=True)
            self._workers = own.with_shared_memory()
        self.optimizer_class = optim
        self.optimizer_arguments = dict(defaults)
        self._group = group
        self.rank = self._workers.rank
        self.world_size = self._workers.size
        self.global_rank = self.rank
        self.backend: str | None = None
        if dist.is_available() and dist.is_initialized():
            self.global_rank = dist.get_rank()
            if group is None or isinstance(group, dist.ProcessGroup):
                self.backend = dist.get_backend(group)
        self._run = OSSRun()
        # Empty defaults: only `optim` knows which arguments are defaults.
        super().__init__(params, {})
        self.layout = layout or "whole"
        if self.world_size > 1:
            options = [{**defaults, **options_of(params)} for params in self.param_groups]
            self.layout = choose_layout(optim, layout, options)
        self._shards = Shards(self._workers, even=self.layout == "even", largest=bucket_size)
        self._parallel = ParallelModules(self._shards.params)
        self._lay_out_all(bucket_size, gather_state)
        self._roll_call = None
        if gather_state and self.world_size > 1:
            self._roll_call = self._workers.roll_call()

    def _lay_out_all(self, bucket_size: int | None, gather_state: bool) -> None:
        facts = {
            "values of layout": self.layout,
            "values of bucket_size": bucket_size,
            "values of optim": self.optimizer_class.__name__,
            "values of gather_state": gather_state,
        }
        # Collectives of different sizes would hang.
        agree(self._workers, {**facts, **facts_of_groups(self.param_groups)}, ADVICE)
        for group in self.param_groups:
            _check_dense(group["params"])
            self._shards.extend(group["params"])
        self._run.trained = self._shards.trained
        groups = [self._group_of_slices(i) for i in range(len(self.param_groups))]
        self._run.optim = self._make(groups)
        self._adopt_options()

    @YieldingProperty
    def _is_accelerate_prepared(self) -> bool:
        """Warn when Accelerate's `prepare` reads this; our `prepare` overrides it."""
        if self.world_size > 1:  # a single rank's parameters stay in place
            warn(
                "accelerator.save_state() and save_model() omit parameters that share memory, "
                "as those of OSS do. Use manyhands.integrations.accelerate.prepare(accelerator, "
                "...) with gather_state=True of OSS, or save with mh.save.",
            )
        return False

    @property
    def gradient_ranks(self) -> RankGroup:
        """The ranks whose gradients are averaged for a step."""
        return self._workers

    @property
    def shards_gradients(self) -> bool:
        """Whether a ShardedDataParallel averages the gradients."""
        return self._run.reducer is not None

    @property
    def optim(self) -> Any:
        """The optimizer of this rank's slices; initially None."""
        return self._run.optim

    @property
    def group(self) -> GroupLike | None:
        """The process group; None without a process group."""
        return self._group or (dist.group.WORLD if dist.is_available() else None)

    def _group_of_slices(self, index: int) -> ParamGroup:
        group = self.param_groups[index]
        slices: list[Tensor] = []
        for i in _state.param_indices(self.param_groups, index):
            slices += [owned.data for owned in self._shards.slices[i]]
        return {**options_of(group), "params": slices}

    # -- parameters ----------------------------------------------------------------------------

    def _check_params(self, params: Sequence[Tensor]) -> None:
        if any(map(is_dtensor, params)):
            raise TypeError(
                "these parameters are already sharded, as by FullyShardedDataParallel. Pass them "
                "to the optimizer directly, or to WholeTensorOptimizer if it needs whole tensors."
            )

    def _take_in_last_group(self) -> None:
        self.refresh_trainable()  # ranks must agree on parameters that were unfrozen before
        _check_dense(self.param_groups[-1]["params"])
        self._shards.extend(self.param_groups[-1]["params"])
        self.optim.add_param_group(self._group_of_slices(len(self.param_groups) - 1))
        copy_options(self.optim.param_groups[-1:], self.param_groups[-1:])
        self._run.trained |= self._shards.trained
        self._run.averaged = False  # DDP does not average new parameters
        if self._run.reducer is not None:
            self._run.reducer.lay_out_buckets()

    def refresh_trainable(self) -> None:
        """Follow parameters that were frozen or unfrozen. `step` calls this automatically."""
        if self._run.reducer is not None:
            self._run.reducer.follow_trained()
            return
        trained = self._shards.trained
        if not trained <= self._run.trained:
            flags = [i in trained for i in range(len(self._shards.params))]
            check_same_frozen(self._workers, flags)
            self._run.trained |= trained
            self._run.averaged = False  # DDP does not average unfrozen parameters

    def _follow_moved(self) -> None:
        if self._shards.moved:
            self._shards.rebuild_buffers()
            if self._run.reducer is not None:
                self._run.reducer.lay_out_buckets()

    def partition_parameters(self) -> list[list[ParamGroup]]:
        """Return each rank's parameter groups, with owned tensors only."""
        by_rank = []
        for rank in range(self._workers.size):
            groups: list[ParamGroup] = []
            for index, group in enumerate(self.param_groups):
                members = _state.param_indices(self.param_groups, index)
                held = self._shards.held_by(rank, members)
                groups.append({**options_of(group), "params": held})
            by_rank.append(groups)
        return by_rank

    # -- a step --------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        self._run.begin()
        self.prepare()

    def _step(self, **kwargs: Any) -> None:
        self._parallel.check_not_joined(type(self).__name__)
        self.join_in()
        self._check_averaged()
        self._shards.step(self.optim, **kwargs)
        if self._run.reducer is not None:
            self._run.reducer.forget(self._shards)
        with explained(self._workers):
            self._shards.wait()
        count_step(self)

    def _check_averaged(self) -> None:
        """Raise if ranks have different gradients in the first step with new parameters."""
        if self._run.averaged or self._run.reducer is not None:
            return
        own = 0.0
        for i, param in enumerate(self._shards.params):
            if param.grad is not None:
                # Weights distinguish the gradients of different parameters.
                own += float(norm(param.grad)) * (1 + i / len(self._shards.params))
        gathered = self._workers.all_gather([own], self._workers.any_device)
        by_rank = [there for (there,) in gathered]
        # Processors may differ. Comparisons with NaN are false.
        if any(abs(there - by_rank[0]) > 1e-5 * abs(by_rank[0]) for there in by_rank):
            listed = ", ".join(f"rank {r}: {there:.6g}" for r, there in enumerate(by_rank[:8]))
            raise RuntimeError(
                f"OSS.step() needs equal gradients on all ranks, but the weighted gradient "
                f"norms differ ({listed}): each slice would train on its owner's samples alone. "
                "Wrap the model in ShardedDataParallel(model, optimizer), or in "
                "DistributedDataParallel with all parameters that are trained later; or "
                "all_reduce the gradients before step()."
            )
        self._run.averaged = True

    def join_in(self) -> None:
        """Take part in averaging without a backward pass. `step` calls this."""
        if self._run.reducer is not None:
            self.refresh_trainable()
            self._run.reducer.complete(self._shards)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        super().zero_grad(set_to_none)
        if self._run.reducer is not None:
            self._run.reducer.forget(self._shards)

    def prepare(self) -> None:
        """Follow parameters that were unfrozen or moved. Call it on every rank."""
        self.refresh_trainable()
        self._follow_moved()

    def clip_grad_norm(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        filter_params_fn: Callable[[list[Tensor]], Iterable[Tensor]] | None = None,
    ) -> Tensor:
        """Clip the gradients to a total norm of `max_norm`; return the norm before clipping.

        Call it on every rank, between `backward` and `step`. `filter_params_fn` takes the list of
        parameters and returns the parameters to clip together.
        """
        params = self._shards.params
        chosen: Iterable[Tensor] = params
        if filter_params_fn is not None:
            chosen = filter_params_fn(list(params))
        ids = set(map(id, chosen))
        self.refresh_trainable()
        self.join_in()
        grads = []
        slices = []
        for param, owned_slices in zip(params, self._shards.slices, strict=True):
            if id(param) in ids:
                grads.append(param.grad)
                slices += [self._shards.gradient(owned) for owned in owned_slices]
        device = params[0].device
        return clip(grads, slices, float(max_norm), float(norm_type), self._workers, device)

    # -- saving and loading --------------------------------------------------------------------

    def consolidate_state_dict(self, recipient_rank: int = 0) -> None:
        """Collect the full state on a rank (or, with -1, on all ranks), for `state_dict`.

        Call it on every rank. The collected tensors are on the CPU.
        """
        self._run.consolidated = _state.collect_state(self._shards, self.optim, recipient_rank)
        self._run.recipient = recipient_rank

    def state_dict(self, all_ranks: bool = False) -> StateDict:
        """Return the plain optimizer's state dict, after `consolidate_state_dict` on this rank.

        With `all_ranks`, collect the state on all ranks first; then call this on every rank.
        `gather_state=True` does so if no state was collected since the last step.
        """
        if self._workers.size == 1:
            return super().state_dict()
        if all_ranks:
            self.consolidate_state_dict(recipient_rank=-1)
        elif not self._run.begun and not self.optim.state:
            return _state.plain_state_dict({}, self.param_groups, self._workers.rank)
        elif self._roll_call is not None and self._run.recipient is None:
            self._roll_call.wait("OSS.state_dict()")
            self.consolidate_state_dict(recipient_rank=-1)
        state = self._run.consolidated
        return _state.plain_state_dict(state, self.param_groups, self._workers.rank)

    def load_state_dict(self, state_dict: SavedState) -> None:
        """Load a plain optimizer's state dict, or a consolidated one. Call it on every rank.

        Each rank copies its shard. The dict is not changed.
        """
        self.prepare()
        shard = _state.cut_state_dict(state_dict, self.param_groups, self._shards)
        begun = self._run.begun or bool(state_dict["state"])
        self.load_parts(shard)
        self._run.begun = begun
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            if "param_names" in loaded:
                group["param_names"] = list(loaded["param_names"])

    # For checkpoints and scaling: see `_optimizers/state_parts.py`.

    def save_parts(self, *, include_empty: bool) -> tuple[list[OptimizerStatePart], StateDict]:
        """Return this rank's state by parameter, and the state dict of `optim`."""
        packed = self.optim.state_dict()
        parts = _state.slice_parts(packed, self.param_groups, self._shards)
        return [part for part in parts if include_empty or not part.empty], packed

    def load_parts(self, packed: StateDict) -> None:
        """Load this rank's shard, in the format of the state dict of `optim`."""
        super().load_parts(packed)
        self._run.begin()

    def replicate_state(self, names: Sequence[str]) -> _state.ReplicatedOSSState:
        """Return a replica of the named entries of the state, for all parameters."""
        return _state.ReplicatedOSSState(self._shards, lambda: self.optim.state, names)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("OSS is not pickled. Save state_dict() after consolidate_state_dict().")


def find_oss(optimizer: Optimizer) -> OSS:
    inner = find_layer(optimizer, OSS)
    if inner is None:
        raise TypeError(
            f"ShardedDataParallel needs the model's manyhands.OSS, got {type(optimizer).__name__}. "
            "Write OSS(model.parameters(), optim=..., ...)."
        )
    return inner


def _check_dense(params: Sequence[Tensor]) -> None:
    """Raise if a parameter is sparse. Call this after all ranks have agreed on the parameters."""
    for param in params:
        if param.layout != torch.strided:
            raise ValueError(
                f"OSS needs dense parameters, got a parameter with layout {param.layout}. "
                "Pass sparse parameters to a separate optimizer."
            )
