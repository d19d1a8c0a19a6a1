"""State dicts with one entry deleted, of another type, NaN or huge: refused or harmless."""

import contextlib
import copy
import math
import random
import warnings
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import manyhands as mh
from helpers.ranks import on_ranks
from manyhands import adaptdl

MUTATIONS = 200  # of each class's state
SAMPLES = 96
OWN = mh.Seconds(2e-3, first=4, own_steps=True)
VALUES = [
    None, True, -1, 0, 3, 10**6, 2**70, 10**400, -0.5, 1.5, 1e300, -1e300, math.nan, math.inf,
    "", "x", [], [1], [[1, 2]], {}, {"a": 1}, torch.ones(2), b"x",
]  # fmt: skip


def places(state, path=()):
    """Yield the path of every entry, and of every entry inside it."""
    entries = state.items() if isinstance(state, dict) else enumerate(state)
    for key, value in entries:
        yield (*path, key)
        if key in ("initial_state", "scheduler"):
            continue  # torch reads what is in them
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
    if isinstance(before, Tensor) and dice.random() < 0.7:
        value = dice.choice([torch.full_like(before, math.nan), before.flatten()[1:], before.int()])
        holder[path[-1]] = value
        return state, path, f"{path} = {value.dtype} {tuple(value.shape)} {value.flatten()[:2]}"
    if isinstance(before, int | float) and dice.random() < 0.5:
        before = before or 1  # as on the other rank, where a rank is 1
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


class RuleRun:
    """A model under a rule, an `AdaptiveDataParallel`, a NoiseScale, or a schedule by progress."""

    passes = 2

    def __init__(self, which):
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)
        params = self.model.parameters()
        if which.startswith("Adam") or which == "rescale_adam":
            inner = torch.optim.AdamW(params, lr=0.01)
        else:
            inner = torch.optim.SGD(params, lr=0.01, momentum=0.9)
        self.optimizer, self.scheduler = inner, None
        options = {"num_gradients_to_accumulate": self.passes}
        if which == "adaptdl":
            self.model = adaptdl.AdaptiveDataParallel(self.model, inner)
            self.forged = inner
        elif which.startswith("NoiseScale"):
            self.passes = 1 if "consecutive" in which else 2
            options["num_gradients_to_accumulate"] = self.passes
            self.forged = mh.NoiseScale(inner, batch_size=4, **options)
        else:
            self.optimizer = self.forged = self.rule(which, inner, options)
        if which == "ProgressScheduler":
            schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 10)
            self.forged = self.scheduler = mh.ProgressScheduler(schedule, self.optimizer)

    def rule(self, which, inner, options):
        if which == "AdaScale consecutive":
            self.passes = 1
            return mh.AdaScale(inner, scale=2.0)
        if which == "AdaScale paper":
            return mh.AdaScale(inner, debias_ewma=False, scale=4.0, **options)
        if which == "LEGWScale":
            return mh.LEGWScale(1.0, SAMPLES, inner, batch_size=4, **options)
        if which == "rescale_adam":
            return mh.SqrtScale(inner, rescale_adam=True, **options)
        return getattr(mh, which if which.endswith("Scale") else "AdaScale")(inner, **options)

    def step(self, steps=1):
        for _ in range(steps):
            self.optimizer.zero_grad()
            for number in range(self.passes):
                loss = (self.model(torch.randn(4, 3)) - torch.randn(4, 1)).square().mean()
                if hasattr(self.model, "no_sync") and number < self.passes - 1:
                    with self.model.no_sync():
                        loss.backward()
                else:
                    (loss / (1 if hasattr(self.model, "no_sync") else self.passes)).backward()
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            if isinstance(self.forged, mh.NoiseScale):
                assert not self.forged.noise_scale < 0
                repr(self.forged)


class BlocksRun:
    """A model in blocks, on two ranks."""

    METHODS: ClassVar = {
        "DiLoCo": lambda inner: mh.DiLoCo(inner, every=3, codec="int8"),
        "overlap": lambda inner: mh.DiLoCo(inner, every=4, overlap=2, fragments=2, state="average"),
        "BMUF": lambda inner: mh.BMUF(inner, global_sync_iter=3, warmup_iterations=2),
        "SlowMo": lambda inner: mh.SlowMo(inner, every=3, state="reset"),
        "own steps": lambda inner: mh.LocalSGD(inner, every=OWN),
    }

    def __init__(self, which):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
        inner = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        if which == "SlowMo":
            inner = torch.optim.Adagrad(self.model.parameters(), lr=0.01)
        self.forged = self.optimizer = self.METHODS[which](inner)
        self.own_steps = which == "own steps"
        self.dice = torch.Generator().manual_seed(dist.get_rank())

    def step(self, steps=1):
        if self.own_steps and steps == 3:
            return  # a rank whose plan says a million steps takes them, and the other waits
        end = self.optimizer.steps + steps  # with own steps, ranks do not take equally many
        while self.optimizer.steps < end:
            self.optimizer.zero_grad()
            (self.model(torch.randn(4, 3, generator=self.dice)) - 1.0).square().mean().backward()
            self.optimizer.step()
        if steps == 3 or self.own_steps:  # else a rank may still wait for the other
            self.optimizer.synchronize()


@pytest.mark.parametrize("which", ["Ramp", "Cursor", "AdaptiveDataLoader"])
def test_a_damaged_state_is_refused_by_name_or_harmless(which):
    forge(lambda: Run(which), which, MUTATIONS)


RULES = [
    "AdaScale", "AdaScale consecutive", "AdaScale paper", "AdamScale", "LinearScale",
    "rescale_adam", "LEGWScale", "adaptdl", "NoiseScale", "NoiseScale consecutive",
    "ProgressScheduler",
]  # fmt: skip


@pytest.mark.parametrize("which", RULES)
def test_a_damaged_state_of_a_rule_is_refused_by_name_or_harmless(which):
    part = None if "Noise" in which or "Progress" in which else "manyhands"
    forge(lambda: RuleRun(which), which, MUTATIONS, part)


@pytest.mark.sample("DiLoCo", "BMUF", "own steps")
@pytest.mark.parametrize("which", BlocksRun.METHODS)
@on_ranks(2)
def test_a_damaged_state_of_blocks_is_refused_by_name_or_harmless(which):
    forge(lambda: BlocksRun(which), which, MUTATIONS // 3, "blocks", warm=7)


def plain(run):
    """Return the state as text, without the seconds since the last round."""
    state = run.forged.state_dict()
    state.get("blocks", {}).pop("clock", None)
    return str(state)


def forge(make, seed, mutations, part=None, warm=5):
    """Load mutations of a state, or of one part of it; each is to be refused, or harmless."""
    dice = random.Random(seed)
    run = make()
    run.step(warm)
    sound = copy.deepcopy(run.forged.state_dict())
    if part == "blocks":
        sound[part]["clock"] = [0.01, 3]  # the ranks' differ
    weights = copy.deepcopy(run.model.state_dict())
    refused, problems, run = 0, [], None
    for _ in range(mutations):
        state, path, what = mutated(sound if part is None else sound[part], dice)
        run = run or make()
        before = plain(run)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                run.forged.load_state_dict(
                    state if part is None else {**copy.deepcopy(sound), part: state}
                )
            except ValueError as error:
                refused += 1
                if plain(run) != before:
                    problems.append(f"{what}: refused, but changed: {error}")
                if not any(str(key) in str(error).lower() for key in path if type(key) is str):
                    problems.append(f"{what}: not named in {error}")
                continue  # with the same run, which has not changed
            except Exception as error:
                problems.append(f"{what}: load: {error!r}")
                run = None
                continue
            try:
                run.step(3)
            except Exception as error:
                problems.append(f"{what}: step: {error!r}")
                run = None
                continue
            params = list(run.model.parameters())
            if not all(torch.isfinite(each).all() for each in params):
                problems.append(f"{what}: weights {params}")
            if part == "blocks":  # groups of our own take long to connect
                run.forged.load_state_dict(copy.deepcopy(sound))
                run.model.load_state_dict(weights)
            else:
                run = None
    assert not problems, f"{len(problems)}:\n" + "\n".join(sorted(set(problems))[:60])
    assert refused > mutations / 4


OBJECTS = {  # the argument of `mh.load`, and how the object is made
    "optimizer": lambda: RuleRun("AdaScale"),
    "noise": lambda: RuleRun("NoiseScale"),
    "scheduler": lambda: RuleRun("ProgressScheduler"),
    "cursor": lambda: Run("Cursor"),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_a_load_names_the_checkpoint_whose_state_does_not_fit(name, tmp_path):
    run = OBJECTS[name]()
    run.step(3)
    state = copy.deepcopy(run.forged.state_dict())
    entry = {"optimizer": "manyhands"}.get(name)
    (state if entry is None else state[entry])["epoch" if name == "cursor" else "steps"] = -7
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(run.forged), "state_dict", lambda self: state)
        if name == "optimizer":
            own = state["manyhands"]
            patch.setattr(type(run.forged), "scaling_state_dict", lambda self: {**own})
        path = mh.save(tmp_path, model=run.model, **{name: run.forged}).path
    run = OBJECTS[name]()
    with pytest.raises(ValueError, match="-7") as caught:
        mh.load(tmp_path, model=run.model, **{name: run.forged})
    assert str(path) in str(caught.value)
