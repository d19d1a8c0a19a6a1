"""Does an optimizer treat each element of a parameter by itself?

If it does, parameters can be cut anywhere. If it looks at a whole tensor (LAMB's and LARS's norms,
Adafactor's rows and columns, Muon's matrices), each has to stay in one piece. torch's own classes
are known. Any other's parameters are left whole, which is right for all that look no further; to
have them cut, the user says so, and is believed if a few steps on toy tensors come out the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, optim

ELEMENTWISE: tuple[type, ...] = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax),
    *(optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD),
)
STEPS = 12
SHAPES = (160, 144), (96,)  # large enough for what sets in at some size only


def chosen_layout(
    kind: type[optim.Optimizer], asked: str | None, options: Sequence[dict[str, Any]]
) -> str:
    """The layout that was asked for, or that an optimizer needs. Raises where it cannot be.

    `options` are those of each of its parameter groups.
    """
    if asked not in (None, "even", "whole"):
        raise ValueError(
            f'layout must be "even", "whole" or None (what {kind.__name__} needs), got {asked!r}.'
        )
    if asked == "even" and not may_be_cut(kind, options):
        raise ValueError(
            f'layout="even" cuts parameters anywhere, and {kind.__name__} looks at whole ones: '
            'its numbers would be wrong. Use layout="whole".'
        )
    if asked is None and kind not in ELEMENTWISE:
        _check_can_be_divided(kind, options)
    return asked or ("even" if kind in ELEMENTWISE else "whole")


def may_be_cut(kind: type[optim.Optimizer], options: Sequence[dict[str, Any]]) -> bool:
    """Whether toy parameters come out the same whole and cut, with any of these options."""
    return kind in ELEMENTWISE or all(_same(kind, each, _cut, False) for each in options)


def _check_can_be_divided(kind: type[optim.Optimizer], options: Sequence[dict[str, Any]]) -> None:
    """Raise where parameters may not even be told apart."""
    if kind is optim.LBFGS or not all(_same(kind, each, _apart, True) for each in options):
        raise ValueError(
            f"{kind.__name__} looks at all parameters together, so its state cannot be divided "
            "among workers. Use it as it is, on every worker. (If it only adds noise of its own, "
            'layout="whole" will do.)'
        )


def _same(
    kind: type[optim.Optimizer],
    options: dict[str, Any],
    divide: Callable[[list[Tensor]], list[Tensor]],
    where_it_fails: bool,
) -> bool:
    """Whether toy parameters come out the same when they are divided up.

    `where_it_fails`: the answer for an optimizer that takes no such toys.
    """
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in SHAPES]
    steps = [[torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(STEPS)]
    moving = {**options, "lr": 0.05} if "lr" in options and not options["lr"] else options
    together = [tensor.clone() for tensor in start]
    try:
        with torch.random.fork_rng(devices=[]):
            _train([together], [steps], kind, moving)
            parts = divide([tensor.clone() for tensor in start])
            grads = [divide(step) for step in steps]
            each = [[[step[i]] for step in grads] for i in range(len(parts))]
            _train([[part] for part in parts], each, kind, moving)
    except Exception:
        return where_it_fails
    flat = torch.cat([part.flatten() for part in parts])
    return torch.equal(flat, torch.cat([tensor.flatten() for tensor in together]))


def _train(
    optimized: list[list[Tensor]],
    gradients: list[list[list[Tensor]]],
    kind: type[optim.Optimizer],
    defaults: dict[str, Any],
) -> None:
    for params, steps in zip(optimized, gradients, strict=True):
        torch.manual_seed(0)  # the same noise for an optimizer that adds some
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
