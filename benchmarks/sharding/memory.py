"""The bytes of all tensors that a rank holds, and the most it held meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from team import Work
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sharding import models
from sharding.contenders import Contender

WARM_UP = 2  # steps until the optimizer has its state and DDP its final buckets


class Held(TorchDispatchMode):
    """Track the memory of all tensors made or touched while active.

    What C++ makes is seen too (DDP's buckets, say), but not gloo's own scratch memory.
    """

    def __init__(self, ignored: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._ignored = {tensor.untyped_storage()._cdata for tensor in ignored}
        self._known: dict[int, StorageWeakRef] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # what it does to the slice that it holds comes here, too
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._see(tensor)
        self.most = max(self.most, self.now())
        return result

    def _see(self, tensor: Tensor) -> None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a stand-in without memory
            return
        if storage._cdata not in self._ignored:
            self._known[storage._cdata] = StorageWeakRef(storage)

    def now(self) -> int:
        """Bytes of the tensors that are alive. (fully_shard empties some and fills them again.)"""
        self._known = {k: v for k, v in self._known.items() if not v.expired()}
        return sum(_size(reference) for reference in self._known.values())


def _size(reference: StorageWeakRef) -> int:
    storage = UntypedStorage._new_with_weak_ptr(reference.cdata)
    return 0 if storage is None else storage.nbytes()


def seen(contender: Contender, size: models.Size, rank: int) -> dict[str, int]:
    """Train a few steps, and return the bytes on this rank during the last one."""
    batches = models.batches(size, rank)
    before = resident("VmRSS")
    with Held(batches) as held:
        model = models.decoder(size)
        trained = contender.make(model)
        trained.choose("fused")
        for number in range(WARM_UP):
            trained.step(batches[number])
        held.most = 0
        trained.backward(trained.model(batches[WARM_UP]))
        after_backward = held.now()
        trained.optimizer.step()
        trained.clear()
        between_steps = held.now()
        most = held.most
    Path("/proc/self/clear_refs").write_text("5")  # the most of resident memory counts from here
    trained.backward(trained.model(batches[WARM_UP]))
    trained.optimizer.step()
    return {
        "parameters": sum(p.numel() * p.element_size() for p in model.parameters()),
        "after_backward": after_backward,
        "between_steps": between_steps,
        "most": most,  # during a step
        "resident": resident("VmHWM") - before,  # pages of all kinds by which the process grew
    }


def resident(what: str) -> int:
    for line in Path(f"/proc/{os.getpid()}/status").read_text().splitlines():
        if line.startswith(what + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(what)


def growth(step: Callable[[], object]) -> int:
    """Bytes by which the process grows at most in a step."""
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the most counts from here
    step()
    return max(resident("VmHWM") - before, 0)


def work(contender: Contender, size: models.Size) -> Work:
    return lambda rank: lambda _: seen(contender, size, rank)
