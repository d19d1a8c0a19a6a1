#!/usr/bin/env python3
"""Count the files of manyhands that a step, a block or a save enters.

    python tools/walks.py            all walks
    python tools/walks.py --order    with the files, in order
    python tools/walks.py --calls    also with the functions that other files call

Each walk trains a small model on forked ranks. After a warm-up, it records all calls of manyhands'
functions on rank 0 during a step, a block, the loss of a worker or a save. "files" is the number of
distinct files, and "changes" the number of calls from one file to another.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import manyhands as mh

HOME = str(Path(mh.__file__).parent) + os.sep
WARM_UP = 3

Calls = dict[str, list[str]]  # by file: the functions that other files call


class Trace:
    """The entered files of manyhands in order, without repetitions."""

    def __init__(self) -> None:
        self.entered: list[str] = []
        self.calls: Calls = {}

    def _call(self, frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(HOME):
            file = path[len(HOME) :]
            if not self.entered or self.entered[-1] != file:
                self.entered.append(file)
            calls = self.calls.setdefault(file, [])
            caller = frame.f_back
            from_outside = caller is None or caller.f_code.co_filename != path
            if from_outside and frame.f_code.co_name not in calls:
                calls.append(frame.f_code.co_name)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Record calls, including calls in new threads."""
        threading.setprofile(self._call)
        sys.setprofile(self._call)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 16)).square().mean().backward()
    optimizer.step()


def one_step(build: Callable[[], tuple[nn.Module, Any]], trace: Trace, steps: int = 1) -> None:
    model, optimizer = build()
    for _ in range(WARM_UP * steps):
        step(model, optimizer)
    with trace.on():
        for _ in range(steps):
            step(model, optimizer)


def adascale(trace: Trace) -> None:
    def build() -> tuple[nn.Module, Any]:
        model = DistributedDataParallel(network())
        return model, mh.AdaScale(AdamW(model.parameters()))

    one_step(build, trace)


def zero(trace: Trace) -> None:
    def build() -> tuple[nn.Module, Any]:
        model = network()
        optimizer = mh.OSS(model.parameters(), optim=AdamW)
        return mh.ShardedDataParallel(model, optimizer), optimizer

    one_step(build, trace)


def fsdp(trace: Trace) -> None:
    def build() -> tuple[nn.Module, Any]:
        model = mh.FSDP(network())
        return model, AdamW(model.parameters())

    one_step(build, trace)


def diloco(trace: Trace) -> None:
    def build() -> tuple[nn.Module, Any]:
        model = network()
        return model, mh.DiLoCo(AdamW(model.parameters()), every=2)

    one_step(build, trace, steps=2)


def save(trace: Trace) -> None:
    model = DistributedDataParallel(network())
    optimizer = AdamW(model.parameters())
    step(model, optimizer)
    folder = Path(os.environ["WALKS_FOLDER"]) / "checkpoint"
    mh.save(folder, model=model, optimizer=optimizer)  # imports what a save needs
    with trace.on():
        mh.save(folder, model=model, optimizer=optimizer)


def crew_with_a_death(trace: Trace, rank: int, store: str) -> None:
    """Train three workers, of which the last dies in the second block."""
    model = network()
    crew = mh.Crew(store, number=rank, expected=3, stall=1.0, secret="the secret of the walks")
    optimizer = mh.DiLoCo(AdamW(model.parameters()), every=2, crew=crew)
    for _ in range(4):
        step(model, optimizer)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with trace.on():
        for _ in range(2):
            step(model, optimizer)
    optimizer.finish()


WALKS: dict[str, tuple[int, Callable[..., None]]] = {
    "a step of AdaScale under DDP": (2, adascale),
    "a step of OSS and ShardedDataParallel": (2, zero),
    "a step of FSDP": (2, fsdp),
    "a block of DiLoCo": (2, diloco),
    "a block in which a crew loses a worker": (3, crew_with_a_death),
    "a save": (2, save),
}


def walk(ranks: int, run: Callable[..., None], folder: str) -> tuple[list[str], Calls]:
    """Run a walk on forked ranks; return the files that rank 0 entered, and the calls."""
    os.environ["WALKS_FOLDER"] = folder
    answer = Path(folder) / "entered.json"
    store = None
    if run is crew_with_a_death:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = []
    for rank in range(ranks):
        process = os.fork()
        if process == 0:
            code = 1
            try:
                trace = Trace()
                torch.manual_seed(rank)
                if store is not None:
                    crew_with_a_death(trace, rank, f"127.0.0.1:{store.port}")
                else:
                    dist.init_process_group(
                        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
                    )
                    run(trace)
                if rank == 0:
                    answer.write_text(json.dumps([trace.entered, trace.calls]))
                code = 0
            except Exception:
                traceback.print_exc()
            finally:
                time.sleep(0.5)  # other ranks may still read from this rank
                os._exit(code)
        processes.append(process)
    for process in processes:
        os.waitpid(process, 0)
    entered, calls = json.loads(answer.read_text())
    return entered, calls


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--order", action="store_true", help="list the files of each walk")
    parser.add_argument("--calls", action="store_true", help="list the called functions too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    AdamW([torch.zeros(1, requires_grad=True)])  # torch's slow imports, once, before the forks
    for name, (ranks, run) in WALKS.items():
        with tempfile.TemporaryDirectory() as folder:
            entered, calls = walk(ranks, run, folder)
        print(f"{name}: {len(calls)} files, {len(entered)} changes")
        if args.order or args.calls:
            for file, functions in calls.items():
                print(f"    {file}")
                if args.calls:
                    print(f"        {', '.join(functions)}")


if __name__ == "__main__":
    main()
