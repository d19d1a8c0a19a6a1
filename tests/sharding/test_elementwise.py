"""Which optimizers allow that parameters are cut anywhere."""

import pytest
import torch
from torch import optim

from helpers.sharding_oracle import Lamb
from manyhands._optimizers.optimizers import choose_layout, may_be_cut

pytestmark = pytest.mark.quick

BY_ELEMENT = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax),
    *(optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD),
)


class SignSGD(optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign(), alpha=group["lr"])


class NormalisedTogether(SignSGD):
    """The step has a length of 1 over all parameters."""

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        length = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            p.sub_(p.grad / length)


class MyAdamW(optim.AdamW):
    """A subclass that changes nothing."""


class Centralised(optim.SGD):
    """Gradient centralisation: the mean over a row is taken off."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad.dim() > 1:
                    p.grad.sub_(p.grad.mean(dim=1, keepdim=True))
        return super().step(closure)


class SometimesCentralised(SignSGD):
    """Looks at whole tensors with an option only."""

    def __init__(self, params, lr=0.1, mean=False):
        super().__init__(params, lr)
        for group in self.param_groups:
            group["mean"] = mean

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if group["mean"] and p.grad is not None:
                    p.grad.sub_(p.grad.mean())
        return super().step(closure)


class OnlyMatrices(SignSGD):
    def step(self, closure=None):
        assert all(p.shape == (3, 3) for group in self.param_groups for p in group["params"])
        super().step(closure)


@pytest.mark.parametrize("kind", BY_ELEMENT)
def test_torchs_optimizers_that_treat_elements_alone(kind):
    assert choose_layout(kind, None, [{}]) == "even"


@pytest.mark.parametrize("kind", BY_ELEMENT)
def test_what_is_known_of_torchs_optimizers_is_what_a_trial_says(kind):
    renamed = type(f"My{kind.__name__}", (kind,), {"__module__": "mine"})
    assert may_be_cut(renamed, [{}])


@pytest.mark.parametrize("kind", [optim.Muon, optim.Adafactor, optim.SparseAdam, Lamb])
def test_optimizers_that_need_whole_tensors(kind):
    assert choose_layout(kind, None, [{}]) == "whole"
    assert not may_be_cut(kind, [{}])
    with pytest.raises(ValueError, match=f"{kind.__name__} needs whole parameters"):
        choose_layout(kind, "even", [{}])


def test_ones_own_optimizer_keeps_whole_parameters_and_is_tried_if_they_are_to_be_cut():
    for kind, options in ((SignSGD, {"lr": 0.5}), (MyAdamW, {"lr": 0.1, "weight_decay": 0.1})):
        assert choose_layout(kind, None, [options]) == "whole"
        assert choose_layout(kind, "even", [options]) == "even"
    with pytest.raises(ValueError, match="Centralised needs whole parameters"):
        choose_layout(Centralised, "even", [{"lr": 0.1}])


def test_a_learning_rate_of_zero_hides_nothing():
    assert not may_be_cut(Lamb, [{"lr": 0.0}])


def test_the_options_of_every_group_are_tried():
    plain, decayed = {"lr": 0.1}, {"lr": 0.1, "mean": True}
    assert may_be_cut(SometimesCentralised, [plain])
    assert not may_be_cut(SometimesCentralised, [plain, decayed])


def test_optimizers_with_8_bit_state_keep_whole_parameters():
    quantized = type("AdamW8bit", (SignSGD,), {"__module__": "torchao.optim.adam"})
    assert not may_be_cut(quantized, [{}])


def test_an_optimizer_that_takes_no_toys_leaves_parameters_whole():
    assert choose_layout(OnlyMatrices, None, [{}]) == "whole"
    assert not may_be_cut(OnlyMatrices, [{}])


@pytest.mark.parametrize("kind", [optim.LBFGS, NormalisedTogether])
def test_an_optimizer_that_couples_parameters_is_an_error(kind):
    with pytest.raises(ValueError, match=f"{kind.__name__} combines all parameters in a step"):
        choose_layout(kind, None, [{}])


def test_the_trial_leaves_the_random_numbers_alone():
    before = torch.get_rng_state()
    choose_layout(Centralised, None, [{"lr": 0.1}])
    assert torch.equal(torch.get_rng_state(), before)
