"""Runs that change: the scale, the passes, the number of workers between save and load."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import manyhands as mh
from helpers.ranks import run_ranks
from helpers.scaling_oracle import loss_of, make_batches, make_model, take_steps, two_groups
from manyhands import adaptdl


def made(passes=2, **options):
    model = make_model(torch.float64)
    inner = torch.optim.SGD(two_groups(model), lr=0.05, momentum=0.9)
    return model, mh.AdaScale(inner, num_gradients_to_accumulate=passes, **options)


def train(passes, steps, load=None, **options):
    """Steps on however many workers there are; returns the saved state and what it reads."""
    ranked = dist.is_initialized()
    rank, workers = (dist.get_rank(), dist.get_world_size()) if ranked else (0, 1)
    model, optimizer = made(passes, **options)
    wrapped = DistributedDataParallel(model) if ranked else model
    if load is not None:
        model.load_state_dict(load["model"])
        optimizer.load_state_dict(load["optimizer"])
    at_load = [optimizer.scale, optimizer.progress, optimizer.gain()]
    x, y = make_batches(steps, workers * passes, dtype=torch.float64)
    own = slice(rank * passes, (rank + 1) * passes)
    take_steps(wrapped, optimizer, x[:, own], y[:, own])
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    return {"state": state, "at_load": at_load, "progress": optimizer.progress}


SIZES = [(1, 4), (2, 1), (2, 2), (4, 1)]


def on(workers, *args, **kwargs):
    if workers == 1:
        return train(*args, **kwargs)
    results = run_ranks(workers, train, *args, **kwargs)
    assert all(r["progress"] == results[0]["progress"] for r in results)
    return results[0]


@functools.cache
def begun(workers, passes):
    return on(workers, passes, 5)


@pytest.mark.sample(
    "loaded_on0-saved_on0", "loaded_on1-saved_on1", "loaded_on2-saved_on2", "loaded_on3-saved_on3"
)
@pytest.mark.parametrize("saved_on", SIZES)
@pytest.mark.parametrize("loaded_on", SIZES)
def test_a_run_goes_on_with_another_number_of_workers(saved_on, loaded_on, tmp_path):
    first = begun(*saved_on)
    torch.save(first["state"], tmp_path / "state")
    state = torch.load(tmp_path / "state", weights_only=True)
    workers, passes = loaded_on
    second = on(workers, passes, 3, load=state)
    scale, progress, gain = second["at_load"]
    assert scale == workers * passes  # the default, anew
    assert progress == first["progress"]
    assert 1.0 < gain < scale
    assert second["progress"] > progress


@pytest.mark.parametrize("loaded_on", SIZES)
def test_a_scale_that_was_given_keeps_its_proportion_to_the_small_batches(loaded_on):
    state = on(2, 1, 3, scale=6.0)["state"]  # three base batches in each micro-batch
    workers, passes = loaded_on
    scale, _, _ = on(workers, passes, 0, load=state)["at_load"]
    assert scale == 3.0 * workers * passes


def test_a_proportion_that_makes_no_sense_is_an_error_and_changes_nothing():
    state = on(2, 2, 2, scale=2.0)["state"]["optimizer"]
    _, optimizer = made(passes=1)
    before = optimizer.snapshot()
    with pytest.raises(ValueError, match=r"number at least 1, got 0\.5"):
        optimizer.load_state_dict(state)
    assert optimizer.snapshot() == before
    assert not optimizer.state


def test_an_explicit_scale_survives_where_passes_are_counted():
    def run(load=None):
        model = make_model()
        rule = mh.AdaScale()
        adp = adaptdl.AdaptiveDataParallel(
            model, torch.optim.SGD(model.parameters(), lr=0.1), scaling_rule=rule, scale=8.0
        )
        if load is not None:
            rule.load_state_dict(load)
            return rule.scale
        x, y = make_batches(1, 4)
        for a in range(4):
            with adp.no_sync() if a < 3 else torch.enable_grad():
                loss_of(adp, x[0, a], y[0, a]).backward()
        rule.step()
        return rule.state_dict()

    assert run(load=run()) == 8.0


def test_adamscale_goes_back_to_before_its_first_step():
    model = make_model()
    optimizer = mh.AdamScale(torch.optim.Adam(model.parameters()), num_gradients_to_accumulate=2)
    state = copy.deepcopy(optimizer.state_dict())
    x, y = make_batches(8, 2)
    take_steps(model, optimizer, x, y)
    assert optimizer.noise.norm_kind == "preconditioned"
    optimizer.zero_grad()
    optimizer.load_state_dict(state)
    take_steps(model, optimizer, x[:1], y[:1])
    assert optimizer.noise.norm_kind == "plain"


def test_a_scale_can_be_set_after_loading():
    _, optimizer = made()
    optimizer.load_state_dict(train(2, 3, scale=6.0)["state"]["optimizer"])
    assert optimizer.scale == 6.0
    optimizer.set_scale(2.0)
    assert optimizer.scale == 2.0


def test_loading_leaves_the_callers_dict_alone():
    state = train(2, 3)["state"]["optimizer"]
    before = copy.deepcopy(state)
    model, optimizer = made()
    optimizer.load_state_dict(state)
    take_steps(model, optimizer, *make_batches(1, 2, dtype=torch.float64))
    assert state["manyhands"] == before["manyhands"]
    assert state["param_groups"] == before["param_groups"]


def test_a_state_dict_that_is_kept_stays_as_it_was():
    model, optimizer = made(passes=1, scale=2.0)
    x, y = make_batches(3, 1, dtype=torch.float64)
    take_steps(model, optimizer, x[:2], y[:2])
    kept = optimizer.state_dict()["manyhands"]
    before = copy.deepcopy(kept)
    take_steps(model, optimizer, x[2:], y[2:])
    assert all(map(torch.equal, kept["previous"], before["previous"]))
    assert kept["average"] == before["average"]


def test_a_plain_optimizer_takes_our_state_dict():
    """So that a run can be taken back out of the wrapper."""
    state = train(2, 3)["state"]["optimizer"]
    plain = torch.optim.SGD(two_groups(make_model(torch.float64)), lr=0.05, momentum=0.9)
    plain.load_state_dict(state)
    assert len(plain.state) == 4


def test_the_gain_is_right_at_once_after_a_change_of_scale():
    model, optimizer = made()
    take_steps(model, optimizer, *make_batches(4, 2, dtype=torch.float64))
    sqr, var = optimizer.noise.sqr_of(), optimizer.noise.var_of()
    for update_estimate in (True, False):
        optimizer.set_scale(4.0, update_estimate=update_estimate)
        assert optimizer.gain() == pytest.approx((var + sqr) / (var / 4.0 + sqr))
    optimizer.set_scale(1.0)
    assert optimizer.gain() == 1.0


def test_the_passes_can_change_and_the_default_scale_and_smoothing_follow():
    optimizer = mh.AdaScale(torch.optim.SGD(make_model().parameters(), lr=0.1))
    assert (optimizer.scale, optimizer.smoothing) == (1.0, 0.999)
    optimizer.set_num_gradients_to_accumulate(4)
    assert (optimizer.scale, optimizer.smoothing) == (4.0, 0.996)
    optimizer.set_num_gradients_to_accumulate(2000)
    assert optimizer.smoothing == 0.0
    optimizer.set_num_gradients_to_accumulate(8, update_smoothing=False)
    assert (optimizer.scale, optimizer.smoothing) == (8.0, 0.0)
    optimizer.set_scale(3.0)
    optimizer.set_num_gradients_to_accumulate(2)
    assert optimizer.scale == 3.0  # it was given


def test_progress_can_be_set():
    optimizer = mh.AdaScale(torch.optim.SGD(make_model().parameters(), lr=0.1))
    optimizer.set_progress(120.5)
    assert optimizer.progress == 120.5
    with pytest.raises(ValueError, match="progress must be a finite number"):
        optimizer.set_progress(-1.0)


# -- options set in this run, and options in the state dict ------------------------------------


def rule_after(steps, load=None, **options):
    model = make_model(torch.float64)
    inner = torch.optim.Adam(model.parameters(), lr=0.01)
    rule = mh.AdamScale(inner, num_gradients_to_accumulate=2, **options)
    if load is not None:
        rule.load_state_dict(load)
    take_steps(model, rule, *make_batches(steps, 2, dtype=torch.float64))
    return rule


def test_a_scale_that_was_set_before_loading_is_explicit():
    state = copy.deepcopy(rule_after(2).state_dict())
    rule = rule_after(0)
    rule.set_scale(6.0)
    rule.load_state_dict(state)
    assert rule.scale == 6.0
    rule = rule_after(0)
    rule.set_scale_per_pass(5.0)
    rule.load_state_dict(state)
    rule.set_num_gradients_to_accumulate(3)
    assert rule.scale == 15.0


@pytest.mark.parametrize(("name", "said"), [("scale", 12.0), ("smoothing", 0.5)])
def test_arguments_win_over_the_state_dict_which_wins_over_defaults(name, said):
    state = copy.deepcopy(rule_after(8, **{name: said}).state_dict())
    assert getattr(rule_after(0, load=state), name) == said
    again = copy.deepcopy(rule_after(1, load=state).state_dict())
    assert getattr(rule_after(0, load=again), name) == said
    assert getattr(rule_after(0, load=state, **{name: 0.75 * said}), name) == 0.75 * said


def test_a_loaded_average_stays_of_its_kind():
    rule = rule_after(12, smoothing=0.75)
    state = copy.deepcopy(rule.state_dict())
    papers = rule_after(0, load=state, debias_ewma=False)
    assert papers.noise.raw_var == rule.noise.raw_var
    assert papers.state_dict()["manyhands"]["average"] == state["manyhands"]["average"]
