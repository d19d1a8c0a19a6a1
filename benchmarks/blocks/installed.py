"""What people install for fewer synchronisations: torchft, and Accelerate's LocalSGD.

Each is used as its documentation says, on ranks whose process group the benchmark has made. What
they make is kept until the process ends.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from team import tell_ranks
from torch import nn
from torch.optim import SGD, Optimizer


class Whole(nn.Module):
    """The parameters of an optimizer, as the module that all of these want."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()
        (group,) = optimizer.param_groups
        self.all = nn.ParameterList(group["params"])


def torchft_diloco(lr: float, momentum: float, **options: Any) -> Callable[..., Optimizer]:
    """torchft's DiLoCo, which is called by the optimizer's own hooks."""

    def make(optimizer: Optimizer, every: int, model: nn.Module | None) -> Optimizer:
        from torchft.local_sgd import DiLoCo

        whole = Whole(optimizer)
        outer = SGD(whole.parameters(), lr=lr, momentum=momentum, nesterov=True)
        block = DiLoCo(_manager(whole), [whole], optimizer, outer, every, **options)
        _kept.append(block.__enter__())
        return optimizer

    return make


def torchft_local_sgd(optimizer: Optimizer, every: int, model: nn.Module | None) -> Optimizer:
    from torchft.local_sgd import LocalSGD

    whole = Whole(optimizer)
    _kept.append(LocalSGD(_manager(whole), whole, optimizer, every).__enter__())
    return optimizer


def _manager(module: nn.Module) -> Any:
    """torchft's manager of a rank that is a replica group of its own; rank 0 has the lighthouse."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # its log, some lines for each quorum
        os.dup2(nowhere, stream)
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer

    address = [""]
    if dist.get_rank() == 0:
        lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=dist.get_world_size())
        address = [lighthouse.address()]
        _kept.append(lighthouse)
    dist.broadcast_object_list(address)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(minutes=1)),
        load_state_dict=module.load_state_dict,
        state_dict=module.state_dict,
        min_replica_size=dist.get_world_size(),
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=address[0],
        replica_id=f"rank{dist.get_rank()}",
        hostname="127.0.0.1",
        init_sync=False,  # all start with the same parameters
    )
    _kept.extend((store, manager))
    return manager


class AccelerateLocalSGD:
    """Accelerate's LocalSGD, which is told of each step by itself."""

    def __init__(self, optimizer: Optimizer, every: int, model: nn.Module | None) -> None:
        from accelerate import Accelerator
        from accelerate.local_sgd import LocalSGD

        tell_ranks()
        self.optimizer = optimizer
        self.zero_grad = optimizer.zero_grad
        self.local = LocalSGD(Accelerator(cpu=True), Whole(optimizer), local_sgd_steps=every)

    def step(self) -> None:
        self.optimizer.step()
        self.local.step()


_kept: list[Any] = []
