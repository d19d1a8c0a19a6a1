"""Train every combination of sharding and rule under the engine that starts this script.

    ENGINE engine_cells.py FOLDER begin     5 steps, then a checkpoint in FOLDER/CELL
    ENGINE engine_cells.py FOLDER resume    5 more steps from the checkpoint, on any number of ranks
    ENGINE engine_cells.py FOLDER whole     10 steps without interruption

`tools/engines_table.py` starts this script and compares the results. The ranks divide the four
micro-batches of a step, so steps on 1, 2 or 4 ranks differ only by the rounding of sums. Each cell
writes the final state, or the text of an error, to `FOLDER/PHASE.json`.
"""

import argparse
import contextlib
import hashlib
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import manyhands as mh

SHARDINGS = ["DDP", "OSS + DDP", "OSS + ShardedDataParallel", "FSDP", "blocks"]
RULES = ["AdaScale", "AdamScale", "none"]
STEPS, MICRO_BATCHES, SAMPLES = 5, 4, 8


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def make(sharding, rule, job, passes, shared_memory):
    """Return the module and the optimizer, created like in a user's script."""
    model = net()
    kind = torch.optim.SGD if rule == "AdaScale" else torch.optim.AdamW
    options = {"lr": 0.05, "momentum": 0.9} if rule == "AdaScale" else {"lr": 0.01}
    module = mh.FSDP(model) if sharding == "FSDP" else model
    if sharding.startswith("OSS"):
        optimizer = mh.OSS(module.parameters(), optim=kind, **options)
    else:
        optimizer = kind(module.parameters(), **options)
    if sharding.endswith("DDP"):
        module = DistributedDataParallel(model)
    elif sharding == "OSS + ShardedDataParallel":
        module = mh.ShardedDataParallel(model, optimizer)
    if rule != "none":
        alone = {"world_size": 1} if sharding == "blocks" else {}
        scale = getattr(mh, rule)
        optimizer = scale(optimizer, num_gradients_to_accumulate=passes, **alone)
    if sharding == "blocks":
        optimizer = mh.DiLoCo(optimizer, every=5, crew=job.crew, shared_memory=shared_memory)
    return module, optimizer


def train(sharding, rule, job, folder, phase, shared_memory, alike):
    """Train a cell, and return the final state, which is equal on all ranks."""
    blocks = sharding == "blocks"
    workers, worker = (job.workers, job.worker) if blocks else (job.world_size, job.rank)
    passes = 2 if blocks else MICRO_BATCHES // workers
    if alike:
        workers, worker = 1, 0
    module, optimizer = make(sharding, rule, job, passes, shared_memory)
    first, last = {"begin": (0, 5), "resume": (5, 10), "whole": (0, 10)}[phase]
    found = {}
    if phase == "resume":
        step = mh.load(folder, model=module, optimizer=optimizer)["step"]
        found["loaded"] = digest(module)
        assert step == first, step
    for step in range(first, last):
        optimizer.zero_grad()
        for number in range(passes):
            seed = (step * workers + worker) * passes + number
            x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(seed))
            quiet = number < passes - 1 and hasattr(module, "no_sync")
            with module.no_sync() if quiet else contextlib.nullcontext():
                (mse_loss(module(x), x.sum(dim=1, keepdim=True)) / passes).backward()
        optimizer.step()
        assert not mh.stopping(optimizer)
    crew = job.crew if blocks else None
    if phase == "begin" and (crew is None or crew.rank == 0):
        mh.save(folder, model=module, optimizer=optimizer, step=last)
    found["digest"] = digest(module)
    found["progress"] = getattr(optimizer, "progress", None)
    found["weights"] = [value for p in whole_parameters(module) for value in p.flatten().tolist()]
    if crew is not None:
        optimizer.finish()
    return found


def whole_parameters(module):
    state = module.state_dict()
    return [
        getattr(state[name], "full_tensor", lambda t=state[name]: t)() for name in sorted(state)
    ]


def digest(module):
    data = b"".join(p.numpy().tobytes() for p in whole_parameters(module))
    return hashlib.sha256(data).hexdigest()[:16]


def main(folder, phase, only=None, shared_memory=True, alike=False):
    job = mh.start()
    torch.set_num_threads(1)
    folder = Path(folder)
    results = {}
    for sharding in SHARDINGS:
        for rule in RULES:
            cell = f"{sharding}, {rule}"
            if only is not None and not cell.startswith(tuple(only)):
                continue
            try:
                results[cell] = train(
                    sharding, rule, job, folder / cell, phase, shared_memory, alike
                )
            except Exception as error:  # the table reports the errors of cells
                results[cell] = {"error": f"{type(error).__name__}: {error}"}
            print(f"{cell} ({job.engine}): {results[cell].get('error', 'done')}", flush=True)
    which = "-".join(only or ["all"]).replace(" ", "")
    (folder / f"{phase}.{which}.{job.worker}.{job.rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("phase", choices=["begin", "resume", "whole"])
    parser.add_argument("--only", nargs="+", help="the cells whose names begin so")
    parser.add_argument("--network", action="store_true", help="blocks: no shared memory")
    parser.add_argument("--alike", action="store_true", help="blocks: all have the same samples")
    arguments = parser.parse_args()
    shared_memory = not arguments.network
    main(arguments.folder, arguments.phase, arguments.only, shared_memory, arguments.alike)
    if dist.is_initialized():
        dist.destroy_process_group()
