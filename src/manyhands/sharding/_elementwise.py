"""Does an optimizer treat each element of a parameter by itself?

If it does, parameters can be cut anywhere. If it looks at a whole tensor (LAMB's and LARS's norms,
Adafactor's rows and columns, Muon's matrices), each has to stay in one piece. torch's own classes
are known; any other is tried: a few steps on a toy tensor, whole and cut in two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, optim

ELEMENTWISE: tuple[type, ...] = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax),
    *(optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD),
)
STEPS = 4


def works_by_element(kind: type[optim.Optimizer], defaults: dict[str, Any]) -> bool:
    """Whether parameters may be cut anywhere. Raises where they may not even be told apart."""
    if kind in ELEMENTWISE:
        return True
    if kind is optim.LBFGS or not _same(kind, defaults, _apart):
        raise ValueError(
            f"{kind.__name__} looks at all parameters together, so its state cannot be divided "
            "among workers. Use it as it is, on every worker."
        )
    return kind.__module__.split(".")[0] != "torch" and _same(kind, defaults, _cut)


def _same(
    kind: type[optim.Optimizer], defaults: dict[str, Any], divide: Callable[..., list[Tensor]]
) -> bool:
    """Whether a toy's parameters come out the same when they are divided up."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 6), (8, 2)]
    start = [torch.randn(shape, generator=generator) for shape in shapes]
    steps = [
        [torch.randn(shape, generator=generator) * 3 for shape in shapes] for _ in range(STEPS)
    ]
    together = [tensor.clone() for tensor in start]
    try:
        with torch.random.fork_rng(devices=[]):
            _train([together], [steps], kind, defaults)
            parts = divide([tensor.clone() for tensor in start])
            grads = [divide(step) for step in steps]
            _train(
                [[part] for part in parts],
                [[[g[i]] for g in grads] for i in range(len(parts))],
                kind,
                defaults,
            )
    except Exception:
        return divide is _apart  # it takes no such toys: leave parameters whole, one by one
    flat = torch.cat([part.flatten() for part in parts])
    return torch.equal(flat, torch.cat([tensor.flatten() for tensor in together]))


def _train(
    optimized: list[list[Tensor]],
    gradients: list[list[list[Tensor]]],
    kind: type[optim.Optimizer],
    defaults: dict[str, Any],
) -> None:
    for params, steps in zip(optimized, gradients, strict=True):
        leaves = [torch.nn.Parameter(param) for param in params]
        optimizer = kind(leaves, **defaults)
        for step in steps:
            for leaf, grad in zip(leaves, step, strict=True):
                leaf.grad = grad.clone()
            optimizer.step()


def _apart(tensors: list[Tensor]) -> list[Tensor]:
    return tensors


def _cut(tensors: list[Tensor]) -> list[Tensor]:
    return [half for tensor in tensors for half in tensor.view(-1).tensor_split(2)]
