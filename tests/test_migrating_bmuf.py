"""docs/migrating.md on fairseq's BMUF: its names, its example and its corrections, on both sides.

fairseq cannot be installed beside what is tested here. Its names are in originals.json, and
its side of the numbers is tests/helpers/fairseq_bmuf.py, which is compared with recorded ones.
"""

import copy
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam

import manyhands as mh
from helpers.blocks_oracle import assert_fairseqs_values
from helpers.bmuf import fairseq_bmuf
from helpers.fairseq_bmuf import Amp, Half, WrittenOut
from helpers.pages import blocks
from helpers.ranks import on_ranks, run_ranks
from manyhands.fairseq import FairseqBMUFConfig

from test_migrating import (  # isort: skip
    PAGE,
    both_sides,
    outcome,
    unchanged_group,
)

# -- the defaults --------------------------------------------------------------------------------

DEFAULTS = {  # of the configuration
    "block_lr": 1,
    "block_momentum": 0.875,
    "global_sync_iter": 50,
    "warmup_iterations": 500,
    "use_nbm": False,
    "average_sync": False,
}


@pytest.mark.parametrize("side", ["original", "ours", "BMUF"])
def test_the_defaults(side):
    defaults = {
        "original": WrittenOut.__init__.__kwdefaults__,
        "ours": vars(FairseqBMUFConfig()),
        "BMUF": mh.BMUF.__init__.__kwdefaults__,
    }[side]
    assert {name: defaults[name] for name in DEFAULTS} == DEFAULTS


def maker(side):
    return WrittenOut if side == "original" else fairseq_bmuf


def test_the_written_out_original_gives_the_values_that_fairseq_gave():
    assert_fairseqs_values(WrittenOut)


# -- the example ---------------------------------------------------------------------------------


def modules_of_fairseq():
    """What the example imports of it."""

    def wrapped(cfg, optimizer):
        options = dict(vars(cfg))
        assert options.pop("distributed_world_size") == dist.get_world_size()
        return WrittenOut(optimizer, **options)

    def sgd(args, params):
        return SGD(params, args.lr[0], args.momentum, weight_decay=args.weight_decay)

    names = {
        "fairseq.optim": {"FairseqBMUF": wrapped},
        "fairseq.optim.sgd": {"SGD": sgd},
        "fairseq.dataclass.configs": {"FairseqBMUFConfig": SimpleNamespace},
    }
    modules = {name: ModuleType(name) for name in ("fairseq", "fairseq.dataclass", *names)}
    for name, contents in names.items():
        vars(modules[name]).update(contents)
    return modules


def test_both_sides_of_the_example_train_alike(monkeypatch):
    (block,) = [block for block in blocks(PAGE) if block.title == "bmuf_loop.py"]

    def run(old):
        monkeypatch.setattr(dist, "init_process_group", lambda backend: None)
        names = {"__name__": "a script"}
        with unchanged_group():
            exec(block.side(old), names)
        return names["model"].state_dict(), names["start"]

    for name, module in modules_of_fairseq().items():
        monkeypatch.setitem(sys.modules, name, module)
    for (fairseq_result, start), (ours, _) in zip(
        run_ranks(2, run, True), run_ranks(2, run, False), strict=True
    ):
        torch.testing.assert_close(ours, fairseq_result)
        assert not torch.allclose(ours["weight"], start)


# -- what is corrected ---------------------------------------------------------------------------

SMALL = {"block_lr": 0.9, "block_momentum": 0.6, "global_sync_iter": 4, "warmup_iterations": 2}
NOW = {**SMALL, "warmup_iterations": 0}


def parameters(add=0.0):
    values = torch.linspace(-1, 1, 20, dtype=torch.float64) + add
    return [nn.Parameter(part.clone()) for part in (values[:15].view(3, 5), values[15:])]


def flat(params):
    return torch.cat([param.detach().flatten() for param in params])


def step_along(optimizer, params, step):
    """One step down a bowl whose middle each worker sees elsewhere, and elsewhere at each step."""
    for param in params:
        at = torch.arange(param.numel(), dtype=param.dtype).view(param.shape)
        param.grad = 0.3 * param.detach() - torch.sin(at * (dist.get_rank() + 1) + step)
    optimizer.step()


def apart(values):
    """How far what the first worker has is from the second's."""
    first, second = (torch.as_tensor(value, dtype=torch.float64) for value in values)
    return float((first - second).abs().max())


def blocks_of(side, options, steps, inner=SGD, params=None, seen=None, **more):
    """Train, and return the parameters and the optimizer."""
    params = parameters() if params is None else params
    optimizer = maker(side)(inner(params, lr=0.1, **more), **options)
    for step in range(1, steps + 1):
        step_along(optimizer, params, step)
        if seen is not None:
            seen.append(flat(params))
    return params, optimizer


def resumed(side, stop, steps=12):
    params, optimizer = blocks_of(side, SMALL, stop, momentum=0.9)
    saved = copy.deepcopy((flat(params), optimizer.state_dict()))
    params = parameters()
    if side == "ours":
        optimizer = fairseq_bmuf(SGD(params, lr=0.1, momentum=0.9), **SMALL)
    nn.utils.vector_to_parameters(saved[0], params)
    if side == "original":  # it is made after the model is loaded: its anchor begins there
        optimizer = WrittenOut(SGD(params, lr=0.1, momentum=0.9), **SMALL)
    optimizer.load_state_dict(saved[1])
    for step in range(stop + 1, steps + 1):
        step_along(optimizer, params, step)
    return flat(params)


@both_sides(original=0.55, ours=0.0)
def test_a_resumed_run(side, expected):
    through = run_ranks(2, lambda: flat(blocks_of(side, SMALL, 12, momentum=0.9)[0]))
    again = run_ranks(2, resumed, side, 6)
    off = max(float((a - b).abs().max()) for a, b in zip(through, again, strict=True))
    assert round(off, 2) == expected
    assert side == "original" or off == 0


@both_sides(original=3.17, ours=0.0)
def test_momentum_at_the_end_of_the_warm_up_after_a_load(side, expected):
    def left():
        options = {**SMALL, "warmup_iterations": 3}
        state = copy.deepcopy(blocks_of(side, options, 1, momentum=0.9)[1].state_dict())
        params = parameters()
        optimizer = maker(side)(SGD(params, lr=0.1, momentum=0.9), **options)
        optimizer.load_state_dict(state)
        for step in range(3 if side == "original" else 2):  # of which the first is forgotten
            step_along(optimizer, params, step)
        inner = optimizer.inner if side == "original" else optimizer
        momentum = inner.state.get(params[0], {}).get("momentum_buffer", torch.zeros(1))
        return round(float(momentum.abs().max()), 2)

    assert run_ranks(2, left)[0] == expected


@both_sides(original=0.1, ours=0.05)
@on_ranks(2)
def test_the_rate_after_the_warm_up(side, expected):
    _, optimizer = blocks_of(side, SMALL, 1)
    optimizer.set_lr(0.05)
    step_along(optimizer, parameters(), 2)
    assert optimizer.param_groups[0]["lr"] == expected


@both_sides(original=1.0, ours=0.0)
def test_workers_that_begin_differently_without_a_warm_up(side, expected):
    def trained():
        return flat(blocks_of(side, NOW, 40, params=parameters(add=dist.get_rank()))[0])

    assert apart(run_ranks(2, trained)) == pytest.approx(expected, abs=1e-9)


def move_in(dtype, side, inner):
    """How far a model in half precision goes in 4 steps, with a sync round after the last."""

    def moved():
        model = nn.Linear(4, 1).to(dtype)
        nn.init.ones_(model.weight)
        made = Half(model.parameters(), inner) if side == "original" else inner(model.parameters())
        optimizer = maker(side)(made, **NOW)
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4, dtype=dtype)).sum()
            optimizer.backward(loss) if side == "original" else loss.backward()
            optimizer.step()
        return float((1 - model.weight.detach()).abs().max())

    return run_ranks(2, moved)


@both_sides(original=0.0, ours=0.72)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.filterwarnings("ignore:in the first block all")  # of one parameter, and one way
def test_training_in_half_precision(dtype, side, expected):
    """Four steps of 0.1 · 2, of which the block takes 0.9."""
    found = move_in(dtype, side, lambda params: SGD(params, lr=0.1))
    assert found == pytest.approx([expected] * 2, abs=4e-3)


def test_the_half_precision_that_is_written_out_trains_where_its_own_backward_is_called():
    model = nn.Linear(4, 1, bias=False).bfloat16()
    optimizer = Half(model.parameters(), lambda params: SGD(params, lr=1.0))
    before = model.weight.detach().clone()
    optimizer.zero_grad()
    optimizer.backward(model(torch.ones(1, 4, dtype=torch.bfloat16)).sum())
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before - 1, rtol=0.01, atol=0.01)


@both_sides(original=("AssertionError", "TypeError"), ours=(2.0, None))
def test_mixed_precision(side, expected):
    def train():
        model = nn.Linear(4, 1, bias=False)
        inner, scaler = SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
        optimizer = maker(side)(Amp(inner) if side == "original" else inner, **NOW)
        loss = model(torch.ones(1, 4)).sum()
        if side == "original":
            optimizer.backward(loss)
            clipped = outcome(lambda: float(optimizer.clip_grad_norm(1.0)))
            return clipped, outcome(optimizer.step)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        return float(optimizer.clip_grad_norm(1.0)), outcome(lambda: scaler.step(optimizer))

    assert run_ranks(2, train) == [expected] * 2


@both_sides(original=[4, 3], ours=[4, 4])
def test_steps_counted_when_one_workers_gradients_overflow(side, expected):
    def counted():
        param = nn.Parameter(torch.ones(2))
        optimizer = maker(side)(SGD([param], lr=0.5), **{**NOW, "global_sync_iter": 5})
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(4):
            optimizer.zero_grad()
            factor = float("inf") if dist.get_rank() == 1 and step == 0 else 1.0
            scaler.scale(param.sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        return optimizer.steps

    assert run_ranks(2, counted) == expected


@both_sides(original=0.57, ours=0.0)
@pytest.mark.filterwarnings("ignore:in the first block all")  # of one parameter, and one way
def test_running_means_after_a_sync_round(side, expected):
    def running_mean():
        model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
        optimizer = maker(side)(SGD(model.parameters(), lr=0.1), **{**NOW, "global_sync_iter": 2})
        for _ in range(2):
            x = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * (1 + dist.get_rank())
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        return model[0].running_mean

    assert apart(run_ranks(2, running_mean)) == pytest.approx(expected, abs=5e-3)


def momenta_after_a_sync_round(side, options):
    def buffer():
        _, optimizer = blocks_of(side, {**NOW, **options}, 4, momentum=0.9)
        inner = optimizer.inner if side == "original" else optimizer
        return torch.cat([inner.state[p]["momentum_buffer"].flatten() for p in inner.state])

    return apart(run_ranks(2, buffer))


@both_sides(original={"average_sync": True}, ours={"state": "average"})
def test_momenta_of_sgd(side, expected):
    found = momenta_after_a_sync_round(side, expected)
    assert round(found, 2) == (2.56 if side == "original" else 0.0)


def test_average_sync_leaves_what_fairseq_leaves():
    options = {"average_sync": True}
    fairseq_result = momenta_after_a_sync_round("original", options)
    assert momenta_after_a_sync_round("ours", options) == pytest.approx(fairseq_result, abs=1e-12)


@both_sides(original=[-1.5] * 4, ours=[-0.5, -0.5, -2.5, -2.5])
def test_two_groups_of_two_workers(side, expected):
    def trained():
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        group = {} if side == "original" else {"process_group": groups[dist.get_rank() // 2]}
        param = nn.Parameter(torch.zeros(1))
        optimizer = maker(side)(
            SGD([param], lr=1.0), block_momentum=0.5, global_sync_iter=1, warmup_iterations=0,
            **group,
        )  # fmt: skip
        param.grad = torch.full((1,), float(dist.get_rank()))
        optimizer.step()
        return param.item()

    assert run_ranks(4, trained) == pytest.approx(expected)


@pytest.mark.filterwarnings("ignore")  # the profiler's
@both_sides(original=["c10d::allreduce_"] * 20, ours=["c10d::allreduce_"])
@on_ranks(2)
def test_what_is_sent_in_a_sync_round_about_20_tensors(side, expected):
    params = [nn.Parameter(torch.ones(3)) for _ in range(20)]
    options = {**NOW, "global_sync_iter": 1}
    if side == "ours":
        options["shared_memory"] = False  # as on several hosts: on one it sends nothing
    optimizer = maker(side)(SGD(params, lr=0.1), **options)
    for param in params:
        param.grad = torch.ones(3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    names = [event.name for event in profile.events()]
    assert [n for n in names if n.startswith("c10d::") and n != "c10d::recv_"] == expected


def difference_from_nesterov(side, **form):
    options = {**NOW, "block_lr": 0.7, "block_momentum": 0.9, **form}

    def train():
        params = parameters()
        optimizer = mh.DiLoCo(SGD(params, lr=0.1), lr=0.7, momentum=0.9, every=4)
        for step in range(1, 41):
            step_along(optimizer, params, step)
        return float((flat(params) - flat(blocks_of(side, options, 40)[0])).abs().max())

    return run_ranks(2, train)[0]


@both_sides(original={"use_nbm": True}, ours={"nesterov": True})
def test_nesterov(side, expected):
    found = difference_from_nesterov(side, **expected)
    assert round(found, 2) == (0.21 if side == "original" else 0.0)
    assert side == "original" or found < 1e-12


@pytest.mark.parametrize("side", ["original", "ours"])
def test_what_fairseq_calls_nesterov_is_a_longer_step(side):
    def off():
        longer = {**NOW, "block_lr": 0.9 * (1 + 0.6)}
        one = flat(blocks_of(side, {**NOW, "use_nbm": True}, 40)[0])
        return float((one - flat(blocks_of(side, longer, 40)[0])).abs().max())

    assert max(run_ranks(2, off)) < 1e-12


@both_sides(original="TypeError", ours=0.05)
def test_one_of_torchs_schedulers(side, expected):
    def halve():
        optimizer = maker(side)(SGD(parameters(), lr=0.1), **NOW)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        step_along(optimizer, parameters(), 1)
        scheduler.step()
        return optimizer.param_groups[0]["lr"]

    assert run_ranks(2, lambda: outcome(halve)) == [expected] * 2


@both_sides(original=None, ours=3.0)
@on_ranks(2)
def test_the_closures_loss(side, expected):
    params = parameters()
    optimizer = maker(side)(SGD(params, lr=0.1), **NOW)
    assert optimizer.step(lambda: 3.0) == expected


@both_sides(original=[True, True], ours=[False, False])
def test_a_nan_on_one_worker(side, expected):
    def has_nan():
        params = parameters()
        optimizer = maker(side)(Adam(params, lr=0.1), **NOW)
        for step in range(1, 5):
            if dist.get_rank() == 1 and step == 2:
                params[0].data.fill_(float("nan"))
            step_along(optimizer, params, step)
        return bool(flat(params).isnan().any())

    assert run_ranks(2, has_nan) == expected
