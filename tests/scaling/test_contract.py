"""What every rule must do, with every way to make up a batch, around every optimizer.

A new rule joins by one line in `RULES`, if its factor follows from the norms.
"""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import manyhands as mh
from helpers import scaling_oracle
from helpers.ranks import run_ranks
from helpers.scaling_oracle import (
    OPTIMIZERS,
    PlainRun,
    loss_of,
    make_batches,
    make_model,
    take_steps,
    two_groups,
)

STEPS = 8  # AdamScale's preconditioner sets in after five

RULES = {  # name: (the rule, its factor from sqr, var, scale and progress, written by hand)
    "AdaScale": (mh.AdaScale, scaling_oracle.adascale),
    "AdamScale": (mh.AdamScale, scaling_oracle.adamscale),
    "LinearScale": (mh.LinearScale, scaling_oracle.linear),
    "SqrtScale": (mh.SqrtScale, scaling_oracle.square_root),
    "LEGWScale": (functools.partial(mh.LEGWScale, 2, 4, batch_size=4), scaling_oracle.legw),
}

SETUPS = {  # name: (workers, passes)
    "4 passes": (1, 4),
    "2 workers": (2, 1),
    "4 workers": (4, 1),
    "2 workers x 2 passes": (2, 2),
}

PRECONDITIONED = {  # which measure gradients as the optimizer divides them
    name
    for name, (rule, _) in RULES.items()
    if getattr(rule, "func", rule)._norm_kind == "preconditioned"
}

COMBINATIONS = [
    (rule, optimizer)
    for rule in RULES
    for optimizer in OPTIMIZERS
    if rule not in PRECONDITIONED or optimizer.startswith("Adam")
]


def train(rule, optimizer, passes, steps=STEPS, around=None, **options):
    """Train with a rule in this process's place among the workers; yields after every step."""
    rank, workers = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model = make_model(torch.float64)
    wrapped = DistributedDataParallel(model) if workers > 1 else model
    x, y = make_batches(steps, workers * passes, dtype=torch.float64)
    inner = OPTIMIZERS[optimizer](two_groups(model))
    scaled = RULES[rule][0](inner, num_gradients_to_accumulate=passes, **options)
    if around is not None:
        around(scaled)
    for step in range(steps):
        scaled.zero_grad()
        for a in range(passes):
            i = rank * passes + a
            wait = wrapped.no_sync() if workers > 1 and a < passes - 1 else torch.enable_grad()
            with wait:
                (loss_of(wrapped, x[step, i], y[step, i]) / passes).backward()
        yield model, scaled


def run(rule, optimizer, passes):
    gains, lrs, calls = [], [], []
    progress = 0.0

    def count_calls(scaled):
        scaled.register_step_pre_hook(lambda *_: calls.append("before"))
        scaled.register_step_post_hook(lambda *_: calls.append("after"))

    for _, scaled in train(rule, optimizer, passes, around=count_calls):
        progress += scaled.gain()  # as the documented loops do, before step()
        gains.append(scaled.gain())
        scaled.step()
        lrs.append([group["lr"] for group in scaled.param_groups])
    return {
        "params": [p.detach() for group in scaled.param_groups for p in group["params"]],
        "gains": gains,
        "progress": [progress, scaled.progress],
        "noise": [list(scaled.noise.raw_sqr), list(scaled.noise.raw_var)],
        "lrs": lrs,
        "calls": calls,
        "scale": scaled.scale,
    }


@functools.cache
def results(rule, setup):
    """Of each worker, by optimizer."""
    workers, passes = SETUPS[setup]

    def run_all():
        return {inner: run(rule, inner, passes) for own, inner in COMBINATIONS if own == rule}

    return [run_all()] if workers == 1 else run_ranks(workers, run_all)


def plain(rule, optimizer, setup):
    workers, passes = SETUPS[setup]
    model = make_model(torch.float64)
    oracle = PlainRun(
        model,
        OPTIMIZERS[optimizer](two_groups(model)),
        RULES[rule][1],
        preconditioned=rule in PRECONDITIONED,
    )
    x, y = make_batches(STEPS, workers * passes, dtype=torch.float64)
    for step in range(STEPS):
        oracle.step(x[step], y[step])
    return oracle


@pytest.mark.sample(
    "AdaScale-SGD-4 passes",
    "AdaScale-SGD-2 workers x 2 passes",
    "AdaScale-SGD momentum-2 workers",
    "AdaScale-Adam-4 passes",
    "AdaScale-Adam-2 workers x 2 passes",
    "AdaScale-AdamW-2 workers",
    "AdamScale-Adam-4 passes",
    "AdamScale-Adam-2 workers x 2 passes",
    "AdamScale-AdamW-2 workers",
    "LinearScale-SGD-4 passes",
    "LinearScale-SGD-2 workers x 2 passes",
    "LinearScale-SGD momentum-2 workers",
    "LinearScale-Adam-4 passes",
    "LinearScale-Adam-2 workers x 2 passes",
    "LinearScale-AdamW-2 workers x 2 passes",
    "SqrtScale-SGD-2 workers",
    "SqrtScale-SGD momentum-4 passes",
    "SqrtScale-SGD momentum-2 workers x 2 passes",
    "SqrtScale-Adam-2 workers",
    "SqrtScale-AdamW-4 passes",
    "SqrtScale-AdamW-2 workers x 2 passes",
    "LEGWScale-SGD-2 workers",
    "LEGWScale-SGD momentum-4 passes",
    "LEGWScale-SGD momentum-2 workers x 2 passes",
    "LEGWScale-Adam-2 workers",
    "LEGWScale-AdamW-4 passes",
    "LEGWScale-AdamW-2 workers x 2 passes",
)
@pytest.mark.parametrize(
    "setup",
    [pytest.param(s, marks=pytest.mark.long if s == "4 workers" else ()) for s in SETUPS],
)
@pytest.mark.parametrize(("rule", "optimizer"), COMBINATIONS)
def test_training_is_the_plain_run_with_the_rules_learning_rate(rule, optimizer, setup):
    ours = [worker[optimizer] for worker in results(rule, setup)]
    expected = plain(rule, optimizer, setup)
    workers, passes = SETUPS[setup]
    # Adam's bias correction is taken in float32, as adaptdl took it: 1e-5 in the gain.
    near = 2e-5 if rule in PRECONDITIONED else 1e-9
    for mine in ours:
        params = list(expected.model.parameters())
        torch.testing.assert_close(mine["params"], params, rtol=near, atol=near)
        assert mine["gains"] == pytest.approx(expected.gains, rel=near)
        assert mine["progress"] == pytest.approx([expected.progress] * 2, rel=near)
        assert mine["scale"] == workers * passes
        # the learning rate is the small batch's again after every step, bit for bit
        small = OPTIMIZERS[optimizer]([torch.zeros(1)]).param_groups[0]["lr"]
        assert mine["lrs"] == [[small, small]] * STEPS
        assert mine["calls"] == ["before", "after"] * STEPS
    for mine in ours[1:]:  # workers agree bit for bit
        assert mine["gains"] == ours[0]["gains"]
        assert mine["noise"] == ours[0]["noise"]
        assert all(map(torch.equal, mine["params"], ours[0]["params"]))


@pytest.mark.parametrize(("rule", "optimizer"), COMBINATIONS)
def test_one_worker_one_pass_is_bitwise_the_bare_optimizer(rule, optimizer):
    if RULES[rule][1](1.0, 1.0, scale=1.0, progress=0.0) != 1.0:
        pytest.skip("as LEGW, it warms up at every scale: its baseline has a warm-up of its own")
    bare = make_model(torch.float64)
    inner = OPTIMIZERS[optimizer](two_groups(bare))
    x, y = make_batches(STEPS, 1, dtype=torch.float64)
    for step, (model, scaled) in enumerate(train(rule, optimizer, passes=1)):
        scaled.step()
        inner.zero_grad()
        loss_of(bare, x[step, 0], y[step, 0]).backward()
        inner.step()
        assert all(map(torch.equal, model.parameters(), bare.parameters()))
        assert scaled.factors == (1.0, 1.0)
        assert scaled.gain() == 1.0
    assert scaled.progress == STEPS


@pytest.mark.parametrize("debias_ewma", [True, False])
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize(("rule", "optimizer"), COMBINATIONS)
def test_a_saved_run_continues_bitwise(rule, optimizer, passes, debias_ewma, tmp_path):
    options = {"debias_ewma": debias_ewma, "scale": 3.0}
    whole = list_params(train(rule, optimizer, passes, **options), save_at=4, to=tmp_path / "run")
    state = torch.load(tmp_path / "run", weights_only=True)
    continued = continue_from(state, rule, optimizer, passes, options)
    torch.testing.assert_close(continued, whole[5:], rtol=0, atol=0)


def list_params(training, save_at, to):
    result = []
    for step, (model, scaled) in enumerate(training):
        scaled.step()
        result.append([p.detach().clone() for p in model.parameters()])
        if step == save_at:
            state = {
                "model": copy.deepcopy(model.state_dict()),
                "optimizer": scaled.state_dict(),
                "progress": scaled.progress,
            }
            torch.save(state, to)
    return result


def continue_from(state, rule, optimizer, passes, options):
    model = make_model(torch.float64)
    model.load_state_dict(state["model"])
    inner = OPTIMIZERS[optimizer](two_groups(model))
    scaled = RULES[rule][0](inner, num_gradients_to_accumulate=passes, **options)
    scaled.load_state_dict(state["optimizer"])
    x, y = make_batches(STEPS, passes, dtype=torch.float64)
    result = []
    for step in range(5, STEPS):
        take_steps(model, scaled, x[step : step + 1], y[step : step + 1])
        result.append([p.detach().clone() for p in model.parameters()])
    return result
