"""AdaScale in a single process: n simulated workers, plain torch.

    python examples/reference/adascale.py

The learning rate was tuned for a small batch. A step of n workers averages the gradients of n small
batches. AdaScale measures the progress of this large step in small steps, the gain. It multiplies
the learning rate by the gain, and ends training when the gains sum to the planned steps.

    n         workers, each with a small batch                                 S in the paper
    g_i       gradient of worker i's small batch; G is the mean
    sqr       |true gradient|^2                                                mu^2
    var       variance of a g_i: the trace of the covariance                   sigma^2
    gain      (sqr + var) / (sqr + var / n), between 1 and n                   r, equation 5
    progress  sum of the gains, in small steps                                 tau

Johnson, Agrawal, Gu, Guestrin, "AdaScale SGD: A User-Friendly Algorithm for Distributed Training",
ICML 2020, arXiv:2007.05105.

`manyhands.AdaScale` returns the same numbers (tests/scaling/test_reference_adascale.py). It adds
gradient accumulation, a gain per parameter group, a limit for exploded gradients and checkpoints,
and measures only some of the later steps.
"""

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def squared_norms(gradients: Tensor) -> tuple[float, float]:
    """Return the mean of |g_i|^2, and |G|^2. `gradients` has the shape (n, parameters)."""
    small = gradients.square().sum(dim=1).mean()
    large = gradients.mean(dim=0).square().sum()
    return small.item(), large.item()


def estimate(small: float, large: float, n: float) -> tuple[float, float]:
    """Solve these equations, which hold in expectation, for sqr and var."""
    # small = sqr + var
    # large = sqr + var / n      averaging divides the variance by n
    sqr = (n * large - small) / (n - 1)
    var = (small - large) * n / (n - 1)
    return sqr, var


def gain(sqr: float, var: float, n: float) -> float:
    """Return the progress of a step of n workers, in small steps."""
    return (sqr + var) / (sqr + var / n)


class Average:
    """Moving average, corrected for the start at zero as in Adam."""

    def __init__(self) -> None:
        self.total = 0.0
        self.weight = 0.0

    def add(self, value: float, smoothing: float) -> None:
        self.total = smoothing * self.total + (1 - smoothing) * value
        self.weight = smoothing * self.weight + (1 - smoothing)

    @property
    def value(self) -> float:
        return self.total / self.weight


class AdaScale:
    """Step an optimizer along the mean gradient, with the gain as factor of the learning rate."""

    def __init__(self, optimizer: torch.optim.Optimizer, n: int) -> None:
        self.optimizer = optimizer
        self.n = n
        self.smoothing = 1 - n / 1000  # averages over about 1000 small batches
        self.sqr = Average()
        self.var = Average()
        self.progress = 0.0

    def step(self, gradients: Tensor) -> float:
        """Take a step with the gradients of all workers; return the gain."""
        small, large = squared_norms(gradients)
        sqr, var = estimate(small, large, self.n)
        self.sqr.add(sqr, self.smoothing)  # a single estimate is noisy, and may be negative
        self.var.add(var, self.smoothing)
        r = gain(max(self.sqr.value, 0.0), max(self.var.value, 1e-6), self.n)
        self.step_along(gradients.mean(dim=0), r)
        self.progress += r
        return r

    def step_along(self, mean: Tensor, factor: float) -> None:
        """Step with the learning rate multiplied by `factor`, for this step only."""
        (group,) = self.optimizer.param_groups
        pieces = mean.split([param.numel() for param in group["params"]])
        for param, piece in zip(group["params"], pieces, strict=True):
            param.grad = piece.view_as(param)
        lr = group["lr"]
        group["lr"] = lr * factor
        self.optimizer.step()
        group["lr"] = lr


def worker_gradients(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the gradient of each worker's batch, with the shape (n, parameters)."""
    rows = []
    for x, y in batches:
        loss = nn.functional.mse_loss(model(x), y)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
    return torch.stack(rows)


def main(n: int = 8, small_steps: int = 800, lr: float = 0.01) -> None:
    """Train a linear regression with n workers, and with a single worker."""
    torch.manual_seed(0)
    truth = torch.randn(10, 1)

    def draw() -> tuple[Tensor, Tensor]:
        x = torch.randn(8, 10)
        return x, x @ truth + torch.randn(8, 1)

    def error(model: nn.Linear) -> float:
        return (model.weight.T - truth).square().sum().item()

    model = nn.Linear(10, 1)
    adascale = AdaScale(torch.optim.SGD(model.parameters(), lr), n)
    single = copy.deepcopy(model)
    sgd = torch.optim.SGD(single.parameters(), lr)
    steps = 0
    taken = 0
    print(f"{n} workers                                       single worker")
    print("steps   gain  learning rate  progress   error   steps   error")
    while adascale.progress < small_steps:
        r = adascale.step(worker_gradients(model, [draw() for _ in range(n)]))
        steps += 1
        while taken < adascale.progress:
            sgd.zero_grad()
            x, y = draw()
            nn.functional.mse_loss(single(x), y).backward()
            sgd.step()
            taken += 1
        if steps in (1, 10, 20, 40, 80) or adascale.progress >= small_steps:
            row = f"{steps:5}{r:7.2f}{lr * r:15.4f}{adascale.progress:10.1f}"
            print(f"{row}{error(model):8.3f}{taken:8}{error(single):8.3f}")


if __name__ == "__main__":
    main()
