"""With loss scaling all workers skip a step together, wherever the overflow was."""

import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.optim import SGD, AdamW

import manyhands as mh
from helpers.ranks import on_ranks, run_ranks
from helpers.sharding_oracle import (
    AROUND_OSS,
    Lamb,
    assert_same,
    copied,
    everyone,
    loss_of,
    make_batches,
    make_model,
    muon_and_adamw,
    one,
    oss,
    plain,
    wrap,
)
from manyhands import fairscale

STEPS = 6
OVERFLOWS = {1: 0, 3: 2}  # step: the rank whose loss overflows


def scaler_of(kind, **options):
    return kind(device="cpu", init_scale=1024.0, growth_interval=2, **options)


def run(build, way, *, clip=False, passes=1, scaler=None):
    """Train as one of three workers, or (`way` None) alone with torch's scaler."""
    rank, _ = everyone()
    module = make_model(torch.float32)
    optimizers = build(module, oss if way else plain)
    model = wrap(way, module, optimizers) if way else module
    scaler = scaler or scaler_of(mh.ShardedGradScaler if way else GradScaler)
    x, y = make_batches(STEPS, passes, 3, dtype=torch.float32)
    scales, stepped = [], []
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for a in range(passes):
            if way:
                loss = loss_of(model, x[step, a, rank], y[step, a, rank])
            else:
                loss = loss_of(model, x[step, a].flatten(0, 1), y[step, a].flatten(0, 1))
            if step in OVERFLOWS and rank == (OVERFLOWS[step] if way else 0) and a == passes - 1:
                loss = loss * torch.inf
            scaler.scale(loss / passes).backward()
        before = copied(module.parameters())
        for optimizer in optimizers:
            if clip:
                scaler.unscale_(optimizer)
                if way:
                    optimizer.clip_grad_norm(0.3)
                else:
                    own = [p for g in optimizer.param_groups for p in g["params"]]
                    nn.utils.clip_grad_norm_(own, 0.3)
            scaler.step(optimizer)
        scaler.update()
        after = copied(module.parameters())
        stepped.append(any(not torch.equal(p, q) for p, q in zip(before, after, strict=True)))
        scales.append(scaler.get_scale())
    return {"params": after, "scales": scales, "stepped": stepped, "state": scaler.state_dict()}


@pytest.mark.sample("<lambda>0-False", "<lambda>1-False", "muon_and_adamw-True")
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("build", [one(AdamW, lr=0.02), one(Lamb, lr=0.02), muon_and_adamw])
def test_all_workers_skip_and_back_off_as_the_plain_run(build, clip):
    ranks = run_ranks(3, lambda: [run(build, way, clip=clip, passes=2) for way in AROUND_OSS])
    expected = run(build, None, clip=clip, passes=2)
    assert expected["stepped"] == [True, False, True, False, True, True]
    for i in range(2):
        assert_same([r[i]["params"] for r in ranks], expected["params"], AROUND_OSS[i], 1e-4, 1e-5)
        for rank in ranks:
            assert {k: rank[i][k] for k in ("scales", "stepped", "state")} == {
                k: expected[k] for k in ("scales", "stepped", "state")
            }


@pytest.mark.parametrize("kind", [AdamW, Lamb])
@on_ranks(3)
def test_an_overflow_in_one_element_of_one_workers_piece_is_everyones(kind):
    """Not even the loss is infinite: one element of what one worker holds is."""
    result = []
    for where in range(3):
        module = make_model(torch.float32)
        optimizer = oss(module.parameters(), kind, lr=0.02)
        model = mh.ShardedDataParallel(module, optimizer)
        scaler = scaler_of(mh.ShardedGradScaler)
        x, y = make_batches(1, 1, 3, dtype=torch.float32)
        scaler.scale(loss_of(model, x[0, 0, 0], y[0, 0, 0])).backward()
        if dist.get_rank() == where:
            pieces = [piece for p in module.parameters() for piece in p.grad.slices]
            pieces[-1][-1] = torch.inf
        before = copied(module.parameters())
        scaler.step(optimizer)
        scaler.update()
        same = all(torch.equal(p, q) for p, q in zip(before, module.parameters(), strict=True))
        result.append((scaler.get_scale(), same))
    assert result == [(512.0, True)] * 3


@on_ranks(3)
def test_a_workers_own_overflow_under_ddp_is_everyones():
    """With DDP gradients are equal everywhere; parameters that DDP does not average are not."""
    module = make_model(torch.float32)
    optimizer = oss(module.parameters(), AdamW, lr=0.02)
    scaler = scaler_of(mh.ShardedGradScaler)
    x, y = make_batches(1, 1, 3, dtype=torch.float32)
    scaler.scale(loss_of(module, x[0, 0, 0], y[0, 0, 0])).backward()
    if dist.get_rank() == 1:
        module[0].weight.grad[0, 0] = torch.inf
    assert scaler.step(optimizer) is None
    scaler.update()
    assert scaler.get_scale() == 512.0


def test_the_scalers_state_round_trips():
    expected = run(one(SGD, lr=0.05), None)

    def half():
        scaler = scaler_of(mh.ShardedGradScaler)
        run(one(SGD, lr=0.05), AROUND_OSS[1], scaler=scaler)
        file = io.BytesIO()
        torch.save(scaler.state_dict(), file)
        file.seek(0)
        other = mh.ShardedGradScaler(device="cpu")
        other.load_state_dict(torch.load(file, weights_only=True))
        assert other.state_dict() == scaler.state_dict()
        plain_scaler = GradScaler("cpu")
        plain_scaler.load_state_dict(other.state_dict())
        assert plain_scaler.state_dict() == other.state_dict()
        return other.state_dict()

    for state in run_ranks(3, half):
        assert state == expected["state"]


@pytest.mark.parametrize("act", ["step", "unscale_"])
@on_ranks(2, raises=RuntimeError, match="ShardedGradScaler")
def test_a_plain_scaler_on_sharded_gradients_is_an_error_that_names_ours(act):
    module = make_model(torch.float32)
    optimizer = oss(module.parameters(), AdamW, lr=0.02)
    model = mh.ShardedDataParallel(module, optimizer)
    scaler = scaler_of(GradScaler)
    scaler.scale(model(torch.ones(2, 5)).sum()).backward()
    getattr(scaler, act)(optimizer)


def test_without_a_process_group_it_is_torchs():
    for build in (one(AdamW, lr=0.02), one(AdamW, lr=0.02, fused=True)):
        module, expected = make_model(torch.float32), make_model(torch.float32)
        (optimizer,), (other,) = build(module, oss), build(expected, plain)
        model = mh.ShardedDataParallel(module, optimizer)
        scaler, torchs = scaler_of(mh.ShardedGradScaler), scaler_of(GradScaler)
        for step in range(5):
            for m, o, s in ((model, optimizer, scaler), (expected, other, torchs)):
                o.zero_grad()
                factor = torch.inf if step == 2 else 1.0
                s.scale(m(torch.ones(2, 5)).sum() * factor).backward()
                s.step(o)
                s.update()
        assert_same([copied(module.parameters())], list(expected.parameters()), rtol=0, atol=0)
        assert scaler.state_dict() == torchs.state_dict()


@on_ranks(2)
def test_it_scales_for_a_plain_optimizer_too():
    module = make_model(torch.float32)
    model = nn.parallel.DistributedDataParallel(module)
    optimizer = SGD(module.parameters(), lr=0.1)
    scaler = scaler_of(mh.ShardedGradScaler)
    scaler.scale(model(torch.ones(2, 5)).sum()).backward()
    if dist.get_rank() == 1:
        module[0].bias.grad[0] = torch.nan
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0


def test_a_worker_without_data_scales_nothing_and_steps_with_the_others():
    def train():
        rank, _ = everyone()
        module = make_model(torch.float32)
        optimizer = oss(module.parameters(), AdamW, lr=0.02)
        model = mh.ShardedDataParallel(module, optimizer)
        scaler = scaler_of(mh.ShardedGradScaler)
        x, y = make_batches(3, 1, 2, dtype=torch.float32)
        for step in range(3):
            optimizer.zero_grad()
            if rank == 0 or step != 1:
                loss = loss_of(model, x[step, 0, rank], y[step, 0, rank])
                scaler.scale(loss).backward()
            else:
                scaler.scale(torch.zeros(()))
            scaler.step(optimizer)
            scaler.update()
        return copied(module.parameters())

    ranks = run_ranks(2, train, timeout=20)
    module = make_model(torch.float32)
    optimizer = AdamW(module.parameters(), lr=0.02)
    x, y = make_batches(3, 1, 2, dtype=torch.float32)
    for step in range(3):
        optimizer.zero_grad()
        with_data = [0] if step == 1 else [0, 1]
        (sum(loss_of(module, x[step, 0, r], y[step, 0, r]) for r in with_data) / 2).backward()
        optimizer.step()
    assert_same(ranks, copied(module.parameters()), rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_disabled_it_does_nothing():
    module = make_model(torch.float32)
    optimizer = oss(module.parameters(), AdamW, lr=0.02)
    model = mh.ShardedDataParallel(module, optimizer)
    scaler = mh.ShardedGradScaler(device="cpu", enabled=False)
    scaler.scale(model(torch.ones(2, 5)).sum()).backward()
    scaler.unscale_(optimizer)
    optimizer.clip_grad_norm(1.0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.state_dict() == {}
    assert scaler.get_scale() == 1.0


NUMBERS = (16.0, 3.0, 0.25, 7)


def test_it_takes_arguments_in_fairscales_order():
    scaler = mh.ShardedGradScaler(*NUMBERS, True, None)
    assert isinstance(scaler, GradScaler)
    assert scaler.state_dict() == GradScaler("cpu", *NUMBERS).state_dict()
    assert scaler.group is scaler.process_group is None


def test_a_group_in_its_place_is_taken():
    group = fairscale.DummyProcessGroup(0, 1)
    assert mh.ShardedGradScaler(*NUMBERS, True, group).group is group


def test_a_device_in_the_place_of_the_scale_is_an_error():
    with pytest.raises(ValueError, match=r'init_scale must be a finite number.*device="cpu"'):
        mh.ShardedGradScaler("cpu")


# -- parameters and gradients that are float16 themselves ----------------------------------------


def exact(model):
    """One step of losses whose gradients float16 has exactly."""
    rank, _ = everyone()
    return (model(torch.full((1, 4), 1.0 + rank, dtype=torch.float16)) * 0.5).sum()


def halves():
    torch.manual_seed(0)
    return nn.Linear(4, 2).half()


def with_ddp(module):
    return nn.parallel.DistributedDataParallel(module), SGD(module.parameters(), lr=0.25)


def with_oss(module):
    optimizer = mh.OSS(module.parameters(), SGD, lr=0.25)
    return nn.parallel.DistributedDataParallel(module), optimizer


def with_sharded_gradients(module):
    optimizer = mh.OSS(module.parameters(), SGD, lr=0.25)
    return mh.ShardedDataParallel(module, optimizer), optimizer


def with_sharded_parameters(module):
    model = mh.FSDP(module)
    return model, SGD(model.parameters(), lr=0.25)


def with_adascale(module):
    model, optimizer = with_sharded_gradients(module)
    return model, mh.AdaScale(optimizer)


def step_in_float16(how, overflow):
    """How far the weights go in one step, and the loss scale after it."""
    module = halves()
    model, optimizer = how(module)
    before = [p.detach().clone() for p in halves().parameters()]
    scaler = mh.ShardedGradScaler(8.0)
    scaler.scale(exact(model) * (torch.inf if overflow and dist.get_rank() else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    after = list(model.state_dict().values())
    return [(b - a).tolist() for b, a in zip(before, after, strict=True)], scaler.get_scale()


@pytest.mark.parametrize("overflow", [False, True], ids=["", "an overflow on one rank"])
def test_gradients_in_float16_are_unscaled(overflow):
    """The mean gradient is (1 + 2) / 2 * 0.5 for weights, and 0.5 for biases."""
    ways = [with_ddp, with_oss, with_sharded_gradients, with_sharded_parameters]
    each = run_ranks(2, lambda: [step_in_float16(how, overflow) for how in ways])
    for moved, scale in (way for rank in each for way in rank):
        assert scale == (4.0 if overflow else 8.0)
        expected = torch.full((2, 4), 0.0 if overflow else 0.25 * 0.75), torch.zeros(2)
        expected[1].fill_(0.0 if overflow else 0.25 * 0.5)
        for found, right in zip(moved, expected, strict=True):  # a weight is rounded when it moves
            torch.testing.assert_close(torch.tensor(found), right, rtol=0, atol=5e-4)


def test_they_are_under_a_scaling_rule_too():
    (moved, scale), same = run_ranks(2, step_in_float16, with_adascale, False)
    assert same == (moved, scale)
    assert scale == 8.0
    assert moved[0][0][0] > 0.25 * 0.75  # the gain is above 1, and the loss scale is not in it
    assert moved[0][0][0] < 2.01 * 0.25 * 0.75


def test_torchs_own_refuses_them():
    model = halves()
    optimizer = SGD(model.parameters(), lr=0.25)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.ones(1, 4, dtype=torch.float16)).sum()).backward()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.step(optimizer)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_sparse_gradient_is_unscaled_where_it_is(dtype):
    model = nn.Embedding(3, 2, sparse=True).to(dtype)
    optimizer = SGD(model.parameters(), lr=1.0)
    scaler = mh.ShardedGradScaler(8.0)
    scaler.scale(model(torch.tensor([1, 1])).sum()).backward()
    scaler.unscale_(optimizer)
    assert model.weight.grad.to_dense().tolist() == [[0.0, 0.0], [2.0, 2.0], [0.0, 0.0]]
