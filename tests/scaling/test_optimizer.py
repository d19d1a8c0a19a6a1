"""The wrapper is a torch.optim.Optimizer, wherever torch takes one."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

import manyhands as mh
from helpers.scaling_oracle import (
    backward,
    loss_of,
    make_batches,
    make_model,
    take_steps,
    two_groups,
)

pytestmark = pytest.mark.quick


def scaled_and_plain_model(**options):
    model = make_model()
    inner = torch.optim.SGD(two_groups(model), lr=0.1, momentum=0.9)
    return model, mh.AdaScale(inner, num_gradients_to_accumulate=2, **options)


SCHEDULERS = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: schedulers.StepLR(o, 2),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda o: schedulers.ConstantLR(o),
    "LinearLR": lambda o: schedulers.LinearLR(o),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=8),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o), schedulers.ExponentialLR(o, 0.9)], [3]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o), schedulers.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0),
    "SWALR": lambda o: SWALR(o, swa_lr=0.02, anneal_epochs=3),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_sets_the_small_batch_rate(name):
    """The rates it sets are those that it sets for the bare optimizer; the factor is on top."""
    model, scaled = scaled_and_plain_model()
    bare = torch.optim.SGD(two_groups(make_model()), lr=0.1, momentum=0.9)
    ours, theirs = SCHEDULERS[name](scaled), SCHEDULERS[name](bare)
    x, y = make_batches(6, 2)
    for step in range(6):
        scaled.zero_grad()
        backward(model, x[step], y[step])
        scaled.step()
        bare.step()
        arguments = (1.0,) if name == "ReduceLROnPlateau" else ()
        ours.step(*arguments)
        theirs.step(*arguments)
        for mine, other in zip(scaled.param_groups, bare.param_groups, strict=True):
            assert mine["lr"] == other["lr"]
            assert mine["momentum"] == other["momentum"]
    assert any(f > 1.0 for f in scaled.factors)


def test_it_is_an_optimizer_whose_groups_state_and_defaults_are_the_inner_ones():
    _, scaled = scaled_and_plain_model()
    assert isinstance(scaled, torch.optim.Optimizer)
    assert scaled.param_groups is scaled.optimizer.param_groups
    assert scaled.state is scaled.optimizer.state
    assert scaled.defaults is scaled.optimizer.defaults
    scaled.optimizer.load_state_dict(scaled.optimizer.state_dict())  # makes new groups
    assert scaled.param_groups is scaled.optimizer.param_groups


def test_hooks_fire_once_a_step_whoever_registers_them():
    from torch.optim import optimizer as module

    model, scaled = scaled_and_plain_model()
    calls = []
    scaled.register_step_pre_hook(lambda *_: calls.append("pre"))
    scaled.register_step_post_hook(lambda *_: calls.append("post"))
    scaled.optimizer.register_step_post_hook(lambda *_: calls.append("inner post"))
    everywhere = module.register_optimizer_step_post_hook(lambda *_: calls.append("global post"))
    scaled.register_state_dict_post_hook(lambda *_: calls.append("state dict"))
    scaled.register_load_state_dict_pre_hook(lambda *_: calls.append("load"))
    x, y = make_batches(1, 2)
    backward(model, x[0], y[0])
    try:
        scaled.step()
    finally:
        everywhere.remove()
    scaled.load_state_dict(scaled.state_dict())
    assert sorted(calls) == ["global post", "inner post", "load", "post", "pre", "state dict"]


def test_closures_are_run_before_the_gain_is_taken_and_their_loss_is_returned():
    model, scaled = scaled_and_plain_model(smoothing=0.0)
    x, y = make_batches(2, 2)
    twin = copy.deepcopy(model)
    by_hand = mh.AdaScale(
        torch.optim.SGD(two_groups(twin), lr=0.1, momentum=0.9),
        num_gradients_to_accumulate=2,
        smoothing=0.0,
    )
    for step in range(2):

        def closure(step=step):
            scaled.zero_grad()
            losses = [loss_of(model, x[step, a], y[step, a]) for a in range(2)]
            for loss in losses:
                (loss / 2).backward()
            return sum(losses).detach()

        loss = scaled.step(closure)
        by_hand.zero_grad()
        backward(twin, x[step], y[step])
        expected = by_hand.step()
        assert expected is None
        assert float(loss) > 0
        assert scaled.factors == by_hand.factors
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p, q)


def test_an_optimizer_that_evaluates_the_closure_often_runs_it_often():
    model = make_model(torch.float64)
    bare = copy.deepcopy(model)
    x, y = make_batches(1, 1, dtype=torch.float64)

    def train(module, optimizer):
        calls = []

        def closure():
            calls.append(1)
            optimizer.zero_grad()
            loss = loss_of(module, x[0, 0], y[0, 0])
            loss.backward()
            return loss

        optimizer.step(closure)
        return len(calls)

    ours = mh.LinearScale(torch.optim.LBFGS(model.parameters(), lr=0.5))
    assert train(model, ours) == train(bare, torch.optim.LBFGS(bare.parameters(), lr=0.5))
    assert all(map(torch.equal, model.parameters(), bare.parameters()))


def test_arguments_of_step_and_zero_grad_are_passed_on():
    class Recorder(torch.optim.SGD):
        def step(self, closure=None, *, note=None):
            self.note = note
            return super().step(closure)

        def zero_grad(self, set_to_none=True, *, why=None):
            self.why = why
            super().zero_grad(set_to_none)

    model = make_model()
    optimizer = mh.AdaScale(Recorder(model.parameters(), lr=0.1), num_gradients_to_accumulate=2)
    x, y = make_batches(1, 2)
    backward(model, x[0], y[0])
    optimizer.step(note="here")
    optimizer.zero_grad(False, why="because")
    assert (optimizer.note, optimizer.why) == ("here", "because")
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_a_learning_rate_in_a_tensor_is_scaled_in_place_and_restored():
    model = make_model()
    rate = torch.tensor(0.1)
    inner = torch.optim.AdamW(model.parameters(), lr=rate)
    optimizer = mh.LinearScale(inner, num_gradients_to_accumulate=2)
    seen = []
    optimizer.register_step_pre_hook(lambda o, *_: seen.append(float(o.param_groups[0]["lr"])))
    take_steps(model, optimizer, *make_batches(1, 2))
    assert seen == [pytest.approx(0.2)]
    assert optimizer.param_groups[0]["lr"] is rate
    assert torch.equal(rate, torch.tensor(0.1))


def test_rates_are_restored_when_the_step_fails():
    class Fails(torch.optim.SGD):
        def step(self, closure=None):
            raise OverflowError("on purpose")

    model = make_model()
    optimizer = mh.LinearScale(Fails(model.parameters(), lr=0.1), num_gradients_to_accumulate=2)
    with pytest.raises(OverflowError):
        take_steps(model, optimizer, *make_batches(1, 2))
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_copy_is_an_error_that_says_what_to_do():
    _, scaled = scaled_and_plain_model()
    with pytest.raises(TypeError, match=r"cannot be copied or pickled. Save state_dict\(\)"):
        copy.deepcopy(scaled)


def test_distributed_checkpoint_takes_the_optimizer_inside():
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    model, scaled = scaled_and_plain_model()
    x, y = make_batches(2, 2)
    take_steps(model, scaled, x[:1], y[:1])
    state = copy.deepcopy(get_optimizer_state_dict(model, scaled.optimizer))
    ours = scaled.scaling_state_dict()
    fresh_model, fresh = scaled_and_plain_model()
    fresh_model.load_state_dict(model.state_dict())
    get_optimizer_state_dict(fresh_model, fresh)  # fills in the empty state with a step at lr 0
    set_optimizer_state_dict(fresh_model, fresh.optimizer, state)
    fresh.load_scaling_state_dict(ours)
    take_steps(model, scaled, x[1:], y[1:])
    take_steps(fresh_model, fresh, x[1:], y[1:])
    assert fresh.progress == scaled.progress
    assert all(map(torch.equal, model.parameters(), fresh_model.parameters()))


def test_repr_shows_the_settings_and_the_inner_optimizer():
    _, scaled = scaled_and_plain_model()
    assert repr(scaled).startswith("AdaScale(scale=2, workers=1, passes=2, smoothing=0.998)\nSGD (")
    assert repr(mh.AdaScale()) == "AdaScale()"


def test_groups_can_be_added():
    model = make_model()
    inner = torch.optim.SGD(model[0].parameters(), lr=0.1)
    optimizer = mh.AdaScale(inner, num_gradients_to_accumulate=2)
    x, y = make_batches(3, 2)
    take_steps(model, optimizer, x[:1], y[:1])
    one = optimizer.noise.raw_var
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.01})
    assert optimizer.noise.raw_var == (*one, 0.0)
    assert optimizer.noise.raw_sqr[1] == 1.0
    take_steps(model, optimizer, x[1:], y[1:])
    assert len(optimizer.factors) == 2
    assert optimizer.gain(1) > 1.0
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)


def test_a_warning_free_life_around_every_optimizer_of_torch():
    """Nothing about the wrapper assumes SGD or Adam."""
    skipped = {"Optimizer", "SparseAdam", "LBFGS", "Muon", "_MultiTensorOptimizer"}
    names = [n for n in dir(torch.optim) if n[0].isupper() and n not in skipped]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in names:
            model = make_model()
            inner = getattr(torch.optim, name)(model.parameters(), lr=0.01)
            optimizer = mh.LinearScale(inner, num_gradients_to_accumulate=2)
            take_steps(model, optimizer, *make_batches(2, 2))
            assert optimizer.snapshot()["step"] == 2


def test_snapshot_is_plain_numbers():
    model, scaled = scaled_and_plain_model()
    take_steps(model, scaled, *make_batches(1, 2))
    snapshot = scaled.snapshot()
    assert set(snapshot) == {
        "step", "progress", "scale", "workers", "passes", "gain", "lr", "factor", "sqr", "var",
        "noise_scale", "skipped", "short", "nonfinite",
    }  # fmt: skip
    for value in snapshot.values():
        for number in value if isinstance(value, list) else [value]:
            assert number is None or type(number) in (int, float)
    assert snapshot["progress"] == snapshot["gain"] == scaled.gain()


def test_noise_that_was_not_measured_is_not_a_number():
    """At scale 1 nothing need be known, and nothing is."""
    model = make_model()
    optimizer = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=0.1))
    take_steps(model, optimizer, *make_batches(2, 1))
    snapshot = optimizer.snapshot()
    assert (snapshot["sqr"], snapshot["var"], snapshot["noise_scale"]) == ([None], [None], [None])
    assert (snapshot["gain"], snapshot["progress"]) == (1.0, 2.0)
    assert not optimizer._core.measurement.previous.grads  # no copy of the gradient is kept


@pytest.mark.parametrize("every", [1.0, 3.0])
def test_a_schedule_driven_by_progress_is_the_same_at_every_scale(every):
    """The rate after a given progress is the plain run's after as many steps."""
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = mh.LinearScale(inner, num_gradients_to_accumulate=4)
    end = 30
    schedule = mh.ProgressScheduler(
        schedulers.CosineAnnealingLR(optimizer, T_max=end / every), optimizer, every=every, end=end
    )
    x, y = make_batches(40, 4)
    steps = 0
    while not schedule.done:
        optimizer.zero_grad()
        backward(model, x[steps], y[steps])
        optimizer.step()
        schedule.step()
        steps += 1
        plain = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        plain_schedule = schedulers.CosineAnnealingLR(plain, T_max=end / every)
        plain.step()
        for _ in range(int(min(optimizer.progress, end) / every + 1e-9)):
            plain_schedule.step()
        assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
        saved = schedule.state_dict()
    assert steps < end
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-12)
    schedule.load_state_dict(saved)


def test_a_schedule_driven_by_progress_passes_for_one_of_torchs():
    model = make_model()
    inner = torch.optim.SGD(two_groups(model), lr=0.1)
    optimizer = mh.LinearScale(inner, num_gradients_to_accumulate=2)
    cosine = schedulers.CosineAnnealingLR(inner, T_max=10)
    schedule = mh.ProgressScheduler(cosine, optimizer)
    assert isinstance(schedule, schedulers.LRScheduler)
    assert schedule.optimizer is optimizer
    assert (schedule.last_epoch, schedule.base_lrs) == (0, [0.1, 0.1])
    take_steps(model, optimizer, *make_batches(1, 2))
    optimizer.set_progress(2.5)
    for _ in range(3):  # trainers call it for each process; it follows the progress
        schedule.step()
    assert schedule.last_epoch == 2
    assert schedule.get_last_lr() == [group["lr"] for group in inner.param_groups] != [0.1, 0.1]
    again = mh.ProgressScheduler(schedulers.CosineAnnealingLR(inner, T_max=10), optimizer)
    again.load_state_dict(schedule.state_dict())
    assert (again.last_epoch, again.get_last_lr()) == (2, schedule.get_last_lr())
    plain = mh.ProgressScheduler(schedulers.CosineAnnealingLR(inner, T_max=10), optimizer)
    plain.load_state_dict(cosine.state_dict())  # of a run that did not count progress
    assert plain.state_dict() == schedule.state_dict()


@pytest.mark.parametrize("name", sorted(set(SCHEDULERS) - {"ReduceLROnPlateau"}))
def test_a_run_saved_before_it_was_wrapped_continues_bit_for_bit(name):
    """As docs/checkpoints.md says: load both states, then wrap, then schedule what is left."""

    def begin():
        model = make_model()
        optimizer = torch.optim.SGD(two_groups(model), lr=0.1, momentum=0.9)
        return model, optimizer, SCHEDULERS[name](optimizer)

    def train(model, optimizer, schedule, batches):
        for x, y in batches:
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
            schedule.step()

    x, y = make_batches(7, 1)
    batches = list(zip(x[:, 0], y[:, 0], strict=True))
    old = begin()
    train(*old, batches[:3])
    states = copy.deepcopy([part.state_dict() for part in old])
    train(*old, batches[3:])

    model, inner, schedule = begin()
    for part, state in zip((model, inner, schedule), states, strict=True):
        part.load_state_dict(state)
    optimizer = mh.AdaScale(inner)
    schedule = mh.ProgressScheduler(schedule, optimizer, end=7 - 3)
    train(model, optimizer, schedule, batches[3:])
    assert schedule.done
    assert inner.param_groups[0]["lr"] == old[1].param_groups[0]["lr"]
    assert all(map(torch.equal, model.parameters(), old[0].parameters()))


def test_a_schedule_driven_by_progress_finds_the_rule_and_needs_one():
    inner = torch.optim.SGD(make_model().parameters(), lr=0.1)
    cosine = schedulers.CosineAnnealingLR(inner, T_max=10)
    for optimizer in (inner, inner.param_groups):
        with pytest.raises(TypeError, match="requires an optimizer with a scaling rule"):
            mh.ProgressScheduler(cosine, optimizer)
    rule = mh.AdaScale(inner)
    rule.set_progress(7.0)
    schedule = mh.ProgressScheduler(cosine, inner, end=7)  # as AdaptiveDataParallel leaves it
    assert schedule.done


def test_one_cycle_ends_at_the_end_of_progress_without_an_error():
    model = make_model()
    optimizer = mh.LinearScale(
        torch.optim.SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=4
    )
    schedule = mh.ProgressScheduler(
        schedulers.OneCycleLR(optimizer, 0.1, total_steps=10), optimizer, end=9
    )
    x, y = make_batches(20, 4)
    for step in range(20):
        optimizer.zero_grad()
        backward(model, x[step], y[step])
        optimizer.step()
        schedule.step()
    assert schedule.done


def test_a_group_without_any_gradient_steps_without_a_floor():
    quiet = nn.Linear(3, 2)
    optimizer = mh.AdaScale(
        torch.optim.SGD(quiet.parameters(), lr=0.1), num_gradients_to_accumulate=2, var_floor=0.0
    )
    for _ in range(2):
        (0.0 * sum(p.sum() for p in quiet.parameters())).backward()
    optimizer.step()
    assert (optimizer.factors, optimizer.gain(), optimizer.progress) == ((1.0,), 1.0, 1.0)
