"""Our optimizers inside of the classes that trainers put around optimizers.

The proxies here are those of Lightning, Fabric and others, reduced to what matters: a class derived
from the optimizer's, which keeps the optimizer in an attribute of its own. tests/test_lightning.py
has the packages themselves.
"""

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import manyhands as mh


class KeepsIt:
    """Lightning 2, Fabric 2: an attribute, and what is missing is looked for there."""

    def __init__(self, optimizer):
        self._optimizer = optimizer
        self._strategy = None
        self.__class__ = type("Proxied", (type(self), type(optimizer)), {})

    @property
    def optimizer(self):
        return self._optimizer

    def step(self, closure=None, **kwargs):
        return self._optimizer.step(*([] if closure is None else [closure]), **kwargs)

    def __getattr__(self, name):
        return getattr(self._optimizer, name)


class CopiesIt(KeepsIt):
    """Lightning 1, Fabric 2.0: the optimizer's attributes are copied as they are at that time."""

    def __init__(self, optimizer):
        self.__dict__ = {k: v for k, v in vars(optimizer).items() if k not in ("step", "__del__")}
        super().__init__(optimizer)

    def __getattr__(self, name):
        raise AttributeError(name)


def subclassed(optimizer):
    """A subclass made on the spot, whose attribute has the public name."""

    class Proxy(type(optimizer)):
        def __init__(self, inner):
            self.__dict__.update(vars(inner))
            self.optimizer = inner

        def step(self, closure=None):
            return self.optimizer.step(closure)

    return Proxy(optimizer)


PROXIES = {"keeps": KeepsIt, "copies": CopiesIt, "subclass": subclassed}
WRAPPERS = {
    "AdaScale": lambda params: mh.AdaScale(SGD(params, lr=0.1), num_gradients_to_accumulate=2),
    "AdamScale": lambda params: mh.AdamScale(AdamW(params), num_gradients_to_accumulate=2),
    "LinearScale": lambda params: mh.LinearScale(SGD(params, lr=0.1), scale=2.0),
    "SqrtScale": lambda params: mh.SqrtScale(AdamW(params), scale=2.0, rescale_adam=True),
    "OSS": lambda params: mh.OSS(params, optim=AdamW),
    "AdaScale of OSS": lambda params: mh.AdaScale(mh.OSS(params, optim=SGD, lr=0.1), scale=1.0),
    "Blocks": lambda params: mh.Blocks(SGD(params, lr=0.1), every=2),
    "LocalSGD": lambda params: mh.LocalSGD(SGD(params, lr=0.1), every=2),
    "DiLoCo": lambda params: mh.DiLoCo(AdamW(params), every=2),
    "SlowMo": lambda params: mh.SlowMo(SGD(params, lr=0.1), every=2),
    "BMUF": lambda params: mh.BMUF(SGD(params, lr=0.1), global_sync_iter=2, warmup_iterations=1),
    "AdaScale of DiLoCo": lambda params: mh.AdaScale(mh.DiLoCo(SGD(params, lr=0.1), every=2)),
}


def train(make, proxy=None, steps=3):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    made = make(model.parameters())
    used = made if proxy is None else proxy(made)
    passes = getattr(made, "passes", 1)
    for _ in range(steps):
        used.zero_grad()
        for _ in range(passes):
            (model(torch.randn(8, 4)).square().mean() / passes).backward()
        used.step()
    return [param.detach() for param in model.parameters()], made, used


@pytest.mark.parametrize("proxy", PROXIES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_proxy_changes_no_number(wrapper, proxy):
    expected, _, _ = train(WRAPPERS[wrapper])
    params, made, used = train(WRAPPERS[wrapper], PROXIES[proxy])
    torch.testing.assert_close(params, expected, rtol=0, atol=0)
    assert used.optimizer is made
    assert used.param_groups is made.param_groups
