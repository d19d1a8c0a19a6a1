"""The length of a gradient, exactly and in one read of the memory.

A CPU adds the squares of a tensor one after the other, so that a float32 norm over ten million
elements comes out 7e-4 too small. Long tensors are therefore taken in rows of 32,768: the same
speed, and 1e-7. Half-precision gradients are summed in float32.

`Plain` measures |g|. `Preconditioned` measures |g / (sqrt(v) + eps)|, the gradient as Adam
and RMSprop see it, with the optimizer's own second moments v; a chunk at a time through a
small scratch buffer on a CPU, so that only g and v cross the memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

ROW = 32_768
CHUNK = 262_144


class Norms(Protocol):
    """Lengths of gradients; `indices` say which parameters they belong to."""

    @property
    def unit(self) -> str:
        """What the lengths are of: "plain" or "preconditioned" gradients."""

    def one(self, index: int, grad: Tensor) -> Tensor: ...

    def many(self, indices: Sequence[int], grads: Sequence[Tensor]) -> list[Tensor]: ...

    def refresh(self) -> None:
        """Look at the optimizer again, after a group was added or its state replaced."""


class Plain:
    """The Euclidean norm."""

    unit = "plain"

    def refresh(self) -> None:
        pass

    def one(self, index: int, grad: Tensor) -> Tensor:
        return norm(grad)

    def many(self, indices: Sequence[int], grads: Sequence[Tensor]) -> list[Tensor]:
        return norms(grads)


def norm(grad: Tensor) -> Tensor:
    """|grad|, as a tensor of no dimensions in float32 or better."""
    if grad.numel() <= 2 * ROW and grad.dtype is torch.float32 and grad.layout is torch.strided:
        return torch.linalg.vector_norm(grad)
    if grad.layout != torch.strided:
        grad = grad.coalesce().values() if grad.layout == torch.sparse_coo else grad.to_dense()
    if grad.numel() <= 2 * ROW or grad.device.type != "cpu":
        return torch.linalg.vector_norm(grad, dtype=_sum_dtype(grad))
    flat = flattened(grad)
    rows = flat.numel() // ROW
    parts = torch.linalg.vector_norm(
        flat[: rows * ROW].view(rows, ROW), dim=1, dtype=_sum_dtype(grad)
    )
    if rows * ROW < flat.numel():
        rest = torch.linalg.vector_norm(flat[rows * ROW :], dtype=parts.dtype)
        parts = torch.cat([parts, rest.view(1)])
    return torch.linalg.vector_norm(parts)


def norms(grads: Sequence[Tensor]) -> list[Tensor]:
    """|g| for each: short dense float32 tensors in one call, the others one by one."""
    result: list[Tensor | None] = [None] * len(grads)
    together: list[int] = []
    for i, grad in enumerate(grads):
        short = grad.numel() <= 2 * ROW or grad.device.type != "cpu"
        if short and grad.layout == torch.strided and grad.dtype == torch.float32:
            together.append(i)
        else:
            result[i] = norm(grad)
    if together:
        lengths = torch._foreach_norm([grads[i] for i in together])
        for i, length in zip(together, lengths, strict=True):
            result[i] = length
    return [length for length in result if length is not None]


def flattened(grad: Tensor) -> Tensor:
    """All elements in one dimension, in the order of memory where they lie densely."""
    if not grad.is_contiguous():
        order = sorted(range(grad.dim()), key=grad.stride, reverse=True)
        grad = grad.permute(order)
    return grad.reshape(-1)


def _sum_dtype(grad: Tensor) -> torch.dtype | None:
    return torch.float32 if grad.dtype in (torch.float16, torch.bfloat16) else None


class Preconditioned:
    """The norm of a gradient divided by what Adam or RMSprop would divide it by.

    Until an optimizer has made `WARM_STEPS` steps its second moments are mostly start-up, and
    the plain norm is taken. Second moments below `floor` times their tensor's mean count as that
    much: a weight that has hardly ever had a gradient (of a rare letter, of an empty pixel) would
    otherwise be divided by almost nothing, and outweigh all others when it gets one.
    """

    WARM_STEPS = 5
    REFRESH = 16  # calls for which a parameter's floor is taken to stay as it is

    def __init__(self, optimizer: torch.optim.Optimizer, floor: float = 0.0) -> None:
        if not isinstance(optimizer, torch.optim.Adam | torch.optim.RMSprop):
            raise TypeError(
                "AdamScale divides gradients as the optimizer does and knows how for Adam, AdamW "
                f"and RMSprop (and subclasses), got {type(optimizer).__name__}. "
                "Use AdaScale for SGD, or SqrtScale for other adaptive optimizers."
            )
        self._optimizer = optimizer
        self._floor = floor
        self._scratch: dict[torch.dtype, Tensor] = {}
        self.refresh()

    def refresh(self) -> None:
        groups = self._optimizer.param_groups
        self._places = [(group, param) for group in groups for param in group["params"]]
        self._warm: set[int] = set()
        self._least: dict[int, tuple[int, Tensor | None]] = {}

    @property
    def unit(self) -> str:
        return "preconditioned" if self._warm else "plain"

    def many(self, indices: Sequence[int], grads: Sequence[Tensor]) -> list[Tensor]:
        return [self.one(index, grad) for index, grad in zip(indices, grads, strict=True)]

    def one(self, index: int, grad: Tensor) -> Tensor:
        group, param = self._places[index]
        state = self._optimizer.state.get(param, {})
        if "step" not in state:
            return norm(grad)
        if index not in self._warm:  # a fused optimizer counts on the device: ask it no longer
            if float(state["step"]) < self.WARM_STEPS:
                return norm(grad)
            self._warm.add(index)
        second, factor = _second_moment(group, state)
        least = self._least_of(index, second)
        if grad.layout != torch.strided:
            grad = grad.to_dense()
        if second.stride() != grad.stride():
            if least is not None:
                second = second.clamp(min=least.square())
            return norm(grad / second.sqrt().mul_(factor).add_(group["eps"]))
        eps = group["eps"] / factor  # g / (sqrt(v) * factor + eps), with the factor left for last
        flat, second = flattened(grad), flattened(second)
        step = CHUNK if flat.device.type == "cpu" else max(1, flat.numel())
        parts = [
            norm(self._divided(g, v, eps, least))
            for g, v in zip(flat.split(step), second.split(step), strict=True)
        ]
        length = parts[0] if len(parts) == 1 else torch.linalg.vector_norm(torch.stack(parts))
        return length / factor

    def _least_of(self, index: int, second: Tensor) -> Tensor | None:
        """The least root that a second moment counts with, or None if none is below it."""
        if not self._floor:
            return None
        calls, least = self._least.get(index, (0, None))
        if calls % self.REFRESH == 0:
            bound = second.mean() * self._floor
            below = second.device.type != "cpu" or bool(second.min() < bound)  # else: no waiting
            least = bound.sqrt() if below else None
        self._least[index] = (calls + 1, least)
        return least

    def _divided(
        self, grad: Tensor, second: Tensor, eps: float | Tensor, least: Tensor | None
    ) -> Tensor:
        """grad / (max(sqrt(second), least) + eps), in the scratch buffer on a CPU."""
        if grad.device.type != "cpu":
            root = second.sqrt()
            return grad / (root if least is None else root.clamp_(min=least)).add_(eps)
        dtype = torch.promote_types(second.dtype, torch.float32)
        if dtype not in self._scratch:
            self._scratch[dtype] = torch.empty(CHUNK, dtype=dtype)
        out = self._scratch[dtype][: grad.numel()]
        torch.sqrt(second, out=out)
        if least is not None:
            out.clamp_(min=least)
        return torch.div(grad, out.add_(eps), out=out)


def _second_moment(group: dict[str, Any], state: dict[str, Any]) -> tuple[Tensor, float | Tensor]:
    """The running mean of squares, and the factor that corrects its square root's bias."""
    if "exp_avg_sq" in state:  # Adam, AdamW
        second = state["max_exp_avg_sq"] if group.get("amsgrad") else state["exp_avg_sq"]
        corrected = 1.0 - group["betas"][1] ** state["step"]  # in float32, as adaptdl's
        if isinstance(corrected, Tensor) and corrected.device.type != "cpu":
            return second, corrected.rsqrt()
        return second, 1.0 / math.sqrt(float(corrected))
    second = state["square_avg"]  # RMSprop
    if group.get("centered"):
        second = torch.addcmul(second, state["grad_avg"], state["grad_avg"], value=-1)
    return second, 1.0
