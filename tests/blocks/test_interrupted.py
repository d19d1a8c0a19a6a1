"""A run that is saved, ended and resumed is the run that was not, bit for bit, between rounds.

The interrupted run is saved into bytes before a step, built anew (other parameters, an empty
optimizer, a clock that shows another time) and loaded. After every step all that it holds is
compared: parameters, buffers, optimizer state, anchor, outer memories, residuals, drift, counters.
"""

import io
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam, AdamW

import manyhands as mh
from helpers.ranks import on_ranks, run_ranks
from manyhands.blocks.averaging import _round

STEPS = 13
EVERY_STEP = range(2, STEPS + 1)
METHODS = {
    "LocalSGD": (lambda p: SGD(p, lr=0.1, momentum=0.9), {}),
    "BMUF": (Adam, {"block_lr": 0.9, "block_momentum": 0.6}),
    "DiLoCo": (Adam, {"lr": 0.7, "momentum": 0.9}),
    "SlowMo": (AdamW, {"slow_lr": 0.8, "slow_momentum": 0.5}),
}
EVERY = {
    "4": 4,
    "Seconds": mh.Seconds(5.0, first=4, least=4),
}


class Clock:
    """The time that the synchronisation sees: of steps that take longer and less long."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now

    def tick(self, step):
        self.now += 1.0 + 0.4 * math.sin(step * (2 + dist.get_rank()))


def build(seed, method, every="4", **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 2))
    inner, outer = METHODS[method]
    names = {}
    if method == "BMUF":
        names = {"every": "global_sync_iter", "warmup": "warmup_iterations"}
        options = {"warmup": 0, "local_warmup": True, **options}
    options = {names.get(k, k): v for k, v in {"every": EVERY[every], **outer, **options}.items()}
    return model, getattr(mh, method)(inner(model.parameters()), **options)


def share_the_group():
    """Let all optimizers of this process with the same options share one group.

    Each makes its own, which costs some time, and descriptors until the process ends.
    """
    made, original = {}, _round.FixedMembers.choose_transport

    def choose_transport(members, devices, **options):
        key = tuple(options.items())
        if key not in made:
            original(members, devices, **options)
            made[key] = members.workers
        members.workers = made[key]

    _round.FixedMembers.choose_transport = choose_transport  # in a process of this test's own


def held(model, optimizer):
    """All that a run holds."""
    sync = optimizer._sync
    state = [optimizer.state[p] for p in model.parameters() if p in optimizer.state]
    moments = [entry[name] for entry in state for name in sorted(entry)]
    outer = [
        tensor for bucket in sync.anchor.buckets for tensor in (bucket.anchor, *bucket.memories)
    ]
    if not sync.pending:  # which write to them meanwhile
        outer += [s.residual for s in sync.anchor.buckets if s.residual is not None]
    seen = optimizer.snapshot()
    names = ("step", "rounds", "every", "distance", "spread", "cosine", "left_out", "workers")
    numbers = torch.tensor([float(seen[name]) for name in names], dtype=torch.float64)
    tensors = [*model.parameters(), *model.buffers(), *moments, *outer, numbers.nan_to_num(-7.0)]
    return [torch.as_tensor(tensor).detach().clone() for tensor in tensors]


def run(case, interrupted=()):
    """What the run holds after each step, and after a last sync round."""
    clock, seen = Clock(), []
    _round.time = SimpleNamespace(perf_counter=clock.perf_counter)
    model, optimizer = build(0, **case)
    for step in range(1, STEPS + 1):
        if step in interrupted and not optimizer._sync.pending:
            file = io.BytesIO()
            torch.save([model.state_dict(), optimizer.state_dict()], file)
            del model, optimizer
            clock.now += 1000.0
            model, optimizer = build(1, **case)
            saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (1 + 0.1 * step)
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x = torch.randn(6, 3, generator=generator)
        clock.tick(step)
        optimizer.zero_grad()
        (model(x) - x[:, :2].sin()).square().mean().backward()
        optimizer.step()
        seen.append(held(model, optimizer))
    optimizer.synchronize()
    return [*seen, held(model, optimizer)]


def differing(cases):
    """Those cases that interruptions change, and after which step."""
    share_the_group()
    found = []
    for case in cases:
        runs = zip(run(case), run(case, EVERY_STEP), strict=True)
        for step, (one, two) in enumerate(runs, 1):
            if len(one) != len(two) or not all(map(torch.equal, one, two)):
                found.append(f"{case} interrupted before every step: step {step}")
                break
    return found


CHEAP = [
    {"method": "BMUF", "overlap": 2, "state": "average", "every": "Seconds"},
    {"method": "BMUF", "overlap": 2, "state": "average_moments", "warmup": 3},
    {"method": "DiLoCo", "overlap": 1, "codec": "int8", "fragments": 2, "state": "average"},
    {"method": "DiLoCo", "overlap": 1, "shared_memory": False, "buffers": "broadcast"},
    {"method": "SlowMo", "overlap": 3, "codec": "int4", "state": "reset", "every": "Seconds"},
    {"method": "LocalSGD", "overlap": 1, "codec": "bfloat16", "anchor_on_host": True},
    {"method": "DiLoCo", "overlap": 1, "codec": "ternary", "fragments": 2},
    {"method": "LocalSGD", "warmup": 3, "local_warmup": True, "state": "average"},
    {"method": "SlowMo", "warmup": 3, "buffers": "keep", "overlap": 2, "every": "Seconds"},
]


def test_a_run_that_is_interrupted_at_every_step_is_the_run_that_is_not():
    assert run_ranks(2, differing, CHEAP) == [[], []]


def test_a_mean_that_is_in_flight_is_sent_again_at_the_end_of_the_next_block():
    def blocks():
        def start():
            param = nn.Parameter(torch.zeros(3))
            return param, mh.LocalSGD(SGD([param], lr=1.0), every=2, overlap=1, codec="int8")

        def train(param, optimizer, steps):
            for _ in range(steps):
                param.grad = torch.full((3,), 1.0 + dist.get_rank())
                optimizer.step()

        param, optimizer = start()
        train(param, optimizer, 2)
        assert optimizer._sync.pending
        resumed_param, resumed = start()
        with torch.no_grad():
            resumed_param.copy_(param)
        resumed.load_state_dict(optimizer.state_dict())
        train(resumed_param, resumed, 3)  # sends 4 steps, and merges after the 5th
        with resumed.at_anchor():
            anchor = resumed_param.tolist()
        return anchor, resumed_param.tolist(), resumed.steps, resumed.rounds

    for rank, (anchor, param, *counts) in enumerate(run_ranks(2, blocks)):
        assert anchor == pytest.approx([-6.0] * 3, rel=1e-2)  # the mean of 4 and 8
        assert param == pytest.approx([-7.0 - rank] * 3, rel=1e-2) and counts == [5, 1]


# -- what else is carried over ---------------------------------------------------------------------


def test_the_state_that_a_reset_goes_back_to_is_saved():
    """That of an optimizer that had taken steps before it came into blocks."""

    def train(steps, saved=None):
        param = nn.Parameter(torch.ones(3))
        inner = SGD([param], lr=0.1, momentum=0.9)
        if saved is None:
            param.grad = torch.ones(3)
            inner.step()
        optimizer = mh.LocalSGD(inner, every=4, state="reset")
        if saved is not None:
            with torch.no_grad():
                param.copy_(saved["param"])
            optimizer.load_state_dict(saved["optimizer"])
        for _ in range(steps):
            param.grad = torch.full((3,), 1.0 + dist.get_rank())
            optimizer.step()
        return {"param": param.detach(), "optimizer": optimizer.state_dict()}

    def both():
        return train(7)["param"], train(5, train(2))["param"]

    for through, resumed in run_ranks(2, both):
        assert torch.equal(through, resumed)


@on_ranks(2)
def test_a_mean_goes_to_the_buffers_that_are_there_when_it_arrives():
    """A module that makes a new buffer in each step, as many do."""
    model = nn.BatchNorm1d(3)
    optimizer = mh.LocalSGD(SGD(model.parameters(), lr=0.1), every=2, overlap=1)
    for _ in range(3):
        model.running_mean = torch.full((3,), 1.0 + dist.get_rank())
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()
    assert model.running_mean.tolist() == [1.5] * 3


@pytest.mark.parametrize("overlap", [0, 1])
@on_ranks(2)
def test_state_that_is_not_finite_is_left_out_of_the_mean(overlap):
    """The square of a gradient of 3e22 is infinite, and the step along it is not."""
    param = nn.Parameter(torch.ones(3))
    optimizer = mh.LocalSGD(Adam([param], lr=0.1), every=2, state="average", overlap=overlap)
    for step in range(5):
        large = dist.get_rank() == 1 and step == 0
        param.grad = torch.full((3,), 3e22 if large else 1.0)
        optimizer.step()
    state = optimizer.state[param]
    assert state["exp_avg_sq"].isfinite().all()
    assert optimizer.snapshot()["left_out"] == 1
