"""DiLoCo in a single process: simulated workers, plain torch.

    python examples/reference/diloco.py

Sending gradients at every step takes too long over a slow network. In DiLoCo, each worker trains a
copy of the model for H local steps, a block. Then the workers synchronize: the mean movement is the
gradient of an outer optimizer, SGD with Nesterov momentum.

    anchor     parameters of all workers at the start of a block               theta in the paper
    H          local steps in a block, with an inner optimizer such as AdamW
    gradient   anchor - mean of the workers' parameters: the outer gradient    Delta
    velocity   momentum buffer of the outer optimizer
    lr, momentum   of the outer optimizer: 0.7 and 0.9 in the paper

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023,
arXiv:2311.08105.

`manyhands.DiLoCo` computes equal parameters (tests/blocks/test_reference_diloco.py). It adds
codecs, overlap with training, fragments, crews and checkpoints.
"""

import copy
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def mse_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


class Worker:
    """A copy of the model, with an inner optimizer that preserves state between blocks."""

    def __init__(self, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = make_optimizer(self.model.parameters())

    def local_steps(self, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Train without the other workers."""
        for x, y in batches:
            self.optimizer.zero_grad()
            mse_loss(self.model, x, y).backward()
            self.optimizer.step()

    @property
    def params(self) -> Tensor:
        """All parameters as a vector."""
        return nn.utils.parameters_to_vector(self.model.parameters()).detach()

    def set_params(self, vector: Tensor) -> None:
        vector = vector.clone()  # the parameters become views
        nn.utils.vector_to_parameters(vector, self.model.parameters())


def outer_gradient(anchor: Tensor, params: list[Tensor]) -> Tensor:
    """Return the negative mean movement of the workers."""
    return anchor - torch.stack(params).mean(dim=0)


def outer_step(
    anchor: Tensor, gradient: Tensor, velocity: Tensor, lr: float = 0.7, momentum: float = 0.9
) -> tuple[Tensor, Tensor]:
    """Return the next anchor and velocity, after a step of SGD with Nesterov momentum."""
    velocity = momentum * velocity + gradient
    anchor = anchor - lr * (gradient + momentum * velocity)
    return anchor, velocity


class DiLoCo:
    """Train multiple workers in blocks."""

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        workers: int,
        lr: float = 0.7,
        momentum: float = 0.9,
    ) -> None:
        self.workers = [Worker(model, make_optimizer) for _ in range(workers)]
        self.lr = lr
        self.momentum = momentum
        self.anchor = self.workers[0].params
        self.velocity = torch.zeros_like(self.anchor)

    def block(self, batches: list[list[tuple[Tensor, Tensor]]]) -> None:
        """Take local steps on the batches of each worker, then synchronize."""
        for worker, own in zip(self.workers, batches, strict=True):
            worker.local_steps(own)
        gradient = outer_gradient(self.anchor, [worker.params for worker in self.workers])
        self.anchor, self.velocity = outer_step(
            self.anchor, gradient, self.velocity, self.lr, self.momentum
        )
        for worker in self.workers:
            worker.set_params(self.anchor)


def main(workers: int = 4, local_steps: int = 20, blocks: int = 15) -> None:
    """Fit noisy data with workers that communicate every `local_steps` steps."""
    torch.manual_seed(0)
    truth = torch.randn(16, 1)

    def draw(samples: int = 8, noise: float = 0.5) -> tuple[Tensor, Tensor]:
        x = torch.randn(samples, 16)
        return x, (x @ truth).tanh() + noise * torch.randn(samples, 1)

    def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-2)

    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    diloco = DiLoCo(model, adamw, workers)
    single = Worker(model, adamw)
    x, y = draw(2000, noise=0.0)
    print(f"              {workers} workers      single worker")
    print("block  steps  movement   loss    loss")
    for block in range(1, blocks + 1):
        before = diloco.anchor
        batches = [[draw() for _ in range(local_steps)] for _ in range(workers)]
        diloco.block(batches)
        single.local_steps(batches[0])
        if block % 3 == 0 or block == 1:
            row = f"{block:5}{block * local_steps:7}{(diloco.anchor - before).norm():10.2f}"
            losses = [mse_loss(worker.model, x, y) for worker in (diloco.workers[0], single)]
            print(f"{row}{losses[0].item():7.3f}{losses[1].item():8.3f}")


if __name__ == "__main__":
    main()
