"""Ways to harm a checkpoint, at random, and runs that are killed."""

import json
import os
import random
import shutil
import signal
import time
from multiprocessing import get_context

import torch

import manyhands as mh
from helpers.ranks import run_ranks
from manyhands.checkpoint import _folder

KINDS = ("flip", "zero", "truncate", "extend", "remove", "foreign", "empty")


def harm(folder, choose: random.Random):
    """Harm one file of a checkpoint; says how."""
    path = choose.choice(sorted(p for p in folder.iterdir() if p.is_file()))
    kind = choose.choice(KINDS)
    data = bytearray(path.read_bytes())
    at = choose.randrange(len(data))
    if kind == "flip":
        data[at] ^= 1 << choose.randrange(8)
    elif kind == "zero":
        while not any(data[at : at + 64]):
            at = choose.randrange(len(data))
        data[at : at + 64] = bytes(len(data[at : at + 64]))
    elif kind == "truncate":
        del data[at:]
    elif kind == "extend":
        data += bytes(choose.randrange(1, 100))
    elif kind == "foreign":
        data = bytearray(choose.randbytes(len(data)))
    elif kind == "empty":
        data.clear()
    if kind == "remove":
        path.unlink()
    else:
        path.write_bytes(data)
    return f"{kind} {path.name} at {at}"


def flip(path, prefix):
    """Change a byte in the middle of the first tensor whose name begins so."""
    data = bytearray(path.read_bytes())
    head = 8 + int.from_bytes(data[:8], "little")
    meta = next(m for name, m in json.loads(data[8:head]).items() if name.startswith(prefix))
    data[head + sum(meta["data_offsets"]) // 2] ^= 1
    path.write_bytes(data)


def refused(setup, harmed):
    """Whether loading it is an error that says what to do, and changes nothing."""
    before = setup.held()
    try:
        mh.load(harmed, **setup.given())
    except (ValueError, FileNotFoundError) as error:
        after = setup.held()
        same = all(torch.equal(before[name], after[name]) for name in before)
        advised = any(word in str(error) for word in ("Load", "load", "Pass", "Copy", "Restore"))
        return same and advised, str(error)
    return False, "no error"


def damage_many(setup, source, folder, times, seed=0):
    """Harm a fresh copy each time; returns what was not refused."""
    choose, wrong = random.Random(seed), []
    for number in range(times):
        harmed = folder / f"harmed{number}"
        shutil.copytree(source, harmed)
        how = harm(harmed, choose)
        good, said = refused(setup, harmed)
        if not good:
            wrong.append(f"{how}: {said}")
        shutil.rmtree(harmed)
    return wrong


def save_forever(path, wait, size):
    """Ranks that save states all of whose numbers are the step, until they are killed."""
    os.setpgid(0, 0)

    def go():
        model = torch.nn.Linear(size, size)
        optimizer = mh.OSS(model.parameters(), optim=torch.optim.AdamW, bucket_size=1000)
        model(torch.ones(1, size)).sum().backward()
        optimizer.step()
        for step in range(10_000):
            with torch.no_grad():
                for tensor in model.parameters():
                    tensor.fill_(step)
                for state in optimizer.state.values():
                    for tensor in state.values():
                        tensor.fill_(step)
            mh.save(path, model=model, optimizer=optimizer, step=step, wait=wait)

    run_ranks(2, go)


def kill_while_saving(path, choose, wait=True, size=40):
    """Start a run, kill all of it at a random moment, and load what there is; returns its step."""
    before = newest_step(path, size)
    run = get_context("fork").Process(target=save_forever, args=(path, wait, size))
    run.start()
    while newest_step(path, size) == before:  # it has come to the first save
        time.sleep(0.005)
    time.sleep(choose.uniform(0, 0.15))
    assert run.pid is not None
    os.killpg(run.pid, signal.SIGKILL)
    run.join()
    return newest_step(path, size)


def newest_step(path, size):
    """Return the step of the newest checkpoint, and its name; None if there is none."""
    step = step_of_all(path, size)
    return step and (step[0], sorted(p.name for p in path.iterdir() if p.name[0] != ".")[-1])


def step_of_all(path, size):
    """Load the newest into a plain optimizer: every number in it must be the step."""
    model = torch.nn.Linear(size, size)
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        step = mh.load(path, model=model, optimizer=optimizer)["step"]
    except FileNotFoundError:
        return None
    for state in ({"data": p, **optimizer.state[p]} for p in model.parameters()):
        for name, tensor in state.items():
            assert torch.equal(tensor, torch.full_like(tensor, step)), (name, step, tensor)
    return [step]


def release_locks():
    """Let other processes save where this one has."""
    while _folder._held:
        os.close(_folder._held.popitem()[1])
