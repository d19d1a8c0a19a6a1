"""Our optimizers inside of the classes that trainers put around optimizers.

The proxies here are those of Lightning, Fabric and others, reduced to what matters: a class derived
from the optimizer's, which keeps the optimizer in an attribute of its own. tests/test_lightning.py
has the packages themselves.
"""

import re

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import manyhands as mh
from helpers.ranks import run_ranks
from manyhands.scaling import ScalingRuleBase


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
    used.zero_grad()
    return [param.detach() for param in model.parameters()], made, used


each_wrapper_once = pytest.mark.sample(
    "AdaScale-keeps",
    "AdamScale-keeps",
    "LinearScale-keeps",
    "SqrtScale-copies",
    "OSS-copies",
    "AdaScale of OSS-copies",
    "Blocks-copies",
    "LocalSGD-copies",
    "DiLoCo-copies",
    "SlowMo-subclass",
    "BMUF-subclass",
    "AdaScale of DiLoCo-subclass",
)


@each_wrapper_once
@pytest.mark.parametrize("proxy", PROXIES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_proxy_changes_no_number(wrapper, proxy):
    expected, _, _ = train(WRAPPERS[wrapper])
    params, made, used = train(WRAPPERS[wrapper], PROXIES[proxy])
    torch.testing.assert_close(params, expected, rtol=0, atol=0)
    assert used.optimizer is made
    assert used.param_groups is made.param_groups


def backward(params, passes):
    for param in params:
        param.grad = None
    for _ in range(passes):
        sum(param.square().sum() for param in params).backward()


@pytest.mark.parametrize("proxy", PROXIES)
def test_what_is_set_on_a_proxy_is_set_on_the_optimizer(proxy):
    _, rule, used = train(WRAPPERS["AdaScale"], PROXIES[proxy])
    used.set_progress(7.0)
    used.set_scale(3.0)
    assert (rule.progress, rule.scale, used.progress) == (7.0, 3.0, 7.0)
    backward(rule.param_groups[0]["params"], 2)
    rule.step()
    assert used.progress == rule.progress > 7.0
    saved = rule.state_dict()
    rule.set_progress(0.0)
    used.load_state_dict(saved)
    assert rule.progress == used.progress > 7.0
    used.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert len(rule.factors) == len(used.factors) == 2


def without_clock(state):
    state.get("blocks", {}).pop("clock", None)  # it goes on from one call to the next
    return str(state)


@each_wrapper_once
@pytest.mark.parametrize("proxy", PROXIES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_proxy_knows_and_saves_what_the_optimizer_does(wrapper, proxy):
    _, made, used = train(WRAPPERS[wrapper], PROXIES[proxy])
    assert without_clock(used.state_dict()) == without_clock(made.state_dict())
    if hasattr(made, "snapshot"):
        assert used.snapshot() == made.snapshot()


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_no_attribute_of_a_wrapper_is_bound_anew_while_it_is_used(wrapper):
    """Else a proxy has an old copy: what changes is inside of an object."""
    _, made, _ = train(WRAPPERS[wrapper], steps=1)
    params = made.param_groups[0]["params"]
    before = {name: id(value) for name, value in vars(made).items()}
    for _ in range(3):
        backward(params, getattr(made, "passes", 1))
        made.step()
        made.zero_grad()
    if getattr(made, "passes", 1) == 1:
        made.step(lambda: backward(params, 1))
    made.load_state_dict(made.state_dict())
    made.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    if isinstance(made, ScalingRuleBase):
        made.set_progress(2.0)
        made.set_scale(1.0)
        made.set_num_gradients_to_accumulate(1)
        made.gain()
        made.unhook()
    if isinstance(made, mh.OSS):
        made.consolidate_state_dict()
    if isinstance(made, mh.Blocks):
        made.synchronize()
    after = {name: id(value) for name, value in vars(made).items()}
    assert {name for name in after if after[name] != before.get(name)} <= {"_opt_called"}


@pytest.mark.parametrize("proxy", PROXIES)
def test_a_sharded_module_takes_a_proxy_for_its_optimizer(proxy):
    def trained(proxy):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        used = proxy(mh.OSS(model.parameters(), optim=AdamW))
        model = mh.ShardedDataParallel(model, used)
        for x in torch.randn(2, 3, 8, 4)[torch.distributed.get_rank()]:
            used.zero_grad()
            model(x).square().mean().backward()
            used.step()
        return [param.detach() for param in model.parameters()]

    def both():
        return trained(PROXIES[proxy]), trained(lambda optimizer: optimizer)

    for ran, expected in run_ranks(2, both):
        torch.testing.assert_close(ran, expected, rtol=0, atol=0)


@pytest.mark.parametrize("proxy", PROXIES)
def test_a_checkpoint_takes_a_proxy_for_its_optimizer(proxy, tmp_path):
    def model_of(rule):
        return nn.ParameterList(rule.param_groups[0]["params"])

    _, rule, used = train(WRAPPERS["AdamScale"], PROXIES[proxy])
    mh.save(tmp_path / "saved", model=model_of(rule), optimizer=used)
    _, other, other_used = train(WRAPPERS["AdamScale"], PROXIES[proxy], steps=1)
    mh.load(tmp_path / "saved", model=model_of(other), optimizer=other_used)
    assert other.progress == rule.progress
    assert str(other.state_dict()) == str(rule.state_dict())


OURS = [
    thing
    for thing in map(mh.__dict__.get, mh.__all__)
    if isinstance(thing, type)
    and issubclass(thing, Optimizer | nn.Module | torch.amp.GradScaler | mh.ProgressScheduler)
]
# What Lightning and Fabric 2.6, Accelerate 1.15, transformers 5.23 and torch 2.13 keep on or set on
# an optimizer, a module, a scaler or a scheduler, or on what they put around one.
THEIRS = set(
    re.findall(
        r"\w+",
        """
    _optimizer _strategy _callbacks _on_before_step _on_after_step _original_module
    _forward_module _forward_methods _fabric_module_initialized _fabric _fabric_optimizers
    _dtype _device _trainer scaler accelerator_state gradient_state device_placement
    _is_overflow _accelerate_step_called _optimizer_original_step_method
    _optimizer_patched_step_method step_was_skipped optimizers split_batches
    step_with_optimizer _original_forward _hf_hook _old_forward _is_hf_initialized
    _is_stateful _orig_mod dynamo_ctx _opt_called _wrapped_by_lr_sched _step_count
    _per_optimizer_states grad_scale found_inf original_optimizer _averager averager
    """,
    )
)


@pytest.mark.parametrize("ours", OURS, ids=lambda ours: ours.__name__)
def test_no_name_of_ours_is_one_that_a_trainer_uses(ours):
    bases = [base for base in ours.__mro__ if base.__module__.split(".")[0] == "manyhands"]
    names = {name: value for base in bases for name, value in vars(base).items()}
    assert names and not THEIRS & set(names)
    properties = [name for name, value in names.items() if isinstance(value, property)]
    assert not [name for name in properties if name.startswith("_")]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_no_attribute_of_ours_is_one_that_a_trainer_uses(wrapper):
    _, made, _ = train(WRAPPERS[wrapper], steps=0)
    assert not THEIRS & set(vars(made))


def test_state_and_defaults_can_be_assigned_to():
    """As Accelerate and torch's functional optimizers do."""
    _, made, _ = train(WRAPPERS["DiLoCo"])
    made.state, made.defaults = dict(made.state), {"lr": 0.5}
    assert made.optimizer.state is made.state
    assert made.optimizer.defaults == {"lr": 0.5}


@pytest.mark.parametrize("wrapper", ["AdaScale", "DiLoCo", "AdaScale of DiLoCo"])
def test_a_closure_may_be_told_that_gradients_are_not_scaled(wrapper):
    """Lightning clips gradients inside of the closure, if the optimizer does not unscale them."""
    _, made, _ = train(WRAPPERS[wrapper])
    if isinstance(made, ScalingRuleBase):
        made.set_num_gradients_to_accumulate(1)
    seen = []

    def closure():
        seen.append(made._step_supports_amp_scaling)
        backward(made.param_groups[0]["params"], 1)

    made.step(closure)
    assert (seen, made._step_supports_amp_scaling) == ([False], True)
    with pytest.raises(ZeroDivisionError):
        made.step(lambda: 1 / 0)
    assert made._step_supports_amp_scaling
