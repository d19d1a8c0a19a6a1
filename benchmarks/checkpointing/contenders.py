"""The contenders: ways to save and load one model under fully_shard, with AdamW's state.

`save(run, path)` and `load(run, path)` are called on every rank. All of them wait until the disk
has what was written.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

import manyhands as mh

OURS = "manyhands"
OURS_OSS = "manyhands, OSS"
COPY = "manyhands, wait=False: until it returns"
FULL = "torch, full state dict"
DCP = "torch.distributed.checkpoint"
CONTROL = "torch.distributed.checkpoint again (A/A)"


@dataclass
class Run:
    """A model and an optimizer that has taken a step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def states(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer}


def sharded(model: nn.Module) -> Run:
    fully_shard(model)
    return _stepped(model, torch.optim.AdamW(model.parameters(), lr=1e-4))


def with_oss(model: nn.Module) -> Run:
    return _stepped(model, mh.OSS(model.parameters(), optim=torch.optim.AdamW, lr=1e-4))


def _stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> Run:
    for param in model.parameters():
        param.grad = torch.full_like(param, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    return Run(model, optimizer)


def save_ours(run: Run, path: Path) -> None:
    mh.save(path, **run.states, keep=1)  # type: ignore[arg-type]


def start_ours(run: Run, path: Path) -> Callable[[], object]:
    return mh.save(path, **run.states, keep=1, wait=False).wait  # type: ignore[arg-type]


def load_ours(run: Run, path: Path) -> None:
    mh.load(path, **run.states)  # type: ignore[arg-type]


def save_full(run: Run, path: Path) -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, optimizer = get_state_dict(run.model, run.optimizer, options=options)
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
    set_state_dict(
        run.model,
        run.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(full_state_dict=True),
    )


def save_dcp(run: Run, path: Path) -> None:
    model, optimizer = get_state_dict(run.model, run.optimizer)
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
    dist.barrier()
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)


def load_dcp(run: Run, path: Path) -> None:
    model, optimizer = get_state_dict(run.model, run.optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    set_state_dict(run.model, run.optimizer, model_state_dict=model, optim_state_dict=optimizer)


@dataclass(frozen=True)
class Contender:
    name: str
    make: Callable[[nn.Module], Run]
    save: Callable[[Run, Path], Callable[[], object] | None]
    load: Callable[[Run, Path], None]


CONTENDERS = [
    Contender(OURS, sharded, save_ours, load_ours),
    Contender(COPY, sharded, start_ours, load_ours),
    Contender(OURS_OSS, with_oss, save_ours, load_ours),
    Contender(FULL, sharded, save_full, load_full),
    Contender(DCP, sharded, save_dcp, load_dcp),
    Contender(CONTROL, sharded, save_dcp, load_dcp),
]
