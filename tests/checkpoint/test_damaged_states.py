"""State dicts with one entry deleted, of another type, NaN or huge: refused or harmless."""

import contextlib
import copy
import math
import random
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands import adaptdl

MUTATIONS = 200  # of each class's state
SAMPLES = 96
VALUES = [
    None, True, -1, 0, 3, 10**6, 2**70, 10**400, -0.5, 1.5, 1e300, -1e300, math.nan, math.inf,
    "", "x", [], [1], [[1, 2]], {}, {"a": 1}, torch.ones(2), b"x",
]  # fmt: skip


def places(state, path=()):
    """Yield the path of every entry, and of every entry inside it."""
    entries = state.items() if isinstance(state, dict) else enumerate(state)
    for key, value in entries:
        yield (*path, key)
        if isinstance(value, dict | list | tuple):
            yield from places(value, (*path, key))


def mutated(state, dice):
    """Return a copy with one entry deleted, replaced, or made longer; where, and what was done."""
    state = copy.deepcopy(state)
    path = dice.choice(list(places(state)))
    holder = state
    for key in path[:-1]:
        inner = holder[key]
        if isinstance(inner, tuple):  # so that it can be changed
            inner = holder[key] = list(inner)
        holder = inner
    if dice.random() < 0.25:
        del holder[path[-1]]
        return state, path, f"{path} deleted"
    value = dice.choice(VALUES)
    before = holder[path[-1]]
    if isinstance(before, int | float) and dice.random() < 0.5:
        value = dice.choice([-before, float(before), str(before), before * 1e18, before + 0.5])
    holder[path[-1]] = value
    return state, path, f"{path} = {value!r:.60}"


class Run:
    """A model with a `Ramp`, a `Cursor` or an `AdaptiveDataLoader`, whose state is forged."""

    def __init__(self, which):
        self.which = which
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)
        inner = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        data = TensorDataset(torch.randn(SAMPLES, 3), torch.randn(SAMPLES, 1))
        self.batches = None
        if which == "AdaptiveDataLoader":
            self.forged = loader = adaptdl.AdaptiveDataLoader(data, batch_size=4, shuffle=True)
            loader.autoscale_batch_size(32, gradient_accumulation=True)
            self.optimizer = inner
            self.model = adaptdl.AdaptiveDataParallel(self.model, inner)
            return
        self.forged = self.optimizer = mh.AdaScale(inner, num_gradients_to_accumulate=2)
        self.ramp = None
        if which == "Ramp":
            self.forged = self.ramp = mh.Ramp(self.optimizer, max_scale=8)
        self.cursor = mh.Cursor(data, batch_size=4, optimizer=self.optimizer)
        if which == "Cursor":
            self.forged = self.cursor

    def step(self, steps=1):
        if self.which == "AdaptiveDataLoader":
            return self.adaptive(steps)
        for _ in range(steps):
            passes = self.ramp.passes if self.ramp is not None else 2
            for _ in range(passes):
                inputs, targets = self.next()
                loss = (self.model(inputs) - targets).square().mean()
                (loss / passes).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return None

    def next(self):
        if self.which != "Cursor":
            return torch.randn(4, 3), torch.randn(4, 1)
        while True:
            self.batches = self.batches or iter(self.cursor)
            with contextlib.suppress(StopIteration):
                return next(self.batches)
            self.batches = None

    def adaptive(self, steps):
        passes = 0
        for _ in adaptdl.remaining_epochs_until(10**9):
            for inputs, targets in self.forged:
                self.optimizer.zero_grad()
                (self.model(inputs) - targets).square().mean().backward()
                self.optimizer.step()
                passes += 1
                if passes >= 6 * steps:
                    return


@pytest.mark.parametrize("which", ["Ramp", "Cursor", "AdaptiveDataLoader"])
def test_a_damaged_state_is_refused_by_name_or_harmless(which):
    dice = random.Random(which)
    run = Run(which)
    run.step(5)
    sound = copy.deepcopy(run.forged.state_dict())
    refused, problems = 0, []
    for _ in range(MUTATIONS):
        state, path, what = mutated(sound, dice)
        run = Run(which)
        before = str(run.forged.state_dict())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                run.forged.load_state_dict(state)
            except ValueError as error:
                refused += 1
                if str(run.forged.state_dict()) != before:
                    problems.append(f"{what}: refused, but changed: {error}")
                if not any(str(key) in str(error).lower() for key in path if type(key) is str):
                    problems.append(f"{what}: not named in {error}")
                continue
            except Exception as error:
                problems.append(f"{what}: load: {error!r}")
                continue
            try:
                run.step(3)
            except Exception as error:
                problems.append(f"{what}: step: {error!r}")
                continue
            tensors = [each for each in run.model.state_dict().values() if isinstance(each, Tensor)]
            if not all(torch.isfinite(each).all() for each in tensors):
                problems.append(f"{what}: weights {tensors}")
    assert not problems, f"{len(problems)}:\n" + "\n".join(sorted(set(problems))[:60])
    assert refused > MUTATIONS / 4
