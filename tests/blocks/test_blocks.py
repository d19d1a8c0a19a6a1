"""Blocks on real workers equal the plain loop: outer steps, overlap, fragments, codecs, types."""

import copy
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import StepLR

import manyhands as mh
from helpers.blocks_plain import gradient, train
from helpers.ranks import on_ranks, raises_on_ranks, run_ranks
from manyhands._ranks import slices as _host
from manyhands._ranks.ranks import RankGroup
from manyhands.blocks import Outer
from manyhands.blocks.averaging._codec import CODECS
from manyhands.fairseq import FairseqBMUF

LR = 0.1
OUTER = {
    "LocalSGD": {},
    "BMUF": {"block_lr": 0.9, "block_momentum": 0.6},
    "DiLoCo": {"lr": 0.7, "momentum": 0.9},
    "SlowMo": {"slow_lr": 0.8, "slow_momentum": 0.5, "inner_lr": LR},
}
SHAPES = [(7, 5), (1,), (11,), (3, 2, 2), (0,), (40,)]
SIZE = sum(torch.Size(shape).numel() for shape in SHAPES)


def start():
    return torch.linspace(-1, 1, SIZE, dtype=torch.float64)


def wrapped(name, params, options, every, shared_memory=False, **more):
    inner = SGD(params, lr=LR)
    more["shared_memory"] = shared_memory
    if name == "BMUF":
        return mh.BMUF(inner, global_sync_iter=every, warmup_iterations=0, **options, **more)
    return getattr(mh, name)(inner, every=every, **options, **more)


def parameters(dtype=torch.float64, value=None):
    flat, params, at = (start() if value is None else value).to(dtype), [], 0
    for shape in SHAPES:
        size = torch.Size(shape).numel()
        params.append(nn.Parameter(flat[at : at + size].view(shape).clone()))
        at += size
    return params


def flat_of(params):
    return torch.cat([p.detach().flatten() for p in params])


def step_along(optimizer, params, rank, step):
    """One step along `gradient`."""
    grad, at = gradient(flat_of(params), rank, step), 0
    for param in params:
        param.grad = grad[at : at + param.numel()].view(param.shape).clone()
        at += param.numel()
    optimizer.step()


def run(name, options, every, steps, **more):
    params = parameters()
    optimizer = wrapped(name, params, options, every, **more)
    seen = []
    for step in range(1, steps + 1):
        step_along(optimizer, params, dist.get_rank(), step)
        seen.append(flat_of(params))
    return torch.stack(seen)


@pytest.mark.parametrize(
    ("name", "workers", "more"),
    [
        ("BMUF", 2, {}),
        ("SlowMo", 3, {}),
        pytest.param("DiLoCo", 3, {"shared_memory": True}, marks=pytest.mark.long),
    ],
)
def test_every_outer_step_overlap_and_fragmentation_equals_the_plain_loop(name, workers, more):
    numbers = [(4, 0, 1), (4, 2, 1), (5, 0, 3), (6, 1, 3), (6, 5, 2), (1, 0, 1)]
    cases = [dict(zip(("every", "overlap", "fragments"), each, strict=True)) for each in numbers]

    def all_cases():
        return [run(name, OUTER[name], steps=17, **case, **more) for case in cases]

    results = run_ranks(workers, all_cases)
    for i, case in enumerate(cases):
        plain = train(start(), gradient, workers, 17, LR, name, OUTER[name], **case)
        for rank in range(workers):
            torch.testing.assert_close(
                results[rank][i], plain[:, rank], rtol=1e-11, atol=1e-11, msg=str(case)
            )


def test_workers_agree_bit_for_bit_after_each_sync_round():
    def each_codec():
        return [run("DiLoCo", OUTER["DiLoCo"], 3, 12, codec=codec) for codec in CODECS]

    for codec, *results in zip(CODECS, *run_ranks(3, each_codec), strict=True):
        for step in (2, 5, 8, 11):
            assert torch.equal(results[0][step], results[1][step]), codec
            assert torch.equal(results[0][step], results[2][step]), codec
        assert not torch.equal(results[0][3], results[1][3]), codec


@on_ranks(3)
def test_in_shared_memory_large_parameters_state_and_buffers_are_averaged_too():
    """Many chunks of each, so that every place in memory is used again."""

    class Doubling(Outer):  # an outer step that overwrites what it is given
        def step(self, anchor, gradient, memories):
            anchor.sub_(gradient.mul_(2.0))

    rank = dist.get_rank()
    model = nn.BatchNorm1d(3_000_000 + 7)
    inner = SGD(model.parameters(), lr=1.0, momentum=0.5)
    optimizer = mh.Blocks(inner, Doubling(), every=1, state="average", shared_memory=True)
    model.running_mean.fill_(rank)
    where = torch.arange(len(model.bias)) % 1000
    for _ in range(2):
        for param in model.parameters():
            param.grad = where * (1.0 + rank)
        optimizer.step()
    moments = [inner.state[p]["momentum_buffer"] for p in model.parameters()]
    expected = [  # the mean gradient is 2 `where`, and the mean momentum then 3 `where`
        (model.weight, 1 - 2 * 2 * where - 2 * 3 * where),
        (model.bias, -2 * 2 * where - 2 * 3 * where),
        (moments[0], 3.0 * where),
        (moments[1], 3.0 * where),
        (model.running_mean, torch.ones(len(where))),
    ]
    assert all(torch.equal(found, value.float()) for found, value in expected)


def test_workers_of_one_host_share_memory_where_they_can(monkeypatch):
    def blocks(codec="float32", shared_memory=True):
        params = parameters()
        options = {"codec": codec, "shared_memory": shared_memory}
        optimizer = wrapped("LocalSGD", params, {}, 1, **options)
        step_along(optimizer, params, dist.get_rank(), 2)
        return optimizer._sync.members.workers.shared_memory is not None, flat_of(params)

    def elsewhere():
        monkeypatch.setattr(_host, "_host_identity", lambda: f"host {dist.get_rank() // 2}")
        return blocks()

    def without_memory():
        def refused(_):
            raise OSError("not here")

        if dist.get_rank() == 1:
            monkeypatch.setattr(os, "memfd_create", refused)
        return blocks()

    def run_all():
        found = []
        for run_one in cases:
            found.append(run_one())
            monkeypatch.undo()
        return found, blocks(shared_memory=False)[1], blocks(codec="int8")[0]

    cases = [blocks, elsewhere, without_memory]
    for found, expected, shares_codes in run_ranks(3, run_all):
        for run_one, (shares, values) in zip(cases, found, strict=True):
            assert shares == (run_one is blocks), run_one
            torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)
        assert not shares_codes


@on_ranks(2)
def test_sharing_memory_takes_no_group_and_a_group_of_ours_waits_no_longer_than_the_given():
    group = dist.new_group(timeout=timedelta(seconds=50))
    waits = []
    for overlap in (0, 1):
        inner = SGD([nn.Parameter(torch.ones(3))], lr=1.0)
        optimizer = mh.LocalSGD(inner, overlap=overlap, process_group=group)
        workers = optimizer._sync.members.workers
        assert workers.shared_memory is not None and (workers.group is group) == (overlap == 0)
        gloo = workers.group._get_backend(torch.device("cpu"))
        waits.append(gloo.options._timeout.total_seconds())
    assert waits == [50.0] * 2


def test_what_rounding_loses_comes_with_the_next_block():
    near = {"bfloat16": 0.01, "int8": 0.02, "int4": 0.2, "ternary": 0.7}

    def each_codec():
        return [run("LocalSGD", {}, 3, 60, codec=codec)[-1] for codec in ("float32", *near)]

    exact, *rounded = run_ranks(2, each_codec)[0]
    for codec, values in zip(near, rounded, strict=True):
        assert 0 < (values - exact).abs().max() < near[codec], codec


@pytest.mark.parametrize("name", OUTER)
def test_one_worker_is_bitwise_the_bare_optimizer(name):
    params, bare = parameters(), parameters()
    optimizer, plain = wrapped(name, params, OUTER[name], 2, codec="int4"), SGD(bare, lr=LR)
    for step in range(1, 8):
        step_along(optimizer, params, 0, step)
        step_along(plain, bare, 0, step)
        assert torch.equal(flat_of(params), flat_of(bare))
    assert optimizer.steps == 7


def test_workers_begin_with_the_first_ones_parameters_and_buffers():
    def begin():
        torch.manual_seed(dist.get_rank())
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        model[1].running_mean.fill_(dist.get_rank() + 1)
        mh.LocalSGD(SGD(model.parameters(), lr=0.1))
        return [*model.parameters(), model[1].running_mean]

    first, second = run_ranks(2, begin)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert second[-1].tolist() == [1.0] * 3


@pytest.mark.parametrize(("buffers", "expected"), [("average", 1.5), ("broadcast", 1), ("keep", 2)])
def test_buffers(buffers, expected):
    def one_block():
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        optimizer = mh.LocalSGD(SGD(model.parameters(), lr=0.1), every=1, buffers=buffers)
        model[1].running_mean.fill_(dist.get_rank() + 1)
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()
        return model[1].running_mean[0].item()

    assert run_ranks(2, one_block)[1] == expected


@pytest.mark.parametrize("state", ["keep", "average", "reset"])
@pytest.mark.parametrize("optim", [Adam, lambda p: SGD(p, lr=0.1, momentum=0.9)])
@pytest.mark.filterwarnings("ignore:in the first block all")  # of one parameter, and one way
def test_the_inner_optimizers_state(state, optim):
    def one_block():
        param = nn.Parameter(torch.ones(3))
        inner = optim([param])
        optimizer = mh.LocalSGD(inner, every=2, state=state)
        for _ in range(2):
            param.grad = torch.full((3,), dist.get_rank() + 1.0)
            optimizer.step()
        seen = inner.state[param].get("exp_avg" if optim is Adam else "momentum_buffer")
        return None if seen is None else seen[0].item()

    first, second = run_ranks(2, one_block)
    if state == "reset":
        assert first is None and second is None
    elif state == "average":
        assert first == second
    else:
        assert second == pytest.approx(2 * first)


@on_ranks(2)
def test_half_precision_parameters_keep_an_anchor_in_single():
    param = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = mh.LocalSGD(SGD([param], lr=1.0), every=1)
    for _ in range(8):  # each moves it by less than half of what bfloat16 can show
        with torch.no_grad():
            param.grad = torch.full_like(param, 0.01 * dist.get_rank())
        optimizer.step()
    anchor = optimizer._sync.anchor.buckets[0].anchor
    assert anchor.dtype == torch.float32
    assert torch.equal(anchor.bfloat16(), param)
    assert (anchor < 1).all()


@on_ranks(2)
def test_parameters_of_several_types_complex_strided_and_frozen():
    torch.manual_seed(0)
    params = [
        nn.Parameter(torch.randn(3, 4)),
        nn.Parameter(torch.randn(5, dtype=torch.float64)),
        nn.Parameter(torch.randn(2, dtype=torch.complex64)),
        nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.randn(6, 6)[:, ::2]),
        nn.Parameter(torch.randn(3), requires_grad=False),
        nn.Parameter(torch.tensor(2.0)),
    ]
    before = [p.detach().clone() for p in params]
    optimizer = mh.LocalSGD(SGD(params, lr=1.0), every=1)
    for param in params:
        if param.requires_grad:
            param.grad = torch.full_like(param, 1.0 + dist.get_rank())
    optimizer.step()
    moved = [(p.detach() - b).flatten() for p, b in zip(params, before, strict=True)]
    for i, difference in enumerate(moved):
        expected = torch.full_like(difference, -1.5 if i != 5 else 0.0)
        torch.testing.assert_close(difference, expected)


@on_ranks(2)
def test_a_parameter_that_thaws_is_taken_in():
    fixed = nn.Parameter(torch.ones(2), requires_grad=False)
    moving = nn.Parameter(torch.ones(2))
    optimizer = mh.LocalSGD(SGD([fixed, moving], lr=1.0), every=2)
    for step in range(4):
        if step == 1:
            fixed.requires_grad_()
        for param in (fixed, moving):
            param.grad = torch.full((2,), 1.0 + dist.get_rank()) if param.requires_grad else None
        optimizer.step()
    assert fixed.tolist() == [1 - 3 * 1.5] * 2
    assert moving.tolist() == [1 - 4 * 1.5] * 2


def test_a_parameter_group_added_later():
    optimizer = mh.LocalSGD(SGD([nn.Parameter(torch.ones(2))], lr=1.0))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 2.0})
    assert optimizer.optimizer.param_groups[1]["lr"] == 2.0

    def blocks():
        added = {"params": [nn.Parameter(torch.ones(1))]}
        mh.LocalSGD(SGD(parameters(), lr=1.0)).add_param_group(added)

    raises_on_ranks(2, RuntimeError, blocks, match="needs a single worker without a crew")


@pytest.mark.filterwarnings("ignore:in the first block all")  # of one parameter, and one way
@on_ranks(2)
def test_one_workers_overflow_does_not_shift_its_count_of_steps():
    rank = dist.get_rank()
    param = nn.Parameter(torch.ones(2))
    optimizer = mh.LocalSGD(SGD([param], lr=0.5), every=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        optimizer.zero_grad()
        loss = (param * (1.0 + rank)).sum()
        if rank == 1 and step == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert (optimizer.steps, optimizer.rounds) == (4, 2)
    # the first worker takes four steps of .5, the second three of 1
    assert param.tolist() == pytest.approx([1 - (4 * 0.5 + 3 * 1.0) / 2] * 2)


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.filterwarnings("ignore:in the first block all")  # of one parameter, and one way
@on_ranks(3)
def test_a_worker_that_is_not_finite_is_left_out_and_healed(overlap):
    rank = dist.get_rank()
    param = nn.Parameter(torch.ones(2))
    optimizer = mh.LocalSGD(AdamW([param], lr=0.1), every=2, overlap=overlap, codec="int8")
    named = []
    for step in range(6):
        param.grad = torch.full((2,), float("nan") if rank == 1 and step < 2 else 1.0)
        optimizer.step()
        named.append(optimizer.left_out)
    optimizer.synchronize()
    assert torch.isfinite(param).all() and optimizer.snapshot()["left_out"] == 1
    at = 1 + overlap  # the step that the first mean arrives after
    assert named == [[]] * at + [[1]] * 2 + [[]] * (4 - at)
    assert (param < 0.75).all()


@pytest.mark.filterwarnings("ignore:in the first block all")  # of one parameter, and one way
@on_ranks(2)
def test_if_no_worker_is_finite_all_go_back():
    param = nn.Parameter(torch.ones(2))
    optimizer = mh.DiLoCo(SGD([param], lr=0.1), every=2)
    for step in range(4):
        param.grad = torch.full((2,), float("inf") if step == 0 else 1.0)
        optimizer.step()
    assert optimizer.snapshot()["left_out"] == 2
    assert param.tolist() == pytest.approx([1 - 0.7 * 1.9 * 0.2] * 2)


def diloco_after_5(params):
    return mh.DiLoCo(SGD(params, lr=LR), every=4, warmup=5)


def bmuf_after_5(params):
    options = {"global_sync_iter": 4, "warmup_iterations": 5, "local_warmup": False}
    return mh.BMUF(SGD(params, lr=LR), **options)


@pytest.mark.parametrize("make", [diloco_after_5, bmuf_after_5])
def test_a_synchronous_warm_up_is_training_on_the_mean_gradient(make):
    def blocks():
        params = parameters()
        optimizer = make(params)
        seen = []
        for step in range(1, 9):
            step_along(optimizer, params, dist.get_rank(), step)
            seen.append(flat_of(params))
        return torch.stack(seen)

    results = run_ranks(2, blocks)
    x = start()
    for step in range(1, 6):
        x = x - LR * (gradient(x, 0, step) + gradient(x, 1, step)) / 2
        for seen in results:
            torch.testing.assert_close(seen[step - 1], x)
    assert torch.equal(results[0][4], results[1][4])
    assert not torch.equal(results[0][6], results[1][6])
    assert torch.equal(results[0][7], results[1][7])


def test_schedulers_closures_and_hooks_are_the_inner_optimizers():
    param = nn.Parameter(torch.ones(1))
    optimizer = mh.BMUF(SGD([param], lr=1.0))
    scheduler, calls = StepLR(optimizer, 1, 0.5), []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))

    def closure():
        optimizer.zero_grad()
        (param * 2).sum().backward()
        return 7.0

    assert optimizer.step(closure) == 7.0
    scheduler.step()
    assert calls == ["before"]
    assert optimizer.param_groups[0]["lr"] == 0.5 == optimizer.optimizer.param_groups[0]["lr"]
    assert isinstance(optimizer, torch.optim.Optimizer)


def test_a_resume_with_more_workers():
    def first():
        params = parameters()
        optimizer = wrapped("BMUF", params, OUTER["BMUF"], 4, codec="int8")
        for step in range(1, 7):
            step_along(optimizer, params, dist.get_rank(), step)
        return {"params": [p.detach() for p in params], "optimizer": optimizer.state_dict()}

    saved = run_ranks(2, first)[0]

    def second():
        params = parameters()
        with torch.no_grad():
            for param, value in zip(params, saved["params"], strict=True):
                param.copy_(value)
        optimizer = wrapped("BMUF", params, OUTER["BMUF"], 4, codec="int8")
        optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        memory = optimizer._sync.anchor.buckets[0].memories[0].clone()
        for step in range(7, 9):
            step_along(optimizer, params, dist.get_rank(), step)
        return flat_of(params), memory, optimizer.rounds

    results = run_ranks(3, second)
    for params, memory, rounds in results:
        assert torch.equal(params, results[0][0]) and rounds == 2
        assert torch.equal(memory, saved["optimizer"]["blocks"]["memories"][0][0])


def test_a_state_of_the_bare_optimizer_begins_at_the_parameters_that_are():
    def blocks():
        params = parameters()
        optimizer = wrapped("DiLoCo", params, OUTER["DiLoCo"], 4)
        with torch.no_grad():
            for param in params:
                param.fill_(3.0)
        optimizer.load_state_dict(SGD(parameters(), lr=0.3).state_dict())
        return optimizer._sync.anchor.buckets[0].anchor, optimizer.param_groups[0]["lr"]

    anchor, lr = run_ranks(2, blocks)[1]
    assert (anchor == 3).all() and lr == 0.3


def test_one_worker_may_use_the_anchor_alone():
    def blocks():
        params = parameters()
        optimizer = wrapped("DiLoCo", params, OUTER["DiLoCo"], 4)
        for step in range(1, 7):
            step_along(optimizer, params, dist.get_rank(), step)
        before = flat_of(params)
        if dist.get_rank() == 0:
            with optimizer.at_anchor():
                seen = flat_of(params)
        else:
            seen = optimizer._sync.anchor.buckets[0].anchor.clone()
        assert torch.equal(before, flat_of(params))
        optimizer.synchronize()
        return seen, flat_of(params)

    (seen, after), (anchor, after_too) = run_ranks(2, blocks)
    assert torch.equal(seen, anchor) and torch.equal(after, after_too)
    assert not torch.equal(seen, after)


@pytest.mark.parametrize("codec", ["bfloat16", "int8", "int4", "ternary"])
@on_ranks(2)
def test_rounding_does_not_change_the_cosine(codec):
    draw = torch.Generator().manual_seed(dist.get_rank())
    common = torch.arange(40_000) % 10 < 3  # moves of one size, as Adam's; 3 in 10 are alike
    own = torch.rand(40_000, generator=draw) < 0.5
    for size in (1.25, 1.45, 1.55):
        param = nn.Parameter(torch.zeros(40_000))
        optimizer = mh.LocalSGD(SGD([param], lr=1.0), every=1, codec=codec, shared_memory=False)
        param.grad = size * torch.where(common | own, 1.0, -1.0)
        optimizer.step()
        assert optimizer.snapshot()["cosine"] == pytest.approx(0.3, abs=0.02), size


def test_drift_is_that_of_the_differences():
    def blocks():
        params = parameters()
        optimizer = wrapped("LocalSGD", params, {}, 3)
        for step in range(1, 4):
            if step == 3:
                before = flat_of(params)
            step_along(optimizer, params, dist.get_rank(), step)
        there = before - LR * gradient(before, dist.get_rank(), 3)
        snapshot = optimizer.snapshot()
        return start() - there, [snapshot[k] for k in ("distance", "spread", "cosine")]

    results = run_ranks(2, blocks)
    a, b = (difference for difference, _ in results)
    mean = (a + b) / 2
    expected = [
        mean.norm().item(),
        ((a - mean).norm().square() / 2 + (b - mean).norm().square() / 2).sqrt().item(),
        (a @ b / ((a @ a + b @ b) / 2)).item(),
    ]
    for _, seen in results:
        assert seen == pytest.approx(expected, rel=1e-6)
    assert results[0][1] == results[1][1]


def test_an_interval_that_chooses_itself_is_the_same_on_all_workers():
    every = mh.Seconds(0.05, first=3)

    def blocks():
        params = parameters()
        optimizer = wrapped("LocalSGD", params, {}, every)
        lengths = []
        for step in range(1, 40):
            step_along(optimizer, params, dist.get_rank(), step)
            lengths.append(optimizer.snapshot()["every"])
        return lengths, optimizer.rounds

    first, second = run_ranks(2, blocks)
    assert first == second and len(set(first[0])) > 1


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: mh.BMUF(nn.Linear(1, 1)), TypeError, "wraps an optimizer, .* got Linear"),
        (lambda: mh.LocalSGD(mh.LocalSGD(SGD(parameters()))), TypeError, "in blocks already"),
        (lambda: mh.LocalSGD(SGD(parameters()), codec="int2"), ValueError, "codec must be one of"),
        (lambda: mh.LocalSGD(SGD(parameters()), every=4, overlap=4), ValueError, "overlap must be"),
        (lambda: mh.LocalSGD(SGD(parameters()), every=4, fragments=5), ValueError, "fragments=5"),
        (lambda: mh.LocalSGD(SGD(parameters()), state="x"), ValueError, "state must be one of"),
        (lambda: mh.LocalSGD(SGD(parameters()), buffers=""), ValueError, "buffers must be one of"),
        (lambda: mh.BMUF(SGD(parameters()), every=3), TypeError, "write global_sync_iter="),
    ],
)
def test_mistakes(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_an_optimizer_without_parameters():
    class Empty(SGD):
        def __init__(self):
            super().__init__([nn.Parameter(torch.ones(1))], lr=0.1)
            self.param_groups[0]["params"] = []

    with pytest.raises(ValueError, match="no parameters"):
        mh.LocalSGD(Empty())


def test_a_group_without_parameters():
    def blocks():
        params = parameters()
        inner = SGD([{"params": params[:0]}, {"params": params}], lr=LR)
        optimizer = mh.LocalSGD(inner, every=1)
        step_along(optimizer, params, dist.get_rank(), 1)
        return flat_of(params)

    first, second = run_ranks(2, blocks)
    assert torch.equal(first, second)


OTHER = r"have different options.*shared_memory: rank 0: True; rank 1: False"


@on_ranks(2, raises=ValueError, match=OTHER)
def test_other_options_on_one_worker_are_errors_on_all():
    mh.LocalSGD(SGD(parameters()), shared_memory=dist.get_rank() == 0)


@pytest.mark.parametrize("other", ["shape", "strides"])
@on_ranks(2, raises=ValueError, match=r"parameter 0 \(weight\): rank 0: .* cpu; rank 1: ")
def test_other_parameters_on_one_worker_are_an_error(other):
    rank = dist.get_rank()
    model = nn.Conv2d(3, 4 + (rank if other == "shape" else 0), 3)
    if other == "strides" and rank:
        model = model.to(memory_format=torch.channels_last)
    mh.LocalSGD(SGD(model.parameters(), lr=0.1))


@on_ranks(2, raises=ValueError, match="rank 0: 3; rank 1: 9")
def test_workers_that_have_taken_different_numbers_of_steps():
    params = parameters()
    optimizer = wrapped("BMUF", params, OUTER["BMUF"], 3)
    if dist.get_rank() == 1:
        FairseqBMUF.set_num_updates(optimizer, 6)
    for step in range(1, 4):
        step_along(optimizer, params, dist.get_rank(), step)


@on_ranks(2)
def test_a_worker_that_is_not_finite_is_healed_in_all_fragments():
    param = nn.Parameter(torch.ones(4))
    optimizer = mh.LocalSGD(SGD([param], lr=0.1), every=4, fragments=2, overlap=1)
    for step in range(16):
        bad = dist.get_rank() == 1 and step == 0
        param.grad = torch.full((4,), float("nan") if bad else 1.0)
        optimizer.step()
    optimizer.synchronize()
    assert torch.isfinite(param).all() and optimizer.snapshot()["left_out"] == 1


@pytest.mark.parametrize("everybody", [True, False])
@on_ranks(2)
def test_buffers_stay_if_no_worker_is_finite_and_inf_in_one_workers_stays_with_it(everybody):
    model = nn.BatchNorm1d(3)
    optimizer = mh.LocalSGD(SGD(model.parameters(), lr=0.1), every=1)
    with torch.no_grad():
        model.running_var.fill_(2.0)
        if everybody:
            model.weight.fill_(float("nan"))
        elif dist.get_rank() == 1:
            model.running_mean.fill_(float("inf"))
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert (model.running_var == 2).all()
    assert torch.isfinite(model.running_mean).all() and torch.isfinite(model.weight).all()


@on_ranks(2)
def test_a_clock_that_is_right_after_a_resume():
    """It goes on from the seconds and steps that were taken; without them it begins anew."""
    params = parameters()
    optimizer = wrapped("LocalSGD", params, {}, mh.Seconds(0.05, first=3))
    optimizer._sync.state = optimizer._sync.state.continue_at(5000)
    optimizer._sync.restart_clock(70.0, 20)
    state = optimizer.state_dict()
    optimizer = wrapped("LocalSGD", params, {}, mh.Seconds(0.05, first=3))
    optimizer.load_state_dict(state)
    sync = optimizer._sync
    clock = sync.clock
    seconds, steps = clock.elapsed(sync.state.own)
    optimizer.load_state_dict({**state, "blocks": {**state["blocks"], "workers": [3, 0]}})
    assert (steps, 70.0 <= seconds < 100.0, clock.elapsed(sync.state.own)[1]) == (20, True, 0)


@on_ranks(2)
def test_an_interval_changed_on_purpose_holds_from_the_next_block_on():
    params = parameters()
    state = wrapped("LocalSGD", params, {}, 8).state_dict()
    optimizer = wrapped("LocalSGD", params, {}, 2)
    state["blocks"]["options"] = None
    optimizer.load_state_dict(state)
    for step in range(1, 17):
        step_along(optimizer, params, dist.get_rank(), step)
    assert optimizer.rounds == 5


def test_after_a_warm_up_all_have_the_same_whatever_their_gradients_were():
    """A gradient of zeros on one worker, and none on the other: AdamW decays, or does not."""

    def blocks():
        used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        inner = AdamW([used, unused], lr=0.1, weight_decay=0.5)
        optimizer = mh.LocalSGD(inner, every=3, warmup=3)
        for _ in range(6):
            used.grad = torch.ones(2)
            unused.grad = torch.zeros(2) if dist.get_rank() == 0 else None
            optimizer.step()
        return unused.detach(), used.detach()

    first, second = run_ranks(2, blocks)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert (first[0] < 1).all()


def test_the_forgotten_process_group_of_shards_and_of_inner_groups():
    def inner_group_only():
        groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        mh.LocalSGD(SGD(parameters(), lr=0.1), inner_group=groups[dist.get_rank() // 2])

    raises_on_ranks(4, ValueError, inner_group_only, match="rank in inner_group")

    def shards_only():
        from torch.distributed.fsdp import fully_shard

        model = nn.Linear(4, 4)
        fully_shard(model)
        mh.LocalSGD(SGD(model.parameters(), lr=0.1))

    raises_on_ranks(2, ValueError, shards_only, match=r"shards \(process_group= must be")


@on_ranks(2)
def test_frozen_parameters_are_the_first_workers_too():
    param = nn.Parameter(torch.full((2,), 1.0 + dist.get_rank()), requires_grad=False)
    optimizer = mh.LocalSGD(SGD([param], lr=0.1), every=1)
    optimizer.step()  # with nothing to train, there is nothing to synchronize
    optimizer.synchronize()
    assert param.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_parameter_that_is_frozen_is_averaged_once_more_and_rests(overlap):
    def blocks():
        fixed, moving = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
        inner = SGD([moving, fixed], lr=1.0)
        optimizer = mh.DiLoCo(inner, every=2, lr=1.0, momentum=0.5, overlap=overlap)
        seen = []
        for step in range(12):
            if step == 5:
                fixed.requires_grad_(False)
            for param in (fixed, moving):
                one = torch.full_like(param, 1.0 + dist.get_rank())
                param.grad = one if param.requires_grad else None
            optimizer.step()
            seen.append(fixed.detach().clone())
        return torch.stack(seen), moving.detach()

    (first, moved), (second, _) = run_ranks(2, blocks)
    assert torch.equal(first[5 + overlap :], second[5 + overlap :])
    assert (first[6 + overlap :] == first[5 + overlap]).all()
    assert (moved < first[-1, :2]).all()


@on_ranks(2, raises=ValueError, match="frozen parameters")
def test_a_parameter_that_only_one_worker_freezes_is_an_error_on_all():
    params = parameters()
    optimizer = mh.LocalSGD(SGD(params, lr=LR), every=2)
    params[0].requires_grad_(dist.get_rank() == 0)
    for param in params:
        param.grad = torch.ones_like(param) if param.requires_grad else None
    optimizer.step()
    optimizer.step()


@on_ranks(2, raises=ValueError, match="in a different memory order")
def test_a_state_of_parameters_in_another_order_of_memory_is_an_error():
    last = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    saved = mh.LocalSGD(SGD(last.parameters(), lr=0.1)).state_dict()
    mh.LocalSGD(SGD(nn.Conv2d(3, 4, 3).parameters(), lr=0.1)).load_state_dict(saved)


@on_ranks(2)
def test_a_reset_goes_to_the_optimizer_that_a_rule_is_around():
    """Adagrad begins with sums in its state, which a reset brings back."""
    found = []
    for rule in (False, True):
        param = nn.Parameter(torch.zeros(3))
        inner = torch.optim.Adagrad([param], lr=0.1, initial_accumulator_value=0.5)
        if rule:
            inner = mh.LinearScale(inner, world_size=1)
        optimizer = mh.BMUF(inner, global_sync_iter=2, warmup_iterations=0, state="reset")
        for step in range(4):
            optimizer.zero_grad()
            (param * torch.arange(3.0)).sum().mul(1.0 + dist.get_rank() + step).backward()
            optimizer.step()
        assert inner.state[param]["sum"].tolist() == [0.5] * 3  # as before the first step
        found.append(param.detach())
    assert torch.equal(*found)


@pytest.mark.parametrize("codec", ["int8", "int4", "ternary"])
def test_a_sync_round_sends_little_more_than_its_codes(codec):
    elements, sent = 1_500_000, []

    def messages(ranks, outgoing, sizes, tag):
        sent.extend(message.numel() for message in outgoing)
        return all_to_all(ranks, outgoing, sizes, tag)

    def one_round():
        param = nn.Parameter(torch.ones(elements))
        optimizer = mh.DiLoCo(SGD([param], lr=0.1), every=1, codec=codec)
        param.grad = torch.randn(elements) * (dist.get_rank() - 0.5)  # not alike
        optimizer.step()
        return sent

    all_to_all = RankGroup.all_to_all
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankGroup, "all_to_all", messages)
        results = run_ranks(3, one_round)
    codes = 2 * 2 / 3 * CODECS[codec].size(elements, torch.float32)
    for sizes in results:
        assert codes * 0.997 < sum(sizes) < codes * 1.003
