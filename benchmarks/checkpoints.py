"""Measure seconds and memory to save and load 100 M parameters."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pages
import peers

peers.this_checkout()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from team import Team, Work, largest  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.checkpoint import state_dict  # noqa: E402
from torch.distributed.checkpoint.state_dict import StateDictOptions  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

import manyhands as mh  # noqa: E402
from sharding import memory, models  # noqa: E402

RANKS = (2, 4)
KEYS = ("save", "load", "save_peak", "load_peak")
Row = dict[str, Any]


def main() -> None:
    args = pages.parser(__doc__).parse_args()
    if not args.draw:
        name, rounds = ("tiny", 2) if args.quick else ("100M", 5)
        size = models.SIZES[name]
        elements = sum(p.numel() for p in models.Decoder(size).parameters())
        known = {"size": size.name, "bytes": 12 * elements, "rounds": rounds}
        result = {**pages.conditions(), **known, "rows": []}
        with tempfile.TemporaryDirectory() as folder:
            for ranks in RANKS:
                result["rows"] += timed(ranks, size, rounds, Path(folder))
        if args.quick:
            print(table(result["rows"]))
            return
        pages.store("checkpoints", result)
    result = pages.read("checkpoints")
    pages.fill("checkpoints", result, table=table(result["rows"]))


# -- contenders ------------------------------------------------------------------------------------
# `save(run, path)` and `load(run, path)` are called on every rank, and wait for the disk.

OURS = "manyhands"
COPY = "manyhands, wait=False"
FULL = "torch, full state dict"
DCP = "torch.distributed.checkpoint"
CONTROL = "torch.distributed.checkpoint (A/A)"


@dataclass
class Run:
    """A model and an optimizer that has taken a step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def states(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}


def sharded(model: nn.Module) -> Run:
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for param in model.parameters():
        param.grad = torch.full_like(param, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    return Run(model, optimizer)


def save_ours(run: Run, path: Path) -> None:
    mh.save(path, **run.states, keep=1)


def start_ours(run: Run, path: Path) -> Callable[[], object]:
    return mh.save(path, **run.states, keep=1, wait=False).wait


def load_ours(run: Run, path: Path) -> None:
    mh.load(path, **run.states)


def save_full(run: Run, path: Path) -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, optimizer = state_dict.get_state_dict(run.model, run.optimizer, options=options)
    if dist.get_rank() == 0:
        path.mkdir(exist_ok=True)
        with (path / "all.pt").open("wb") as file:
            torch.save({"model": model, "optimizer": optimizer}, file)
            file.flush()
            os.fsync(file.fileno())
    dist.barrier()


def load_full(run: Run, path: Path) -> None:
    # Every rank reads what it needs of it: broadcasting from rank 0 hung here (torch 2.13, gloo).
    state = torch.load(path / "all.pt", weights_only=True, mmap=True)
    state_dict.set_state_dict(
        run.model,
        run.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(full_state_dict=True),
    )


def save_dcp(run: Run, path: Path) -> None:
    model, optimizer = state_dict.get_state_dict(run.model, run.optimizer)
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
    dist.barrier()
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)


def load_dcp(run: Run, path: Path) -> None:
    model, optimizer = state_dict.get_state_dict(run.model, run.optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    state_dict.set_state_dict(
        run.model, run.optimizer, model_state_dict=model, optim_state_dict=optimizer
    )


@dataclass(frozen=True)
class Contender:
    name: str
    save: Callable[[Run, Path], Callable[[], object] | None]
    load: Callable[[Run, Path], None]


CONTENDERS = [
    Contender(OURS, save_ours, load_ours),
    Contender(COPY, start_ours, load_ours),
    Contender(FULL, save_full, load_full),
    Contender(DCP, save_dcp, load_dcp),
    Contender(CONTROL, save_dcp, load_dcp),
]


def timed(ranks: int, size: models.Size, rounds: int, folder: Path) -> list[Row]:
    """Return each contender's seconds (the slowest rank's) and peaks (the largest), by round."""
    rows: list[Row] = []
    for contender in CONTENDERS:
        rows.append({"ranks": ranks, "name": contender.name, **{key: [] for key in KEYS}})
    for round_ in range(rounds):
        for place in range(len(CONTENDERS)):
            number = (place + round_) % len(CONTENDERS)
            path = folder / f"{ranks}-{number}"
            with Team(ranks, work(CONTENDERS[number], size, path)) as team:
                seen = largest(team.ask({}))
            shutil.rmtree(path)
            for key in KEYS:
                rows[number][key].append(seen[key])
    return rows


def work(contender: Contender, size: models.Size, path: Path) -> Work:
    def begin(rank: int) -> Callable[[dict[str, Any]], Any]:
        torch.manual_seed(0)
        run = sharded(models.Decoder(size))

        def answer(_: dict[str, Any]) -> dict[str, float]:
            finish, save, save_peak = measured(lambda: contender.save(run, path))
            if finish is not None:
                finish()
            _, load, load_peak = measured(lambda: contender.load(run, path))
            return {"save": save, "load": load, "save_peak": save_peak, "load_peak": load_peak}

        return answer

    return begin


def measured(do: Callable[[], Any]) -> tuple[Any, float, float]:
    """Return the result, the seconds, and by how many bytes the process grew at the most."""
    dist.barrier()
    results: list[Any] = []
    start = time.perf_counter()
    peak = memory.growth(lambda: results.append(do()))
    return results[0], time.perf_counter() - start, peak


def table(rows: list[Row]) -> str:
    cells = []
    for contender in CONTENDERS:
        line = [contender.name]
        for key in KEYS:
            values = [row[key] for row in rows if row["name"] == contender.name]
            if contender.name == COPY and key.startswith("load"):
                line.append("")  # the same as without a copy
            elif key.endswith("peak"):
                line.append("/".join(f"{max(each) / 1e6:,.0f}" for each in values))
            else:
                line.append("/".join(f"{median(each):.2f}" for each in values))
        cells.append(line)
    head = "on 2/4 ranks | save, s | load, s | peak while saving, MB | peak while loading, MB"
    return pages.table(head, cells)


if __name__ == "__main__":
    main()
