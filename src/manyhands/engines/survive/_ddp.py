"""Average gradients and buffers of `DistributedDataParallel` without raising errors.

A failed average would raise an error in `backward()` of the user's loop. This module calls `fail()`
instead, and leaves arbitrary gradients, which the optimizer does not use.

torch's `Reducer` has no way to forget a failed step, and the ranks' buckets must be equal. So all
ranks make a new `Reducer` whenever the members of the process group change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from manyhands._tensors.flat import group_by_type
from manyhands.engines.survive._messages import LOST, Messages

Hook = Callable[[Any, dist.GradBucket], Future[Tensor]]


class AveragedModule:
    def __init__(
        self,
        module: DistributedDataParallel,
        check_undecided: Callable[[], None],
        has_failed: Callable[[], bool],
        fail: Callable[[Exception], None],
        messages: Messages,
    ) -> None:
        self.module: Any = module  # with private attributes of torch
        self._check_undecided = check_undecided
        self._has_failed = has_failed
        self._fail = fail
        self.messages = messages
        if module.find_unused_parameters:
            raise ValueError(
                "survive=True does not support find_unused_parameters=True, with which torch sends "
                "a message that cannot be repeated. Remove it, or pass static_graph=True."
            )
        self._group: AveragingGroup | None = None
        self._user_hook: tuple[Hook, object] | None = None
        if self.module._comm_hooks:
            self._user_hook = self.module._comm_hooks[-1]
        self.renew()

    def renew(self) -> None:
        """Make a new `Reducer`, and register the hooks."""
        ddp = self.module
        ddp.logger = None  # refers to the reducer
        ddp.reducer = None
        params, sparse = ddp._build_params_for_reducer()
        names = ddp._build_debug_param_to_name_mapping(params)
        self._group = AveragingGroup(self._averaged, self._followed)  # torch keeps no reference
        ddp.process_group = self._group
        ddp._ddp_init_helper(params, sparse, names, ddp.static_graph)
        ddp.process_group = dist.group.WORLD
        if ddp.static_graph:
            ddp.reducer._set_static_graph()
            ddp.logger._set_static_graph()
        if self._user_hook is not None:
            # Not `register_comm_hook`, which compares annotations with types, not with their names.
            registered: Any = dist
            registered._register_comm_hook(ddp.reducer, None, self._call_user_hook)
        location = torch.nn.parallel.distributed._BufferCommHookLocation.PRE_FORWARD
        ddp._register_buffer_comm_hook(None, self._broadcast, location)

    def rebuild_buckets(self) -> None:
        """Order the buckets as the first backward pass did. A collective after the first step."""
        self.module.reducer._rebuild_buckets()

    def _call_user_hook(self, state: object, bucket: dist.GradBucket) -> Future[Tensor]:
        assert self._user_hook is not None
        hook, hook_state = self._user_hook
        return self._averaged(bucket.buffer(), partial(hook, hook_state, bucket))

    def _averaged(self, local: Tensor, start: Callable[[], Future[Any]]) -> Future[Tensor]:
        self._check_undecided()
        return self._followed(local, start)

    def _followed(self, local: Tensor, start: Callable[[], Future[Any]]) -> Future[Tensor]:
        if self._has_failed():
            return _ready(local)
        try:
            message = start()
        except LOST as error:
            self._fail(error)
            return _ready(local)
        return self.messages.follow(message, local)

    def _broadcast(self, state: object, buffers: Mapping[str, Tensor]) -> None:
        """Give all ranks the buffers of rank 0."""
        for alike in group_by_type(list(buffers.values())):
            flat = torch.cat([buffer.reshape(-1) for buffer in alike])
            self._followed(flat, partial(start_broadcast, flat)).wait()
            if self._has_failed():
                return
            parts = flat.split([buffer.numel() for buffer in alike])
            for buffer, part in zip(alike, parts, strict=True):
                buffer.copy_(part.view(buffer.shape))


class AveragingGroup(dist.ProcessGroup):
    """The default group for a `Reducer`, whose sums fail without an error.

    Without a communication hook, the `Reducer` divides gradients while copying them.
    """

    def __init__(
        self,
        averaged: Callable[[Tensor, Callable[[], Any]], Future[Tensor]],
        followed: Callable[[Tensor, Callable[[], Any]], Future[Tensor]],
    ) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size())  # type: ignore[call-arg]
        self._averaged = averaged
        self._followed = followed

    def getBackendName(self) -> str:
        return "manyhands"

    def allreduce(  # type: ignore[override]
        self, tensors: list[Tensor], options: object = None
    ) -> FollowedWork:
        def start() -> Any:
            work: Any = dist.all_reduce(tensors[0], async_op=True)
            return work.get_future()

        return FollowedWork(self._averaged(tensors[0], start))

    def broadcast(  # type: ignore[override]
        self, tensors: list[Tensor], options: Any = None
    ) -> FollowedWork:  # in `rebuild_buckets`
        return FollowedWork(self._followed(tensors[0], partial(start_broadcast, tensors[0])))


class FollowedWork(dist.Work):
    def __init__(self, future: Future[Tensor]) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: object = None) -> bool:
        self._future.wait()
        return True

    def get_future(self) -> Future[Tensor]:
        return self._future


def start_broadcast(tensor: Tensor) -> Future[Any]:
    work: Any = dist.broadcast(tensor, 0, async_op=True)
    future: Future[Any] = work.get_future()
    return future


def _ready(tensor: Tensor) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    future.set_result(tensor)
    return future
