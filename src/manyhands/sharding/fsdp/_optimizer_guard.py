"""Refuse optimizers that cannot train sharded parameters, at their first step.

    made before wrapping     the optimizer holds plain parameters, which the model no longer uses
    needs full tensors       the optimizer calls functions that DTensors do not have, or that give
                             another result on a slice

torch calls a hook of ours before the step of any optimizer in the process; each optimizer is
checked once. A class that is not torch's is tried on a small example, sharded and not: the results
must agree.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import LBFGS, Adafactor, Optimizer, Rprop, SparseAdam
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from manyhands._core.sharded import is_dtensor
from manyhands.sharding.fsdp._full_tensors import to_full

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

REPLACED, SHARDED = "_manyhands_replaced", "_manyhands_sharded"
NEED_WHOLE = (Adafactor, Rprop, SparseAdam)

# The number of parameters with which an optimizer was checked; add_param_group() changes it.
_checked: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
_problems: dict[type, str | None] = {}  # by class; None: it works
_hook: list[RemovableHandle] = []  # the handle of the hook, once there is one


def guard_optimizers(before: Iterable[Tensor], after: Iterable[Tensor]) -> None:
    """Mark parameters that were replaced by sharded ones, and check optimizers from now on.

    `before` are the plain parameters, `after` the sharded ones.
    """
    # Marked on the tensors: an optimizer has no other link to the model.
    for param in before:
        setattr(param, REPLACED, True)
    for param in after:
        setattr(param, SHARDED, True)
    if not _hook:
        _hook.append(register_optimizer_step_pre_hook(_check_at_step))


def _check_at_step(optimizer: Optimizer, *_: object) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if _checked.get(optimizer) == len(params):
        return
    if any(getattr(param, REPLACED, False) for param in params):
        raise RuntimeError(
            f"this {type(optimizer).__name__} was made before the model was wrapped, and holds "
            "parameters that the model no longer uses. Make it after wrapping, from "
            "model.parameters()."
        )
    if any(getattr(param, SHARDED, False) for param in params):
        _check_class(optimizer, next(p for p in params if is_dtensor(p)))
    _checked[optimizer] = len(params)


def _check_class(optimizer: Optimizer, like: DTensor) -> None:
    kind = type(optimizer)
    if isinstance(optimizer, LBFGS):
        raise TypeError(
            "LBFGS works on all parameters as one vector, and cannot train sharded ones. Train "
            "without sharding, or with another optimizer."
        )
    # Ours check their own parameters when they are made.
    if kind.__module__.startswith("manyhands."):
        return
    if kind not in _problems:
        _problems[kind] = _problem_with(optimizer, like)
    problem = _problems[kind]
    if problem is not None:
        raise TypeError(
            f"{kind.__name__} cannot train parameters that FullyShardedDataParallel has sharded: "
            f"{problem}. Use manyhands.OSS(model.parameters(), optim={kind.__name__}, ...) with "
            "ShardedDataParallel instead, which gives each full tensor to one rank."
        )


def _problem_with(optimizer: Optimizer, like: DTensor) -> str | None:
    """Return why a class cannot work on DTensors, or None.

    The example sends, so every rank must call this at the same step.
    """
    if isinstance(optimizer, NEED_WHOLE):
        return "it needs full tensors"
    if type(optimizer).__module__.startswith("torch.optim."):
        return None
    try:
        plain = _run_example(optimizer, like, sharded=False)
    except Exception:
        return None  # it cannot be made from its defaults, so it cannot be tried
    try:
        sharded = _run_example(optimizer, like, sharded=True)
    except Exception as error:
        return f"on a small example it raised {type(error).__name__}"
    same = torch.allclose(sharded, plain, rtol=1e-3, atol=1e-5)
    return None if same else "on a small example its steps differ from those with full tensors"


def _run_example(optimizer: Optimizer, like: DTensor, *, sharded: bool) -> Tensor:
    """Run two steps of such an optimizer on a small matrix, and return the matrix in full."""
    # Two rows of three for each rank, so that no slice is empty.
    elements = 6 * like.device_mesh.size()
    param = torch.linspace(-1, 1, elements, dtype=like.dtype, device=like.device).view(-1, 3)
    grad = param.sin() + param.square()
    if sharded:
        from torch.distributed.tensor import distribute_tensor

        mesh, placements = like.device_mesh, like.placements
        param = distribute_tensor(param, mesh, placements, src_data_rank=None)
        grad = distribute_tensor(grad, mesh, placements, src_data_rank=None)
    matrix = torch.nn.Parameter(param)
    example = type(optimizer)([matrix], **optimizer.defaults)
    for _ in range(2):  # the second step uses the state that the first has made
        matrix.grad = grad.clone()
        example.step()
    return to_full(matrix.detach())
