"""The plain run: what our wrappers must equal, written with nothing of ours in it.

One process, gradients of all small batches taken one at a time, their statistics computed as in
examples/reference/adascale.py, and a plain optimizer whose learning rate is set by hand.
"""

import math

import torch
from torch import nn
from torch.optim import Adam, AdamW, RMSprop

from helpers.ranks import run_ranks
from reference.adascale import Average, estimate, gain

OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05),
    "SGD momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
}


def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)


class TrunkAndExtra(nn.Module):
    """Two layers, of which a rank's loss may leave one out."""

    def __init__(self):
        super().__init__()
        self.trunk, self.extra = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x, extra):
        return self.trunk(x).sum() + (self.extra(x).sum() if extra else 0.0)


def two_groups(model):
    """A parameter group for each layer."""
    return [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]


def make_batches(steps, small_batches, size=4, dtype=torch.float32, seed=1):
    """x and y of [step][small batch][sample]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(steps, small_batches, size, 3, generator=generator)
    y = torch.randn(steps, small_batches, size, 2, generator=generator) + x[..., :2] * 2
    return x.to(dtype), y.to(dtype)


def loss_of(model, x, y):
    return nn.functional.mse_loss(model(x), y)


def backward(model, x, y):
    """A backward pass for each small batch of a step."""
    for xs, ys in zip(x, y, strict=True):
        (loss_of(model, xs, ys) / len(x)).backward()


def take_steps(model, optimizer, x, y):
    """A step for each [small batch][sample] of x and y."""
    for xs, ys in zip(x, y, strict=True):
        optimizer.zero_grad()
        backward(model, xs, ys)
        optimizer.step()


def gradients(model, x, y):
    """One gradient per small batch, as lists of tensors."""
    result = []
    for xi, yi in zip(x, y, strict=True):
        params = list(model.parameters())
        result.append([g.clone() for g in torch.autograd.grad(loss_of(model, xi, yi), params)])
    return result


def preconditioners(optimizer):
    """What the optimizer divides each gradient by, once it has made five steps."""
    result = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            step = float(state.get("step", 0))
            if step < 5 or not isinstance(optimizer, Adam | AdamW | RMSprop):
                result.append(torch.ones_like(p))
            elif "exp_avg_sq" in state:
                corrected = state["exp_avg_sq"] / (1 - group["betas"][1] ** step)
                result.append(corrected.sqrt() + group["eps"])
            else:
                result.append(state["square_avg"].sqrt() + group["eps"])
    return result


class PlainRun:
    """Train on `x, y` with a learning rate that `factor(sqr, var, scale, progress)` scales."""

    def __init__(
        self,
        model,
        optimizer,
        factor,
        scale=None,
        preconditioned=False,
        smoothing=None,
        mix_norm_kinds=False,
    ):
        self.model, self.optimizer, self.factor = model, optimizer, factor
        self.scale, self.preconditioned, self.smoothing = scale, preconditioned, smoothing
        self.sizes = [len(g["params"]) for g in optimizer.param_groups]
        self.restart_averages()
        self.warm, self.mix_norm_kinds = False, mix_norm_kinds
        self.progress = 0.0
        self.gains = []

    def per_group(self, grads, pinv):
        squares = [
            float((g.double() / d.double()).square().sum())
            for g, d in zip(grads, pinv, strict=True)
        ]
        result, start = [], 0
        for size in self.sizes:
            result.append(sum(squares[start : start + size]))
            start += size
        return result

    def restart_averages(self):
        self.sqr_averages = [Average() for _ in self.sizes]
        self.var_averages = [Average() for _ in self.sizes]

    def add(self, estimates, theta, divided):
        """Add one step's estimates to the averages."""
        started = self.preconditioned and divided
        if started and not self.warm and not self.mix_norm_kinds:  # the norms have another unit
            self.restart_averages()
        self.warm = started
        for group, (sqr, var) in enumerate(estimates):
            self.sqr_averages[group].add(sqr, theta)
            self.var_averages[group].add(var, theta)

    def step(self, x, y, weight_in_steps=1):
        """Train one step; its gradients count as those of so many steps, with 0 not at all."""
        grads = gradients(self.model, x, y)
        n = len(grads)
        scale = self.scale or n
        mean = [torch.stack(gs).mean(dim=0) for gs in zip(*grads, strict=True)]
        ones = [torch.ones_like(m) for m in mean]
        pinv = preconditioners(self.optimizer) if self.preconditioned else ones
        small = [sum(v) / n for v in zip(*(self.per_group(g, pinv) for g in grads), strict=True)]
        big = self.per_group(mean, pinv)
        estimates = []
        for s, b in zip(small, big, strict=True):
            sqr, var = estimate(s, b, n)
            estimates.append((sqr, var * scale / n))  # the noise of a batch of scale 1
        theta = max(1 - n / 1000, 0) if self.smoothing is None else self.smoothing
        if weight_in_steps:
            self.add(estimates, theta**weight_in_steps, any((d != 1).any() for d in pinv))
        self.sqr = [max(average.value, 0.0) for average in self.sqr_averages]
        self.var = [max(average.value, 1e-6) for average in self.var_averages]
        self.gains.append(gain(sum(self.sqr), sum(self.var), scale))
        factors = [
            self.factor(s, v, scale, self.progress) for s, v in zip(self.sqr, self.var, strict=True)
        ]
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for p, g in zip(self.model.parameters(), mean, strict=True):
            p.grad = g
        for group, factor in zip(self.optimizer.param_groups, factors, strict=True):
            group["lr"] *= factor
        self.optimizer.step()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.progress += self.gains[-1]


# The rules' formulas, by hand: from the noise, the scale and the progress to the factor.


def adascale(sqr, var, scale, progress):
    return gain(sqr, var, scale)


def adamscale(sqr, var, scale, progress):
    return math.sqrt(gain(sqr, var, scale))


def linear(sqr, var, scale, progress):
    return scale


def square_root(sqr, var, scale, progress):
    return math.sqrt(scale)


def legw(sqr, var, scale, progress, warmup_steps=2):
    return math.sqrt(scale) * min(1.0, progress / (warmup_steps * scale))


def trained_as_under_ddp(world, train, plain, how, *args, **kwargs):
    """What each rank has of `train(how, ...)`, after `train(plain, ...)`, which it must equal."""

    def both():
        return [train(way, *args, **kwargs) for way in (plain, how)]

    under_ddp, everyone = zip(*run_ranks(world, both), strict=True)
    assert_as_under_ddp(everyone, under_ddp[0])
    return everyone


def assert_as_under_ddp(everyone, plain):
    """Each rank's statistics and parameters are those of DDP; all ranks' statistics are alike."""
    for seen, params in everyone:
        torch.testing.assert_close(seen, plain[0], rtol=1e-5, atol=1e-12)
        torch.testing.assert_close(params, plain[1], rtol=1e-4, atol=1e-6)
        assert torch.equal(seen, everyone[0][0])
