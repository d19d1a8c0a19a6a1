"""Which optimizers allow that parameters are cut anywhere."""

import pytest
import torch
from torch import optim

from manyhands.sharding._elementwise import works_by_element
from sharding_oracle import Lamb

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


class OnlyMatrices(SignSGD):
    def step(self, closure=None):
        assert all(p.shape == (3, 3) for group in self.param_groups for p in group["params"])
        super().step(closure)


@pytest.mark.parametrize("kind", BY_ELEMENT)
def test_torchs_optimizers_that_treat_elements_alone(kind):
    assert works_by_element(kind, {}) is True


@pytest.mark.parametrize("kind", BY_ELEMENT)
def test_what_is_known_of_torchs_optimizers_is_what_a_trial_says(kind):
    renamed = type(f"My{kind.__name__}", (kind,), {"__module__": "mine"})
    assert works_by_element(renamed, {}) is True


@pytest.mark.parametrize("kind", [optim.Muon, optim.Adafactor, optim.SparseAdam, Lamb])
def test_optimizers_that_need_whole_tensors(kind):
    assert works_by_element(kind, {}) is False


def test_ones_own_optimizer_is_tried():
    assert works_by_element(SignSGD, {"lr": 0.5}) is True
    assert works_by_element(MyAdamW, {"lr": 0.1, "weight_decay": 0.1}) is True
    assert works_by_element(Centralised, {"lr": 0.1}) is False


def test_an_optimizer_that_takes_no_toys_leaves_parameters_whole():
    assert works_by_element(OnlyMatrices, {}) is False


@pytest.mark.parametrize("kind", [optim.LBFGS, NormalisedTogether])
def test_an_optimizer_that_couples_parameters_is_an_error(kind):
    with pytest.raises(ValueError, match=f"{kind.__name__} looks at all parameters together"):
        works_by_element(kind, {})


def test_the_trial_leaves_the_random_numbers_alone():
    before = torch.get_rng_state()
    works_by_element(Centralised, {"lr": 0.1})
    assert torch.equal(torch.get_rng_state(), before)
