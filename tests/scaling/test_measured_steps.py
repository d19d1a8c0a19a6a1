"""`measure_every=k`: one step in k is measured, and the steps between use the averages as they are.

The oracle is the plain run that takes gradients one at a time, and leaves them out of its averages
in the same steps.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import manyhands as mh
from helpers.measured_steps import (
    RULES,
    SETTLED,
    SMOOTHING,
    STEPS,
    K,
    adascale,
    is_measured,
    settle_soon,
    train,
)
from helpers.ranks import on_ranks, run_ranks
from helpers.scaling_oracle import (
    OPTIMIZERS,
    PlainRun,
    loss_of,
    make_batches,
    make_model,
    trained_as_under_ddp,
    two_groups,
)
from manyhands._ranks.ranks import RankGroup
from manyhands.scaling import _noise
from manyhands.scaling._hooks import PlainNorm
from manyhands.scaling._noise import DebiasedAverage, MeasuredSteps, PaperAverage, steps_between


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    settle_soon(monkeypatch)


# -- arithmetic ---------------------------------------------------------------------------------


@given(
    k=st.integers(1, 16),
    memory=st.floats(1.0, 1e4),
    held=st.one_of(st.floats(0.0, 1e5), st.just(float("inf"))),
    small_batches=st.integers(2, 64),
)
def test_a_measured_step_stands_for_at_most_k_steps_and_leaves_enough_measured_ones(
    k, memory, held, small_batches
):
    period = steps_between(k, memory, held, small_batches)
    assert 1 <= period <= k
    if period > 1:
        measured = memory / period + 1e-3
        assert held >= memory - 0.5 and measured >= _noise.LEAST_STEPS
        assert measured * small_batches >= _noise.LEAST


@pytest.mark.parametrize("kind", [DebiasedAverage, PaperAverage])
@given(
    values=st.lists(st.floats(-10, 10), min_size=1, max_size=30),
    smoothing=st.floats(0.1, 0.95),
    steps=st.integers(1, 8),
)
def test_a_value_that_stands_for_k_steps_counts_as_k_equal_values(kind, values, smoothing, steps):
    together, one_by_one = kind(), kind()
    for value in values:
        together = together.add([value], smoothing, steps)
        for _ in range(steps):
            one_by_one = one_by_one.add([value], smoothing)
    if kind is DebiasedAverage:  # the other one changes from a mean to a moving average on the way
        near = pytest.approx(one_by_one.value(0.0, 1)[0], abs=1e-9)
        assert together.value(0.0, 1)[0] == near
    seen = steps * len(values)
    if smoothing**seen > 1e-9:
        assert together.steps_held(smoothing, 1) == pytest.approx(seen, rel=1e-4)
    assert together.steps_held(smoothing, 2) == 0  # nothing of the second group


def test_steps_are_counted_down_to_the_next_measured_one():
    schedule, measured, weights = MeasuredSteps(), [], []
    for _ in range(9):
        measured.append(schedule.due)
        weights += [schedule.weight_in_steps] if schedule.due else []
        schedule.count(4)
    assert measured == [True, False, False, False] * 2 + [True]
    assert weights == [1, 4, 4]
    schedule.count(1)  # every step has to be measured now
    assert schedule.due


# -- in training --------------------------------------------------------------------------------


def run(rule, passes, **options):
    gains = []
    for model, optimizer in train(rule, passes, **options):  # noqa: B007
        gains.append(optimizer.gain())
    return {
        "params": [p.detach() for p in model.parameters()],
        "gains": gains,
        "progress": optimizer.progress,
    }


@pytest.mark.sample(
    "AdaScale-1-2-True",
    "AdaScale-3-1-True",
    "AdamScale-2-2-True",
    "LinearScale-1-2-False",
    "LinearScale-3-1-False",
)
@pytest.mark.parametrize("debias", [True, False])
@pytest.mark.parametrize(("workers", "passes"), [(1, 2), (2, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize("rule", RULES)
def test_training_is_the_plain_run_that_measures_one_step_in_k_by_hand(
    rule, workers, passes, debias
):
    def everything():
        return run(rule, passes, debias_ewma=debias)

    ranks = [everything()] if workers == 1 else run_ranks(workers, everything)
    model = make_model(torch.float64)
    _, factor, inner, settled = RULES[rule]
    oracle = PlainRun(
        model,
        OPTIMIZERS[inner](two_groups(model)),
        factor,
        preconditioned=rule == "AdamScale",
        smoothing=SMOOTHING,
    )
    x, y = make_batches(STEPS, workers * passes, dtype=torch.float64)
    for step in range(STEPS):
        weight_in_steps = 1 if step <= settled else K * is_measured(step, settled)
        oracle.step(x[step], y[step], weight_in_steps)
    assert len(set(oracle.gains)) == STEPS - sum(not is_measured(s, settled) for s in range(STEPS))
    near = 2e-5 if rule == "AdamScale" else 1e-9
    for mine in ranks:
        assert mine["gains"] == ranks[0]["gains"]
        if debias:  # PlainRun has no other average
            assert mine["gains"] == pytest.approx(oracle.gains, rel=near)
            assert mine["progress"] == pytest.approx(oracle.progress, rel=near)
            params = list(oracle.model.parameters())
            torch.testing.assert_close(mine["params"], params, rtol=near, atol=near)
        else:
            assert len(set(mine["gains"])) == len(set(oracle.gains))


def test_one_step_in_four_is_measured_by_default(monkeypatch):
    monkeypatch.setattr(_noise, "LEAST_STEPS", 2)
    monkeypatch.setattr(_noise, "LEAST", 4)
    gains = run("AdaScale", 2, measure_every=None)["gains"]
    assert gains == run("AdaScale", 2, measure_every=4)["gains"]
    assert len(set(gains)) == SETTLED + 1 + (STEPS - SETTLED - 1) // 4
    assert len(set(run("AdaScale", 2, measure_every=1)["gains"])) == STEPS


@pytest.mark.parametrize(("passes", "every"), [(2, 8), (3, 5), (4, 4)])
def test_by_default_fewer_steps_are_measured_with_few_small_batches(passes, every):
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.zeros(2))
    inner = torch.optim.SGD([param], lr=0.01)
    optimizer = mh.AdaScale(inner, num_gradients_to_accumulate=passes)
    noise = []
    for _ in range(1000 // passes + 5 * every):
        optimizer.zero_grad()
        for _ in range(passes):
            (param @ (1.0 + torch.randn(2)) / passes).backward()
        optimizer.step()
        noise.append(optimizer.noise.var_of())
    settled = 1000 // passes
    assert len(set(noise[:settled])) == settled
    assert len(set(noise[settled - 1 :])) == 1 + 5


def test_averages_that_would_rest_on_few_steps_are_measured_more_often(monkeypatch):
    monkeypatch.setattr(_noise, "LEAST_STEPS", 5)  # ten steps leave one in two
    gains = run("AdaScale", 2)["gains"]
    changed = [step for step in range(1, STEPS) if gains[step] != gains[step - 1]]
    assert changed == [*range(1, SETTLED + 1), *range(SETTLED + 2, STEPS, 2)]


@contextlib.contextmanager
def counted():
    """The payloads that a rule sends, and the norms that it takes, meanwhile."""
    sent, taken = [], []
    send, many, one = RankGroup.sum_and_gather, PlainNorm.many, PlainNorm.one
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankGroup, "sum_and_gather", lambda *a: sent.append(a) or send(*a))
        patch.setattr(PlainNorm, "many", lambda *a: taken.append(a) or many(*a))
        patch.setattr(PlainNorm, "one", lambda *a: taken.append(a) or one(*a))
        yield sent, taken


@pytest.mark.parametrize("passes", [1, 2])
@on_ranks(2)
def test_a_step_that_is_not_measured_takes_no_norm_and_sends_its_claims(passes):
    training = train("AdaScale", passes)
    next(training)  # what is sent when a rule is made does not count
    for step in range(1, STEPS):
        with counted() as (sent, taken):
            next(training)
        assert len(sent) == 1
        assert bool(taken) is is_measured(step)


def test_figures_stay_those_of_the_last_measured_step_and_progress_grows_by_them():
    figures = ("gain", "sqr", "var", "noise_scale", "factor")
    seen = [optimizer.snapshot() for _, optimizer in train("AdaScale", 2)]
    for step in range(1, STEPS):
        before, now = seen[step - 1], seen[step]
        same = all(now[name] == before[name] for name in figures)
        assert same is not is_measured(step)
        assert now["progress"] == before["progress"] + now["gain"]


def test_gain_before_a_step_that_is_not_measured_is_the_gain_it_is_made_with():
    *_, (model, optimizer) = train("AdaScale", 2, steps=SETTLED + 2)
    optimizer.zero_grad()
    for _ in range(2):
        (model(torch.randn(4, 3, dtype=torch.float64)).square().mean() / 2).backward()
    gain = optimizer.gain()
    optimizer.step()
    assert optimizer.gain() == gain
    assert optimizer.factors == tuple(optimizer.gain(i) for i in range(2))


def test_a_closure_is_a_step_like_any_other():
    def go(use_closure):
        model = make_model()
        optimizer = adascale(model, 2)
        x, y = make_batches(STEPS, 2)
        for step in range(STEPS):

            def closure(step=step):
                optimizer.zero_grad()
                for a in range(2):
                    loss = loss_of(model, x[step, a], y[step, a]) / 2
                    loss.backward()
                return loss

            if use_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        return optimizer.gain(), [p.detach() for p in model.parameters()]

    assert str(go(True)) == str(go(False))


def test_one_sample_and_weighted_mean_in_steps_that_are_not_measured():
    model = make_model()
    optimizer = adascale(model, 2)
    x, _ = make_batches(STEPS, 4)
    for step in range(STEPS):
        optimizer.zero_grad()
        if step % 2:
            mean = mh.WeightedMean([4, 2], optimizer)
            mean(model(x[step, 0]).square().sum()).backward()
            mean(model(x[step, 1][:2]).square().sum()).backward()
            assert optimizer._core.measurement.next_weight is None
        else:
            for a in range(2):
                with optimizer.one_sample():
                    (model(x[step, a]).square().mean() / 4).backward()
                    (model(x[step, a + 2]).square().mean() / 4).backward()
        before = optimizer.gain()
        optimizer.step()
        assert optimizer.gain() == before
        assert optimizer._core.measurement.hooks.idle is not is_measured(step)


def sharded(how, rule, passes=1):
    model = make_model()
    inner = torch.optim.SGD if rule is mh.AdaScale else torch.optim.AdamW
    options = {"num_gradients_to_accumulate": passes, "smoothing": SMOOTHING, "measure_every": K}
    if how == "fully_shard":
        fully_shard(model[0])
        fully_shard(model)
    if how == "OSS":
        optimizer = rule(mh.OSS(model.parameters(), optim=inner, lr=0.01), **options)
        model = mh.ShardedDataParallel(model, optimizer)
    else:
        model = mh.FSDP(model) if how == "FSDP" else model
        optimizer = rule(inner(model.parameters(), lr=0.01), **options)
        model = DDP(model) if how == "DDP" else model
    rank, size = dist.get_rank(), dist.get_world_size()
    x, y = make_batches(STEPS + 4, size * passes)
    seen = []
    for step in range(STEPS + 4):
        optimizer.zero_grad()
        for a in range(passes):
            if how == "fully_shard":
                model.set_requires_gradient_sync(a == passes - 1)
            quiet = a < passes - 1 and how != "fully_shard"
            with model.no_sync() if quiet else contextlib.nullcontext():
                i = rank * passes + a
                (loss_of(model, x[step, i], y[step, i]) / passes).backward()
        optimizer.step()
        seen += [optimizer.gain(), float(optimizer._core.measurement.hooks.idle)]
    if how == "FSDP":
        params = list(model.state_dict().values())
    else:
        params = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.tensor(seen, dtype=torch.float64), [p.detach().clone() for p in params]


@pytest.mark.sample("AdaScale-OSS-1", "AdamScale-OSS-1", "AdamScale-FSDP-2")
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("how", ["OSS", "fully_shard", "FSDP"])
@pytest.mark.parametrize("rule", [mh.AdaScale, mh.AdamScale])
def test_sharded_gradients_are_measured_in_the_same_steps_as_under_ddp(how, rule, passes):
    for seen, _ in trained_as_under_ddp(2, sharded, "DDP", how, rule, passes):
        assert 4 <= seen[1::2].sum() <= 10
