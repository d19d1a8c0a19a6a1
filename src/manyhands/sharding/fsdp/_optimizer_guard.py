"""Optimizers that cannot train sharded parameters are told so at their first step.

    made before wrapping     it holds the parameters as they were, which nobody uses any more
    needs whole tensors      some optimizers do to DTensors what these cannot

torch calls a hook of ours before the step of any optimizer; each is looked at once. A class that
is not torch's is tried on a toy: sharded and whole must agree.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Adafactor, Optimizer, Rprop, SparseAdam
from torch.optim.optimizer import register_optimizer_step_pre_hook

from manyhands._core.dtensor import is_dtensor
from manyhands.sharding.fsdp._full_tensors import whole

REPLACED, SHARDED = "_manyhands_replaced", "_manyhands_sharded"
NEED_WHOLE = (Adafactor, Rprop, SparseAdam)

_looked_at: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
_works: dict[type, str | None] = {}
_listening: list[Any] = []


def guard_optimizers(before: Iterable[Tensor], after: Iterable[Tensor]) -> None:
    """These parameters were guard_optimizers by sharded ones."""
    for param in before:
        setattr(param, REPLACED, True)
    for param in after:
        setattr(param, SHARDED, True)
    if not _listening:
        _listening.append(register_optimizer_step_pre_hook(_look_at))


def _look_at(optimizer: Optimizer, *_: Any) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if _looked_at.get(optimizer) == len(params):
        return
    if any(getattr(param, REPLACED, False) for param in params):
        raise RuntimeError(
            f"this {type(optimizer).__name__} was made before the model was wrapped, and holds "
            "parameters that are no longer the model's. Make it after wrapping, from "
            "model.parameters()."
        )
    if any(getattr(param, SHARDED, False) for param in params):
        _check_class(optimizer, next(p for p in params if is_dtensor(p)))
    _looked_at[optimizer] = len(params)


def _check_class(optimizer: Optimizer, like: Any) -> None:
    kind = type(optimizer)
    if isinstance(optimizer, LBFGS):
        raise TypeError(
            "LBFGS works on all parameters as one vector, and cannot train sharded ones. Train "
            "without sharding, or with another optimizer."
        )
    if kind.__module__.startswith("manyhands."):
        return
    if kind not in _works:
        _works[kind] = _problem_with(optimizer, like)
    problem = _works[kind]
    if problem is not None:
        raise TypeError(
            f"{kind.__name__} cannot train parameters that FullyShardedDataParallel has sharded: "
            f"{problem}. Use manyhands.OSS(model.parameters(), optim={kind.__name__}, ...) with "
            "ShardedDataParallel instead, which gives each whole tensor to one worker."
        )


def _problem_with(optimizer: Optimizer, like: Any) -> str | None:
    """Why a class cannot work on DTensors, or None. Every worker comes here at the same step."""
    if isinstance(optimizer, NEED_WHOLE):
        return "it needs whole tensors"
    if type(optimizer).__module__.startswith("torch.optim."):
        return None
    try:
        alone = _toy_run(optimizer, like, sharded=False)
    except Exception:
        return None  # not to be made from its defaults: nothing can be said
    try:
        sharded = _toy_run(optimizer, like, sharded=True)
    except Exception as error:
        return f"on a small example it raised {type(error).__name__}"
    same = torch.allclose(sharded, alone, rtol=1e-3, atol=1e-5)
    return None if same else "on a small example its steps are not those of whole tensors"


def _toy_run(optimizer: Optimizer, like: Any, *, sharded: bool) -> Tensor:
    """A few steps of such an optimizer on a small matrix, perhaps sharded as `like` is."""
    elements = 6 * like.device_mesh.size()
    param = torch.linspace(-1, 1, elements, dtype=like.dtype, device=like.device).view(-1, 3)
    grad = param.sin() + param.square()
    if sharded:
        from torch.distributed.tensor import distribute_tensor

        mesh, placements = like.device_mesh, like.placements
        param = distribute_tensor(param, mesh, placements, src_data_rank=None)
        grad = distribute_tensor(grad, mesh, placements, src_data_rank=None)
    toy_param = torch.nn.Parameter(param)
    toy = type(optimizer)([toy_param], **optimizer.defaults)
    for _ in range(2):
        toy_param.grad = grad.clone()
        toy.step()
    return whole(toy_param.detach())
