"""Run one rank of a large group without the other ranks, and count its messages.

    group   each collective answers as if every rank had this one's tensors, and is counted
    store   a key that all ranks add to grows by the sum of all, and no rank is waited for

Layouts, buckets, messages, memory and the time that Python takes are those of this rank among so
many. Values are not: gathered shards are N copies of one of them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, Store

from manyhands._arguments import format_bytes, whole

BACKEND = "dry"  # not "gloo": parts choose what they choose on GPUs
Group: Any = dist.ProcessGroup  # torch's types know each method in several forms


@cache
def names_of_torch() -> Any:
    """Return the private names of torch that a dry run needs."""
    try:
        from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    except ImportError as error:
        raise RuntimeError(
            f"dry_run was tried on torch 2.13, and torch {torch.__version__} is another: {error}."
        ) from error
    return _create_work_from_future, _clear_sharding_prop_cache


class DryRun:
    """The traffic of one of N ranks, and its requests to the store, since the start or `clear`.

    `calls` and `sent` are collectives and their bytes, by kind: 2 (N-1)/N of an all-reduce's
    tensor, the part for other ranks in an all-to-all, and (N-1)/N of the full tensor otherwise.
    `requests` are those to the store, by kind, with keys and values of `store_bytes`. `keys` are
    those that this rank has written.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Count from here on."""
        self.calls = Counter[str]()
        self.sent = Counter[str]()
        self.requests = Counter[str]()
        self.keys = set[str]()
        self.store_bytes = 0

    def __repr__(self) -> str:
        kinds = []
        for kind, calls in self.calls.items():
            kinds.append(f"{kind}: {calls:,} ({format_bytes(self.sent[kind])})")
        requests = f"{self.requests.total():,} ({format_bytes(self.store_bytes)})"
        return f"DryRun({', '.join([*kinds, f'store requests: {requests}'])})"


class CountingStore(Store):
    """Counts the requests to a store, and stands for `ranks` ranks with the same requests."""

    def __init__(self, inner: Store, counted: DryRun, ranks: int = 1) -> None:
        super().__init__()
        self.inner = inner
        self.counted = counted
        self.ranks = ranks

    def clone(self) -> CountingStore:
        return self

    def __getattribute__(self, kind: str) -> Any:
        if kind == "deleteKey":  # its name in C++
            kind = "delete_key"
        if kind not in ("set", "get", "add", "wait", "check", "delete_key"):
            return super().__getattribute__(kind)

        def ask(keys: Any, *rest: Any) -> Any:
            if kind == "add":
                rest = (rest[0] * self.ranks,)
            if kind == "get" and self.ranks > 1 and not self.inner.check([keys]):
                raise RuntimeError(f"no other rank of a dry run can have written {keys!r}.")
            answer = True  # all have written
            if self.ranks == 1 or kind not in ("wait", "check"):
                answer = getattr(self.inner, kind)(keys, *rest)
            names = [keys] if isinstance(keys, str) else keys
            self.counted.requests[kind] += 1
            for part in (*names, *rest, answer):
                if isinstance(part, str | bytes):
                    self.counted.store_bytes += len(part)
            if kind in ("set", "add"):
                self.counted.keys.add(keys)
            return answer

        return ask


def dry_group() -> Any:
    """Return the group of the dry run that this is, or None: the other ranks exist."""
    group = dist.group.WORLD
    return group if isinstance(group, DryGroup) else None


class DryGroup(Group):
    """A process group in which all ranks have this rank's tensors, in every collective."""

    def __init__(self, rank: int, size: int, counted: DryRun) -> None:
        super().__init__(rank, size)
        self.counted = counted
        self._name = ""
        self._others = (size - 1) / size

    # torch's own ask for a backend in C++.
    group_name = property(lambda self: self._name, lambda self, name: setattr(self, "_name", name))
    _set_group_name = group_name.fset

    def getBackendName(self) -> str:
        return BACKEND

    def _done(self, kind: str, tensors: Any, share: float, result: Any = None) -> Any:
        """Count a collective that has sent this share of the tensors; return its work."""
        if isinstance(tensors, Tensor):
            tensors = [tensors]
        self.counted.calls[kind] += 1
        self.counted.sent[kind] += round(share * sum(tensor.nbytes for tensor in tensors))
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(result or tensors)
        return names_of_torch()[0](future)

    def _sum(self, tensors: Any, options: Any) -> None:
        # The mean of equal tensors, and the largest of them, is one of them.
        if options is None or options.reduceOp == dist.ReduceOp.SUM:
            for tensor in [tensors] if isinstance(tensors, Tensor) else tensors:
                tensor.mul_(self.size())

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        self._sum(tensors, options)
        return self._done("all_reduce", tensors, 2 * self._others)

    def reduce(self, tensors: Any, options: Any = None) -> Any:
        self._sum(tensors, options)
        return self._done("reduce", tensors, self._others)

    def broadcast(self, tensors: Any, options: Any = None) -> Any:
        return self._done("broadcast", tensors, self._others)

    def allgather(self, outputs: list[list[Tensor]], inputs: Any, options: Any = None) -> Any:
        all_rows = []
        for rows, own in zip(outputs, inputs, strict=True):
            for row in rows:
                all_rows.append(row.copy_(own))
        return self._done("all_gather", all_rows, self._others, outputs)

    def all_gather_single(self, output: Tensor, own: Tensor, options: Any = None) -> Any:
        output.view(self.size(), -1).copy_(own.clone().view(1, -1))  # `own` may be a part of it
        return self._done("all_gather", output, self._others)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, options: Any = None) -> Any:
        output.copy_(given.view(self.size(), *output.shape)[self.rank()].clone())
        self._sum(output, options)
        return self._done("reduce_scatter", given, self._others, [output])

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_cuts: Any, cuts: Any, options: Any = None
    ) -> Any:
        sizes = cuts or [len(given) // self.size()] * self.size()
        own = given.split(sizes)[self.rank()]
        for part in output.split(output_cuts or sizes):  # of other sizes where others send more
            part.copy_(own if part.shape == own.shape else part.new_zeros(()))
        return self._done("all_to_all", given, 1 - len(own) / max(1, len(given)), [output])

    def send(self, tensors: Sequence[Tensor], to: int, tag: int) -> Any:
        return self._done("send", tensors, 1)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Any:
        return self._done("receive", tensors, 0)

    def barrier(self, options: Any = None) -> Any:
        return self._done("barrier", [], 0)

    # Their names until torch 2.12.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


@contextmanager
def dry_run(world_size: int, rank: int = 0) -> Iterator[DryRun]:
    """Run what is inside as one rank of `world_size`, of which the others do not exist.

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(1024, 1024)
    >>> with mh.dry_run(world_size=1024) as counted:
    ...     model, optimizer = mh.shard(model, torch.optim.AdamW(model.parameters()), level=2)
    ...     for _ in range(2):  # in the first step, ranks agree on the order of buckets
    ...         counted.clear()
    ...         model(torch.ones(8, 1024)).sum().backward()
    ...         optimizer.step()
    >>> dict(counted.calls)
    {'reduce_scatter': 9, 'all_reduce': 1, 'all_gather': 9}

    torch has a process group of so many ranks meanwhile, in which every part of the library,
    torch's DDP and `fully_shard` run. Each collective answers as if every rank had this one's
    tensors: values are not to be relied on. Collectives, memory and the time that Python takes are
    those of this rank on GPUs with NCCL. `save` writes nothing. It yields what is counted: `calls`
    and `sent` of collectives by their kind, `requests`, `keys` and `store_bytes` of the store.
    """
    world_size = whole("world_size", world_size, least=1)
    rank = whole("rank", rank, least=0)
    if rank >= world_size:
        raise ValueError(f"rank must be below world_size={world_size}, got {rank}.")
    if dist.is_initialized():
        raise RuntimeError(
            "dry_run makes a process group of its own, and there is one. Leave out what made it, "
            "or call torch.distributed.destroy_process_group() first."
        )
    names_of_torch()
    counted = DryRun()

    dist.Backend.register_backend(
        BACKEND, lambda _, rank, size, __: DryGroup(rank, size, counted), devices=["cpu", "cuda"]
    )
    store = CountingStore(HashStore(), counted, world_size)
    hook = sys.excepthook
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world_size)
    try:
        yield counted
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook  # torch's would write the rank before each line of an error
        names_of_torch()[1]()  # of DTensors: it has meshes, of which rank 0's counts as rank 3's
