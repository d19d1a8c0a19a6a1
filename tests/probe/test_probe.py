"""A probe in real runs: its branches, what it leaves behind, what it decides, what it refuses."""

import copy
import math
import random

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import manyhands as mh
from manyhands.probe import _probe

SIZES = dict(budget=400, scales=(1, 2, 4), repeats=3, held_out=4)
LENGTH = 40  # micro-batches of each branch, with these sizes


def make_model(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 2)
    )


def make_batches(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, 6, generator=generator)
    noise = torch.randn(count, 4, 2, generator=generator)
    return list(zip(inputs, inputs[..., :2] + noise, strict=True))


def loss(model, batch):
    inputs, targets = batch
    return mse_loss(model(inputs), targets)


RULES = {
    "AdaScale": lambda params: mh.AdaScale(torch.optim.SGD(params, lr=0.05, momentum=0.9)),
    "AdamScale": lambda params: mh.AdamScale(torch.optim.AdamW(params, lr=0.01)),
    "SqrtScale": lambda params: mh.SqrtScale(
        torch.optim.Adam(params, lr=torch.tensor(0.01)), rescale_adam=True
    ),
    "delayed": lambda params: mh.AdaScale(torch.optim.SGD(params, lr=0.05), delayed=True),
    "scale set": lambda params: mh.AdaScale(torch.optim.SGD(params, lr=0.05), scale=3.0),
    "smoothing set": lambda params: mh.AdaScale(torch.optim.SGD(params, lr=0.05), smoothing=0.5),
}


def train(model, optimizer, batches, passes=1):
    for start in range(0, len(batches) - passes + 1, passes):
        for batch in batches[start : start + passes]:
            (loss(model, batch) / passes).backward()
        optimizer.step()
        optimizer.zero_grad()


def everything(model, optimizer):
    """All state, in a form that can be compared with `equal`."""
    return [
        {k: v.clone() for k, v in model.state_dict().items()},
        copy.deepcopy(optimizer.state_dict()),
        [module.training for module in model.modules()],
        (torch.get_rng_state(), random.getstate()),
        optimizer.snapshot(),
    ]


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


@pytest.mark.parametrize("rule", RULES)
def test_the_run_goes_on_as_if_there_had_been_no_probe(rule):
    runs = []
    for probed in (False, True):
        model = make_model(dropout=0.2)
        optimizer = RULES[rule](model.parameters())
        train(model, optimizer, make_batches(30))
        before = everything(model, optimizer)
        identities = [id(t) for t in model.parameters()] + list(map(id, optimizer.state.values()))
        if probed:
            mh.probe_batch(model, optimizer, loss, make_batches(500, seed=2), **SIZES)
        assert equal(everything(model, optimizer), before)
        assert identities == [
            *(id(t) for t in model.parameters()), *map(id, optimizer.state.values())
        ]  # fmt: skip
        train(model, optimizer, make_batches(30, seed=3))
        runs.append(everything(model, optimizer))
    assert equal(*runs)


def test_a_run_that_has_not_begun_has_no_state_afterwards():
    model = make_model()
    optimizer = RULES["AdamScale"](model.parameters())
    mh.probe_batch(model, optimizer, loss, make_batches(500), **SIZES)
    assert not optimizer.state and optimizer.progress == 0.0
    assert all(param.grad is None for param in model.parameters())


def test_the_losses_are_those_of_a_plain_loop():
    """The oracle: each branch written out, from a copy of the model and the optimizer."""
    batches = make_batches(500, seed=2)
    held_out, stream = batches[:4], batches[4:]
    model = make_model()
    optimizer = RULES["AdaScale"](model.parameters())
    train(model, optimizer, make_batches(30))
    result = mh.probe_batch(model, optimizer, loss, batches, **SIZES)

    for row in result.rows:
        assert row.steps == LENGTH // row.scale and row.passes == row.scale
        for repeat in range(3):
            memo = {}
            branch = copy.deepcopy(model, memo)
            rule = copy.deepcopy(optimizer, memo)
            rule.set_num_gradients_to_accumulate(row.scale)
            samples = iter(stream[repeat * LENGTH : (repeat + 1) * LENGTH])
            for step in range(row.steps):
                left = 1 - (step + 0.5) / row.steps
                rule.param_groups[0]["lr"] = 0.05 * (1.0 if left >= 0.5 else left / 0.5)
                for _ in range(row.scale):
                    (loss(branch, next(samples)) / row.scale).backward()
                rule.step()
                rule.zero_grad()
            branch.eval()
            with torch.no_grad():
                losses = [float(loss(branch, batch)) for batch in held_out]
            assert row.losses[repeat] == math.fsum(losses) / len(losses)


def test_branches_of_a_repeat_have_the_same_random_numbers():
    drawn = []

    def noting(model, batch):
        if model.training:
            drawn.append((float(torch.rand(())), random.random()))
        return loss(model, batch)

    model = make_model(dropout=0.5)
    optimizer = RULES["AdaScale"](model.parameters())
    mh.probe_batch(model, optimizer, noting, make_batches(500), **SIZES)
    branches = [drawn[start : start + LENGTH] for start in range(0, len(drawn), LENGTH)]
    assert len(branches) == 9
    for repeat in range(3):
        assert branches[3 * repeat] == branches[3 * repeat + 1] == branches[3 * repeat + 2]
    assert branches[0] != branches[3] != branches[6]


# -- what it decides -------------------------------------------------------------------------------


def quadratic(noise, count=4000, dimensions=20):
    """A loss |w - x|^2 / 2 at w = 1 with x of mean 0: the noise scale is noise^2."""
    model = nn.Linear(dimensions, 1, bias=False, dtype=torch.float64)
    nn.init.ones_(model.weight)
    generator = torch.Generator().manual_seed(0)
    targets = torch.randn(count, 1, dimensions, generator=generator, dtype=torch.float64) * noise
    return model, targets, lambda model, target: 0.5 * (model.weight - target).square().sum()


def probe_quadratic(noise, **options):
    model, targets, loss = quadratic(noise)
    optimizer = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=0.01))
    options = {"budget": 4000, "scales": (1, 2, 4, 16), **options}
    return mh.probe_batch(model, optimizer, loss, targets, **options)


def test_a_batch_below_the_critical_one_is_level_and_one_far_above_is_worse():
    options = dict(scales=(1, 2, 64), repeats=5, held_out=128, budget=5440)
    result = probe_quadratic(noise=3.0, **options)  # critical at 9
    assert [row.verdict for row in result.rows] == ["reference", "level", "worse"]
    assert result.largest == 2 and result.interval == (2, 64)


def test_without_noise_worth_averaging_no_larger_batch_is_level():
    result = probe_quadratic(noise=1.0, budget=2400)  # critical at 1
    assert [row.verdict for row in result.rows] == ["reference", "worse", "worse", "worse"]
    assert result.interval == (1, 2)


def test_in_noise_alone_every_batch_is_level():
    result = probe_quadratic(noise=6.0, budget=2000, scales=(1, 2, 4, 8))  # critical at 36
    assert [row.verdict for row in result.rows] == ["reference", "level", "level", "level"]
    assert result.largest == 8 and result.interval == (8, math.inf)


def test_pairs_differ_less_than_runs():
    result = probe_quadratic(noise=6.0, budget=2400)
    small, double = (torch.tensor(row.losses) for row in result.rows[:2])
    assert (double - small).var() < 0.1 * (double.var() + small.var())


def test_a_branch_that_diverges_is_a_verdict_and_no_exception():
    model, targets, loss = quadratic(noise=1.0)
    optimizer = mh.LinearScale(torch.optim.SGD(model.parameters(), lr=0.9))
    result = mh.probe_batch(model, optimizer, loss, targets, budget=2000, scales=(1, 2, 16))
    assert result.rows[2].verdict in ("diverged", "worse") and result.largest <= 2
    assert torch.equal(model.weight, torch.ones_like(model.weight))

    def broken(model, target):
        return loss(model, target) * (math.nan if optimizer.passes == 4 else 1.0)

    optimizer = mh.LinearScale(torch.optim.SGD(model.parameters(), lr=0.001), smoothing=0.5)
    result = mh.probe_batch(model, optimizer, broken, targets, budget=1000, scales=(1, 2, 4))
    assert result.rows[2].verdict == "diverged" and result.interval[1] <= 4
    assert "diverged" in str(result)


def test_parameters_that_are_shared_frozen_or_of_another_optimizer_are_kept():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 2))
    model[2].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    # The last layer is another optimizer's.
    mine = [p for p in model[:3].parameters() if p.requires_grad]
    optimizer = RULES["AdaScale"](mine)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    mh.probe_batch(model, optimizer, loss, make_batches(500), **SIZES)
    assert equal(dict(model.state_dict()), before) and model[2].weight is model[0].weight
    assert all(param.grad is None for param in model.parameters())
    loss(model, make_batches(1)[0]).backward()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="every optimizer that the model has"):
        mh.probe_batch(model, optimizer, loss, make_batches(500), **SIZES)


def test_parameters_of_the_loss_are_kept():
    model, weight = make_model(), nn.Parameter(torch.ones(()))
    optimizer = RULES["AdaScale"]([*model.parameters(), weight])

    def weighted(model, batch):
        return loss(model, batch) * weight.exp() - weight

    mh.probe_batch(model, optimizer, weighted, make_batches(500), **SIZES)
    assert float(weight.detach()) == 1.0


def test_a_ramp_is_not_disturbed():
    model = make_model()
    optimizer = RULES["AdaScale"](model.parameters())
    ramp = mh.Ramp(optimizer, max_scale=8)
    before = ramp.state_dict()
    mh.probe_batch(model, optimizer, loss, make_batches(500), **SIZES)
    assert ramp.state_dict() == before and optimizer._observer is ramp


class MovingMean(nn.Module):
    """Puts new tensors in the place of its buffers, as many layers of users do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 2)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("seen", None)

    def forward(self, inputs):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * inputs.mean(dim=0)
            self.seen = torch.ones(1)
        return self.linear(inputs - self.mean)


def test_buffers_that_the_model_replaces_are_kept():
    model = MovingMean()
    optimizer = RULES["AdaScale"](model.parameters())
    before = model.mean
    mh.probe_batch(model, optimizer, loss, make_batches(500), **SIZES)
    assert model.mean is before and torch.equal(before, torch.zeros(6)) and model.seen is None


def test_micro_batches_may_be_drawn_from_the_generators_that_the_branches_seed():
    drawn = []

    def endless():
        while True:
            drawn.append((torch.randn(4, 6), torch.randn(4, 2) + random.random()))
            yield drawn[-1]

    model = make_model(dropout=0.2)
    optimizer = RULES["AdaScale"](model.parameters())
    torch.manual_seed(3)
    before = everything(model, optimizer)
    mh.probe_batch(model, optimizer, loss, endless(), **SIZES)
    assert equal(everything(model, optimizer), before)
    assert len(drawn) == 4 + 3 * LENGTH
    assert len({float(targets.sum()) for _, targets in drawn}) == len(drawn)  # no two are the same


# -- the result ------------------------------------------------------------------------------------


def test_it_counts_what_it_cost():
    seen = []

    def counting(model, batch):
        seen.append(model.training)
        return loss(model, batch)

    model = make_model()
    result = mh.probe_batch(
        model, RULES["AdaScale"](model.parameters()), counting, make_batches(500), **SIZES
    )
    assert seen.count(True) == 3 * 3 * LENGTH and seen.count(False) == 3 * 3 * 4
    assert result.samples == 4 * seen.count(True)
    assert result.passes == 3 * 3 * LENGTH + 12 <= SIZES["budget"]


def test_the_table_and_the_figure_show_every_scale():
    result = probe_quadratic(noise=6.0, budget=2400)
    text = str(result)
    assert "4 scales, 6 repeats: " in text and text.endswith(result.conclusion)
    for row in result.rows:
        assert row.verdict in text and f"{row.steps:,}" in text
    pytest.importorskip("plotly")
    figure = result.figure()
    assert list(figure.data[0].x) == ["2", "4", "16"]
    assert list(figure.data[0].y) == [row.difference for row in result.rows[1:]]


# -- mistakes --------------------------------------------------------------------------------------


def test_a_loss_that_raises_changes_nothing():
    model = make_model(dropout=0.2)
    optimizer = RULES["AdamScale"](model.parameters())
    train(model, optimizer, make_batches(30))
    before = everything(model, optimizer)
    calls = []

    def failing(model, batch):
        calls.append(1)
        if len(calls) == 100:
            raise ArithmeticError("mine")
        return loss(model, batch)

    with pytest.raises(ArithmeticError, match="mine"):
        mh.probe_batch(model, optimizer, failing, make_batches(500, seed=2), **SIZES)
    assert equal(everything(model, optimizer), before)
    train(model, optimizer, make_batches(2))


def attempt(optimizer=None, batches=500, **options):
    model = make_model()
    optimizer = (optimizer or RULES["AdaScale"])(model.parameters())
    options = {**SIZES, **options}
    return mh.probe_batch(model, optimizer, loss, make_batches(batches), **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batches": 123}, ValueError, r"needs 124 micro-batches .* `batches` had 123\."),
        ({"batches": 2}, ValueError, r"needs 124 micro-batches .* `batches` had 2\."),
        ({"budget": 191}, ValueError, "a budget of at least 192 passes, got 191"),
        ({"scales": (2, 4)}, ValueError, "begin with 1 and rise, got"),
        ({"scales": (1, 4, 2)}, ValueError, "begin with 1 and rise"),
        ({"scales": (1,)}, ValueError, "begin with 1 and rise"),
        ({"scales": (1, 2.0)}, ValueError, "must be whole numbers"),
        ({"scales": (1, "2")}, ValueError, "must be whole numbers"),
        ({"budget": math.inf}, ValueError, "budget must be a whole number, got inf"),
        ({"repeats": 2.5}, ValueError, r"repeats must be a whole number, got 2\.5"),
        ({"held_out": 4.0}, ValueError, r"held_out must be a whole number, got 4\.0"),
        ({"repeats": 1}, ValueError, "repeats must be at least 2, got 1"),
        ({"held_out": 1}, ValueError, "held_out must be at least 2, got 1"),
        ({"cooldown": 1.5}, ValueError, "cooldown must be from 0 to 1, got 1.5"),
        ({"confidence": 0.5}, ValueError, "confidence must be above 0.5"),
        (
            {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1)},
            TypeError,
            r"got SGD\. Write mh\.AdaScale\(optimizer\) for SGD, mh\.AdamScale",
        ),
        (
            {"optimizer": lambda p: mh.AdaScale(mh.LocalSGD(torch.optim.SGD(p, lr=0.1)))},
            TypeError,
            "cannot undo the sync rounds of blocks",
        ),
        (
            {
                "optimizer": lambda p: mh.AdaScale(
                    torch.optim.SGD(p, lr=0.1), grad_scaler=torch.amp.GradScaler("cpu")
                )
            },
            TypeError,
            "does not scale the loss",
        ),
        (
            {
                "optimizer": lambda p: mh.SqrtScale(
                    torch.optim.Adam(p, betas=(0.5, 0.9)), rescale_adam=True
                )
            },
            ValueError,
            "must stay below 1",
        ),
    ],
)
def test_mistakes_say_what_to_do(options, error, message):
    with pytest.raises(error, match=message):
        attempt(**options)


def test_counted_passes_and_gradients_that_are_left_are_mistakes():
    model = make_model()
    optimizer = RULES["AdaScale"](model.parameters())
    loss(model, make_batches(1)[0]).backward()
    with pytest.raises(RuntimeError, match=r"after zero_grad\(\) of every optimizer"):
        mh.probe_batch(model, optimizer, loss, make_batches(500), **SIZES)
    model, rule = make_model(), mh.AdaScale()
    adp = mh.AdaptiveDataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), rule)
    with pytest.raises(TypeError, match="AdaptiveDataParallel counts them"):
        mh.probe_batch(adp, rule, loss, make_batches(500), **SIZES)


def test_a_branch_has_whole_steps_at_every_scale():
    assert _probe.branch_length(1000, [1, 3, 4], 2, 4) % 12 == 0
    assert _probe.branch_length(1000, [2, 4, 8], 2, 4) % 8 == 0
