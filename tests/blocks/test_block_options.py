"""Options of blocks: meaningless ones are errors, numpy's numbers are numbers, and overrides."""

import copy
import inspect
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import manyhands as mh
from helpers.bmuf import fairseq_bmuf
from helpers.ranks import on_ranks
from manyhands.blocks import Outer
from manyhands.blocks._methods import BlockOptions, CommonOptions


def inner(optim=SGD):
    return optim([nn.Parameter(torch.ones(3))], lr=0.1)


METHODS = [mh.LocalSGD, mh.DiLoCo, mh.SlowMo, mh.BMUF]


def test_the_options_that_are_passed_on_are_those_of_blocks():
    options = inspect.get_annotations(mh.Blocks.__init__)
    own = {"optimizer", "outer", "every", "return"}
    assert inspect.get_annotations(BlockOptions).keys() == options.keys() - own
    assert CommonOptions.__annotations__.items() < BlockOptions.__annotations__.items()
    for name, kind in BlockOptions.__annotations__.items():
        assert kind.__forward_arg__ == options[name]


@pytest.mark.parametrize("method", METHODS)
def test_a_misspelled_option_is_named(method):
    with pytest.raises(TypeError, match=r"has no argument evry\. Is every meant"):
        method(inner(), evry=3)


NOT_COUNTS = [2.5, 2.0, math.nan, math.inf, -1, "3", None, True, np.float32(2), np.bool_(True), 1j]
NOT_NUMBERS = [math.nan, math.inf, -math.inf, -0.5, "1", None, True, np.float64("nan"), 1j]
NOT_FLAGS = ["False", 2, None, math.nan, 0.5]

COUNTS = {
    "every": lambda v: mh.LocalSGD(inner(), every=v),
    "overlap": lambda v: mh.LocalSGD(inner(), overlap=v),
    "fragments": lambda v: mh.LocalSGD(inner(), fragments=v),
    "warmup": lambda v: mh.LocalSGD(inner(), warmup=v),
    "global_sync_iter": lambda v: mh.BMUF(inner(), global_sync_iter=v),
    "warmup_iterations": lambda v: mh.BMUF(inner(), warmup_iterations=v),
    "num_updates": lambda v: fairseq_bmuf(inner()).set_num_updates(v),
    "first": lambda v: mh.Seconds(9.0, first=v),
    "least": lambda v: mh.Seconds(9.0, least=v),
    "number": lambda v: mh.Crew("localhost:1", number=v),
    "expected": lambda v: mh.Crew(expected=v),
}
NUMBERS = {
    "block_lr": lambda v: mh.BMUF(inner(), block_lr=v),
    "block_momentum": lambda v: mh.BMUF(inner(), block_momentum=v),
    "lr": lambda v: mh.DiLoCo(inner(), lr=v),
    "momentum": lambda v: mh.DiLoCo(inner(), momentum=v),
    "slow_lr": lambda v: mh.SlowMo(inner(), slow_lr=v),
    "slow_momentum": lambda v: mh.SlowMo(inner(), slow_momentum=v),
    "inner_lr": lambda v: mh.SlowMo(inner(), inner_lr=v),
    "mix": lambda v: mh.DiLoCo(inner(), mix=v),
    "seconds": lambda v: mh.Seconds(v),
    "stall": lambda v: mh.Crew(stall=v),
    "patience": lambda v: mh.Crew(stall=0.1, patience=v),
}
FLAGS = {
    "local_warmup": lambda v: mh.LocalSGD(inner(), local_warmup=v),
    "anchor_on_host": lambda v: mh.LocalSGD(inner(), anchor_on_host=v),
    "shared_memory": lambda v: mh.LocalSGD(inner(), shared_memory=v),
    "use_nbm": lambda v: mh.BMUF(inner(), use_nbm=v),
    "average_sync": lambda v: mh.BMUF(inner(), average_sync=v),
    "nesterov": lambda v: mh.BMUF(inner(), nesterov=v),
}


@pytest.fixture(autouse=True)
def _secret(monkeypatch):
    monkeypatch.setenv("MANYHANDS_SECRET", "0" * 64)  # without which a crew is not made


@pytest.mark.parametrize("name", COUNTS)
def test_counts(name):
    for value in NOT_COUNTS:
        if value is None and name in ("number", "expected"):
            continue  # from the environment
        message = f"^{name} must be a whole number of at least [01], got"
        with pytest.raises(ValueError, match=message):
            COUNTS[name](value)
    for value in (2, np.int64(2), np.uint8(2), torch.tensor(2)):
        COUNTS[name](value)


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name):
    for value in NOT_NUMBERS:
        if value is not None or name not in ("inner_lr", "mix", "stall", "patience"):
            message = f"^{name} must be a finite number (above|at least) 0"
            with pytest.raises(ValueError, match=message):
                NUMBERS[name](value)
    for value in (0.5, np.float32(0.5), np.float64(0.5)):
        NUMBERS[name](value)


@pytest.mark.parametrize("name", FLAGS)
def test_flags(name):
    for value in NOT_FLAGS:
        with pytest.raises(ValueError, match=f"^{name} must be True or False, got"):
            FLAGS[name](value)
    for value in (False, True, np.bool_(True), 1):
        FLAGS[name](value)


@pytest.mark.parametrize("momentum", [1, 1.0, 1.5])
def test_a_momentum_of_one_would_never_fade(momentum):
    for make in (NUMBERS["block_momentum"], NUMBERS["momentum"], NUMBERS["slow_momentum"]):
        with pytest.raises(ValueError, match=r"below 1, got .* would never fade"):
            make(momentum)


def test_rates_norms_and_states_that_mean_nothing():
    optimizer = fairseq_bmuf(inner())
    for lr in (math.nan, -1.0, math.inf):
        with pytest.raises(ValueError, match=r"^lr must be a finite number at least 0"):
            optimizer.set_lr(lr)
    for norm in (math.nan, -1.0):
        with pytest.raises(ValueError, match=r"^max_norm must be at least 0"):
            optimizer.clip_grad_norm(norm)
    for state in ("keep", "reset"):
        with pytest.raises(ValueError, match=f"average_sync=True .* state='{state}' does not"):
            mh.BMUF(inner(), average_sync=True, state=state)
    mh.BMUF(inner(), average_sync=True, state="average")


# -- options of a saved run ------------------------------------------------------------------------

CHANGES = [
    (mh.BMUF, {}, "block_momentum", 0.6),
    (mh.BMUF, {}, "block_lr", 0.5),
    (mh.BMUF, {}, "use_nbm", True),
    (mh.BMUF, {}, "nesterov", True),
    (mh.BMUF, {}, "global_sync_iter", 8),
    (mh.BMUF, {}, "warmup_iterations", 5),
    (mh.BMUF, {}, "average_sync", True),
    (mh.BMUF, {}, "codec", "int8"),
    (mh.SlowMo, {}, "slow_lr", 0.5),
    (mh.SlowMo, {}, "slow_momentum", 0.3),
    (mh.SlowMo, {}, "inner_lr", 0.2),
    (mh.DiLoCo, {"outer_lr": "lr"}, "outer_lr", 0.5),
    (mh.DiLoCo, {"outer_momentum": "momentum"}, "outer_momentum", 0.5),
    (mh.LocalSGD, {}, "every", 8),
    (mh.LocalSGD, {}, "overlap", 2),
    (mh.LocalSGD, {}, "mix", 0.5),
]


@pytest.mark.parametrize(("method", "arguments", "name", "value"), CHANGES)
def test_options_have_the_names_of_the_class(method, arguments, name, value):
    saved = method(inner(AdamW)).state_dict()
    optimizer = method(inner(AdamW), **{arguments.get(name, name): value})
    called = "state" if name == "average_sync" else name
    with pytest.raises(ValueError, match=f"other options: {called}: saved .*, now "):
        optimizer.load_state_dict(copy.deepcopy(saved))
    saved["blocks"]["options"] = None
    optimizer.load_state_dict(saved)
    assert f"{called}=" in repr(optimizer)


def test_settings_of_an_outer_step_of_ones_own_are_compared():
    class Own(Outer):
        def __init__(self, rate):
            self.rate = rate

        def step(self, anchor, gradient, memories):
            anchor.sub_(gradient, alpha=self.rate)

    saved = mh.Blocks(inner(), Own(0.5)).state_dict()
    optimizer = mh.Blocks(inner(), Own(0.25))
    with pytest.raises(ValueError, match=r"outer\.rate: saved 0.5, now 0.25"):
        optimizer.load_state_dict(saved)
    mh.Blocks(inner(), Own(0.5)).load_state_dict(saved)


def test_a_run_goes_on_under_another_name_of_its_method():
    """DiLoCo is BMUF with Nesterov's momentum; LocalSGD has no outer settings."""
    saved = mh.DiLoCo(
        inner(), lr=0.7, momentum=0.9, every=20, warmup=0, local_warmup=True
    ).state_dict()
    options = {"block_lr": 0.7, "block_momentum": 0.9, "nesterov": True, "global_sync_iter": 20}
    optimizer = mh.BMUF(inner(), warmup_iterations=0, **options)
    optimizer.load_state_dict(saved)


@on_ranks(2, raises=ValueError, match="block_momentum: rank 0: 0.5; rank 1: 0.75")
def test_workers_with_other_options_see_them_by_the_names_of_the_class():
    mh.BMUF(inner(), block_momentum=0.5 + 0.25 * torch.distributed.get_rank())
