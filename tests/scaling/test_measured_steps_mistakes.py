"""`measure_every=k`: where every step is measured after all, and mistakes in the steps between."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import manyhands as mh
from helpers.measured_steps import (
    SETTLED,
    SMOOTHING,
    STEPS,
    K,
    adascale,
    is_measured,
    settle_soon,
    train,
)
from helpers.ranks import RanksFailed, on_ranks, raises_on_ranks, run_ranks
from helpers.scaling_oracle import loss_of, make_batches, make_model
from manyhands import adaptdl
from manyhands._ranks.stop_notice import stop_notice
from manyhands.errors import RanksDisagree
from manyhands.scaling._payload import RankReport


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    settle_soon(monkeypatch)


# -- where every step is measured ---------------------------------------------------------------


def every_step_measured(what):
    model = make_model()
    options = {"smoothing": SMOOTHING, "measure_every": K, "num_gradients_to_accumulate": 2}
    passes = 2
    if what == "one gradient":
        options["num_gradients_to_accumulate"] = passes = 1
        options["scale"] = 2.0
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    if what == "AdaptiveDataParallel":
        optimizer = mh.AdaScale(smoothing=SMOOTHING)
        model = adaptdl.AdaptiveDataParallel(model, inner, scaling_rule=optimizer)
    else:
        optimizer = mh.AdaScale(inner, **options)
    ramp = mh.Ramp(optimizer, max_scale=2.0) if what == "Ramp" else None
    idle = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        passes = passes if ramp is None else ramp.passes
        for a in range(passes):
            alone = what == "AdaptiveDataParallel" and a == 0
            with model.no_sync() if alone else contextlib.nullcontext():
                (model(torch.randn(4, 3)).square().mean() / passes).backward()
        optimizer.step()
        idle.append(optimizer._core.measurement.hooks.idle)
    return any(idle)


@pytest.mark.parametrize("what", ["one gradient", "AdaptiveDataParallel", "Ramp"])
def test_where_the_numbers_of_each_step_are_needed_every_step_is_measured(what):
    assert every_step_measured("nothing")
    assert not every_step_measured(what)


@on_ranks(2)
def test_a_ramp_that_comes_later_measures_every_step_from_its_first_on():
    idle, ramp = [], None
    for _, optimizer in train("AdaScale", 1):
        idle.append(optimizer._core.measurement.hooks.idle)
        if len(idle) == SETTLED + 2:
            ramp = mh.Ramp(optimizer, max_scale=2.0)
    expected = [not is_measured(step) for step in range(STEPS)]
    assert idle == expected[: SETTLED + 3] + [False] * (STEPS - SETTLED - 3)
    assert ramp._steps == STEPS - SETTLED - 2


class Listener:
    """An observer that notes how many reports it is given."""

    def __init__(self):
        self.heard = []

    def report(self):
        return RankReport()

    def after_step(self, reports):
        self.heard.append(len(reports))


@on_ranks(2)
def test_an_observer_is_given_no_reports_of_an_earlier_step():
    listener = Listener()
    for _, optimizer in train("AdaScale", 1, steps=SETTLED + 5):
        if optimizer.snapshot()["step"] == SETTLED + 2:
            optimizer.port.observer = listener
    assert listener.heard == [2, 2, 2]


@on_ranks(2)
def test_a_stop_notice_is_passed_on_in_the_next_step_measured_or_not():
    assert not is_measured(SETTLED + 2)
    agreed = []
    for _, optimizer in train("AdaScale", 1):
        agreed.append(optimizer.stop_agreed())
        if len(agreed) == SETTLED + 2 and dist.get_rank() == 1:
            stop_notice.give("SIGTERM")
    assert agreed == [False] * (SETTLED + 2) + [True] * (STEPS - SETTLED - 2)


# -- mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [0, 2.5, True])
def test_a_number_of_steps_that_makes_no_sense(every):
    with pytest.raises(ValueError, match="measure_every must be a whole number of at least 1"):
        mh.AdaScale(torch.optim.SGD(make_model().parameters(), lr=0.1), measure_every=every)


@on_ranks(2, raises=RanksDisagree, match="ranks have different measure_every")
def test_ranks_must_measure_equally_often():
    model = make_model()
    mh.AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), measure_every=dist.get_rank() + 2)


@on_ranks(2, raises=RanksDisagree, match="Load the state dict on every worker", timeout=20)
def test_a_state_that_one_rank_has_loaded_is_an_error_in_the_first_step():
    *_, (model, optimizer) = train("AdaScale", 1, steps=SETTLED + 2)
    state = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    for _ in train("AdaScale", 1, load=None if dist.get_rank() else state):
        pass


@pytest.mark.parametrize("workers", [1, 2])
@on_ranks("workers", raises=RuntimeError, match="without a backward", timeout=20)
def test_a_step_without_a_backward(workers):
    *_, (_, optimizer) = train("AdaScale", 3 - workers, steps=SETTLED + 2)
    optimizer.step()


@pytest.mark.parametrize("step", [SETTLED + 1, SETTLED + 2, SETTLED + 3])
def test_one_worker_with_too_few_passes_gets_the_error_that_it_gets_without_the_option(step):
    *_, (model, optimizer) = train("AdaScale", 2, steps=step)
    optimizer.zero_grad()
    model(torch.randn(4, 3, dtype=torch.float64)).sum().backward()
    with pytest.raises(RuntimeError, match=r"after 1 of 2 backward passes.*pass an Accumulation"):
        optimizer.step()


def one_rank_makes_a_mistake(what, at):
    """Train under DDP; rank 1 does something else at step `at`."""
    rank = dist.get_rank()
    model = make_model()
    wrapped = DDP(model)
    passes = 2 if what in ("a pass too few", "passes") else 1
    optimizer = adascale(model, passes)
    x, y = make_batches(STEPS, 4)
    for step in range(STEPS):
        try:
            wrong = rank == 1 and step == at
            declared = passes
            if wrong and what == "a state":
                entry = optimizer.scaling_state_dict()
                optimizer.load_scaling_state_dict({**entry, "progress": 7.0, "schedule": [0, 0]})
            elif wrong and what == "a Ramp":
                mh.Ramp(optimizer, max_scale=2.0)
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
        except (RuntimeError, ValueError) as error:
            raise type(error)(f"at step {step}: {error}") from error


@pytest.mark.sample(
    "a step left out-statistics, progress or factors-10",
    "a state-Load the state dict on every worker-10",
    "scale-different scale: rank 0: 2; rank 1: 3-10",
    "scale-different scale: rank 0: 2; rank 1: 3-12",
    "passes-rank 1: set_num_gradients_to_accumulate\\\\(\\\\)-12",
    "a Ramp-Use a Ramp on all workers or on none-12",
)
@pytest.mark.parametrize("at", [SETTLED + 1, SETTLED + 2, SETTLED + 3])
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("a step left out", "statistics, progress or factors"),
        ("a state", "Load the state dict on every worker"),
        ("scale", "different scale: rank 0: 2; rank 1: 3"),
        ("passes", r"rank 1: set_num_gradients_to_accumulate\(\)"),
        ("a Ramp", "Use a Ramp on all workers or on none"),
    ],
)
def test_ranks_that_have_come_to_disagree_all_raise_at_the_next_step(what, message, at):
    # a step that one rank has left out is missed in the next; a Ramp acts from its first step on
    late = {"a step left out": [1], "a Ramp": [1, 2]}.get(what, [0])
    match = rf"at step ({'|'.join(str(at + steps) for steps in late)}): (.|\n)*{message}"
    raises_on_ranks(2, RanksDisagree, one_rank_makes_a_mistake, what, at, match=match, timeout=20)


@pytest.mark.sample(
    "an extra pass-this is backward pass 2 since the last step-10",
    "a pass too few-step\\\\(\\\\) after 1 of 2 backward passes|which is this rank-11",
    "no_sync-no_sync-12",
)
@pytest.mark.parametrize("at", [SETTLED + 1, SETTLED + 2, SETTLED + 3])
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("an extra pass", "this is backward pass 2 since the last step"),
        ("a pass too few", r"step\(\) after 1 of 2 backward passes|which is this rank"),
        ("no_sync", "no_sync"),
    ],
)
def test_a_mistake_that_a_rank_can_see_alone_is_an_error_there_at_once(what, message, at):
    # The other rank waits for it, in DDP or for its numbers, until its process ends.
    with pytest.raises(RanksFailed, match=rf"rank 1 raised:(.|\n)*({message})"):
        run_ranks(2, one_rank_makes_a_mistake, what, at, timeout=20)
