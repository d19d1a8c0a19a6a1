"""The ranks of `survive.py`: synchronous training that survives lost ranks.

    python -m faults.ranks cost RULE SOCKET      steps of a 10.5 M MLP, on orders
    python -m faults.ranks survive LOG           training under kills, with mh.start(survive=True)
    python -m faults.ranks torchft LOG           the same, as in torchft's train_ddp.py

Under kills, the model is the CNN of torchft's example without its unused layer of 1 GB, and a rank
sleeps PACE seconds for each sample, as if a device of its own computed. One line of JSON is
appended to the log at once for each step that the optimizer has made, and for each meeting.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import pairwise
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import torch
from rounds import spent
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.utils.data import TensorDataset

import manyhands as mh

BATCH = 64  # samples of a step of four ranks
PACE = 0.005  # seconds for each sample of a rank
GLOO_TIMEOUT = timedelta(seconds=5)  # as the other timeouts, that of torchft's example
COUNTED = 4  # steps of a turn


def mlp() -> nn.Module:
    sizes = pairwise((1024, 2048, 2048, 2048))
    hidden = [layer for size in sizes for layer in (nn.Linear(*size), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(2048, 10))


def cnn() -> nn.Module:
    convolutions = [nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2, 2)]
    convolutions += [nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2, 2), nn.Flatten()]
    layers = [nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    return nn.Sequential(*convolutions, *layers)


def samples(count: int, *shape: int) -> TensorDataset:
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, *shape, generator=random)
    return TensorDataset(inputs, torch.randint(0, 10, (count,), generator=random))


# -- cost -----------------------------------------------------------------------------------------


def cost(contender: str, address: str) -> None:
    """Run steps when told to. All contenders have the same Cursor, model and optimizer."""
    job = mh.start(survive=contender == "survive", checkpoints=f"{address}-{contender}")
    ranks = job.crew.expected if job.crew else job.world_size
    torch.manual_seed(0)
    model = mlp()
    optimizer = AdamW(model.parameters(), lr=1e-4, fused=True)
    # On the survivors' path before the run knows its ranks, so that all have 7 samples.
    rows = mh.Cursor(samples(7 * ranks * 20, 1024), batch_size=7 * ranks, optimizer=optimizer)
    ddp = DistributedDataParallel(model)
    if contender == "survive":
        job.load(model=ddp, optimizer=optimizer, cursor=rows)
    batches = _endless(rows)

    def step() -> None:
        x, y = next(batches)
        loss = rows.mean(F.cross_entropy(ddp(x), y, reduction="sum"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    with Client(address, "AF_UNIX") as pipe:
        pipe.send_bytes(contender.encode())
        while steps := json.loads(pipe.recv_bytes()):
            pipe.send_bytes(json.dumps(spent(step, steps)).encode())
    os._exit(0)  # a benchmark of steps, not of the end


def _endless(rows: Any) -> Iterator[Any]:
    while True:
        yield from rows


# -- training under kills -------------------------------------------------------------------------


class Diary:
    def __init__(self, path: str, number: int) -> None:
        self._file = Path(path).open("a", buffering=1)  # noqa: SIM115
        self._number = number

    def note(self, event: str, **more: Any) -> None:
        line = {"event": event, "time": time.monotonic(), "number": self._number}
        self._file.write(json.dumps({**line, "pid": os.getpid(), **more}) + "\n")


def survive(log: str) -> None:
    job = mh.start(survive=True, checkpoints=log + "-checkpoints")
    diary = Diary(log, job.worker)
    model = cnn()
    optimizer = AdamW(model.parameters())
    rows = mh.Cursor(samples(100 * BATCH, 3, 32, 32), batch_size=BATCH, optimizer=optimizer)
    ddp = DistributedDataParallel(model)
    job.load(model=ddp, optimizer=optimizer, cursor=rows)
    _note_meetings(job._run, diary)
    while True:
        for x, y in rows:
            before = (rows.epoch, rows.position)
            time.sleep(PACE * len(x))
            loss = rows.mean(F.cross_entropy(ddp(x), y, reduction="sum"))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if (rows.epoch, rows.position) != before:  # else the step is repeated
                size = torch.distributed.get_world_size()
                step = rows.epoch * 100 + rows.position // BATCH
                diary.note("step", step=step, ranks=size, samples=BATCH)


def _note_meetings(run: Any, diary: Diary) -> None:
    recover = run._recover
    meet = run._meet

    def recover_noted() -> bool:
        diary.note("failed")
        return recover()

    def meet_noted(**options: Any) -> bool:
        stepped = meet(**options)
        diary.note("met")
        return stepped

    run._recover = recover_noted
    run._meet = meet_noted


def torchft(log: str) -> None:
    from torchft import DistributedDataParallel as Replicated
    from torchft import Manager, Optimizer, ProcessGroupGloo
    from torchft.checkpointing.pg_transport import PGTransport

    number = int(os.environ["REPLICA_GROUP_ID"])
    diary = Diary(log, number)
    model = cnn()
    inner = AdamW(model.parameters())
    group = ProcessGroupGloo(timeout=GLOO_TIMEOUT)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=group,
        min_replica_size=1,
        load_state_dict=lambda state: _load(state, model, inner),
        state_dict=lambda: {"model": model.state_dict(), "optim": inner.state_dict()},
        replica_id=f"train_ddp_{number}",
        timeout=timedelta(seconds=30),
        checkpoint_transport=PGTransport(group, timedelta(seconds=10), torch.device("cpu")),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
    )
    Replicated._comm_hook = staticmethod(_corrected(Replicated._comm_hook))
    ddp = Replicated(manager, model)
    optimizer = Optimizer(manager, inner)
    local = BATCH // int(os.environ["NUM_REPLICA_GROUPS"])
    inputs, labels = samples(100 * local, 3, 32, 32).tensors
    position = 0
    while True:
        x = inputs[position : position + local]
        y = labels[position : position + local]
        position = (position + local) % len(inputs)
        optimizer.zero_grad()
        time.sleep(PACE * len(x))
        F.cross_entropy(ddp(x), y).backward()
        before = manager.current_step()
        optimizer.step()
        if manager.current_step() != before and manager.participating_rank() is not None:
            size = manager.num_participants()
            step = manager.current_step()
            diary.note("step", step=step, ranks=size, samples=local * size)


def _corrected(hook: Any) -> Any:
    """Keep survivors alive: in torchft 0.2.0 an assertion of the hook ends them after a failure."""

    @functools.wraps(hook)
    def corrected(state: Any, bucket: Any) -> Any:
        try:
            return hook(state, bucket)
        except AssertionError:  # the manager knows of the failure: the step will not be committed
            future: torch.futures.Future[Any] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

    return corrected


def _load(state: dict[str, Any], model: nn.Module, optimizer: AdamW) -> None:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optim"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    runs: dict[str, Callable[..., None]] = {"cost": cost, "survive": survive, "torchft": torchft}
    runs[sys.argv[1]](*sys.argv[2:])
