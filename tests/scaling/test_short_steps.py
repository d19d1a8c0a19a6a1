"""Steps with fewer backward passes than declared, as loops end an epoch with.

The oracle is the plain run, in one process, that divides by the passes that there were.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW

import manyhands as mh
from helpers.ranks import on_ranks, raises_on_ranks, run_ranks
from helpers.scaling_oracle import (
    PlainRun,
    adamscale,
    adascale,
    linear,
    loss_of,
    make_batches,
    make_model,
    square_root,
)
from manyhands.errors import RanksDisagree

N = 4
PASSES = [4, 4, 3, 4, 2, 4, 1, 4]  # of each step, where N are declared
MOMENTUM = {"lr": 0.05, "momentum": 0.9}
RULES = {
    "AdaScale": (mh.AdaScale, adascale, SGD, MOMENTUM),
    "LinearScale": (mh.LinearScale, linear, SGD, MOMENTUM),
    "SqrtScale": (mh.SqrtScale, square_root, AdamW, {"lr": 0.01}),
    "AdamScale": (mh.AdamScale, adamscale, AdamW, {"lr": 0.01}),
}


class Loop:
    """What a trainer's adapter says: it knows which pass is the last when it comes."""

    gradient_accumulation_steps = N
    sync_gradients = False


class CarelessLoop(Loop):
    """One that calls every pass the last, as Accelerate does outside of `accumulate()`."""

    sync_gradients = property(lambda self: True, lambda self, value: None)


def rank_and_size():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def under(wrapper, optim, options):
    """A model and its optimizer."""
    model = make_model(torch.float64)
    if wrapper in ("OSS", "sharded"):
        optimizer = mh.OSS(model.parameters(), optim=optim, bucket_size=8, **options)
        return (DDP(model) if wrapper == "OSS" else mh.ShardedDataParallel(model, optimizer)), (
            optimizer
        )
    if wrapper == "DDP":
        model = DDP(model)
    if wrapper == "FSDP":
        model = mh.FSDP(model)
    if wrapper == "fully_shard":
        model = fully_shard(model)
    return model, optim(model.parameters(), **options)


def whole(model):
    return [
        (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for p in model.parameters()
    ]


def unaveraged(model, last):
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
    return contextlib.nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync()


def train(wrapper, rule, found, clip=None, passes=PASSES, loop_kind=Loop):
    """Return the parameters and what was read after each step."""
    rule, _, optim, arguments = RULES[rule]
    rank, size = rank_and_size()
    model, optimizer = under(wrapper, optim, arguments)
    loop = loop_kind()
    declared = loop if found is True else N
    optimizer = rule(optimizer, num_gradients_to_accumulate=declared)
    if found == "follow":  # the loop met the rule later
        optimizer.port.follow(loop)
    x, y = make_batches(len(passes), N * size, dtype=torch.float64)
    read = []
    for step, count in enumerate(passes):
        for a in range(count):
            loop.sync_gradients = last = a == count - 1
            with unaveraged(model, last):
                i = a * size + rank
                (loss_of(model, x[step, i], y[step, i]) / N).backward()
        if clip is not None and wrapper == "sharded":
            optimizer.clip_grad_norm(clip)
        elif clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        shown = optimizer.snapshot()
        read.append([shown[key] for key in ("scale", "passes", "gain", "progress", "short")])
        read[-1] += shown["factor"]
        optimizer.zero_grad()
    return whole(model), torch.tensor(read, dtype=torch.float64)


def plain(rule, size, clip=None, passes=PASSES):
    """The same training, with nothing of ours in it."""
    _, factor, optim, arguments = RULES[rule]
    model = make_model(torch.float64)
    optimizer = optim(model.parameters(), **arguments)
    if clip is not None:
        optimizer.register_step_pre_hook(
            lambda *_: nn.utils.clip_grad_norm_(model.parameters(), clip) and None
        )
    run = PlainRun(model, optimizer, factor, preconditioned=rule == "AdamScale")
    x, y = make_batches(len(passes), N * size, dtype=torch.float64)
    read = []
    for step, count in enumerate(passes):
        n = count * size
        run.step(x[step, :n], y[step, :n])
        factors = factor(run.sqr[0], run.var[0], n, run.progress)
        short = sum(c < N for c in passes[: step + 1])
        read.append([n, count, run.gains[-1], run.progress, short, factors])
    return [p.detach() for p in model.parameters()], torch.tensor(read, dtype=torch.float64)


def assert_plain(result, expected):
    params, read = result
    torch.testing.assert_close(read, expected[1], rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(params, expected[0], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("rule", RULES)
def test_a_short_step_is_the_plain_one_of_its_passes(rule):
    passes = [count for count in PASSES if count > 1]  # one gradient alone has no noise
    result = train(None, rule, True, passes=passes)
    assert_plain(result, plain(rule, 1, passes=passes))


@pytest.mark.sample("DDP", "sharded", "fully_shard")
@pytest.mark.parametrize("wrapper", ["DDP", "OSS", "sharded", "FSDP", "fully_shard"])
def test_a_short_step_on_two_ranks(wrapper):
    expected = plain("AdaScale", 2)
    for result in run_ranks(2, train, wrapper, "AdaScale", True):
        assert_plain(result, expected)


@pytest.mark.parametrize("wrapper", ["DDP", "sharded", "FSDP"])
def test_a_gradient_is_clipped_as_the_mean_of_the_passes_that_there_were(wrapper):
    expected = plain("AdaScale", 2, clip=0.5)
    for result in run_ranks(2, train, wrapper, "AdaScale", True, clip=0.5):
        assert_plain(result, expected)


def test_a_loop_that_meets_the_rule_later():
    passes = [4, 3, 4]
    result = train(None, "LinearScale", "follow", passes=passes)
    assert_plain(result, plain("LinearScale", 1, passes=passes))


@pytest.mark.parametrize("wrapper", ["DDP", "sharded"])
def test_a_loop_that_calls_every_pass_the_last_is_counted_by_its_steps(wrapper):
    expected = plain("AdaScale", 2)
    for result in run_ranks(2, train, wrapper, "AdaScale", True, loop_kind=CarelessLoop):
        assert_plain(result, expected)


def test_an_explicit_scale_shrinks_with_the_passes():
    loop = Loop()
    x, y = make_batches(1, N)
    model = make_model()
    optimizer = mh.LinearScale(
        SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=loop, scale=8.0
    )
    for a in range(3):
        loop.sync_gradients = a == 2
        (loss_of(model, x[0, a], y[0, a]) / N).backward()
    optimizer.step()
    assert optimizer.factors == (6.0,)
    assert optimizer.state_dict()["manyhands"]["batch"]["scale"] == 8.0
    assert optimizer.state_dict()["manyhands"]["batch"]["passes"] == N


@pytest.mark.parametrize(
    "change",
    [lambda port: port.begin_step(2), lambda port: port.follow(Loop())],
    ids=["begin_step", "follow"],
)
def test_passes_are_not_declared_in_the_middle_of_a_step(change):
    model = make_model()
    optimizer = mh.LinearScale(SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=N)
    backward(model, 1)
    with pytest.raises(RuntimeError, match=r"in the middle of a step, after 1 of its"):
        change(optimizer.port)


def backward(model, count, divided_by=N):
    x, y = make_batches(1, N)
    for a in range(count):
        (loss_of(model, x[0, a], y[0, a]) / divided_by).backward()


def test_the_number_of_passes_may_change_between_steps():
    loop, model = Loop(), make_model()
    optimizer = mh.LinearScale(SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=loop)
    for count in (4, 2, 3):
        loop.gradient_accumulation_steps = count
        for a in range(count):
            loop.sync_gradients = a == count - 1
            backward(model, 1, divided_by=count)
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.factors == (float(count),)
    assert optimizer.snapshot()["short"] == 0
    with pytest.raises(RuntimeError, match="the loop controls the number of passes"):
        optimizer.set_num_gradients_to_accumulate(2)


def test_the_noise_scale_counts_the_short_steps_of_a_loop():
    def measured(found, passes):
        loop, model = Loop(), make_model(torch.float64)
        inner = SGD(model.parameters(), lr=0.0)
        noise = mh.NoiseScale(inner, num_gradients_to_accumulate=loop if found else passes)
        x, y = make_batches(1, N, dtype=torch.float64)
        for a in range(passes):
            loop.sync_gradients = a == passes - 1
            (loss_of(model, x[0, a], y[0, a]) / (N if found else passes)).backward()
        grads = [p.grad.clone() for p in model.parameters()]
        inner.step()
        return [noise.squared_norm, noise.variance], grads

    found, grads = measured(True, 3)
    expected, plain_grads = measured(False, 3)
    assert found == pytest.approx(expected, rel=1e-9)
    # it changes nothing in the loop, whose gradient is divided by the passes of a whole step
    torch.testing.assert_close(grads, [grad * 3 / N for grad in plain_grads])


# -- mistakes ----------------------------------------------------------------------------------


class SilentLoop(Loop):
    """One that never says which pass is the last."""

    sync_gradients = property(lambda self: False, lambda self, value: None)


@pytest.mark.parametrize("found", [False, True], ids=["declared", "found"])
def test_a_short_step_is_an_error_that_says_what_to_do(found):
    def step():
        train("DDP", "AdaScale", found, passes=[4, 2][found:], loop_kind=SilentLoop)

    said = r"after 2 of 4 .* call set_num_gradients_to_accumulate\(2\)"
    said = r"after 2 of 4 .* gradient_accumulation_steps to 2," if found else said
    other = "make sync_gradients true" if found else "pass an Accumulation"
    raises_on_ranks(2, RuntimeError, step, match=rf"{said} .* by 2\. .* {other}")


def test_the_way_out_is_right_in_a_loop_that_clips_and_divides_by_the_passes_that_there_are():
    def as_timm_does():
        rank, size = rank_and_size()
        model, optimizer = under("DDP", SGD, MOMENTUM)
        optimizer = mh.AdaScale(optimizer, num_gradients_to_accumulate=N)
        x, y = make_batches(len(PASSES), N * size, dtype=torch.float64)
        read = []
        for step, count in enumerate(PASSES):
            if count != optimizer.passes:
                optimizer.set_num_gradients_to_accumulate(count)
            for a in range(count):
                with unaveraged(model, a == count - 1):
                    i = a * size + rank
                    (loss_of(model, x[step, i], y[step, i]) / count).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            read.append([optimizer.scale, optimizer.gain(), optimizer.progress])
        return whole(model), torch.tensor(read, dtype=torch.float64)

    expected, read = plain("AdaScale", 2, clip=0.5)
    for result in run_ranks(2, as_timm_does):
        assert_plain(result, (expected, read[:, [0, 2, 3]]))


def test_without_any_pass_there_is_nothing_to_count():
    optimizer = mh.AdaScale(
        SGD(make_model().parameters(), lr=0.1), num_gradients_to_accumulate=Loop()
    )
    with pytest.raises(RuntimeError, match=r"step\(\) without a backward\(\)"):
        optimizer.step()


@pytest.mark.parametrize("passes", [(4, 3), (3, 2)])
@on_ranks(2, raises=RanksDisagree, match="different numbers of backward passes in a step")
def test_ranks_that_run_different_numbers_of_passes(passes):
    model = make_model()
    loop = Loop()
    optimizer = mh.AdaScale(SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=loop)
    own = passes[dist.get_rank()]
    for a in range(own):
        loop.sync_gradients = a == own - 1
        backward(model, 1)
    optimizer.step()


def test_a_loop_that_decides_divides_its_losses():
    sgd = SGD(make_model().parameters(), lr=0.1)
    with pytest.raises(ValueError, match="must divide the losses"):
        mh.AdaScale(sgd, num_gradients_to_accumulate=Loop(), is_scaled_loss=False)


def test_a_weighted_mean_has_all_passes():
    model = make_model()
    loop = Loop()
    optimizer = mh.AdaScale(SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=loop)
    mean = mh.WeightedMean([4] * N, optimizer)
    x, y = make_batches(1, N)
    loop.sync_gradients = True
    with pytest.raises(RuntimeError, match=r"a WeightedMean of 4 counts, but only 1 backward"):
        mean(loss_of(model, x[0, 0], y[0, 0])).backward()
