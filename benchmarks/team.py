"""Run the ranks of a contender in processes that wait for orders.

    team = Team(2, work)              work(rank) returns a function from an order to a result
    team.ask({"steps": 3})            every rank's result, in rank order

Every contender has separate processes: freed memory in the heap of one contender would make the
allocations of the next cheaper. Teams live side by side and take turns; a waiting team uses no CPU.
Ranks are forked, so that all share what is imported. Orders and results travel as JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LEAVE = b"leave"
Work = Callable[[int], Callable[[dict[str, Any]], Any]]


class Team:
    """N ranks in a gloo group of their own."""

    def __init__(
        self,
        ranks: int,
        work: Work,
        enter: Callable[[int], object] = lambda rank: None,
        *,
        daemon: bool = True,
    ) -> None:
        """Fork the ranks. Each rank first calls `enter(rank)`, which may move it to another host.

        Ranks that start processes, such as a DataLoader's, need `daemon=False`.
        """
        torch.set_num_threads(1)
        # Ranks are forked; what torch imports late is imported here, once.
        torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], fused=True)
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._ranks = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            given = (rank, ranks, self._folder.name, work, enter, theirs)
            process = context.Process(target=_live, args=given, daemon=daemon)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._ranks.append(process)

    def ask(self, order: dict[str, Any]) -> list[Any]:
        """Give an order to every rank, and wait for all results."""
        for pipe in self._pipes:
            pipe.send_bytes(json.dumps(order).encode())
        results = [json.loads(pipe.recv_bytes()) for pipe in self._pipes]
        for rank, result in enumerate(results):
            if "error" in result:
                raise RuntimeError(f"rank {rank} failed:\n{result['error']}")
        return [result["found"] for result in results]

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:  # closing it is not enough: later teams inherited our end
            with suppress(BrokenPipeError):  # an interrupt has ended it
                pipe.send_bytes(LEAVE)
        for process in self._ranks:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()


def largest(seen: list[dict[str, float]]) -> dict[str, float]:
    """Return each figure of the rank that has most."""
    return {key: max(rank[key] for rank in seen) for key in seen[0]}


def tell_ranks() -> None:
    """Set torchrun's variables, which some libraries read beside the process group."""
    rank = str(dist.get_rank())
    ranks = str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")


def _live(
    rank: int,
    ranks: int,
    folder: str,
    work: Work,
    enter: Callable[[int], object],
    pipe: Connection,
) -> None:
    enter(rank)
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(minutes=5)
    )
    answer = None
    while (message := pipe.recv_bytes()) != LEAVE:
        try:
            answer = answer or work(rank)
            result = {"found": answer(json.loads(message))}
        except Exception:
            result = {"error": traceback.format_exc()}
        pipe.send_bytes(json.dumps(result).encode())
    dist.barrier()
    dist.destroy_process_group()
