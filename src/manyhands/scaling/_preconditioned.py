"""The length of a gradient as Adam and RMSprop see it: |g / (sqrt(v) + eps)|.

v are the optimizer's own second moments, bias-corrected. On a CPU a chunk at a time goes through
a small scratch buffer, so that only g and v cross the memory. Where eps is next to nothing
beside every root, the square is taken as g . (g / v), at half the cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer, RMSprop

from manyhands._dtensors import is_dtensor
from manyhands._norms import flattened, norm
from manyhands.scaling._measures import Piece
from manyhands.sharding._dtensor_mirror import DTensorMirror
from manyhands.sharding._mirror import StateMirror
from manyhands.sharding._oss import OSS

CHUNK = 131_072
SINGLE = {torch.float32, torch.bfloat16, torch.float16}  # measured in float32
NEGLIGIBLE = 5e-3  # eps beside the least root: twice that is the error of its element, at most


class Preconditioned:
    """The norm of a gradient divided by what Adam or RMSprop would divide it by.

    Until an optimizer has made `WARM_STEPS` steps its second moments are mostly start-up, and
    the plain norm is taken. Second moments below `floor` times their tensor's mean count as that
    much: a weight that has hardly ever had a gradient (of a rare letter, of an empty pixel) would
    otherwise be divided by almost nothing, and outweigh all others when it gets one.
    """

    WARM_STEPS = 5
    REFRESH = 16  # steps for which a parameter's floor is kept, on a CPU

    def __init__(self, optimizer: Optimizer, floor: float = 0.0) -> None:
        kind = optimizer.optim if isinstance(optimizer, OSS) else optimizer
        if not isinstance(kind, Adam | RMSprop):
            raise TypeError(
                "AdamScale divides gradients as the optimizer does and knows how for Adam, AdamW "
                f"and RMSprop (and subclasses), got {type(kind).__name__}. "
                "Use AdaScale for SGD, or SqrtScale for other adaptive optimizers."
            )
        self._optimizer = optimizer
        self._mirror: StateMirror | DTensorMirror | None = None
        if isinstance(optimizer, OSS) and optimizer.shards_state:
            self._mirror = StateMirror(optimizer, _moments(optimizer))
        elif any(is_dtensor(p) for group in optimizer.param_groups for p in group["params"]):
            self._mirror = DTensorMirror(optimizer, _moments(optimizer))
        self._floor = floor
        self._scratch: dict[torch.dtype, Tensor] = {}
        self.refresh()

    def refresh(self) -> None:
        groups = self._optimizer.param_groups
        self._places = [(group, param) for group in groups for param in group["params"]]
        self._warm: set[int] = set()
        # parameter index -> (when it was taken, the least v, whether any v is below it)
        self._bounds: dict[int, tuple[int, float, bool]] = {}
        self.stepped()

    def stepped(self) -> None:
        if self._mirror is not None:
            self._mirror.update()

    def saved(self) -> list[Any]:
        return [[index, *bound] for index, bound in self._bounds.items()]

    def load(self, state: list[Any]) -> None:
        self.refresh()
        self._bounds = {
            int(index): (int(when), float(least), bool(below))
            for index, when, least, below in state
        }

    @property
    def unit(self) -> str:
        return "preconditioned" if self._warm else "plain"

    def many(self, indices: Sequence[int], grads: Sequence[Tensor]) -> list[Tensor]:
        return [self.one(index, grad) for index, grad in zip(indices, grads, strict=True)]

    def pieces(self, pieces: Sequence[Piece]) -> list[Tensor]:
        return [self.one(*piece) for piece in pieces]

    def one(
        self, index: int, grad: Tensor, part: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """The length of a gradient, or of what `part` takes of it."""
        group, param = self._places[index]
        held = self._optimizer if self._mirror is None else self._mirror
        state = held.state.get(param, {})
        if "step" not in state:
            return norm(grad)
        if index not in self._warm:  # a fused optimizer counts on the device: ask it no longer
            if float(state["step"]) < self.WARM_STEPS:
                return norm(grad)
            self._warm.add(index)
        second, factor = _second_moment(group, state)
        if grad.layout != torch.strided:
            grad = grad.to_dense()
        # g / (sqrt(v) * factor + eps), with the factor left for last
        eps = group["eps"] / factor
        whole = second
        if part is not None:
            second = part(second)
            if grad.is_contiguous():
                second = second.contiguous()
        if grad.device.type != "cpu" or second.stride() != grad.stride():
            if self._floor:
                second = second.clamp(min=whole.mean() * self._floor)
            return norm(grad / second.sqrt().add_(eps)) / factor
        least, below = self._bound(index, int(state["step"]), whole)
        pairs = zip(flattened(grad).split(CHUNK), flattened(second).split(CHUNK), strict=True)
        single = second.dtype == torch.float32 and grad.dtype in SINGLE
        if single and eps < NEGLIGIBLE * math.sqrt(least):
            squares = torch.stack(list(self._squares(pairs, least if below else None)))
            return squares.sum().sqrt() / factor
        parts = [norm(self._divided(g, v, eps, least if below else None)) for g, v in pairs]
        return torch.linalg.vector_norm(torch.stack(parts)) / factor

    def _bound(self, index: int, step: int, second: Tensor) -> tuple[float, bool]:
        """The least v that counts, and whether there are any below it."""
        if not self._floor:
            return 0.0, False
        when, least, below = self._bounds.get(index, (-1, 0.0, False))
        if when != step // self.REFRESH:
            least = float(second.mean()) * self._floor
            # (a v that is not below it yet may shrink by beta at each of the next steps)
            below = bool(second.min() < 2.0 * least)
            self._bounds[index] = (step // self.REFRESH, least, below)
        return least, below

    def _squares(
        self, pairs: Iterator[tuple[Tensor, Tensor]], least: float | None
    ) -> Iterator[Tensor]:
        """g . (g / max(v, least)), chunk by chunk."""
        for chunk, second in pairs:
            grad = chunk.float()  # which its mean over the workers may be in
            out = self._buffer(grad.dtype, grad.numel())
            if least is None:
                torch.div(grad, second, out=out)
            else:
                torch.div(grad, torch.clamp_min(second, least, out=out), out=out)
            yield torch.dot(grad, out)

    def _divided(self, grad: Tensor, second: Tensor, eps: float, least: float | None) -> Tensor:
        """grad / (sqrt(max(second, least)) + eps), in the scratch buffer."""
        out = self._buffer(torch.promote_types(second.dtype, torch.float32), grad.numel())
        torch.sqrt(second, out=out)
        if least is not None:
            out.clamp_min_(math.sqrt(least))
        return torch.div(grad, out.add_(eps), out=out)

    def _buffer(self, dtype: torch.dtype, size: int) -> Tensor:
        if dtype not in self._scratch:
            self._scratch[dtype] = torch.empty(CHUNK, dtype=dtype)
        return self._scratch[dtype][:size]


def _moments(optimizer: Optimizer) -> list[str]:
    """The entries of its state that `_second_moment` asks for."""
    names: set[str] = set()
    for group in optimizer.param_groups:
        if "betas" in group:
            names.add("max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq")
        else:
            names |= {"square_avg", *(["grad_avg"] if group.get("centered") else [])}
    return sorted(names)


def _second_moment(group: dict[str, Any], state: dict[str, Any]) -> tuple[Tensor, Any]:
    """The running mean of squares, and the factor that corrects its square root's bias."""
    if "betas" in group:  # Adam, AdamW
        second = state["max_exp_avg_sq"] if group.get("amsgrad") else state["exp_avg_sq"]
        corrected = 1.0 - group["betas"][1] ** state["step"]  # in float32, as adaptdl's
        if isinstance(corrected, Tensor) and corrected.device.type != "cpu":
            return second, corrected.rsqrt()
        return second, 1.0 / math.sqrt(float(corrected))
    second = state["square_avg"]  # RMSprop
    if group.get("centered"):
        second = torch.addcmul(second, state["grad_avg"], state["grad_avg"], value=-1)
    return second, 1.0
