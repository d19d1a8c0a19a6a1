"""Start a training script many times, each time as new processes, and let it end in one way.

    python ending_script.py PART WAY TIMES

PART is who trains, WAY is how the script ends (both are listed below). Each rank is a fork of this
process, which has imported torch already, and ends as any Python program does: its `main` returns,
and Python shuts down. This process prints one line of JSON for each run: the ranks' exit codes, and
what they wrote to stderr.
"""

import atexit
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch._dynamo  # DDP imports it, which takes as long as all else: once, before the forks
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import manyhands as mh

RANKS = 2


def scaling(model):
    model = DistributedDataParallel(model)
    return model, mh.AdaScale(SGD(model.parameters(), lr=0.1))


def sharding(model):
    optimizer = mh.AdaScale(mh.OSS(model.parameters(), optim=SGD, lr=0.1))
    return mh.ShardedDataParallel(model, optimizer), optimizer


def shared_memory(model):
    optimizer = mh.OSS(model.parameters(), optim=SGD, lr=0.1, shared_memory=True)
    return mh.ShardedDataParallel(model, optimizer), optimizer


def fsdp(model):
    model = mh.FSDP(model)
    return model, mh.AdaScale(SGD(model.parameters(), lr=0.1))


def blocks(model):
    return model, mh.DiLoCo(SGD(model.parameters(), lr=0.1), every=2, overlap=1)


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, i):
        return torch.full((8,), float(i))


loader = None


def loading(model):
    """Processes that load data, and outlive signals to the whole job, are there when it ends."""
    global loader
    mh.stopping()
    loader = torch.utils.data.DataLoader(Samples(), num_workers=2, persistent_workers=True)
    next(iter(loader))
    return model, SGD(model.parameters(), lr=0.1)


def aborting(model):
    """No part of ours: what a thread that comes back too late would do."""
    atexit.register(os.abort)
    return model, SGD(model.parameters(), lr=0.1)


PARTS = [scaling, sharding, shared_memory, fsdp, blocks, loading]

# How the script ends, and the exit code that its author means.
WAYS = {"return": 0, "destroy": 0, "del": 0, "exception": 1, "exit": 7, "sigterm": -signal.SIGTERM}


def train(part):
    model, optimizer = part(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)))
    torch.manual_seed(dist.get_rank())
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(2, 8)).square().sum().backward()
        optimizer.step()
    return model, optimizer


model = optimizer = None  # as in a script without functions


def main(part, way, rank, store):
    """What a user's script does. `model` and `optimizer` are alive when it ends."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    global model, optimizer
    model, optimizer = train(part)
    if way == "destroy":
        dist.destroy_process_group()
    elif way == "del":
        dist.destroy_process_group()
        del model, optimizer
    elif way == "exception":
        raise ValueError("of the script's own")
    elif way == "exit":
        sys.exit(WAYS[way])
    elif way == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)


def start(part, way, rank, store, stderr):
    """Fork a rank. Return its process id; in the rank itself return None."""
    process = os.fork()
    if process:
        return process
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT), 2)
    return None


def wait(processes, seconds):
    """Return the exit codes; kill what has not ended in time, whose code is then None."""
    codes: dict[int, int | None] = {}
    deadline = time.monotonic() + seconds
    while len(codes) < len(processes):
        for process in set(processes) - codes.keys():
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                codes[process] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                codes[process] = None
        time.sleep(0.002)
    return [codes[process] for process in processes]


if __name__ == "__main__":
    torch.set_num_threads(1)
    part, way, times = globals()[sys.argv[1]], sys.argv[2], int(sys.argv[3])
    folder = tempfile.mkdtemp()
    rank_here = None
    for number in range(times):
        errors = [f"{folder}/{number}.{rank}.txt" for rank in range(RANKS)]
        store = f"{folder}/{number}.store"
        processes = []
        for rank in range(RANKS):
            process = start(part, way, rank, store, errors[rank])
            if process is None:
                rank_here = rank
                break
            processes.append(process)
        if rank_here is not None:
            break
        codes = wait(processes, 60.0)
        said = [Path(path).read_text() for path in errors]
        print(json.dumps({"codes": codes, "stderr": said}), flush=True)
    if rank_here is not None:  # the rank's program, which ends as this file does
        main(part, way, rank_here, store)
