"""`measure_every=k`: one step in k is measured, and the steps between use the averages as they are.

The oracle is the plain run that takes gradients one at a time, and leaves them out of its averages
in the same steps.
"""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.amp import GradScaler
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import manyhands as mh
from helpers.ranks import RanksFailed, raises_on_ranks, run_ranks
from helpers.scaling_oracle import (
    OPTIMIZERS,
    PlainRun,
    TrunkAndExtra,
    adamscale,
    adascale,
    linear,
    loss_of,
    make_batches,
    make_model,
    trained_as_under_ddp,
    two_groups,
)
from manyhands._core.ranks import RankGroup
from manyhands.errors import RanksDisagree
from manyhands.scaling import _hooks, _measured_steps, _rotation
from manyhands.scaling._hooks import PlainNorm
from manyhands.scaling._measured_steps import MeasuredSteps, steps_between
from manyhands.scaling._noise import DebiasedAverage, PaperAverage

K = 3
SMOOTHING = 0.9  # a memory of ten steps
SETTLED = 10  # the step whose averages hold as many: K steps after it the next one is measured
STEPS = 20


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Averages of ten steps may rest on three measured ones."""
    monkeypatch.setattr(_measured_steps, "LEAST", 3)


def is_measured(step, settled=SETTLED):
    return step <= settled or (step - settled) % K == 0


# -- arithmetic ---------------------------------------------------------------------------------


@given(
    k=st.integers(1, 16),
    memory=st.floats(1.0, 1e4),
    held=st.one_of(st.floats(0.0, 1e5), st.just(float("inf"))),
)
def test_a_measured_step_stands_for_at_most_k_steps_and_leaves_enough_measured_ones(
    k, memory, held
):
    period = steps_between(k, memory, held)
    assert 1 <= period <= k
    if period > 1:
        assert held >= memory - 0.5 and memory / period >= _measured_steps.LEAST - 1e-3


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
        weights += [schedule.stands_for] if schedule.due else []
        schedule.count(schedule.next_measured(4) if schedule.sends else None)
    assert measured == [True, False, False, False] * 2 + [True]
    assert weights == [1, 4, 4]


def test_the_first_step_after_loading_is_a_check_that_changes_nothing_else():
    schedule = MeasuredSteps.parse_state({"between": [2, 1]})
    assert not schedule.due and schedule.sends
    schedule.count(schedule.next_measured(4))
    assert schedule.to_state() == [1, 2] and not schedule.sends
    loaded = MeasuredSteps.parse_state({"between": [2, 1]})
    loaded.count(loaded.next_measured(1))  # every step has to be measured now
    assert loaded.due and loaded.stands_for == 3


# -- in training --------------------------------------------------------------------------------

RULES = {
    "AdaScale": (mh.AdaScale, adascale, "SGD momentum", SETTLED),
    # averages restart when it begins to divide, after five steps
    "AdamScale": (mh.AdamScale, adamscale, "AdamW", SETTLED + 5),
    "LinearScale": (mh.LinearScale, linear, "SGD", SETTLED),
}


def train(rule, passes, steps=STEPS, make=DDP, load=None, **options):
    """Train in this process's place among the workers; yields after every step."""
    rank, workers = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model = make_model(torch.float64)
    optimizer = RULES[rule][0](
        OPTIMIZERS[RULES[rule][2]](two_groups(model)),
        num_gradients_to_accumulate=passes,
        **{"smoothing": SMOOTHING, "measure_every": K, **options},
    )
    wrapped = make(model) if workers > 1 else model
    x, y = make_batches(STEPS, workers * passes, dtype=torch.float64)
    first = 0
    if load is not None:
        model.load_state_dict(load["model"])
        optimizer.load_state_dict(load["optimizer"])
        first = optimizer.snapshot()["step"]
    for step in range(first, steps):
        optimizer.zero_grad()
        for a in range(passes):
            quiet = workers > 1 and a < passes - 1
            with wrapped.no_sync() if quiet else contextlib.nullcontext():
                i = rank * passes + a
                (loss_of(wrapped, x[step, i], y[step, i]) / passes).backward()
        optimizer.step()
        yield model, optimizer


def run(rule, passes, **options):
    gains = []
    for model, optimizer in train(rule, passes, **options):  # noqa: B007
        gains.append(optimizer.gain())
    return {
        "params": [p.detach() for p in model.parameters()],
        "gains": gains,
        "progress": optimizer.progress,
        "rotated": optimizer._tap.rotated,
    }


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
        stands_for = 1 if step <= settled else K * is_measured(step, settled)
        oracle.step(x[step], y[step], stands_for)
    assert len(set(oracle.gains)) == STEPS - sum(not is_measured(s, settled) for s in range(STEPS))
    near = 2e-5 if rule == "AdamScale" else 1e-9
    for mine in ranks:
        assert mine["gains"] == ranks[0]["gains"]
        if debias:  # PlainRun has no other average
            assert mine["gains"] == pytest.approx(oracle.gains, rel=near)
            assert mine["progress"] == pytest.approx(oracle.progress, rel=near)
            for p, q in zip(mine["params"], oracle.model.parameters(), strict=True):
                torch.testing.assert_close(p, q.detach(), rtol=near, atol=near)
        else:
            assert len(set(mine["gains"])) == len(set(oracle.gains))


def test_all_steps_are_measured_by_default():
    gains = run("AdaScale", 2, measure_every=None)["gains"]
    assert len(set(gains)) == STEPS
    assert gains == run("AdaScale", 2, measure_every=1)["gains"]


def test_averages_that_would_rest_on_few_steps_are_measured_more_often(monkeypatch):
    monkeypatch.setattr(_measured_steps, "LEAST", 5)  # ten steps leave one in two
    gains = run("AdaScale", 2)["gains"]
    changed = [step for step in range(1, STEPS) if gains[step] != gains[step - 1]]
    assert changed == [*range(1, SETTLED + 1), *range(SETTLED + 2, STEPS, 2)]


@contextlib.contextmanager
def counted():
    """The payloads that a rule sends, and the norms that it takes, meanwhile."""
    sent, taken = [], []
    send, many, one = RankGroup.sum_and_gather, PlainNorm.many, _hooks.vector_norm
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankGroup, "sum_and_gather", lambda *a: sent.append(a) or send(*a))
        patch.setattr(PlainNorm, "many", lambda *a: taken.append(a) or many(*a))
        patch.setattr(_hooks, "vector_norm", lambda *a: taken.append(a) or one(*a))
        yield sent, taken


@pytest.mark.parametrize("passes", [1, 2])
def test_a_step_that_is_not_measured_sends_nothing_and_takes_no_norm(passes):
    def per_step():
        found, norms = [], []
        training = train("AdaScale", passes)
        next(training)  # what is sent when a rule is made does not count
        for _ in range(STEPS - 1):
            with counted() as (sent, taken):
                next(training)
            found.append(len(sent))
            norms.append(len(taken))
        return [1, *found], [1, *norms]

    for found, norms in run_ranks(2, per_step):
        assert found == [int(is_measured(step)) for step in range(STEPS)]
        assert not any(norms[step] for step in range(STEPS) if not is_measured(step))
        assert all(norms[step] for step in range(STEPS) if is_measured(step))


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


@pytest.mark.parametrize("rule", ["AdaScale", "AdamScale"])
def test_delayed_statistics_come_one_step_later(rule):
    def delayed():
        gains = [optimizer.gain() for _, optimizer in train(rule, 1, delayed=True)]
        return gains

    settled = RULES[rule][3] + 1  # the averages that decide are one step older
    for gains in run_ranks(2, delayed):
        changed = [step for step in range(2, STEPS) if gains[step] != gains[step - 1]]
        assert changed == [step for step in range(2, STEPS) if is_measured(step - 1, settled)]


def test_progress_of_delayed_steps_counts_each_step_once():
    *_, (_, optimizer) = train("LinearScale", 2, delayed=True)
    progress, gain = optimizer.progress, optimizer.gain()
    optimizer.scaling_state_dict()  # adds what is on its way
    assert optimizer.progress == pytest.approx(progress + gain)
    assert optimizer._counts.steps == STEPS


def test_a_closure_is_a_step_like_any_other():
    def go(use_closure):
        model = make_model()
        optimizer = mh.AdaScale(
            OPTIMIZERS["SGD"](two_groups(model)),
            num_gradients_to_accumulate=2,
            smoothing=SMOOTHING,
            measure_every=K,
        )
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
    optimizer = mh.AdaScale(
        OPTIMIZERS["SGD"](two_groups(model)),
        num_gradients_to_accumulate=2,
        smoothing=SMOOTHING,
        measure_every=K,
    )
    x, _ = make_batches(STEPS, 4)
    for step in range(STEPS):
        optimizer.zero_grad()
        if step % 2:
            mean = mh.WeightedMean([4, 2], optimizer)
            mean(model(x[step, 0]).square().sum()).backward()
            mean(model(x[step, 1][:2]).square().sum()).backward()
            assert optimizer._tap.next_weight is None
        else:
            for a in range(2):
                with optimizer.one_sample():
                    (model(x[step, a]).square().mean() / 4).backward()
                    (model(x[step, a + 2]).square().mean() / 4).backward()
        before = optimizer.gain()
        optimizer.step()
        assert optimizer.gain() == before
        assert optimizer._tap.hooks.idle is not is_measured(step)


def test_only_measured_steps_have_a_turn_in_the_rotation(monkeypatch):
    monkeypatch.setattr(_rotation, "LONG", 10)
    monkeypatch.setattr(_rotation, "LEAST_BLOCKS", 1)
    monkeypatch.setattr(_rotation, "BLOCK", 2)
    found = run("AdaScale", 2, measured=1 / 2)
    assert found["rotated"] == sum(map(is_measured, range(STEPS)))


def sharded(how, rule, passes=1):
    model = make_model()
    inner = torch.optim.SGD if rule is mh.AdaScale else torch.optim.AdamW
    options = {
        "num_gradients_to_accumulate": passes,
        "smoothing": SMOOTHING,
        "measure_every": K,
    }
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
        seen += [optimizer.gain(), float(optimizer._tap.hooks.idle)]
    if how == "FSDP":
        params = list(model.state_dict().values())
    else:
        params = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.tensor(seen, dtype=torch.float64), [p.detach().clone() for p in params]


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("how", ["OSS", "fully_shard", "FSDP"])
@pytest.mark.parametrize("rule", [mh.AdaScale, mh.AdamScale])
def test_sharded_gradients_are_measured_in_the_same_steps_as_under_ddp(how, rule, passes):
    for seen, _ in trained_as_under_ddp(2, sharded, "DDP", how, rule, passes):
        assert 4 <= seen[1::2].sum() <= 9


# -- saving and loading -------------------------------------------------------------------------


def params_of(model):
    return [p.detach().clone() for p in model.parameters()]


def saved_and_continued(rule, passes, stop, delayed):
    whole, state = [], None
    for model, optimizer in train(rule, passes, delayed=delayed):
        whole.append(params_of(model))
        if optimizer.snapshot()["step"] == stop:
            state = copy.deepcopy(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            )
    # the option comes from the state dict
    options = {"load": state, "measure_every": None, "smoothing": None, "delayed": delayed}
    continued = train(rule, passes, **options)
    parts = [params_of(model) for model, _ in continued]
    same = [
        all(torch.equal(p, q) for p, q in zip(a, b, strict=True))
        for a, b in zip(whole[stop:], parts, strict=True)
    ]
    return all(same)


@pytest.mark.parametrize("stop", [SETTLED, SETTLED + 1, SETTLED + 2, SETTLED + 3, SETTLED + 7])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("rule", ["AdaScale", "AdamScale"])
def test_a_run_that_was_saved_between_two_measured_steps_continues_bitwise(rule, workers, stop):
    def go():
        return saved_and_continued(rule, 3 - workers, stop, delayed=False)

    assert all([go()] if workers == 1 else run_ranks(workers, go))


def test_a_delayed_run_continues_bitwise():
    def go():
        return [saved_and_continued("AdaScale", 1, s, delayed=True) for s in range(10, 16)]

    assert run_ranks(2, go) == [[True] * 6] * 2


def test_a_state_saved_in_the_middle_of_a_step_is_that_before_it():
    def go():
        *_, (model, optimizer) = train("AdaScale", 1, steps=SETTLED + 2)
        before = optimizer.scaling_state_dict()["between"]
        optimizer.zero_grad()
        wrapped = DDP(model)
        wrapped(torch.randn(4, 3, dtype=torch.float64)).square().mean().backward()
        during = optimizer.scaling_state_dict()["between"]
        optimizer.step()
        return [list(before), list(during), list(optimizer.scaling_state_dict()["between"])]

    assert run_ranks(2, go) == [[[1, 1], [1, 1], [0, 2]]] * 2


def test_a_state_of_an_older_release_begins_with_a_measured_step():
    *_, (model, optimizer) = train("AdaScale", 2, steps=SETTLED + 2)
    state = optimizer.state_dict()
    del state["manyhands"]["between"], state["manyhands"]["options"]["measure_every"]
    options = {"load": {"model": model.state_dict(), "optimizer": state}, "measure_every": None}
    for _, continued in train("AdaScale", 2, **options):
        assert not continued._tap.hooks.idle


@pytest.mark.parametrize("between", [[-1, 0], [0], "ab", [17, 0], None])
def test_a_damaged_position_is_found(between):
    *_, (_, optimizer) = train("AdaScale", 2, steps=SETTLED + 2)
    entry = {**optimizer.scaling_state_dict(), "between": between}
    with pytest.raises(ValueError, match="damaged"):
        optimizer.load_scaling_state_dict(entry)


def test_another_number_of_workers_goes_on_from_the_same_position():
    *_, (model, optimizer) = train("AdaScale", 2, steps=SETTLED + 2)
    state = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    def go():
        return [
            optimizer._tap.hooks.idle
            for _, optimizer in train("AdaScale", 1, load=state, measure_every=None)
        ]

    expected = [not is_measured(step) for step in range(SETTLED + 2, STEPS)]
    assert run_ranks(3, go) == [expected] * 3


def test_a_copy_is_at_the_same_position():
    *_, (_, optimizer) = train("AdaScale", 2, steps=SETTLED + 2)
    twin = copy.deepcopy(optimizer)
    assert twin._tap.schedule.to_state() == [1, 1] == optimizer._tap.schedule.to_state()


# -- changes in the middle ----------------------------------------------------------------------


def test_set_scale_between_two_measured_steps_changes_the_gain_at_once():
    def go():
        for _, optimizer in train("AdaScale", 1):
            if optimizer.snapshot()["step"] == SETTLED + 2:
                noise = optimizer.noise
                optimizer.set_scale(3.0)
                assert optimizer.gain() == noise.gain(3.0) != noise.gain(2.0)
            yield optimizer._tap.hooks.idle

    expected = [not is_measured(step) for step in range(STEPS)]
    assert run_ranks(2, lambda: list(go())) == [expected] * 2


def test_passes_that_change_between_two_measured_steps():
    def go():
        model = make_model()
        wrapped = DDP(model)
        optimizer = mh.AdaScale(
            OPTIMIZERS["SGD"](two_groups(model)), smoothing=SMOOTHING, measure_every=K
        )
        x, y = make_batches(STEPS, 4)
        idle = []
        for step in range(STEPS):
            optimizer.zero_grad()
            passes = 1 if step < SETTLED + 2 else 2
            if step == SETTLED + 2:
                optimizer.set_num_gradients_to_accumulate(2, update_smoothing=False)
            for a in range(passes):
                with wrapped.no_sync() if a < passes - 1 else contextlib.nullcontext():
                    i = 2 * dist.get_rank() + a
                    (loss_of(wrapped, x[step, i], y[step, i]) / passes).backward()
            optimizer.step()
            idle.append(optimizer._tap.hooks.idle)
        return idle

    assert run_ranks(2, go) == [[not is_measured(step) for step in range(STEPS)]] * 2


def with_bad_step(bad, scaler=None):
    """Which steps are idle, if the gradients of step `bad` are not finite; and the snapshots."""
    model = make_model()
    optimizer = mh.AdaScale(
        torch.optim.SGD(model.parameters(), lr=0.0),  # parameters stay as they are
        num_gradients_to_accumulate=2,
        smoothing=SMOOTHING,
        measure_every=K,
        grad_scaler=scaler,
    )
    x, y = make_batches(STEPS + 6, 2)
    idle, seen = [], []
    for step in range(STEPS + 6):
        optimizer.zero_grad()
        for a in range(2):
            loss = loss_of(model, x[step, a], y[step, a]) / 2
            loss = loss * (float("nan") if step == bad else 1.0)
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
            for p in model.parameters():
                p.data.nan_to_num_()
        else:
            scaler.step(optimizer)
            scaler.update()
        idle.append(optimizer._tap.hooks.idle)
        seen.append(optimizer.snapshot())
    return idle, seen


def test_a_non_finite_gradient_in_a_step_that_is_not_measured_is_not_seen():
    idle, seen = with_bad_step(SETTLED + 1)
    assert idle == [not is_measured(step) for step in range(STEPS + 6)]
    assert seen[-1]["nonfinite"] == 0
    assert 1.0 <= seen[-1]["gain"] <= 2.0


def test_after_a_non_finite_gradient_in_a_measured_step_each_is_measured_until_one_is_finite():
    bad = SETTLED + K
    idle, seen = with_bad_step(bad)
    # The next measured step is fixed already. It is followed by another, which finds it finite.
    expected = [not is_measured(step) for step in range(bad + K)]
    expected += [False, False, True, True, False]
    assert idle[: len(expected)] == expected
    assert seen[bad]["nonfinite"] == 1 and seen[-1]["nonfinite"] == 1
    assert seen[bad]["gain"] == seen[bad - 1]["gain"]


@pytest.mark.parametrize("bad", [SETTLED + 1, SETTLED + K])
def test_a_scaler_skips_a_step_that_is_not_measured_too(bad):
    scaler = GradScaler("cpu", init_scale=8.0)
    _, seen = with_bad_step(bad, scaler)
    assert seen[bad]["skipped"] == seen[bad]["nonfinite"] == 1
    assert seen[bad]["progress"] == seen[bad - 1]["progress"]
    assert seen[-1]["skipped"] == 1


def test_an_added_group_is_measured_from_the_next_measured_step_on():
    *_, (model, optimizer) = train("AdaScale", 2, steps=SETTLED + 2)
    more = torch.nn.Linear(3, 2).double()
    optimizer.add_param_group({"params": list(more.parameters())})
    idle = []
    for _ in range(6):
        optimizer.zero_grad()
        for _ in range(2):
            x = torch.randn(4, 3, dtype=torch.float64)
            ((model(x) + more(x)).square().mean() / 2).backward()
        optimizer.step()
        idle.append(optimizer._tap.hooks.idle)
    assert idle == [True, False, False, False, False, False]  # it holds few steps
    assert optimizer.gain(2) > 1.0


# -- where every step is measured ---------------------------------------------------------------


class Loop:
    gradient_accumulation_steps = 2
    sync_gradients = False


def every_step_measured(what):
    model = make_model()
    options = {"smoothing": SMOOTHING, "measure_every": K, "num_gradients_to_accumulate": 2}
    passes = 2
    if what == "a loop":
        loop = options["num_gradients_to_accumulate"] = Loop()
    elif what == "one gradient":
        options["num_gradients_to_accumulate"] = passes = 1
        options["scale"] = 2.0
    elif what == "short_step":
        options["short_step"] = "count"
    elif what == "examples":
        options |= {"examples": True, "model": model}
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    if what == "AdaptiveDataParallel":
        optimizer = mh.AdaScale(smoothing=SMOOTHING, measure_every=K)
        model = mh.AdaptiveDataParallel(model, inner, optimizer)
    else:
        optimizer = mh.AdaScale(inner, **options)
    ramp = mh.Ramp(optimizer, max_scale=2.0) if what == "Ramp" else None
    idle = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        passes = passes if ramp is None else ramp.passes
        for a in range(passes):
            if what == "a loop":
                loop.sync_gradients = a == 1
            alone = what == "AdaptiveDataParallel" and a == 0
            with model.no_sync() if alone else contextlib.nullcontext():
                (model(torch.randn(4, 3)).square().mean() / passes).backward()
        optimizer.step()
        idle.append(optimizer._tap.hooks.idle)
    return any(idle)


@pytest.mark.parametrize(
    "what",
    ["a loop", "one gradient", "short_step", "examples", "AdaptiveDataParallel", "Ramp"],
)
def test_where_other_numbers_of_a_step_are_needed_every_step_is_measured(what):
    assert every_step_measured("nothing")
    assert not every_step_measured(what)


def test_a_ramp_that_comes_later_waits_for_the_next_measured_step():
    def go():
        idle, ramp = [], None
        for _, optimizer in train("AdaScale", 1):
            idle.append(optimizer._tap.hooks.idle)
            if len(idle) == SETTLED + 2:
                ramp = mh.Ramp(optimizer, max_scale=2.0)
        return idle, ramp._steps

    expected = [not is_measured(step) for step in range(STEPS)]
    expected[SETTLED + 3 :] = [False] * (STEPS - SETTLED - 3)
    assert run_ranks(2, go) == [(expected, STEPS - SETTLED - 2)] * 2


def one_rank_leaves_parameters_out(first):
    """Rank 1's loss uses the optimizer's parameters only before step `first`."""
    model = TrunkAndExtra()
    wrapped = DDP(model, find_unused_parameters=True)
    optimizer = mh.AdaScale(
        torch.optim.SGD(model.extra.parameters(), lr=0.01), smoothing=SMOOTHING, measure_every=K
    )
    idle = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for p in model.trunk.parameters():
            p.grad = None
        used = dist.get_rank() == 0 or step != first
        wrapped(torch.randn(4, 3), extra=used).square().backward()
        optimizer.step()
        idle.append(optimizer._tap.hooks.idle)
    return any(idle)


def test_if_a_rank_has_seen_fewer_passes_every_step_is_measured_from_then_on():
    assert run_ranks(2, one_rank_leaves_parameters_out, 4) == [False, False]


# -- mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [0, -1, 17, 2.5, True, "all", float("nan")])
def test_a_number_of_steps_that_makes_no_sense(every):
    with pytest.raises(ValueError, match="measure_every must be a whole number from 1 to 16"):
        mh.AdaScale(torch.optim.SGD(make_model().parameters(), lr=0.1), measure_every=every)


def test_ranks_must_measure_equally_often():
    def make():
        model = make_model()
        mh.AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), measure_every=dist.get_rank() + 2)

    raises_on_ranks(2, RanksDisagree, make, match="ranks have different measure_every")


def only_one_rank_loads():
    """A state from between two measured steps."""
    *_, (model, optimizer) = train("AdaScale", 1, steps=SETTLED + 2)
    state = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    for _ in train("AdaScale", 1, load=None if dist.get_rank() else state):
        pass


def test_a_state_that_one_rank_has_loaded_is_an_error_in_the_first_step():
    match = "Load the state dict on every worker"
    raises_on_ranks(2, RuntimeError, only_one_rank_loads, match=match, timeout=20)


def steps_without_a_backward():
    *_, (_, optimizer) = train("AdaScale", 1, steps=SETTLED + 2)
    optimizer.step()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_step_without_a_backward(workers):
    match = "without a backward"
    if workers == 2:
        raises_on_ranks(2, RuntimeError, steps_without_a_backward, match=match, timeout=20)
        return
    *_, (_, optimizer) = train("AdaScale", 2, steps=SETTLED + 2)
    with pytest.raises(RuntimeError, match=match):
        optimizer.step()


@pytest.mark.parametrize("step", [SETTLED + 1, SETTLED + 2, SETTLED + 3])
def test_one_worker_with_too_few_passes_gets_the_error_that_it_gets_without_the_option(step):
    *_, (model, optimizer) = train("AdaScale", 2, steps=step)
    optimizer.zero_grad()
    model(torch.randn(4, 3, dtype=torch.float64)).sum().backward()
    with pytest.raises(RuntimeError, match=r"after 1 of 2 backward passes.* say what to do"):
        optimizer.step()


def one_rank_makes_a_mistake(what, at):
    """Train under DDP; rank 1 does something else at step `at`."""
    rank = dist.get_rank()
    model = make_model()
    wrapped = DDP(model)
    passes = 2 if what in ("a pass too few", "passes") else 1
    optimizer = mh.AdaScale(
        OPTIMIZERS["SGD"](two_groups(model)),
        num_gradients_to_accumulate=passes,
        smoothing=SMOOTHING,
        measure_every=K,
    )
    x, y = make_batches(STEPS, 4)
    for step in range(STEPS):
        wrong = rank == 1 and step == at
        declared = passes
        if wrong and what == "a state":
            entry = optimizer.scaling_state_dict()
            optimizer.load_scaling_state_dict({**entry, "progress": 7.0, "between": [0, 0]})
        elif wrong and what == "a Ramp":
            mh.Ramp(optimizer, max_scale=8.0)
        elif wrong and what == "scale":
            optimizer.set_scale(3.0)
        elif wrong and what == "passes":
            optimizer.set_num_gradients_to_accumulate(3, update_smoothing=False)
        if what == "passes" and rank == 1 and step >= at:
            declared = 3
        optimizer.zero_grad()
        for a in range(declared):
            quiet = a < declared - 1 or (wrong and what == "no_sync")
            with wrapped.no_sync() if quiet else contextlib.nullcontext():
                i = rank * 2 + a % 2
                (loss_of(wrapped, x[step, i], y[step, i]) / declared).backward()
            if wrong and what == "a pass too few":
                break
        if wrong and what == "an extra pass":
            loss_of(wrapped, x[step, 0], y[step, 0]).backward()
        if wrong and what == "a step left out":
            continue
        optimizer.step()


@pytest.mark.parametrize("at", [SETTLED + 1, SETTLED + 2, SETTLED + 3])
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("a step left out", "different statistics, progress or factors"),
        ("a state", "Load the state dict on every worker"),
        ("scale", "disagree on the scale: rank 0: 2, rank 1: 3"),
        ("passes", r"was called on rank\(s\) 1"),
        ("a Ramp", "Is there a Ramp on some workers only"),
    ],
)
def test_ranks_that_have_come_to_disagree_all_raise_at_the_next_measured_step(what, message, at):
    raises_on_ranks(2, RuntimeError, one_rank_makes_a_mistake, what, at, match=message, timeout=20)


@pytest.mark.parametrize("at", [SETTLED + 1, SETTLED + 2, SETTLED + 3])
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("an extra pass", "this is backward pass 2 since the last step"),
        ("a pass too few", r"step\(\) after 1 of 2 backward passes|which is this one"),
        ("no_sync", "no_sync"),
    ],
)
def test_a_mistake_that_a_rank_can_see_alone_is_an_error_there_at_once(what, message, at):
    # The other rank waits for it, in DDP or for its numbers, until its process ends.
    with pytest.raises(RanksFailed, match=rf"rank 1 raised:(.|\n)*({message})"):
        run_ranks(2, one_rank_makes_a_mistake, what, at, timeout=20)
