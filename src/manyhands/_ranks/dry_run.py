"""Run a single rank of a large group without the other ranks, and count its messages.

    group   each collective is counted, and answers as if all ranks had this rank's tensors
    store   counters that all ranks increase grow by the total; no call waits for other ranks

Layouts, buckets, messages, memory and Python's running time are real. Values are not.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, Store

from manyhands._arguments import format_bytes, whole
from manyhands._warn import user_line

BACKEND = "dry"  # not "gloo", so that the library behaves as on GPUs
Group: Any = dist.ProcessGroup  # overloads in torch's types are incompatible with a subclass


@cache
def names_of_torch() -> Any:
    try:
        from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    except ImportError as error:
        raise RuntimeError(
            f"dry_run was tried on torch 2.13, and torch {torch.__version__} is another: {error}."
        ) from error
    return _create_work_from_future, _clear_sharding_prop_cache


@dataclass(frozen=True)
class Collective:
    """A collective or a save."""

    operation: str
    group: int  # index in `DryRun.groups`
    nbytes: int  # of the tensors
    sent: int  # bytes
    shape: tuple[int, ...]  # of the first tensor
    line: str  # of the script


class DryRun:
    """Traffic and store requests of a rank, since the start or the last `clear`.

    `calls` and `sent` contain the number of collectives and sent bytes by kind: 2 (N-1)/N of the
    tensor of an all-reduce, the part for other ranks of an all-to-all, and (N-1)/N of the full
    tensor otherwise. `requests` contains the number of store requests by kind, and `store_bytes`
    the size of their keys and values. `keys` contains the keys written by this rank.

    `sequence` contains the collectives in order, and `groups` the ranks of each process group.
    """

    def __init__(self, *, fake: bool = False) -> None:
        self.fake = fake  # whether tensors have no memory
        self.groups: list[Sequence[int]] = []
        self.clear()

    def clear(self) -> None:
        self.sequence: list[Collective] = []
        self.requests = Counter[str]()
        self.keys = set[str]()
        self.store_bytes = 0

    @property
    def calls(self) -> Counter[str]:
        return Counter(each.operation for each in self.sequence if each.operation != "save")

    @property
    def sent(self) -> Counter[str]:
        sent = Counter[str]()
        for each in self.sequence:
            if each.operation != "save":
                sent[each.operation] += each.sent
        return sent

    def __repr__(self) -> str:
        kinds = []
        sent = self.sent
        for kind, calls in self.calls.items():
            kinds.append(f"{kind}: {calls:,} ({format_bytes(sent[kind])})")
        requests = f"{self.requests.total():,} ({format_bytes(self.store_bytes)})"
        return f"DryRun({', '.join([*kinds, f'store requests: {requests}'])})"


class CountingStore(Store):
    """Counts requests to a store, and simulates `ranks` ranks with equal requests."""

    def __init__(self, inner: Store, counted: DryRun, ranks: int = 1) -> None:
        super().__init__()
        self.inner = inner
        self.counted = counted
        self.ranks = ranks

    def clone(self) -> CountingStore:
        return self

    def __getattribute__(self, kind: str) -> Any:
        if kind == "deleteKey":  # name in C++
            kind = "delete_key"
        if kind not in ("set", "get", "add", "wait", "check", "delete_key"):
            return super().__getattribute__(kind)

        def ask(keys: Any, *rest: Any) -> Any:
            if kind == "add":
                rest = (rest[0] * self.ranks,)
            if kind == "get" and self.ranks > 1 and not self.inner.check([keys]):
                raise RuntimeError(f"no other rank of a dry run can have written {keys!r}.")
            answer = True  # all ranks have written
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
    group = dist.group.WORLD
    return group if isinstance(group, DryGroup) else None


class DryGroup(Group):
    """A process group that answers as if all ranks had this rank's tensors."""

    def __init__(self, rank: int, size: int, counted: DryRun, ranks: Sequence[int] = ()) -> None:
        super().__init__(rank, size)
        self.counted = counted
        self._name = ""
        self.others = (size - 1) / size
        self.number = len(counted.groups)
        counted.groups.append(ranks)

    # torch's properties require a backend in C++.
    group_name = property(lambda self: self._name, lambda self, name: setattr(self, "_name", name))
    _set_group_name = group_name.fset

    def getBackendName(self) -> str:
        return BACKEND

    def _done(self, kind: str, tensors: Any, share: float, result: Any = None) -> Any:
        """Count a collective that sends this share of the tensors; return completed work."""
        if isinstance(tensors, Tensor):
            tensors = [tensors]
        self.record(kind, tensors, share)
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(result or tensors)
        return names_of_torch()[0](future)

    def record(self, operation: str, tensors: Sequence[Tensor] = (), share: float = 0) -> None:
        groups = self.counted.groups
        if not groups[self.number]:  # unknown to torch in `__init__`
            groups[self.number] = dist.get_process_group_ranks(self)
        nbytes = sum(tensor.nbytes for tensor in tensors)
        sent = round(share * nbytes)
        shape: tuple[int, ...] = ()
        if tensors:
            shape = tuple(tensors[0].shape)
        line = user_line(sys._getframe())
        self.counted.sequence.append(Collective(operation, self.number, nbytes, sent, shape, line))

    def _sum(self, tensors: Any, options: Any) -> None:
        # The mean and the maximum of equal tensors are equal to the tensors.
        if options is None or options.reduceOp == dist.ReduceOp.SUM:
            for tensor in [tensors] if isinstance(tensors, Tensor) else tensors:
                tensor.mul_(self.size())

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        self._sum(tensors, options)
        return self._done("all_reduce", tensors, 2 * self.others)

    def reduce(self, tensors: Any, options: Any = None) -> Any:
        self._sum(tensors, options)
        return self._done("reduce", tensors, self.others)

    def broadcast(self, tensors: Any, options: Any = None) -> Any:
        return self._done("broadcast", tensors, self.others)

    def allgather(self, outputs: list[list[Tensor]], inputs: Any, options: Any = None) -> Any:
        all_rows = []
        for rows, own in zip(outputs, inputs, strict=True):
            for row in rows:
                all_rows.append(row.copy_(own))
        return self._done("all_gather", all_rows, self.others, outputs)

    def all_gather_single(self, output: Tensor, own: Tensor, options: Any = None) -> Any:
        output.view(self.size(), -1).copy_(own.clone().view(1, -1))  # `own` may overlap
        return self._done("all_gather", output, self.others)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, options: Any = None) -> Any:
        output.copy_(given.view(self.size(), *output.shape)[self.rank()].clone())
        self._sum(output, options)
        return self._done("reduce_scatter", given, self.others, [output])

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_cuts: Any, cuts: Any, options: Any = None
    ) -> Any:
        sizes = cuts or [len(given) // self.size()] * self.size()
        kept = sizes[self.rank()]
        if not self.counted.fake:
            own = given.split(sizes)[self.rank()]
            for part in output.split(output_cuts or sizes):  # sizes may differ between ranks
                part.copy_(own if part.shape == own.shape else part.new_zeros(()))
        return self._done("all_to_all", given, 1 - kept / max(1, len(given)), [output])

    def send(self, tensors: Sequence[Tensor], to: int, tag: int) -> Any:
        return self._done("send", tensors, 1)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Any:
        return self._done("receive", tensors, 0)

    def barrier(self, opts: Any = None) -> Any:
        return self._done("barrier", [], 0)

    # DTensor uses these functions.

    def allgather_into_tensor_coalesced(
        self, outputs: Any, inputs: Any, options: Any = None
    ) -> Any:
        for output, own in zip(outputs, inputs, strict=True):
            work = self.all_gather_single(output, own)
        return work

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, options: Any) -> Any:
        for output, given in zip(outputs, inputs, strict=True):
            work = self.reduce_scatter_single(output, given, options)
        return work

    # Names up to torch 2.12.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


def _without_memory() -> AbstractContextManager[None]:
    from manyhands._ranks.fake_tensors import fake_tensors  # imports much of torch

    return fake_tensors()


@contextmanager
def dry_run(world_size: int, rank: int = 0, *, fake: bool = False) -> Iterator[DryRun]:
    """Run the block as a single rank of `world_size`, without the other ranks.

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

    Inside the block, torch has a process group of this size. All parts of the library, torch's DDP
    and `fully_shard` work. Collectives answer as if every rank had this rank's tensors, so values
    are meaningless. Collectives, memory and Python's running time match a rank on GPUs with NCCL.
    `save` does not write files.

    With `fake=True`, tensors have no memory, so models can be larger than memory. Create the model
    inside the block, and do not read values such as a loss.

    Yields counters of collectives and store requests.
    """
    world_size = whole("world_size", world_size, least=1)
    rank = whole("rank", rank, least=0)
    if rank >= world_size:
        raise ValueError(f"rank must be below world_size={world_size}, got {rank}.")
    if dist.is_initialized():
        raise RuntimeError(
            "dry_run creates a process group, and there is one already. Do not create a process "
            "group before, or call torch.distributed.destroy_process_group() first."
        )
    names_of_torch()
    counted = DryRun(fake=fake)

    dist.Backend.register_backend(
        BACKEND, lambda _, rank, size, __: DryGroup(rank, size, counted), devices=["cpu", "cuda"]
    )
    store = CountingStore(HashStore(), counted, world_size)
    hook = sys.excepthook
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world_size)
    try:
        with _without_memory() if fake else nullcontext():
            yield counted
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook  # torch's hook would print the rank before each line of an error
        names_of_torch()[1]()  # DTensor's cache does not distinguish meshes of different ranks
