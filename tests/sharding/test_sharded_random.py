"""Whatever a training loop does, in whatever order: drawn at random, and equal to the plain run."""

import contextlib
import random

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import manyhands as mh
from helpers.ranks import run_ranks
from helpers.sharding_oracle import (
    Lamb,
    assert_same,
    copied,
    everyone,
    muon_and_adamw,
    one,
    oss,
    plain,
)

WORKERS = 3
LAYERS = ("first", "left", "right")


class Model(nn.Module):
    """Two branches that a loss may leave out, one of them with a layer that is used twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.left, self.right = nn.Linear(5, 11), nn.Linear(11, 11), nn.Linear(11, 11)
        self.last = nn.Linear(11, 3)
        self.to(torch.float64)

    def forward(self, x, use):
        h = self.first(x).tanh()
        if "l" in use:
            h = h + self.left(self.left(h).tanh())
        if "r" in use:
            h = h * self.right(h).sigmoid()
        return self.last(h)


def plan_of(seed, steps=7):
    """What happens in each step; the same on all ranks but for `use`, which is each rank's."""
    draw = random.Random(seed)
    plan = []
    open_pass = False  # whose gradients were neither used nor cleared
    for _ in range(steps):
        passes = draw.choice(["s", "s", "ns", "sn s", "nr", "ss", "nns"]).replace(" ", "")
        step = {
            "clear": draw.choice(["optimizer", "model", "inner", "none"]),
            "set_to_none": draw.random() < 0.7,
            "freeze": draw.choice(LAYERS) if draw.random() < 0.3 else None,
            "freeze early": draw.random() < 0.5,
            "rate": draw.choice([0.01, 0.03]),
            "passes": [
                (kind, [draw.choice(["lr", "lr", "l", "r", ""]) for _ in range(WORKERS)])
                for kind in passes
            ],
            "idle": draw.randrange(WORKERS) if passes == "s" and draw.random() < 0.4 else None,
            "look": draw.random() < 0.3,
            "clip": draw.choice([None, None, 0.1, 0.5]),
            "step": draw.random() < 0.85,
            "reload": draw.random() < 0.2,
        }
        if not step["step"] or (open_pass and step["clear"] not in ("optimizer", "model")):
            step["idle"] = None  # a worker without data joins in with the step, and with one pass
        open_pass = not step["step"]
        plan.append(step)
    return plan


def train(build, seed, sharded):
    rank, _ = everyone()
    module = Model()
    optimizers = build(module, oss if sharded else plain)
    model = module
    if sharded:
        model = mh.ShardedDataParallel(module, optimizers, warn_on_trainable_params_changed=False)
    data = torch.Generator().manual_seed(seed)

    def freeze(step):
        if step["freeze"]:
            layer = getattr(module, step["freeze"])
            layer.requires_grad_(not next(layer.parameters()).requires_grad)

    for step in plan_of(seed):
        if step["freeze early"]:
            freeze(step)
        if step["clear"] == "optimizer":
            for optimizer in optimizers:
                optimizer.zero_grad(step["set_to_none"])
        elif step["clear"] != "none":
            (model if step["clear"] == "model" else module).zero_grad(step["set_to_none"])
        if not step["freeze early"]:
            freeze(step)
        for kind, uses in step["passes"]:
            x = torch.randn(WORKERS, 2, 5, generator=data, dtype=torch.float64)
            with_data = [r for r in range(WORKERS) if r != step["idle"]]
            if not sharded:
                losses = [model(x[r], uses[r]).square().mean() for r in with_data]
                (sum(losses) / WORKERS).backward()
                continue
            if rank in with_data:
                with model.no_sync() if kind in "nr" else contextlib.nullcontext():
                    model(x[rank], uses[rank]).square().mean().backward()
            if kind == "r":
                model.reduce()
        if step["look"] and rank == 0:
            with torch.no_grad():
                model(x[0], "lr")
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = step["rate"]
            if step["clip"] and sharded:
                optimizer.clip_grad_norm(step["clip"])
            elif step["clip"]:
                own = [p for group in optimizer.param_groups for p in group["params"]]
                nn.utils.clip_grad_norm_(own, step["clip"])
        # a step that is left out is left out by every optimizer, and by every rank
        for optimizer in optimizers if step["step"] else []:
            optimizer.step()
        for optimizer in optimizers if step["reload"] else []:
            if sharded:
                optimizer.consolidate_state_dict(-1)
            optimizer.load_state_dict(optimizer.state_dict())
        yield copied(module.parameters())


BUILDS = {
    "AdamW": one(AdamW, lr=0.01, weight_decay=0.3),
    "SGD": one(SGD, lr=0.01, momentum=0.9, weight_decay=0.1),
    "LAMB": one(Lamb, lr=0.01, weight_decay=0.1),
    "Muon and AdamW": muon_and_adamw,
}


@pytest.mark.sample("AdamW-seeds0", "LAMB-seeds0", "Muon and AdamW-seeds0")
@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 9), marks=pytest.mark.long)])
@pytest.mark.parametrize("name", BUILDS)
def test_any_loop_is_the_plain_run(name, seeds):
    def run():
        return [list(train(BUILDS[name], seed, True)) for seed in seeds]

    ranks = run_ranks(WORKERS, run)
    for place, seed in enumerate(seeds):
        for step, expected in enumerate(train(BUILDS[name], seed, False)):
            what = f"seed {seed}, step {step}: {plan_of(seed)[: step + 1]}"
            assert_same([r[place][step] for r in ranks], expected, what, rtol=1e-6, atol=1e-9)
