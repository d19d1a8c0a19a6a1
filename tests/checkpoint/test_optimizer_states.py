"""States of torch's optimizers: whole ones continue, and those that lack an entry are refused."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import manyhands as mh
from helpers.forge import content, only, sign

OPTIMIZERS = {
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "Adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1}),
    "Adam": (torch.optim.Adam, {}),
    "Adam amsgrad": (torch.optim.Adam, {"amsgrad": True, "maximize": True}),
    "Adam fused": (torch.optim.Adam, {"fused": True}),
    "Adam foreach": (torch.optim.Adam, {"foreach": True}),
    "Adam tensor": (torch.optim.Adam, {"lr": torch.tensor(0.01)}),
    "Adamax": (torch.optim.Adamax, {}),
    "AdamW": (torch.optim.AdamW, {}),
    "ASGD": (torch.optim.ASGD, {}),
    "NAdam": (torch.optim.NAdam, {"decoupled_weight_decay": True}),
    "RAdam": (torch.optim.RAdam, {}),
    "RMSprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    "Rprop": (torch.optim.Rprop, {}),
    "SGD": (torch.optim.SGD, {}),
    "SGD momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "SGD fused": (torch.optim.SGD, {"fused": True}),
}


class Odd(nn.Module):
    """Parameters of all kinds of shapes; one of them never has a gradient."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(3, 5, dtype=dtype))
        self.square = nn.Parameter(torch.randn(4, 4, dtype=dtype))
        self.image = nn.Parameter(torch.randn(2, 3, 2, 3, dtype=dtype))
        self.image.data = self.image.data.contiguous(memory_format=torch.channels_last)
        self.row = nn.Parameter(torch.randn(1, 5, dtype=dtype))
        self.one = nn.Parameter(torch.randn(1, dtype=dtype))
        self.number = nn.Parameter(torch.randn((), dtype=dtype))
        self.empty = nn.Parameter(torch.empty(0, 3, dtype=dtype))
        self.unused = nn.Parameter(torch.randn(3, dtype=dtype))


def build(which, dtype, way):
    kind, options = OPTIMIZERS[which]
    model = Odd(dtype)
    if which == "Adafactor":  # divides by the number of elements
        model.empty = nn.Parameter(torch.ones(2, 2, 2, dtype=dtype))
    groups = [
        {"params": [model.matrix, model.square, model.unused]},
        {"params": [model.image, model.row, model.one, model.number, model.empty], "lr": 0.02},
    ]
    if "tensor" in which:
        groups[1]["lr"] = torch.tensor(0.02)
    options = copy.deepcopy(options)
    if way == "OSS":
        return model, mh.OSS(groups, optim=kind, **options)
    return model, kind(groups, **options)


def step(model, optimizer):
    for name, param in model.named_parameters():
        param.grad = None if name == "unused" else torch.ones_like(param)
    optimizer.step()


def held(model, optimizer):
    return str([*model.named_parameters(), optimizer.state_dict()])


each_optimizer_once = pytest.mark.sample(
    "Adadelta-plain",
    "Adagrad-plain",
    "Adam amsgrad-plain",
    "Adam foreach-plain",
    "Adamax-plain",
    "AdamW-OSS",
    "NAdam-OSS",
    "RMSprop-OSS",
    "SGD-OSS",
    "SGD fused-OSS",
)


@each_optimizer_once
@pytest.mark.parametrize("way", ["plain", "OSS"])
@pytest.mark.parametrize("which", OPTIMIZERS)
def test_every_state_continues_after_any_number_of_steps(which, way, tmp_path):
    for dtype in (torch.float32, torch.bfloat16):
        for steps in range(3):
            model, optimizer = build(which, dtype, way)
            for _ in range(steps):
                step(model, optimizer)
            mh.save(tmp_path, model=model, optimizer=optimizer)
            other = build(which, dtype, way)
            step(*other)
            mh.load(tmp_path, model=other[0], optimizer=other[1])
            step(model, optimizer), step(*other)
            assert held(*other) == held(model, optimizer)


@each_optimizer_once
@pytest.mark.parametrize("way", ["plain", "OSS"])
@pytest.mark.parametrize("which", OPTIMIZERS)
def test_a_state_without_an_entry_is_refused_or_continues(which, way, tmp_path):
    model, optimizer = build(which, torch.float32, way)
    step(model, optimizer)
    path = mh.save(tmp_path / "run", model=model, optimizer=optimizer).path
    whole = content(path)
    keys = [key for key in whole["table"]["slices"] if key.startswith("optimizer.0/")]
    keys = [key for key in keys if "options" not in key]
    refused = set()
    for key in keys:
        meta = copy.deepcopy(whole)
        del meta["table"]["slices"][key]
        sign(path, meta)
        other = build(which, torch.float32, way)
        step(*other)
        before = held(*other)
        try:
            mh.load(path, model=other[0], optimizer=other[1])
        except ValueError as error:
            assert str(path) in str(error)
            assert repr(key.split("/")[2]) in str(error)
            assert held(*other) == before
            refused.add(key.split("/")[1])
        else:
            step(*other)
    if which[:2] in ("Ad", "NA", "RA", "AS", "Rp", "RM"):
        assert "step" in refused


def test_an_optimizer_that_cannot_be_tried_is_loaded_as_it_is(tmp_path):
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    model(torch.tensor([1, 3])).sum().backward()
    optimizer.step()
    mh.save(tmp_path, model=model, optimizer=optimizer)
    other = nn.Embedding(5, 2, sparse=True)
    twin = torch.optim.SparseAdam(other.parameters())
    mh.load(tmp_path, model=other, optimizer=twin)
    assert str(twin.state_dict()) == str(optimizer.state_dict())


def test_a_trial_leaves_hooks_and_replaced_methods_of_the_optimizer_alone(tmp_path):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)  # replaces `step`
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step(), schedule.step()
    mh.save(tmp_path, model=model, optimizer=optimizer)
    calls = []
    optimizer.register_step_pre_hook(lambda *given: calls.append(given))
    handle = register_optimizer_step_pre_hook(lambda *given: calls.append(given))
    try:
        mh.load(tmp_path, model=model, optimizer=optimizer)
    finally:
        handle.remove()
    assert calls == [] and optimizer._opt_called
    checkpoint = only(tmp_path)
    meta = content(checkpoint)
    meta["optimizers"][0]["groups"][0]["options"]["lr"] = "fast"
    sign(checkpoint, meta)
    with pytest.raises(ValueError, match="AdamW cannot continue from the state of 'weight'"):
        mh.load(tmp_path, model=model, optimizer=optimizer)
