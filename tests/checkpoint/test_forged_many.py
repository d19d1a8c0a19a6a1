"""Thousands of changed checkpoints: each is refused by its name, or loaded as its files say.

A refused one has changed nothing: no tensor, no option, no state of a scheduler, a scaler or a
random generator. None takes more than a few hundred MB of memory.

TIMES=2000 SEED=1 pytest tests/checkpoint/test_forged_many.py -k OSS
"""

import os
import random
import shutil
from functools import partial

import pytest
import torch
import torch.distributed as dist
import typer
from torch import nn

import manyhands as mh
from helpers.checkpoint_oracle import ADAMW, LAMB, SGD, Setup
from helpers.forge import content, only
from helpers.memory import little_memory
from helpers.mutations import read_plainly, signed, unsigned
from helpers.ranks import run_ranks
from helpers.sharding_oracle import Lamb
from manyhands.tools.cli.checkpoint import consolidate, inspect

SEED = int(os.environ.get("SEED", "0"))


class Counter(nn.Linear):
    """A module with extra state."""

    seen = 0

    def get_extra_state(self):
        return {"seen": self.seen, "ever": (1, 2.5)}

    def set_extra_state(self, state):
        self.seen = int(state["seen"])


class Run:
    """A run with all that there can be in a checkpoint."""

    def __init__(self, way, kind, rule, seed=0):
        self.setup = Setup(way, kind, seed=seed, rule=rule)
        self.ema = Counter(2, 2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        self.scaler.scale(torch.ones(1))

    def given(self):
        return {**self.setup.given(), "ema": self.ema, "scaler": self.scaler}

    def step(self):
        """Train a step, without the scheduler: torch takes any state for one."""
        self.setup.optimizer.zero_grad()
        self.setup.model(torch.ones(2, 5)).square().mean().backward()
        self.setup.optimizer.step()

    def state(self):
        """Everything that a load may change, as text and tensors."""
        optimizer = self.setup.optimizer
        inner = getattr(optimizer, "optimizer", optimizer)
        plain = [
            self.setup.scheduler.state_dict(),
            self.scaler.state_dict(),
            self.ema.seen,
            [{k: v for k, v in group.items() if k != "params"} for group in inner.param_groups],
            [sorted(entries) for entries in inner.state.values()],
            random.getstate(),
            optimizer.scaling_state_dict() if hasattr(optimizer, "scaling_state_dict") else None,
        ]
        tensors = {
            **self.setup.held(),
            **{f"ema.{name}": t.detach().clone() for name, t in self.ema.named_parameters()},
            "generator": torch.get_rng_state(),
        }
        return str(plain), tensors


def saved(folder, way, kind, rule):
    def write():
        run = Run(way, kind, rule)
        run.setup.train(2)
        run.ema.seen = 7
        values = {"t": (torch.ones(3), {1, 2}), "d": {1.5: complex(1, 2)}, "inf": float("inf")}
        mh.save(folder, **run.given(), step=5, values=values, best=0.25, name="x")

    run_ranks(2, write)
    return only(folder)


RUNS = {
    "OSS": ("OSS", ADAMW, mh.AdamScale),
    "fully_shard": ("fully_shard", ADAMW, None),
    "Lamb": ("OSS", LAMB, None),
    "SGD": ("fully_shard", SGD, mh.AdaScale),
}


@pytest.fixture(scope="module", params=RUNS)
def source(request, tmp_path_factory):
    way, kind, rule = RUNS[request.param]
    return saved(tmp_path_factory.mktemp("source") / "run", way, kind, rule), kind, rule


def equal(before, after):
    plain = before[0] == after[0]
    names = before[1].keys() == after[1].keys()
    return plain and names and all(torch.equal(t, after[1][n]) for n, t in before[1].items())


def check_loaded(run, checkpoint):
    """Raise unless the run has what the files say, and goes on."""
    saved, meta = read_plainly(checkpoint), content(checkpoint)
    held = run.setup.held()
    aliases = meta["model"]["aliases"]
    for name, tensor in held.items():
        entry, of, param = name.partition(" of ")
        key = f"optimizer.0/{entry}/{param}" if of else f"model/{aliases.get(name, name)}"
        if key in saved:
            torch.testing.assert_close(tensor, saved[key], rtol=0, atol=0, equal_nan=True)
        elif not of and name != "lr":
            assert "scratch" in name, name
    # Numbers are loaded as they are, and the user's own optimizers are not tried before.
    finite = all(tensor.isfinite().all() for tensor in held.values())
    if finite and not isinstance(run.setup.optimizer, Lamb):
        run.step()


def try_load(run, checkpoint, before):
    """Load; return what is wrong, and whether it was refused."""
    try:
        with little_memory():
            mh.load(checkpoint, **run.given())
    except (ValueError, FileNotFoundError) as error:
        if str(checkpoint) not in str(error):
            return f"not named: {error!r:.300}", True
        return ("" if equal(before, run.state()) else f"changed by: {error!r:.300}"), True
    except BaseException as error:
        return f"raised {error!r:.300}", True
    try:
        check_loaded(run, checkpoint)
    except BaseException as error:
        return f"loaded, and then {error!r:.500}", False
    return "", False


def try_command(command, checkpoint, capsys, **options):
    """Run a command; return what is wrong, and its exit code."""
    try:
        with little_memory():
            command(str(checkpoint), **options)
    except typer.Exit as stopped:
        said = "".join(capsys.readouterr()).replace("\n", "")
        return ("" if str(checkpoint) in said else f"not named: {said[-300:]}"), stopped.exit_code
    except BaseException as error:
        return f"raised {error!r:.300}", 3
    finally:
        capsys.readouterr()
    return "", 0


def many(source, folder, times, capsys):
    checkpoint, kind, rule = source
    dice = random.Random(SEED)
    problems = []
    refused = 0
    run = None
    for number in range(times):
        copy = folder / f"{number:06d}"
        shutil.copytree(checkpoint, copy)
        words = (signed if number % 2 else unsigned)(copy, dice)
        if run is None:
            run = Run("plain", kind, rule, seed=3)
            run.step()
            before = run.state()
        wrong, was_refused = try_load(run, copy, before)
        refused += was_refused
        found = {"load": wrong}
        if wrong or not was_refused:
            run = None
        found["inspect"], _ = try_command(inspect, copy, capsys)
        found["verify"], code = try_command(inspect, copy, capsys, verify=True)
        for to in ("plain", "hf"):
            target = folder / "out"
            options = {"target": target, "to": to, "max_shard_size": "5GB"}
            found[to], code = try_command(consolidate, copy, capsys, **options)
            if code and target.exists() and os.listdir(target):
                found[to] += f" left {os.listdir(target)}"
            shutil.rmtree(target, ignore_errors=True)
        problems += [f"{number} {words}: {do}: {said}" for do, said in found.items() if said]
        shutil.rmtree(copy)
    return problems, refused


@pytest.mark.parametrize("times", [20, pytest.param(500, marks=pytest.mark.long)])
def test_a_changed_checkpoint_is_refused_by_name_or_loaded_as_it_says(
    times, source, tmp_path, capsys
):
    times = int(os.environ.get("TIMES", times))
    problems, refused = many(source, tmp_path, times, capsys)
    assert not problems, f"{len(problems)}:\n" + "\n".join(problems)
    assert refused > times / 2


class InBlocks:
    """A run in blocks on two ranks: each is a replica."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        inner = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.optimizer = mh.DiLoCo(inner, every=2, codec="int8")

    def given(self):
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self):
        for _ in range(2):
            self.optimizer.zero_grad()
            self.model(torch.ones(2, 3) + dist.get_rank()).square().mean().backward()
            self.optimizer.step()

    def state(self):
        state = self.optimizer.state_dict()
        state["blocks"].pop("clock")
        return str(state) + str(self.model.state_dict()) + str(torch.get_rng_state().tolist())


class Sharded:
    """A run that is sharded over two ranks."""

    def __init__(self, way, seed=0):
        self.setup = Setup(way, seed=seed, rule=mh.AdamScale)
        self.given = self.setup.given

    def step(self):
        self.setup.optimizer.zero_grad()
        self.setup.model(torch.ones(2, 5)).square().mean().backward()
        self.setup.optimizer.step()

    def state(self):
        setup = self.setup
        plain = setup.scheduler.state_dict(), setup.optimizer.scaling_state_dict()
        return str([setup.held(), *plain, torch.get_rng_state().tolist()])


ON_RANKS = {
    "blocks": InBlocks,
    "OSS": partial(Sharded, "OSS"),
    "fully_shard": partial(Sharded, "fully_shard"),
}


def many_on_ranks(make, folder, times):
    """Load changed checkpoints on two ranks; return what is wrong, and the number refused."""
    run = make()
    run.step()
    source = mh.save(folder / "run", **run.given(), step=1).path
    dice = random.Random(SEED)
    problems = []
    refused = 0
    run = None
    for number in range(times):
        copy = folder / f"{number:06d}"
        if dist.get_rank() == 0:
            shutil.copytree(source, copy)
            (signed if number % 2 else unsigned)(copy, dice)
        dist.barrier()
        if run is None:
            run = make(seed=3)
            run.step()
            before = run.state()
        try:
            with little_memory():
                mh.load(copy, **run.given())
            run = None
        except (ValueError, FileNotFoundError) as error:
            refused += 1
            same = run.state() == before
            if str(copy) not in str(error) or not same:
                problems.append(f"{number}: {same} {error!r:.300}")
        except BaseException as error:
            problems.append(f"{number}: {error!r:.300}")
            break  # the other rank may be elsewhere
    return problems, refused


@pytest.mark.parametrize("way", ON_RANKS)
@pytest.mark.parametrize("times", [10, pytest.param(200, marks=pytest.mark.exhaustive)])
def test_a_changed_checkpoint_is_refused_on_all_ranks_or_loaded(times, way, tmp_path):
    times = int(os.environ.get("TIMES", times))
    for problems, refused in run_ranks(
        2, many_on_ranks, ON_RANKS[way], tmp_path, times, timeout=500
    ):
        assert not problems, "\n".join(problems)
        assert refused > times / 2
