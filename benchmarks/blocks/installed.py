"""What people install for fewer synchronisations: torchft, Accelerate's LocalSGD, hivemind.

Each is used as its documentation says, on ranks whose process group the benchmark has made. What
they make is kept until the process ends.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from team import tell_ranks
from torch import nn
from torch.optim import SGD, Optimizer


class Whole(nn.Module):
    """The parameters of an optimizer, as the module that all of these want."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self.all = nn.ParameterList(params)


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
        self.optimizer, self.zero_grad = optimizer, optimizer.zero_grad
        self.local = LocalSGD(Accelerator(cpu=True), Whole(optimizer), local_sgd_steps=every)

    def step(self) -> None:
        self.optimizer.step()
        self.local.step()


class HivemindAverage:
    """hivemind's averager. Who averages with whom is settled by `prepare`, before it is timed."""

    def __init__(self, optimizer: Optimizer, every: int, model: nn.Module | None) -> None:
        from hivemind import DHT
        from hivemind.averaging import DecentralizedAverager

        multiprocessing.current_process()._config["daemon"] = False  # it starts processes
        self.optimizer, self.zero_grad = optimizer, optimizer.zero_grad
        self.every, self.count = every, 0
        self.params = list(Whole(optimizer).parameters())
        here = ["/ip4/127.0.0.1/tcp/0"]
        addresses: list[list[str]] = [[]]
        if dist.get_rank() == 0:
            table = DHT(start=True, host_maddrs=here)
            addresses = [[str(address) for address in table.get_visible_maddrs()]]
        dist.broadcast_object_list(addresses)
        if dist.get_rank() > 0:
            table = DHT(start=True, host_maddrs=here, initial_peers=addresses[0])
        self.averager = DecentralizedAverager(
            [param.detach().clone() for param in self.params],
            table,
            start=True,
            prefix="benchmark",
            target_group_size=dist.get_world_size(),
            min_matchmaking_time=2.0,
            request_timeout=1.0,
        )
        self.settled: Any = None

    def prepare(self) -> None:
        """Find the group of the next averaging."""
        from hivemind.averaging.control import AveragingStage
        from hivemind.utils import get_dht_time

        soon = get_dht_time() + 2.0
        self.settled = self.averager.step(scheduled_time=soon, wait=False, require_trigger=True)
        while self.settled.stage.value < AveragingStage.AWAITING_TRIGGER.value:
            time.sleep(0.02)

    @torch.no_grad()
    def step(self) -> None:
        self.optimizer.step()
        self.count += 1
        if self.count % self.every:
            return
        if self.settled is None:
            self.prepare()
        with self.averager.get_tensors() as tensors:
            torch._foreach_copy_(list(tensors), self.params)
        self.settled.allow_allreduce()
        self.settled.result()
        self.settled = None
        with self.averager.get_tensors() as tensors:
            torch._foreach_copy_(self.params, list(tensors))

    def cpu_elsewhere(self) -> float:
        """CPU seconds of the processes that it has started."""
        from psutil import Process

        children = Process().children(recursive=True)
        return sum(sum(child.cpu_times()[:2]) for child in children)


_kept: list[Any] = []
