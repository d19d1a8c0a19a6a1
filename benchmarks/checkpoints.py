"""Seconds and memory to save and load 100 M parameters.

python benchmarks/checkpoints.py            some minutes; writes the page
python benchmarks/checkpoints.py --quick    a smoke test: a small model, writes nothing
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
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
from team import Team  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.checkpoint.state_dict import (  # noqa: E402
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard  # noqa: E402

import manyhands as mh  # noqa: E402
from sharding import memory, models  # noqa: E402

RANKS = (2, 4)


def main() -> None:
    parser = pages.parser(__doc__)
    parser.add_argument("--folder", help="where checkpoints are written")
    args = parser.parse_args()
    if args.draw:
        draw(pages.read("checkpoints"))
        return
    name, rounds = ("tiny", 2) if args.quick else ("100M", 5)
    size = models.SIZES[name]
    result: dict[str, Any] = {
        **pages.conditions(),
        "size": size.name,
        "bytes": 12 * sum(p.numel() for p in models.Decoder(size).parameters()),
        "rounds": rounds,
    }
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        result["rows"] = [row for n in RANKS for row in timed(n, size, rounds, Path(folder))]
    print(table(result["rows"]))
    if not args.quick:
        pages.store("checkpoints", result)
        draw(result)


# -- contenders ------------------------------------------------------------------------------------
# Ways to save and load one model under fully_shard, with AdamW's state. `save(run, path)` and
# `load(run, path)` are called on every rank, and wait until the disk has what was written.

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
    def states(self) -> dict[str, object]:
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
    save: Callable[[Run, Path], Callable[[], object] | None]
    load: Callable[[Run, Path], None]


CONTENDERS = [
    Contender(OURS, save_ours, load_ours),
    Contender(COPY, start_ours, load_ours),
    Contender(FULL, save_full, load_full),
    Contender(DCP, save_dcp, load_dcp),
    Contender(CONTROL, save_dcp, load_dcp),
]


# -- seconds and memory ----------------------------------------------------------------------------


def timed(ranks: int, size: models.Size, rounds: int, folder: Path) -> list[dict[str, Any]]:
    """Each contender's seconds (the slowest rank's) and peaks (the largest), by round."""
    keys = ("save", "load", "save_peak", "load_peak")
    rows = [{"ranks": ranks, "name": c.name, **{key: [] for key in keys}} for c in CONTENDERS]
    for round_ in range(rounds):
        for place in range(len(CONTENDERS)):
            number = (place + round_) % len(CONTENDERS)
            path = folder / f"{ranks}-{number}"
            with Team(ranks, work(CONTENDERS[number], size, path)) as team:
                seen = team.ask({})
            shutil.rmtree(path)
            for key in keys:
                rows[number][key].append(max(rank[key] for rank in seen))
    return rows


def work(
    contender: Contender, size: models.Size, path: Path
) -> Callable[[int], Callable[[dict[str, Any]], Any]]:
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
    """The result, the seconds, and by how many bytes the process grew at the most."""
    dist.barrier()
    results: list[Any] = []
    start = time.perf_counter()
    peak = memory.growth(lambda: results.append(do()))
    return results[0], time.perf_counter() - start, peak


# -- the page --------------------------------------------------------------------------------------


def table(rows: Sequence[dict[str, Any]]) -> str:
    def cells(name: str) -> list[str]:
        columns = []
        for key in ("save", "load", "save_peak", "load_peak"):
            found = [row[key] for row in rows if row["name"] == name]
            peak = key.endswith("peak")
            texts = [f"{max(f) / 1e6:,.0f}" if peak else f"{median(f):.2f}" for f in found]
            columns.append("" if name == COPY and key.startswith("load") else "/".join(texts))
        return [name, *columns]

    head = "on 2/4 ranks | save, s | load, s | peak while saving, MB | peak while loading, MB"
    return pages.table(head, (cells(contender.name) for contender in CONTENDERS))


def ratios(rows: Sequence[dict[str, Any]], one: str, other: str, key: str) -> str:
    """One contender's seconds or bytes over another's, by number of ranks."""
    found = {(row["ranks"], row["name"]): row for row in rows}
    by = max if key.endswith("peak") else median
    each = (by(found[n, one][key]) / max(by(found[n, other][key]), 1e-9) for n in RANKS)
    return " and ".join(f"{ratio:.2f}" for ratio in each)


PAGE = """# Time and memory of checkpoints

A decoder of {million} parameters (float32) under `fully_shard` with AdamW's state, {state:,.0f} MB
in all, is saved and loaded by `mh.save` and `mh.load`, by torch's full state dict
(`torch.save` on rank 0, `torch.load(mmap=True)` on each), and by `torch.distributed.checkpoint`.
{versions}, {machine}, gloo.

```bash
python benchmarks/checkpoints.py
```

{table}

Seconds are the median of {rounds} rounds, until the disk has the file (with `wait=False` until
`save` returns). "Peak" is the growth of the rank that grows most.
The A/A row takes {noise_save} (save) and {noise_load} (load) times as long as what it repeats, so
smaller differences mean nothing.

- The full state dict takes {full_save} times as long to save and {full_load} times as long to load,
  and its rank 0 needs {full_peak} times our peak.
- torch.distributed.checkpoint takes {dcp_save} times as long to save and {dcp_load} to load. It has
  no checksums, and pickles its metadata. `mh.load` reads everything twice: first to compare
  checksums.
"""


def draw(result: dict[str, Any]) -> None:
    rows = result["rows"]
    pages.write(
        "checkpoints",
        PAGE,
        result,
        million=result["size"].replace("M", " M"),
        state=result["bytes"] / 1e6,
        table=table(rows),
        noise_save=ratios(rows, CONTROL, DCP, "save"),
        noise_load=ratios(rows, CONTROL, DCP, "load"),
        full_save=ratios(rows, FULL, OURS, "save"),
        full_load=ratios(rows, FULL, OURS, "load"),
        full_peak=ratios(rows, FULL, OURS, "save_peak"),
        dcp_save=ratios(rows, DCP, OURS, "save"),
        dcp_load=ratios(rows, DCP, OURS, "load"),
    )


if __name__ == "__main__":
    main()
