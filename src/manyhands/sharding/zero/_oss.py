"""The sharded optimizer: each worker updates its pieces, then all exchange what is new.

A step, in order
    gradients   each piece gets its part of `param.grad` (`_flat_params.py`)
    options     learning rates and the like, as they are in `param_groups` now
    step        of `optim`, the optimizer that the user asked for, on this worker's pieces
    share       every worker sends its slices of the flat parameters and receives the others'
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from manyhands._core.dtensor import is_dtensor
from manyhands._core.ranks import RankGroup
from manyhands._core.wrapper import Shared, SharingOptimizer, YieldingProperty
from manyhands.sharding._agreement import (
    Claims,
    all_freeze_alike,
    all_or_none,
    check_agreement,
    claims_on_groups,
    claims_on_options,
    options_of,
)
from manyhands.sharding._clip import clip_grad_norm
from manyhands.sharding.zero import _state
from manyhands.sharding.zero._elementwise import ELEMENTWISE, chosen_layout
from manyhands.sharding.zero._flat_params import FlatBucket, ParamSlice, Shards

PARTS = 4  # of a step: the first are on their way while the others are computed


class OSS(SharingOptimizer):
    """Optimizer state sharding: each of N workers keeps 1/N of the optimizer's state.

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = mh.OSS(model.parameters(), optim=torch.optim.AdamW, lr=1e-3)
    >>> model(torch.ones(2, 3)).sum().backward()
    >>> optimizer.step()

    It takes the place of the optimizer, under `DistributedDataParallel` or with
    `ShardedDataParallel`, which shards the gradients too. After `step` every worker has all
    parameters, and they are those of the plain optimizer.

    The parameters become views of flat memory when the optimizer is made; make it after the
    model is on its device. `state_dict` is the plain optimizer's and has to be collected
    from the workers first: call `consolidate_state_dict` on all of them.

    Args:
        params: parameters, or groups of them, as for any optimizer.
        optim: class of the optimizer.
        group: the workers that share the state; all, by default.
        broadcast_buffer_size: fairscale's name of `bucket_size`; without effect if not positive.
        broadcast_fp16: send updated parameters as float16. All workers then train with the
            rounded values; the exact ones stay with their owners. (With `shared_memory` nothing is
            sent, or rounded.) They are not in state dicts: a resumed run begins with the rounded.
        force_broadcast_object: accepted for fairscale's callers; no objects are sent.
        layout: "even" cuts parameters anywhere, into equal shares, for optimizers that work
            element by element; "whole" leaves each with one worker. By default what `optim`
            needs; see `.layout`.
        shared_memory: for workers of one host, on the CPU: they read gradients and parameters
            from each other's memory, and nothing is sent. Half the CPU time of sending, or less.
        bucket_size: elements that travel together; by default 4 Mi, more among many workers, and
            less of a small model.
        **defaults: the optimizer's own arguments. Those that it keeps as its defaults, and that
            change what it computes, must be the same on every worker.

    Attributes:
        optim: this worker's part of the optimizer.
        rank: of this worker in `group`,
        global_rank: and among all.
        world_size: the number of workers in `group`.
        backend: the name of the group's backend; None for one worker without a process group.
        broadcast_fp16: as it was given,
        force_broadcast_object: and this.
    """

    optim = Shared[Any]()
    _overlap = Shared[bool]()
    _begun = Shared[bool]()  # whether there is state that pieces are tied to
    _consolidated = Shared[dict[int, dict[str, Any]] | None]()
    _pending_state = Shared[dict[int, dict[str, Any]]]()  # loaded state of frozen parameters
    _listener = Shared[Callable[[], Any]]()

    def __init__(
        self,
        params: Any,
        optim: type[Optimizer] = SGD,
        group: Any = None,
        broadcast_buffer_size: int = -1,
        broadcast_fp16: bool = False,
        force_broadcast_object: bool = False,
        *,
        layout: str | None = None,
        shared_memory: bool = False,
        bucket_size: int | None = None,
        **defaults: Any,
    ) -> None:
        if not (isinstance(optim, type) and issubclass(optim, Optimizer)):
            raise TypeError(
                f"optim must be an optimizer class, such as torch.optim.AdamW, got {optim!r}. "
                "Its arguments follow by name: OSS(params, optim=AdamW, lr=1e-3)."
            )
        for name, flag in {
            "broadcast_fp16": broadcast_fp16,
            "force_broadcast_object": force_broadcast_object,
        }.items():
            if not isinstance(flag, bool):
                raise TypeError(f"{name} must be True or False, got {flag!r}.")
        if isinstance(broadcast_buffer_size, bool) or not isinstance(broadcast_buffer_size, int):
            raise TypeError(
                "broadcast_buffer_size must be a number of elements (-1 for a good one), got "
                f"{broadcast_buffer_size!r}. It is fairscale's fourth argument; broadcast_fp16 is "
                "the fifth. Give both by name."
            )
        if isinstance(group, float | str | Tensor):
            raise TypeError(
                f"group must be a process group, got {group!r}. The optimizer's own arguments are "
                "given by name: OSS(params, optim=SGD, lr=0.1)."
            )
        self._workers = RankGroup.of(group)
        if shared_memory:
            self._workers = self._workers.with_own_group(torch.device("cpu")).with_shared_memory()
        if bucket_size is None and broadcast_buffer_size > 0:
            bucket_size = broadcast_buffer_size
        if bucket_size is not None and bucket_size < 1:
            raise ValueError(f"bucket_size must be at least 1 element, got {bucket_size}.")
        self._kind = optim
        self._given = dict(defaults)
        self._group = group
        self.rank, self.world_size = self._workers.rank, self._workers.size
        self.global_rank, self.backend = _place_among_all(group, self.rank)
        self.broadcast_fp16 = broadcast_fp16
        self.force_broadcast_object = force_broadcast_object
        self._listener = lambda: None
        self._overlap = False
        self._begun = False
        self._consolidated = None
        self._pending_state = {}
        self.optim = None
        # Comes to add_param_group. Which arguments are defaults of groups, `optim` will say.
        super().__init__(params, {})
        options = [{**defaults, **options_of(params)} for params in self.param_groups]
        alone = self._workers.size == 1
        self.layout = layout or "whole" if alone else chosen_layout(optim, layout, options)
        self._shards = Shards(
            self._workers,
            even=self.layout == "even",
            largest=bucket_size,
            wire=torch.float16 if broadcast_fp16 and not shared_memory else None,
        )
        facts = {
            "values of layout": self.layout,
            "values of bucket_size": bucket_size,
            "values of optim": optim.__name__,
            "values of broadcast_fp16": broadcast_fp16,
        }
        self._check_workers_agree({**facts, **claims_on_groups(self.param_groups)})
        for group_of_params in self.param_groups:
            self._shards.extend(group_of_params["params"])
        self._shards.lay_out()
        self.optim = self._made()
        self.defaults = self.optim.defaults
        for outer, inner in zip(self.param_groups, self.optim.param_groups, strict=True):
            _copy_options(inner, outer)
        self._check_workers_agree(claims_on_options(self.param_groups, self.defaults))

    @YieldingProperty
    def group(self) -> Any:
        """The process group of the workers; None for one worker without."""
        return self._group or (dist.group.WORLD if dist.is_available() else None)

    @YieldingProperty
    def _reducer(self) -> Any:
        """Of a ShardedDataParallel, while there is one."""
        return self._listener()

    def __repr__(self) -> str:
        size = self._workers.size
        how = f"layout {self.layout!r}, {size} worker{'s' if size > 1 else ''}"
        return f"OSS of {self._kind.__name__} ({how})" + super().__repr__().removeprefix("OSS")

    # -- the inner optimizer -------------------------------------------------------------------

    def _made(self) -> Optimizer:
        """The inner optimizer, new."""
        groups = [self._inner_group(index) for index in range(len(self.param_groups))]
        return all_or_none(self._workers, lambda: self._kind(groups, **self._given))

    def _inner_group(self, index: int) -> dict[str, Any]:
        """A parameter group's options, with this worker's pieces of its parameters."""
        members = self._param_indices(index)
        pieces = [piece.data for i in members for piece in self._shards.slices[i]]
        return {**options_of(self.param_groups[index]), "params": pieces}

    def _param_indices(self, index: int) -> range:
        """Which parameters are those of a group, counted through all groups."""
        sizes = [len(group["params"]) for group in self.param_groups]
        first = sum(sizes[:index])
        return range(first, first + sizes[index])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with their own options, as any optimizer does; on every worker."""
        super().add_param_group(param_group)
        if any(is_dtensor(param) for param in self.param_groups[-1]["params"]):
            self.param_groups.pop()
            raise TypeError(
                "OSS shards the state of whole parameters, and these are sharded already, as by "
                "FullyShardedDataParallel. Give them to the optimizer itself, without OSS."
            )
        if self.optim is None:  # the constructor's groups are taken in together
            return
        try:
            added, place = self.param_groups[-1:], len(self.param_groups) - 1
            claims = claims_on_groups(added, first=place)
            claims.update(claims_on_options(added, self.defaults, first=place))
            self._check_workers_agree(claims)
        except ValueError:
            self.param_groups.pop()
            raise
        self.wait()
        self._shards.extend(self.param_groups[-1]["params"])
        self._shards.lay_out()
        self.optim.add_param_group(self._inner_group(len(self.param_groups) - 1))
        _copy_options(self.optim.param_groups[-1], self.param_groups[-1])
        self._replace_pieces()

    def refresh_trainable(self) -> None:
        """Take in parameters that have thawed since. `step` does so by itself."""
        if self._shards.missing:
            trained = [p.requires_grad for group in self.param_groups for p in group["params"]]
            all_freeze_alike(self._workers, trained)
            new = self._shards.lay_out()
            self._replace_pieces()
            self._begin_state_of(new)

    def _begin_state_of(self, pieces: Sequence[ParamSlice]) -> None:
        """State of parameters that thaw: what was loaded, or what the optimizer begins with."""
        begun = self._made().state  # some optimizers make theirs when they are made
        for piece in pieces:
            loaded = self._pending_state.get(piece.param)
            if loaded is not None:
                param = self._shards.params[piece.param]
                part = _state.part_of(loaded, piece, param)
                self.optim.state[piece.data] = {
                    name: _state.placed(value, value, piece.data) for name, value in part.items()
                }
            elif piece.data in begun:
                self.optim.state[piece.data] = begun[piece.data]
        for piece in pieces:
            self._pending_state.pop(piece.param, None)

    def _replace_pieces(self) -> None:
        """Let the inner optimizer's groups hold the pieces that there are now."""
        for index, inner in enumerate(self.optim.param_groups):
            inner["params"] = self._inner_group(index)["params"]
        if self._reducer is not None:
            self._reducer.cover()

    def _follow_moved(self) -> None:
        """The model was moved or converted: our memory, and the state, go after it."""
        before = [piece.data for pieces in self._shards.slices for piece in pieces]
        self._shards.follow()
        after = [piece.data for pieces in self._shards.slices for piece in pieces]
        for old, new in zip(before, after, strict=True):
            if old in self.optim.state:
                state = self.optim.state.pop(old)
                self.optim.state[new] = {k: _state.placed(v, old, new) for k, v in state.items()}
        self._replace_pieces()

    def partition_parameters(self) -> list[list[dict[str, Any]]]:
        """For each worker the parameter groups with what it keeps up to date.

        Whole parameters, or (as views) those parts of them that are the worker's.
        """
        return [
            [
                {
                    **options_of(group),
                    "params": self._shards.held_by(rank, self._param_indices(index)),
                }
                for index, group in enumerate(self.param_groups)
            ]
            for rank in range(self._workers.size)
        ]

    def _bucket_size(self, elements: int) -> None:
        """Lay the parameters out again in buckets of that size; before the first step only."""
        if elements == self._shards.largest or self._workers.size == 1:
            return
        if self._begun:
            raise ValueError(
                "the size of buckets cannot be changed any more: the optimizer has state. Give "
                "bucket_size to OSS, or wrap the model before the first step."
            )
        self._shards.largest = elements
        self._shards.release()
        self._shards.lay_out()
        self.optim = self._made()

    # -- a step --------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update the parameters: this worker's pieces by `optim`, then everybody's everywhere.

        A `closure` is run once before, and its loss returned.
        """
        self._consolidated, self._begun = None, True
        self._prepare()
        for group, inner in zip(self.param_groups, self.optim.param_groups, strict=True):
            _copy_options(group, inner)
        if self._workers.size == 1:
            result = self.optim.step(*([] if closure is None else [closure]), **kwargs)
        else:
            result = None
            if closure is not None:
                with torch.enable_grad():
                    result = closure()
            self.join_in()
            for buckets in self._parts():
                with self._gradients_on_pieces(buckets):
                    self.optim.step(**kwargs)
                self._shards.share(buckets)  # while the next part steps
            self._shards.note_change()
            if self._reducer is not None:
                self._reducer.stepped(self._shards)
            if not self._overlap:
                self.wait()
        for group, inner in zip(self.param_groups, self.optim.param_groups, strict=True):
            _copy_options(inner, group)
        return result

    @property
    def shards_state(self) -> bool:
        """Whether this worker has only a part of the state: whether there are others."""
        return self._workers.size > 1

    def join_in(self) -> None:
        """Take part in averaging gradients for which this worker has had no backward pass.

        `step` does so by itself; with every worker's gradients averaged it does nothing.
        """
        if self._reducer is not None:
            self.refresh_trainable()
            self._reducer.complete(self._shards)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        super().zero_grad(set_to_none)
        if self._reducer is not None:
            self._reducer.stepped(self._shards)

    def wait(self) -> None:
        """Until this worker has all of the parameters that the last step made."""
        self._shards.wait()

    def _prepare(self) -> None:
        """Before a step: parameters may have thawed, moved, or been overwritten."""
        self.wait()
        self.refresh_trainable()
        if self._shards.moved:
            self._follow_moved()
        self._shards.take_changes()

    def _parts(self) -> list[list[FlatBucket]]:
        """What to step together: all, for an optimizer that might count its calls of `step`."""
        buckets, optim = self._shards.to_step, self.optim
        hooks = optim._optimizer_step_pre_hooks or _global_optimizer_pre_hooks
        counts = type(optim) not in ELEMENTWISE or hooks or _global_optimizer_post_hooks
        if counts or optim._optimizer_step_post_hooks or self._workers.shared_memory is not None:
            return [buckets]
        size = max(-(-len(buckets) // PARTS), 1)
        return [buckets[i : i + size] for i in range(0, len(buckets), size)]

    @contextmanager
    def _gradients_on_pieces(self, buckets: Iterable[FlatBucket]) -> Iterator[None]:
        pieces = [piece for bucket in buckets for piece, _ in bucket.slices]
        try:
            for piece in pieces:
                piece.data.grad = self._shards.gradient(piece)
            yield
        finally:
            for piece in pieces:
                piece.data.grad = None

    def clip_grad_norm(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        filter_params_fn: Callable[[list[Tensor]], Iterable[Tensor]] | None = None,
    ) -> Tensor:
        """Scale the gradients down to a norm of at most `max_norm`; returns the norm they had.

        To be called on every worker, between `backward` and `step`. `filter_params_fn` takes
        the list of parameters and returns those to be clipped, together.
        """
        params = self._shards.params
        chosen = params if filter_params_fn is None else list(filter_params_fn(list(params)))
        self.refresh_trainable()
        self.join_in()
        return clip_grad_norm(self._shards, chosen, float(max_norm), float(norm_type))

    # -- saving and loading --------------------------------------------------------------------

    def consolidate_state_dict(self, recipient_rank: int = 0) -> None:
        """Collect the whole state on one worker (or, with -1, on all), for `state_dict`.

        To be called on every worker. Tensors come to the CPU.
        """
        size = self._workers.size
        if not -1 <= recipient_rank < size:
            raise ValueError(
                f"recipient_rank must be a rank of the {size} worker(s), or -1 for all of them, "
                f"got {recipient_rank}."
            )
        if size > 1:
            self.wait()
            state = _state.collected(self._shards, self.optim, self._pending_state, recipient_rank)
            here = recipient_rank in (-1, self._workers.rank)
            self._consolidated = state if here else None

    def state_dict(self, all_ranks: bool = False) -> dict[str, Any]:
        """The plain optimizer's state dict, after `consolidate_state_dict` on this worker.

        With `all_ranks`, collects it on all of them first; to be called on every worker.
        """
        if self._workers.size == 1:
            return super().state_dict()
        if all_ranks:
            self.consolidate_state_dict(recipient_rank=-1)
        if self._consolidated is None:
            raise RuntimeError(
                f"worker {self._workers.rank} has only its share of the optimizer's state, as of "
                "the last step. Call consolidate_state_dict() on every worker before "
                "state_dict() on the recipient (rank 0, unless you name another)."
            )
        groups = [
            {
                **{k: v for k, v in group.items() if k != "params"},
                "params": list(self._param_indices(index)),
            }
            for index, group in enumerate(self.param_groups)
        ]
        state = {i: dict(entries) for i, entries in self._consolidated.items()}
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a plain optimizer's state dict, or a consolidated one; on every worker.

        Each takes its share of it. The dict is left as it is.
        """
        self._prepare()
        _state.check(state_dict, self.param_groups, self._shards)
        for_later = {
            number: copy.deepcopy(state_dict["state"][key])
            for number, key in enumerate(k for g in state_dict["param_groups"] for k in g["params"])
            if key in state_dict["state"] and number in self._shards.without_slices
        }
        self._continue_from(
            _state.share_of(state_dict, self.param_groups, self._shards)
            if self._workers.size > 1
            else copy.deepcopy(dict(state_dict)),
            for_later,
            state_dict["param_groups"],
        )

    def _continue_from(
        self,
        share: dict[str, Any],
        for_later: dict[int, dict[str, Any]],
        groups: Sequence[Mapping[str, Any]],
    ) -> None:
        """Take this worker's `share` of a state, as the inner optimizer's state dict."""
        self.optim.load_state_dict(share)
        self._consolidated, self._begun = None, True
        self._pending_state = for_later
        for group, loaded in zip(self.param_groups, groups, strict=True):
            _copy_options(copy.deepcopy(options_of(loaded)), group)
            if "param_names" in loaded:
                group["param_names"] = list(loaded["param_names"])

    @property
    def state(self) -> Any:
        """The state of this worker's pieces."""
        return {} if self.optim is None else self.optim.state

    @state.setter
    def state(self, value: Any) -> None:
        """torch's constructor brings an empty one."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("OSS is not pickled. Save state_dict() after consolidate_state_dict().")

    def _check_workers_agree(self, claims: Claims) -> None:
        if self._workers.size > 1:
            check_agreement(self._workers, claims)


def _place_among_all(group: Any, rank: int) -> tuple[int, str | None]:
    """The rank among all processes, and the name of the group's backend, if there is a group."""
    if not (dist.is_available() and dist.is_initialized()):
        return rank, None
    if group is not None and not isinstance(group, dist.ProcessGroup):
        return dist.get_rank(), None  # a stand-in, such as DummyProcessGroup
    return dist.get_rank(), dist.get_backend(group)


def _copy_options(source: Mapping[str, Any], target: dict[str, Any]) -> None:
    target.update(options_of(source))
