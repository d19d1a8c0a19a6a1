"""A ramp in real runs: the batch it chooses, the data it hands out, the same on all ranks."""

import contextlib
import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

import manyhands as mh
from helpers.clocks import Clock
from helpers.ranks import on_ranks, run_ranks
from manyhands.ramp import _observed
from manyhands.ramp._decision import Noise, StepTime, goodput


def quadratic(rank=0, batches=4000, spread=1.0):
    """A model w with the loss |w - target|^2 / 2, and a loader of noisy targets around 1."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    generator = torch.Generator().manual_seed(1 + rank)
    noise = torch.randn(batches, 1, 1, generator=generator, dtype=torch.float64)
    return model, 1.0 + spread * noise


def train(clock, model, optimizer, ramp, loader, steps=None, after_step=lambda loss: None):
    """Train as the documented loop does; return each step's number of micro-batches."""
    seen = []
    for micro_batches in ramp.over(loader):
        for target in micro_batches:
            loss = (model(torch.ones_like(target)) - target).square().mean() / 2
            (loss / len(micro_batches)).backward()
        clock.step(len(micro_batches))
        optimizer.step()
        optimizer.zero_grad()
        after_step(loss)
        seen.append(len(micro_batches))
        if len(seen) == steps:
            break
    return seen


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(_observed.time, "perf_counter", clock.perf_counter)
    return clock


def test_the_batch_becomes_the_geometric_mean_of_the_noise_scale_and_the_overhead(clock):
    """|g|^2 = 1 and noise 64 at a = 4 b: sqrt(4 x 64) = 16 micro-batches."""
    model, loader = quadratic(spread=8.0, batches=6000)
    optimizer = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=1e-6))
    ramp = mh.Ramp(optimizer, max_scale=64)
    seen = train(clock, model, optimizer, ramp, loader)
    noise, time = Noise(1.0, 64.0), StepTime(4.0, 1.0)
    reached = [goodput(noise, time, 1.0, passes) for passes in seen[len(seen) // 2 :]]
    assert sum(reached) / len(reached) >= 0.93 * goodput(noise, time, 1.0, 16)
    assert ramp.step_time.fixed == pytest.approx(4.0) and ramp.step_time.per_pass == 1.0
    assert sum(seen) == 6000  # every micro-batch once


def test_a_loop_that_fetches_its_own_data_takes_the_steps_of_the_documented_one(clock):
    """The last step is shorter, and what is not training takes no time of a step."""
    ours, loader = quadratic(spread=8.0, batches=1500)
    optimizer = mh.AdaScale(torch.optim.SGD(ours.parameters(), lr=1e-6))
    ramp = mh.Ramp(optimizer, max_scale=64)
    seen = train(clock, ours, optimizer, ramp, loader)
    progress, times = optimizer.progress, ramp.step_time

    clock.now = 0.0
    model, _ = quadratic()
    optimizer = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=1e-6))
    ramp, left, mine = mh.Ramp(optimizer, max_scale=64), list(loader), []
    while left:
        if len(mine) % 10 == 9:
            clock.now += 1000.0  # a validation
            ramp.skip_time()
        if len(left) < ramp.passes:
            ramp.begin_step(len(left))
        step, left = left[: ramp.passes], left[ramp.passes :]
        for target in step:
            loss = (model(torch.ones_like(target)) - target).square().mean() / 2
            (loss / len(step)).backward()
        clock.step(len(step))
        optimizer.step()
        optimizer.zero_grad()
        mine.append(len(step))
    assert sum(mine) == sum(seen) == 1500 and mine[-1] < max(mine)
    assert optimizer.progress == pytest.approx(progress, rel=0.1)
    assert ramp.step_time.fixed == pytest.approx(times.fixed)


def test_a_step_that_somebody_else_declares(clock):
    model, _ = quadratic()
    optimizer = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=1e-6))
    ramp = mh.Ramp(optimizer, max_scale=4)
    with pytest.raises(ValueError, match="must be a whole number of at least 1"):
        ramp.begin_step(0)
    optimizer._core.batch.loop.decides = True
    with pytest.raises(RuntimeError, match=r"declares its passes.* the trainer's loop"):
        ramp.begin_step(2)


@pytest.mark.parametrize("options", [{}, {"var_floor": 0.0}])
def test_without_noise_the_batch_stays_small(clock, options):
    model, loader = quadratic(spread=0.0)
    optimizer = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=1e-6), **options)
    seen = train(clock, model, optimizer, mh.Ramp(optimizer, max_scale=64), loader, steps=300)
    assert max(seen) <= 6 and seen[-1] == 1  # 3 and 6 to measure the time of a pass


def test_a_batch_that_began_too_large_shrinks(clock):
    model, loader = quadratic(spread=0.0)
    inner = torch.optim.SGD(model.parameters(), lr=1e-6)
    optimizer = mh.AdaScale(inner, num_gradients_to_accumulate=32)
    seen = train(clock, model, optimizer, mh.Ramp(optimizer, 64), loader, steps=100)
    assert seen[0] == 32 and seen[-1] == 1


def test_the_largest_batch_that_is_allowed_is_never_exceeded(clock):
    model, loader = quadratic(spread=100.0, batches=1000)
    optimizer = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=1e-6))
    ramp = mh.Ramp(optimizer, max_scale=5.5)
    seen = train(clock, model, optimizer, ramp, loader)
    assert max(seen) == 5 and optimizer.scale <= 5.5


def test_fewest_steps_need_no_measurement(clock):
    model, loader = quadratic()
    optimizer = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=1e-6))
    seen = train(clock, model, optimizer, mh.Ramp(optimizer, 8, goal="steps"), loader, steps=40)
    assert seen[::3] == [1, 2, 4] + [8] * 11


def test_training_is_the_plain_loop_with_the_same_numbers_of_passes(clock):
    model, loader = quadratic(spread=8.0)
    optimizer = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=0.01), smoothing=0.99)
    seen = train(clock, model, optimizer, mh.Ramp(optimizer, 16), loader, steps=200)
    assert len(set(seen)) > 4

    plain, _ = quadratic()
    inner = torch.optim.SGD(plain.parameters(), lr=0.01)
    expected = mh.AdaScale(inner, smoothing=0.99, measure_every=1)  # a Ramp measures every step
    targets = iter(loader)
    for passes in seen:
        expected.set_num_gradients_to_accumulate(passes, update_smoothing=False)
        for _ in range(passes):
            target = next(targets)
            loss = (plain(torch.ones_like(target)) - target).square().mean() / 2
            (loss / passes).backward()
        expected.step()
        expected.zero_grad()
    assert torch.equal(model.weight, plain.weight)
    assert optimizer.progress == expected.progress


@pytest.mark.parametrize("order", ["optimizer first", "ramp first", "mh.load"])
@pytest.mark.parametrize(
    "rule",
    [
        "AdaScale",
        *(pytest.param(r, marks=pytest.mark.long) for r in ("AdamScale", "a scale of its own")),
    ],
)
def test_a_loop_over_passes_continues_exactly_in_any_order_of_loading(clock, tmp_path, rule, order):
    def begin():
        model, loader = quadratic(spread=8.0)
        if rule == "AdamScale":
            optimizer = mh.AdamScale(torch.optim.Adam(model.parameters(), lr=0.01))
        else:
            optimizer = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=0.01))
        if rule == "a scale of its own" and not clock.now:  # a continued run has it from the state
            optimizer.set_scale(1.5)
        return model, optimizer, mh.Ramp(optimizer, 16), iter(loader)

    def train(model, optimizer, ramp, batches, steps):
        seen = []
        for _ in range(steps):
            passes = ramp.passes
            for target in itertools.islice(batches, passes):
                loss = (model(torch.ones_like(target)) - target).square().mean() / 2
                (loss / passes).backward()
            clock.step(passes)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(passes)
        return seen, model.weight.item(), optimizer.gain(), optimizer.smoothing

    run = begin()
    first, *_ = train(*run, steps=103)
    model, optimizer, ramp, batches = run
    states = optimizer.state_dict(), ramp.state_dict()
    mh.save(tmp_path, model=model, optimizer=optimizer, ramp=ramp)
    saved = copy.deepcopy((model.state_dict(), *states))
    whole = train(*run, steps=97)
    assert len(set(first + whole[0])) > 4

    model, optimizer, ramp, batches = begin()
    if order == "mh.load":
        mh.load(tmp_path, model=model, optimizer=optimizer, ramp=ramp)
    else:
        model.load_state_dict(saved[0])
        pairs = list(zip((optimizer, ramp), saved[1:], strict=True))
        for thing, state in pairs if order == "optimizer first" else reversed(pairs):
            thing.load_state_dict(state)
    assert ramp.state_dict() == saved[2]
    rest = itertools.islice(batches, sum(first), None)
    assert train(model, optimizer, ramp, rest, steps=97) == whole


def test_a_batch_is_kept_on_another_number_of_workers():
    def begin(workers):
        model = nn.Linear(1, 1)
        rule = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), world_size=workers)
        return mh.Ramp(rule, 64)

    ramp = begin(1)
    ramp.load_state_dict({**ramp.state_dict(), "scale": 24.0, "workers": 4})
    assert (ramp.passes, ramp.scale) == (24, 24.0)


def of_two_ranks(lengths, wrap=None, fixed=(4.0, 4.0), steps=None, lr=0.01):
    """Train on ranks whose loaders and clocks differ; return the passes of each step."""
    rank = dist.get_rank()
    clock = Clock(fixed=fixed[rank])
    _observed.time = clock  # in this forked rank alone
    model, loader = quadratic(rank, batches=lengths[rank], spread=8.0)
    parallel = DistributedDataParallel(model) if wrap is None else wrap(model)
    inner = torch.optim.SGD(parallel.parameters(), lr=lr)
    optimizer = mh.AdaScale(inner)
    ramp = mh.Ramp(optimizer, 64, model=parallel if hasattr(parallel, "no_sync") else None)
    seen = train(clock, parallel, optimizer, ramp, loader, steps)
    return seen, ramp.scale, [p.detach() for p in model.parameters()]


def test_ranks_have_the_same_batches_and_end_together():
    """One rank has a quarter less data: both end with its last micro-batch."""
    (seen, scale, params), (other, _, others) = run_ranks(2, of_two_ranks, (1000, 750))
    assert seen == other and sum(seen) == 750
    assert scale == 2.0 * seen[-2] or len(set(seen[-12:])) > 1
    torch.testing.assert_close(params, others, rtol=0, atol=0)


def test_the_mean_time_of_the_ranks_decides():
    """|g|^2 = 1, noise 64, and a pass is a scale of 2: sqrt(a 64 / 2) passes, at the mean a."""

    def last(fixed):
        return run_ranks(2, of_two_ranks, (4000, 4000), fixed=fixed, steps=60, lr=1e-6)[0][0][-2]

    assert 3 <= last((1.0, 1.0)) <= 8
    assert 12 <= last((1.0, 31.0)) <= 29


def test_a_rank_without_data_ends_all():
    assert [seen for seen, *_ in run_ranks(2, of_two_ranks, (100, 0))] == [[], []]


@on_ranks(2)
def test_gradients_are_averaged_once_a_step_and_nothing_else_is_sent():
    """The plain loop at the same passes, inside no_sync(), has as many collectives."""
    assert collectives_of_a_step(use_ramp=True) == collectives_of_a_step(use_ramp=False)


def collectives_of_a_step(use_ramp):
    model, loader = quadratic(dist.get_rank(), batches=64)
    ddp = DistributedDataParallel(model)
    calls = []
    ddp.register_comm_hook(None, lambda _, bucket: reduce(bucket, calls))
    optimizer = mh.AdaScale(torch.optim.SGD(ddp.parameters(), lr=0.01))
    exchange = optimizer._core.measurement.exchange
    send = exchange.send
    exchange.send = lambda *a, **k: (calls.append("statistics"), send(*a, **k))[1]
    if use_ramp:
        ramp = mh.Ramp(optimizer, 8, goal="steps", model=ddp)
        steps = len(train(Clock(), ddp, optimizer, ramp, loader))
        return len(calls) / steps
    optimizer.set_num_gradients_to_accumulate(2)
    for first, second in zip(loader[::2], loader[1::2], strict=True):
        for target, context in ((first, ddp.no_sync()), (second, contextlib.nullcontext())):
            with context:
                loss = (ddp(torch.ones_like(target)) - target).square().mean() / 2
                (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return len(calls) / 32


def with_a_graph(static, passes):
    """Train from a first step of so many passes on."""
    model, loader = quadratic(dist.get_rank(), batches=30)
    ddp = DistributedDataParallel(model, static_graph=static)
    inner = torch.optim.SGD(ddp.parameters(), lr=0.01)
    optimizer = mh.AdaScale(inner, num_gradients_to_accumulate=passes)
    ramp = mh.Ramp(optimizer, 16, goal="steps", model=ddp)
    return train(Clock(), ddp, optimizer, ramp, loader), model.weight.item(), optimizer.progress


@pytest.mark.parametrize("passes", [1, 4])
def test_a_static_graph_is_recorded_in_the_first_pass_also_of_a_large_batch(passes):
    static, other = run_ranks(2, with_a_graph, True, passes)
    plain, _ = run_ranks(2, with_a_graph, False, passes)
    assert static == other and static[0] == plain[0] and sum(static[0]) == 30
    assert static[1:] == pytest.approx(plain[1:])


def reduce(bucket, calls):
    calls.append("gradients")
    work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


@pytest.mark.parametrize(
    "way", ["OSS", "fully_shard", pytest.param("FSDP", marks=pytest.mark.long)]
)
@on_ranks(2)
def test_under_every_sharding_it_is_the_same_run(way):
    def run(sharded):
        clock = Clock()
        _observed.time = clock
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)).double()
        if sharded and way == "OSS":
            inner = mh.OSS(model.parameters(), torch.optim.SGD, lr=0.01)
            parallel = mh.ShardedDataParallel(model, inner)
        else:
            wrap = mh.FullyShardedDataParallel if way == "FSDP" else fully_shard
            parallel = wrap(model) if sharded else DistributedDataParallel(model)
            inner = torch.optim.SGD(parallel.parameters(), lr=0.01)
        optimizer = mh.AdaScale(inner)
        ramp = mh.Ramp(optimizer, 32, goal="steps", model=parallel)
        generator = torch.Generator().manual_seed(dist.get_rank())
        loader = torch.randn(200, 2, 3, generator=generator, dtype=torch.float64)
        seen, losses = [], []
        for micro_batches in ramp.over(loader):
            for x in micro_batches:
                loss = (parallel(x) - 1.0).square().mean()
                (loss / len(micro_batches)).backward()
                losses.append(loss.item())
            clock.step(len(micro_batches))
            optimizer.step()
            optimizer.zero_grad()
            seen.append(len(micro_batches))
        return seen, losses

    (seen, losses), (sharded_seen, sharded_losses) = run(False), run(True)
    assert seen == sharded_seen and max(seen) == 16
    assert losses == pytest.approx(sharded_losses, rel=1e-9)


@pytest.mark.sample("AdaScale", "LinearScale")
@pytest.mark.parametrize("rule", [mh.AdaScale, mh.AdamScale, mh.SqrtScale, mh.LinearScale])
def test_loss_scaling_and_clipping_at_a_changing_batch(clock, rule):
    """A scaler and a clipped gradient: the same run as without the scaler."""

    def run(scaled):
        model, loader = quadratic(spread=8.0)
        model = model.float()
        kind = torch.optim.Adam if rule is mh.AdamScale else torch.optim.SGD
        optimizer = rule(kind(model.parameters(), lr=0.01))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        if scaled:
            optimizer._core.loss_scale.scaler = scaler
        ramp = mh.Ramp(optimizer, 16, goal="steps")
        seen = []
        for micro_batches in ramp.over(loader.float()):
            for target in micro_batches:
                loss = (model(torch.ones_like(target)) - target).square().mean() / 2
                scaler.scale(loss / len(micro_batches)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen.append(len(micro_batches))
            if len(seen) == 40:
                break
        return seen, model.weight.item(), optimizer.progress

    (seen, weight, progress), (expected_seen, expected, expected_progress) = run(True), run(False)
    assert seen == expected_seen and max(seen) == 16
    assert weight == pytest.approx(expected, rel=1e-5)
    assert progress == pytest.approx(expected_progress, rel=1e-4)


def in_blocks():
    rank = dist.get_rank()
    clock = Clock(fixed=(1.0, 30.0)[rank])
    _observed.time = clock
    model, loader = quadratic(rank, batches=8_000, spread=8.0)  # for 120 steps of any size
    rule = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=1e-3), world_size=1)
    blocks = mh.LocalSGD(rule, every=10)
    ramp = mh.Ramp(rule, 64)
    seen = train(clock, model, blocks, ramp, loader, steps=120)
    return seen, model.weight.item()


def test_inside_blocks_each_worker_has_its_own_batch():
    (seen, weight), (other, other_weight) = run_ranks(2, in_blocks)
    assert sum(other[-50:]) > 1.5 * sum(seen[-50:])  # its steps have a larger fixed cost
    assert weight == other_weight  # after a sync round


def test_micro_batches_of_different_sizes_are_averaged_over_their_tokens(clock):
    model, _ = quadratic()
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 9, (150,), generator=generator).tolist()
    loader = [torch.randn(n, 1, generator=generator, dtype=torch.float64) for n in sizes]
    optimizer = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=1e-3))
    ramp = mh.Ramp(optimizer, 8, goal="steps")
    for micro_batches in ramp.over(loader, count=len):
        for targets in micro_batches:
            losses = (model(torch.ones_like(targets)) - targets).square()
            micro_batches.mean(losses.sum()).backward()
        everything = torch.cat(list(micro_batches))
        whole = (model(torch.ones_like(everything)) - everything).square().mean()
        (expected,) = torch.autograd.grad(whole, [model.weight])
        torch.testing.assert_close(model.weight.grad, expected, rtol=1e-12, atol=0)
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.noise.measured and ramp.passes == 8
    with pytest.raises(RuntimeError, match=r"pass count= to ramp.over"):
        next(ramp.over(loader)).mean(torch.ones(()))


def test_mistakes_are_errors_that_say_what_to_do(clock):
    model, _ = quadratic()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"under a scaling rule, got SGD.*mh.AdaScale"):
        mh.Ramp(plain, 64)
    optimizer = mh.AdaScale(plain, num_gradients_to_accumulate=4)
    with pytest.raises(ValueError, match="max_scale=2 is below the current scale of 4"):
        mh.Ramp(optimizer, 2)
    for wrong in (
        {"goal": "money"},
        {"efficiency": 0.5},
        {"goal": "samples", "efficiency": 0.0},
    ):
        with pytest.raises(ValueError, match=list(wrong)[-1]):
            mh.Ramp(optimizer, 64, **wrong)
    with pytest.raises(TypeError, match=r"model=Linear has no no_sync"):
        mh.Ramp(optimizer, 64, model=model)
    mh.Ramp(optimizer, 64)
    with pytest.raises(ValueError, match="already has a Ramp"):
        mh.Ramp(optimizer, 64)


def test_a_rule_that_cannot_go_so_far_says_so_when_the_ramp_is_made():
    model, _ = quadratic()
    adam = torch.optim.Adam(model.parameters(), betas=(0.9, 0.999))
    with pytest.raises(ValueError, match="the scale must be below 10, got 64"):
        mh.Ramp(mh.SqrtScale(adam, rescale_adam=True), max_scale=64)


def test_a_scale_that_was_set_becomes_that_of_a_pass(clock):
    """A loader whose batches are four small batches each."""
    model, loader = quadratic()
    optimizer = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=1e-6), scale=4.0)
    ramp = mh.Ramp(optimizer, 32, goal="steps")
    seen = train(clock, model, optimizer, ramp, loader, steps=40)
    assert seen[-1] == 8 and ramp.scale == 32.0


def test_a_record_says_of_each_step_what_that_step_was(tmp_path, clock):
    """Also of the step after which the batch changes, and of a short one at the end."""
    model, loader = quadratic(spread=8.0, batches=1495)
    optimizer = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=1e-6))
    gains, before = [], 0.0

    def after_step(loss):
        nonlocal before
        record.step(loss=loss)
        gains.append(optimizer.progress - before)
        assert optimizer.gain() == pytest.approx(gains[-1])
        before = optimizer.progress

    ramp = mh.Ramp(optimizer, 64)
    with mh.Record(tmp_path / "a.jsonl", optimizer) as record:
        taken = train(clock, model, optimizer, ramp, loader, after_step=after_step)
    run = mh.read_record(tmp_path / "a.jsonl")
    assert len(set(taken)) > 4 and taken[-1] < taken[-2]
    assert run.column("passes") == run.column("scale") == taken
    assert run.column("gain")[3:] == pytest.approx(gains[3:])
    assert optimizer.passes == ramp.passes  # a loop over `ramp.passes` may follow


@pytest.mark.parametrize("kind", ["loader", "cursor"])
def test_two_loops_at_the_same_time_are_an_error(clock, kind):
    """They would share one count of what is left, and both end early."""
    model, loader = quadratic(batches=100)
    optimizer = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=1e-6))
    ramp, data = mh.Ramp(optimizer, 8), loader
    if kind == "cursor":
        data = mh.Cursor(loader, batch_size=1, seed=0)
    for micro_batches in ramp.over(data):
        assert len(micro_batches)
        break
    outer = ramp.over(data)
    next(outer)
    assert len(train(clock, model, optimizer, ramp, loader[:8])) > 0
    with pytest.raises(RuntimeError, match="another loop over this Ramp has started"):
        next(outer)
    if kind == "cursor":
        assert data.epoch == 0


@pytest.mark.parametrize(
    "is_skipped", [lambda i: i <= 30, lambda i: i % 2, lambda i: i > 95, lambda i: True]
)
def test_steps_that_the_loop_leaves_out_cost_no_data(clock, is_skipped):
    """As where a loss is not finite."""
    model, loader = quadratic(batches=100)
    inner = torch.optim.SGD(model.parameters(), lr=1e-6)
    optimizer = mh.AdaScale(inner)
    seen = 0
    for step, micro_batches in enumerate(mh.Ramp(optimizer, 1).over(loader)):
        for target in micro_batches:
            (model(torch.ones_like(target)) - target).square().mean().backward()
        if not is_skipped(step):
            optimizer.step()
        optimizer.zero_grad()
        seen += len(micro_batches)
    assert seen == 100


@pytest.mark.parametrize(("spread", "looks"), [(0.0, {3}), (1.0, {3, 9}), (6.0, {9})])
def test_one_worker_with_one_pass_takes_a_second_one_until_the_noise_is_known(spread, looks):
    """A single gradient says nothing. The more noise there is, the longer a look takes."""
    model, loader = quadratic(spread=spread)
    optimizer = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=1e-6))
    ramp = mh.Ramp(optimizer, 64, goal="samples")
    seen = train(Clock(), model, optimizer, ramp, loader, steps=300 if spread < 6.0 else 100)
    lengths = [(passes, len(list(steps))) for passes, steps in itertools.groupby(seen)]
    assert {steps for passes, steps in lengths[1:3] + lengths[3:-1] if passes == 2} == looks
    assert {steps for passes, steps in lengths[2:-1] if passes == 1} == {63}  # and looks again


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.ones(50, 1, dtype=torch.float64))


def test_a_stream_without_a_length_is_handed_out_to_its_end(clock):
    model, _ = quadratic()
    optimizer = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=1e-6))
    loader = DataLoader(Stream(), batch_size=1)
    assert sum(train(clock, model, optimizer, mh.Ramp(optimizer, 8), loader)) == 50


def test_noise_that_was_not_measured_for_long_is_forgotten(clock):
    """One worker, one pass: the noise grows while nobody looks, and is found nevertheless."""
    model, _ = quadratic()
    generator = torch.Generator().manual_seed(3)
    loader = (
        1.0 + (0.1 if k < 150 else 6.0) * torch.randn(1, 1, generator=generator).double()
        for k in range(2000)
    )
    optimizer = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=1e-6))
    seen = train(clock, model, optimizer, mh.Ramp(optimizer, 64), loader)
    assert seen[100] == 1  # without noise the small batch is the best
    late = seen[-60:-10]
    assert sum(late) / len(late) > 5  # and 12 is, at a noise scale of 36
