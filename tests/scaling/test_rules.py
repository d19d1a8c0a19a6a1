"""Properties of single rules and of the norms that they measure."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import manyhands as mh
from helpers.ranks import on_ranks
from helpers.scaling_oracle import backward, loss_of, make_batches, make_model, take_steps
from manyhands import fairscale
from manyhands._tensors.flat import norm
from manyhands.scaling._hooks import PlainNorm
from manyhands.scaling._preconditioned import PreconditionedNorm


def step_by_hand(model, optimizer, x, y):
    optimizer.zero_grad()
    (sum(loss_of(model, x[a], y[a]) for a in range(len(x))) / len(x)).backward()
    optimizer.step()


def test_a_rule_that_makes_its_optimizer_is_the_rule_around_it():
    def train(wrap):
        model = make_model(torch.float64)
        optimizer = wrap(model.parameters())
        take_steps(model, optimizer, *make_batches(3, 3, dtype=torch.float64))
        return [*model.parameters(), torch.tensor([optimizer.progress, optimizer.smoothing])]

    options = {"num_gradients_to_accumulate": 3, "debias_ewma": False}
    sgd = {"lr": 0.1, "momentum": 0.9}

    def made(params):
        made_of = {"optim_cls": torch.optim.SGD, **sgd, **options}
        return fairscale.AdaScaleWrapper(params, None, 3.0, 0.9, **made_of)

    def around(params):
        return mh.AdaScale(torch.optim.SGD(params, **sgd), None, 3.0, 0.9, **options)

    torch.testing.assert_close(train(made), train(around), rtol=0, atol=0)


def test_a_rule_that_makes_its_optimizer_needs_a_class():
    inner = torch.optim.SGD(make_model().parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"must be an optimizer class, such as"):
        fairscale.AdaScaleWrapper(make_model().parameters(), optim_cls=inner)
    with pytest.raises(TypeError, match="no_such"):
        fairscale.AdaScaleWrapper(make_model().parameters(), no_such=1)


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "RMSprop"])
def test_the_square_root_rule_rescales_the_whole_optimizer(kind):
    """Four small batches under the rule are one big one with lr, beta and epsilon set by hand."""
    model = make_model(torch.float64)
    other = copy.deepcopy(model)
    inner = getattr(torch.optim, kind)
    plain = {"lr": 0.01, "eps": 1e-4}
    by_hand = {"lr": 0.02, "eps": 0.5e-4}
    if kind == "RMSprop":
        plain["alpha"], by_hand["alpha"] = 0.95, 0.8
    else:
        plain["betas"], by_hand["betas"] = (0.9, 0.99), (0.6, 0.96)
    ours = mh.SqrtScale(
        inner(model.parameters(), **plain), num_gradients_to_accumulate=4, rescale_adam=True
    )
    theirs = inner(other.parameters(), **by_hand)
    x, y = make_batches(6, 4, dtype=torch.float64)
    take_steps(model, ours, x, y)
    for step in range(6):
        step_by_hand(other, theirs, x[step], y[step])
    params = [list(each.parameters()) for each in (model, other)]
    torch.testing.assert_close(*params, rtol=1e-9, atol=1e-12)
    for name, value in plain.items():
        assert ours.param_groups[0][name] == value  # as they were, between steps


KINDS = {
    "Adam": lambda p: torch.optim.Adam(p, betas=(0.9, 0.95)),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "Adam fused": lambda p: torch.optim.Adam(p, fused=True),
    "Adam capturable-like": lambda p: torch.optim.Adam(p, foreach=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, alpha=0.9),
    "RMSprop centered": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
}


def unscale(optimizer, param, group):
    state = optimizer.state[param]
    if "exp_avg_sq" in state:
        second = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
        second = second / (1 - group["betas"][1] ** float(state["step"]))
    else:
        second = state["square_avg"]
        if group["centered"]:
            second = second - state["grad_avg"] ** 2
    return second.sqrt() + group["eps"]


@pytest.mark.parametrize("layout", ["small", "larger than a chunk", "channels last"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_divided_by_what_the_optimizer_divides_them_by(kind, layout):
    shape = {"small": (7, 3), "larger than a chunk": (700, 301), "channels last": (8, 3, 5, 5)}
    data = torch.randn(shape[layout])
    if layout == "channels last":
        data = data.to(memory_format=torch.channels_last)
    param = nn.Parameter(data)
    optimizer = KINDS[kind]([param])
    measure = PreconditionedNorm(optimizer)
    for step in range(8):
        grad = torch.randn_like(param)
        (length,) = measure.many([0], [grad])
        if step < 5:
            expected = grad.double().norm()
        else:
            scale = unscale(optimizer, param, optimizer.param_groups[0])
            expected = (grad.double() / scale.double()).norm()
        assert float(length) == pytest.approx(float(expected), rel=2e-5)
        param.grad = grad
        optimizer.step()
    strange = torch.randn(shape[layout][::-1]).permute(*range(len(shape[layout]))[::-1])
    scale = unscale(optimizer, param, optimizer.param_groups[0])
    expected = (strange.double() / scale.double()).norm()
    assert float(measure.one(0, strange)) == pytest.approx(float(expected), rel=2e-5)


@pytest.mark.parametrize("layout", ["small", "larger than a chunk", "strange"])
def test_tiny_second_moments_are_raised_to_a_fraction_of_the_mean(layout):
    """A weight that has had no gradient yet does not outweigh the others when it gets one."""
    shape = (700, 501) if layout == "larger than a chunk" else (8, 6)
    param = nn.Parameter(torch.randn(shape))
    optimizer = torch.optim.Adam([param])
    for _ in range(6):
        param.grad = torch.randn(shape)
        param.grad[0, 0] = 0.0
        optimizer.step()
    grad = torch.randn(shape)
    if layout == "strange":
        grad = torch.randn(shape[::-1]).t()
    second = optimizer.state[param]["exp_avg_sq"].double()
    corrected = 1 - 0.999**6
    floored = second.clamp(min=1e-3 * float(second.mean()))
    expected = (grad.double() / ((floored / corrected).sqrt() + 1e-8)).norm()
    found = float(PreconditionedNorm(optimizer, 1e-3).one(0, grad))
    assert found == pytest.approx(float(expected), rel=2e-5)
    assert float(PreconditionedNorm(optimizer).one(0, grad)) > 1e3 * float(expected)
    with pytest.raises(ValueError, match="second_moment_floor must be a finite number at least 0"):
        mh.AdamScale(optimizer, second_moment_floor=1.0)


@pytest.mark.parametrize(
    ("dtype", "floor"),
    [
        (torch.bfloat16, 0.0),
        (torch.bfloat16, 1e-5),
        (torch.float16, 0.0),
        (torch.float16, 1e-5),
        (torch.complex64, 0.0),
        (torch.complex64, 1e-5),
    ],
)
def test_the_norm_of_half_precision_and_complex_gradients(dtype, floor):
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(30, 8, dtype=dtype))
    optimizer = torch.optim.Adam([param], eps=1e-3)
    for _ in range(6):
        param.grad = torch.randn_like(param)
        optimizer.step()
    grad = torch.randn_like(param)
    second = optimizer.state[param]["exp_avg_sq"]
    parts = grad
    if dtype.is_complex:
        second = torch.view_as_real(second)
        parts = torch.view_as_real(grad)
    divisor = (second.double() / (1 - 0.999**6)).sqrt() + 1e-3
    expected = float((parts.double() / divisor).norm())
    found = float(PreconditionedNorm(optimizer, floor).one(0, grad))
    assert found == pytest.approx(expected, rel=2e-3)


# eps over the smallest root: negligible, small (without roots, with a shift), and large.
@pytest.mark.parametrize("size", [1e-3, 1e-5, 1e-6])
@pytest.mark.parametrize("floor", [0.0, 1e-3])
@pytest.mark.parametrize("moments", ["dense", "zeros", "denormal"])
def test_dead_units_and_small_gradients_have_the_norm_of_the_formula(
    moments, floor, size, monkeypatch
):
    torch.manual_seed(0)
    shape = (600, 301)
    param = nn.Parameter(torch.randn(shape))
    optimizer = torch.optim.Adam([param], eps=1e-8)
    sizes = size * torch.exp(torch.randn(shape))
    if moments != "dense":
        sizes[::2] = {"zeros": 0.0, "denormal": 1e-19}[moments]
    for _ in range(6):
        param.grad = torch.randn(shape) * sizes
        optimizer.step()
    state = optimizer.state[param]
    second = state["exp_avg_sq"].double()
    if moments == "dense":
        assert second.min() > 0.0
    else:
        assert second.min() < 1e-38
    least = floor * float(second.mean())
    divisor = (second.clamp(min=least) / (1 - 0.999**6)).sqrt() + 1e-8
    normal = torch.finfo(torch.float32).tiny
    root = torch.sqrt

    def sqrt(numbers, **options):
        assert numbers.min() >= normal  # smaller numbers take up to 30 times as long
        return root(numbers, **options)

    monkeypatch.setattr(torch, "sqrt", sqrt)
    measure = PreconditionedNorm(optimizer, floor)
    near = {1e-3: 5e-4, 1e-5: 5e-3, 1e-6: 2e-5}[size] if floor else 2e-5
    grads = [torch.randn(shape) * sizes]
    for above in (1.0, 6.0, 1000.0):  # in a single element: the largest errors
        grads.append(torch.zeros(shape))
        nearest = int((second - above * least).abs().argmin())
        grads[-1].view(-1)[nearest] = size
    for _ in range(2):
        for grad in grads:
            expected = float((grad.double() / divisor).norm())
            assert float(measure.one(0, grad)) == pytest.approx(expected, rel=near)
        measure.load_state(measure.to_state())


@pytest.mark.parametrize("eps", [1e-8, 1e-2])
def test_the_floor_continues_bitwise(eps):
    """It is looked at every sixteen steps, so a continued run has to know when it was last."""

    def run(save_at=None, load=None, steps=24):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 1))
        optimizer = mh.AdamScale(
            torch.optim.Adam(model.parameters(), eps=eps), num_gradients_to_accumulate=2
        )
        x = torch.randn(24, 2, 8, 6) * torch.tensor([1.0, 1.0, 1e-4, 0.0, 1.0, 1.0])
        start = 0
        if load is not None:
            model.load_state_dict(load[0])
            optimizer.load_state_dict(load[1])
            start = 10
        for step in range(start, steps):
            optimizer.zero_grad()
            for a in range(2):
                (model(x[step, a]).square().mean() / 2).backward()
            optimizer.step()
            if step + 1 == save_at:
                return copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        return optimizer.noise, [p.detach() for p in model.parameters()]

    noise, params = run()
    again, same = run(load=run(save_at=10))
    assert again == noise
    assert all(map(torch.equal, params, same))


def test_norms_of_every_kind_of_tensor():
    tensors = [
        torch.randn(5),
        torch.randn(70_000),
        torch.randn(3, 4).double(),
        torch.randn(300, 400).bfloat16(),
        torch.randn(40, 50).to_sparse(),
        torch.zeros(0),
        torch.tensor(-3.0),
        torch.randn(6, 7).t(),
        torch.randn(200, 1000).t(),
        torch.randn(3, dtype=torch.complex64),
        torch.randn(70_000, dtype=torch.complex64),
        torch.randn(5, dtype=torch.complex64).conj(),
        torch.ones(2, 3).expand(2, 3),
    ]
    for tensor, together in zip(tensors, PlainNorm().many([], tensors), strict=True):
        plain = tensor.to_dense() if tensor.is_sparse else tensor
        wide = plain.to(torch.complex128 if plain.is_complex() else torch.float64)
        expected = pytest.approx(float(wide.abs().square().sum().sqrt()), rel=5e-6)
        assert float(norm(tensor)) == expected
        assert float(together) == expected
        assert norm(tensor).dtype in (torch.float32, torch.float64)


def test_adamscales_factor_is_a_power_of_the_gain():
    model = make_model()
    optimizer = mh.AdamScale(torch.optim.Adam(model.parameters()), num_gradients_to_accumulate=4)
    x, y = make_batches(1, 4)
    backward(model, x[0], y[0])
    gain = optimizer.gain()
    optimizer.step()
    assert optimizer.factors == (pytest.approx(math.sqrt(gain)),)
    assert optimizer.scale_lr(4.0, power=1.0) == [pytest.approx(gain)]


def test_identical_micro_batches_gain_nothing():
    model = make_model(torch.float64)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = mh.AdaScale(sgd, num_gradients_to_accumulate=4)
    x, y = make_batches(1, 1, dtype=torch.float64)
    backward(model, [x[0, 0]] * 4, [y[0, 0]] * 4)
    assert optimizer.gain() == pytest.approx(1.0, abs=1e-4)


def zero_in_place(optimizer):
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()


RESETS = {
    "cleared": lambda optimizer, fresh: optimizer.optimizer.state.clear(),
    "loaded": lambda optimizer, fresh: optimizer.optimizer.load_state_dict(copy.deepcopy(fresh)),
    "zeroed": lambda optimizer, fresh: zero_in_place(optimizer.optimizer),
}


def batches_of(model, optimizer, x, y, rule=None):
    """Train on [step][pass], and yield the rule's statistics after each step."""
    for xs, ys in zip(x, y, strict=True):
        take_steps(model, optimizer, [xs], [ys])
        yield (rule or optimizer).noise


@pytest.mark.parametrize("kind", ["Adam", "AdamW amsgrad", "Adam fused", "RMSprop"])
@pytest.mark.parametrize("reset", RESETS)
def test_averages_restart_when_the_optimizer_was_reset(kind, reset):
    """Norms of plain and of divided gradients differ by orders of magnitude: never mix them."""
    x, y = make_batches(16, 2)
    model, options = make_model(), {"num_gradients_to_accumulate": 2, "smoothing": 0.9}
    inner = KINDS[kind](model.parameters())
    fresh = copy.deepcopy(inner.state_dict())
    optimizer = mh.AdamScale(inner, **options)
    for noise in batches_of(model, optimizer, x[:8], y[:8]):
        assert noise.measured
    assert optimizer.noise.norm_kind == "preconditioned"
    RESETS[reset](optimizer, fresh)
    optimizer.zero_grad()
    other = copy.deepcopy(model)
    begun = mh.AdamScale(KINDS[kind](other.parameters()), **options)
    for ours, anew in zip(
        batches_of(model, optimizer, x[8:], y[8:]),
        batches_of(other, begun, x[8:], y[8:]),
        strict=True,
    ):
        assert ours.norm_kind == anew.norm_kind
        assert ours.raw_var == pytest.approx(anew.raw_var, rel=1e-6)
        assert ours.raw_sqr == pytest.approx(anew.raw_sqr, rel=1e-6, abs=1e-9)
    assert optimizer.noise.norm_kind == "preconditioned"  # again


@pytest.mark.filterwarnings("ignore:in the first block all")  # both ranks train on equal data
@on_ranks(2)
def test_averages_restart_when_blocks_reset_the_optimizer_inside():
    """BMUF resets Adam's state at every sync round."""
    model = make_model()
    inner = mh.AdamScale(torch.optim.Adam(model.parameters()), scale=2.0, world_size=1)
    optimizer = mh.BMUF(inner, global_sync_iter=8, warmup_iterations=0, state="reset")
    kinds = [noise.norm_kind for noise in batches_of(model, optimizer, *make_batches(12, 1), inner)]
    assert kinds == ["plain"] * 5 + ["preconditioned"] * 3 + ["plain"] * 4


def test_a_state_that_was_replaced_by_one_of_the_same_age_gets_its_own_floor():
    param = nn.Parameter(torch.randn(8, 6))

    def trained(factor):
        optimizer = torch.optim.Adam([param])
        for _ in range(6):
            param.grad = torch.randn(8, 6) * factor
            param.grad[0, 0] = 0.0
            optimizer.step()
        return optimizer

    optimizer, other = trained(1.0), trained(100.0)
    measure, grad = PreconditionedNorm(optimizer, 1e-3), torch.randn(8, 6)
    measure.one(0, grad)
    optimizer.load_state_dict(other.state_dict())
    assert measure.one(0, grad) == PreconditionedNorm(other, 1e-3).one(0, grad)


class OnDevice(torch.Tensor):
    """A count that says it is on a GPU, and how often its value was asked for."""

    asked = 0

    @property
    def device(self):
        return torch.device("cuda")

    def __float__(self):
        OnDevice.asked += 1
        return float(self.as_subclass(torch.Tensor))


def test_a_step_count_on_the_device_is_read_only_if_something_else_has_changed_it():
    param = nn.Parameter(torch.randn(3))
    optimizer = torch.optim.Adam([param])
    step = torch.tensor(6.0).as_subclass(OnDevice)
    optimizer.state[param] = {"step": step}
    measure = PreconditionedNorm(optimizer)
    OnDevice.asked = 0
    for _ in range(4):  # the optimizer's steps
        assert measure.norm_kind == "preconditioned"
        step.add_(1.0)
        measure.optimizer_stepped()
    assert OnDevice.asked == 1
    step.zero_()
    assert measure.norm_kind == "plain"
    optimizer.state[param] = {"step": torch.tensor(9.0).as_subclass(OnDevice)}
    assert measure.norm_kind == "preconditioned"
    optimizer.state.clear()
    assert measure.norm_kind == "plain"


def test_an_exploded_gradient_leaves_the_gain():
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 1)
    optimizer = mh.AdaScale(
        torch.optim.SGD(model.parameters(), lr=1e-6), num_gradients_to_accumulate=16
    )

    def step(size):
        x = torch.randn(16, 8, 20)
        y = x.sum(dim=2, keepdim=True)
        y[3] += size * torch.randn(8, 1)
        for part, targets in zip(x, y, strict=True):
            ((model(part) - targets).square().mean() / 16).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(40):
        step(0.0)
    before = optimizer.gain()
    step(1000.0)
    assert optimizer.gain() == pytest.approx(before, rel=0.1)


# -- what users combine with a rule: the lines of docs/scaling.md --------------------------------


def noisy(rule, optimizer_of, passes=8):
    """A parameter with four times as much noise as signal, one without gradients, and the rule."""
    weight, quiet = nn.Parameter(torch.zeros(64)), nn.Parameter(torch.ones(4))
    inner = optimizer_of([weight, quiet])
    draw = torch.Generator().manual_seed(0)

    def gradients(optimizer):
        optimizer.zero_grad()
        for _ in range(passes):
            along = 0.5 / 8 + torch.randn(64, generator=draw) / 8
            ((weight @ along + 0.0 * quiet.sum()) / passes).backward()

    return weight, quiet, gradients, rule(inner, num_gradients_to_accumulate=passes)


@pytest.mark.parametrize("passes", [4, 16])
def test_weight_decay_times_the_factor_is_the_small_batchs(passes):
    rate, decay = 1e-2, 0.1
    decayed = {}
    for restored in (True, False):
        _, quiet, gradients, optimizer = noisy(
            mh.AdamScale, lambda p: torch.optim.AdamW(p, lr=rate, weight_decay=decay), passes
        )
        while optimizer.progress < 400:
            gradients(optimizer)
            for group, factor in zip(optimizer.param_groups, optimizer.factors, strict=True):
                group["weight_decay"] = decay * factor if restored else decay
            optimizer.step()
        small = (1 - rate * decay) ** optimizer.progress  # without a gradient there is only decay
        decayed[restored] = math.log(float(quiet.detach()[0])) / math.log(small)
    assert decayed[True] == pytest.approx(1.0, abs=0.03)
    assert decayed[False] < 0.8


@pytest.mark.parametrize("passes", [4, 16])
def test_an_average_of_weights_lags_as_far_behind_as_the_small_batchs(passes):
    """Weights that go ahead by one in each small-batch step; their average is steps behind."""
    decay, lag = 0.9, {}
    for by_gain in (True, False):
        weight, _, gradients, optimizer = noisy(
            mh.AdaScale, lambda p: torch.optim.SGD(p, lr=0.0), passes
        )
        average = AveragedModel(
            nn.ParameterList([weight]),
            avg_fn=lambda mean, new, _, o=optimizer, g=by_gain: mean.lerp(
                new, 1 - decay ** (o.gain() if g else 1)
            ),
        )
        while optimizer.progress < 400:
            gradients(optimizer)
            optimizer.step()
            with torch.no_grad():
                weight.fill_(optimizer.progress)
            average.update_parameters(nn.ParameterList([weight]))
        lag[by_gain] = optimizer.progress - float(average.module[0].detach()[0])
    gain, small = optimizer.gain(), decay / (1 - decay)
    assert lag[True] == pytest.approx(small, abs=gain / 2)  # it is seen only after whole steps
    assert lag[False] == pytest.approx(small * gain, rel=0.05) and gain > 2


@pytest.mark.parametrize("passes", [4, 16])
def test_a_threshold_divided_by_the_gains_root_clips_what_the_small_batchs_did(passes):
    """Relative to it, the norm of the mean gradient is that of one small batch's."""
    weight, _, gradients, optimizer = noisy(
        mh.AdaScale, lambda p: torch.optim.SGD(p, lr=0.0), passes
    )
    squares = []
    for _ in range(400):
        gradients(optimizer)
        threshold = 1.0 / optimizer.gain() ** 0.5
        squares.append((float(weight.grad.norm()) / threshold) ** 2)
        optimizer.step()
    small = 0.25 + 1.0  # |signal|^2 and the noise of one pass
    assert sum(squares) / len(squares) == pytest.approx(small, rel=0.03)
