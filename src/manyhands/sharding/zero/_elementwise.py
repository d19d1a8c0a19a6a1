"""Does an optimizer treat each element of a parameter by itself?

If it does, parameters can be cut anywhere. If it looks at a whole tensor (LAMB's and LARS's norms,
Adafactor's rows and columns, Muon's matrices), each parameter has to stay whole.

torch's own classes are known. Parameters of any other class are left whole, which is right for all
classes that look at one parameter at a time. If the user asks for cut parameters, a few steps on
toy parameters must come out the same whole and cut.
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
SHAPES = (160, 144), (96,)  # some optimizers change their method above a size


def choose_layout(
    kind: type[optim.Optimizer], asked: str | None, options: Sequence[dict[str, Any]]
) -> str:
    """Return the layout: the one that was asked for, or else the one that the optimizer needs.

    Raise a ValueError if its numbers would be wrong. `options` are those of each parameter group.
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
    """Return whether toy parameters come out the same whole and cut, with any of these options."""
    return kind in ELEMENTWISE or all(
        _trains_alike(kind, each, _in_halves, if_it_fails=False) for each in options
    )


def _check_can_be_divided(kind: type[optim.Optimizer], options: Sequence[dict[str, Any]]) -> None:
    """Raise a ValueError if the optimizer cannot step some of the parameters without the others."""
    if kind is optim.LBFGS or not all(
        _trains_alike(kind, each, _one_by_one, if_it_fails=True) for each in options
    ):
        raise ValueError(
            f"{kind.__name__} looks at all parameters together, so its state cannot be divided "
            "among workers. Use it as it is, on every worker. (If it only adds noise of its own, "
            'layout="whole" will do.)'
        )


def _trains_alike(
    kind: type[optim.Optimizer],
    options: dict[str, Any],
    divide: Callable[[list[Tensor]], list[Tensor]],
    *,
    if_it_fails: bool,
) -> bool:
    """Return whether toy parameters come out the same together and divided.

    `if_it_fails` is the answer for an optimizer that cannot train such toys.
    """
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in SHAPES]
    steps = [[torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(STEPS)]
    moving = {**options, "lr": 0.05} if "lr" in options and not options["lr"] else options
    together = [tensor.clone() for tensor in start]
    try:
        with torch.random.fork_rng(devices=[]):
            _train_toys([together], [steps], kind, moving)
            parts = divide([tensor.clone() for tensor in start])
            grads = [divide(step) for step in steps]
            each = [[[step[i]] for step in grads] for i in range(len(parts))]
            _train_toys([[part] for part in parts], each, kind, moving)
    except Exception:
        return if_it_fails
    flat = torch.cat([part.flatten() for part in parts])
    return torch.equal(flat, torch.cat([tensor.flatten() for tensor in together]))


def _train_toys(
    optimized: list[list[Tensor]],
    gradients: list[list[list[Tensor]]],
    kind: type[optim.Optimizer],
    defaults: dict[str, Any],
) -> None:
    """Train each list of parameters with an optimizer of its own, along the given gradients."""
    for params, steps in zip(optimized, gradients, strict=True):
        torch.manual_seed(0)  # the same noise for an optimizer that adds some
        leaves = [torch.nn.Parameter(param) for param in params]
        optimizer = kind(leaves, **defaults)
        for step in steps:
            for leaf, grad in zip(leaves, step, strict=True):
                leaf.grad = grad.clone()
            optimizer.step()


def _one_by_one(tensors: list[Tensor]) -> list[Tensor]:
    return tensors


def _in_halves(tensors: list[Tensor]) -> list[Tensor]:
    return [half for tensor in tensors for half in tensor.view(-1).tensor_split(2)]
