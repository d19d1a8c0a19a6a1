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

from manyhands._core.dtensor import is_dtensor
from manyhands._core.flat import flatten
from manyhands._core.norms import norm
from manyhands.scaling._norm_kinds import Piece
from manyhands.scaling._replicated_state import DTensorMirror, StateMirror
from manyhands.sharding.zero._oss import OSS

Bound = tuple[int, float, float, bool]

CHUNK = 131_072
SINGLE = {torch.float32, torch.bfloat16, torch.float16}  # measured in float32
NEGLIGIBLE = 5e-3  # eps beside the least root: twice that is the error of its element, at most


class Preconditioned:
    """The norm of a gradient divided by what Adam or RMSprop would divide it by.

    Until an optimizer has made `WARM_STEPS` steps its second moments are mostly start-up, and
    the plain norm is taken; and again when its state was reset or replaced by a younger one.
    Second moments below `floor` times their tensor's mean count as that much: a weight that has
    hardly ever had a gradient (of a rare letter, of an empty pixel) would otherwise be divided by
    almost nothing, and outweigh all others when it gets one.
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
        self.floor = floor
        self._scratch: dict[torch.dtype, Tensor] = {}
        self.refresh()

    def refresh(self) -> None:
        groups = self._optimizer.param_groups
        self._places = [(group, param) for group in groups for param in group["params"]]
        self._latest = 0  # index of a parameter that was warm when it was last looked at
        # parameter index -> the step count of one that is warm, and its version after our step
        self._on_device: dict[int, tuple[Tensor, int]] = {}
        # parameter index -> (when it was taken, of which floor, the least v, whether any is below)
        self._bounds: dict[int, Bound] = {}
        self._bounds_of: dict[int, Any] = {}  # parameter index -> the step count they go with
        self.stepped()

    def stepped(self) -> None:
        if self._mirror is not None:
            self._mirror.update()
        for index, (step, _) in self._on_device.items():
            self._on_device[index] = step, step._version

    def saved(self) -> list[Any]:
        return [[index, *bound] for index, bound in self._bounds.items()]

    def load(self, state: list[Any]) -> None:
        self.refresh()
        self._bounds = {
            int(index): (int(when), floor, float(least), bool(below))
            for index, when, floor, least, below in state
        }

    @property
    def unit(self) -> str:
        """Of the optimizer's state, and so the same on every rank, whatever each has measured."""
        for index in (self._latest, *range(len(self._places))):
            if self._is_warm(index, self._state_of(index)):
                self._latest = index
                return "preconditioned"
        return "plain"

    def _state_of(self, index: int) -> dict[str, Any]:
        held = self._optimizer if self._mirror is None else self._mirror
        state: dict[str, Any] = held.state.get(self._places[index][1], {})
        return state

    def _is_warm(self, index: int, state: dict[str, Any]) -> bool:
        """Whether these second moments have seen enough steps.

        A count on a device (of a fused optimizer) is asked for while it is small, and again only
        where somebody else than the optimizer's step has changed it: that waits for the device.
        """
        step = state.get("step")
        if not isinstance(step, Tensor) or step.device.type == "cpu":
            return step is not None and float(step) >= self.WARM_STEPS
        known, version = self._on_device.get(index, (None, 0))
        if known is step and version == step._version:
            return True
        warm = float(step) >= self.WARM_STEPS
        if warm:
            self._on_device[index] = step, step._version
        else:
            self._on_device.pop(index, None)
        return warm

    def many(self, indices: Sequence[int], grads: Sequence[Tensor]) -> list[Tensor]:
        return [self.one(index, grad) for index, grad in zip(indices, grads, strict=True)]

    def pieces(self, pieces: Sequence[Piece]) -> list[Tensor]:
        return [self.one(*piece) for piece in pieces]

    def one(
        self, index: int, grad: Tensor, part: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """The length of a gradient, or of what `part` takes of it."""
        group, _ = self._places[index]
        state = self._state_of(index)
        if not self._is_warm(index, state):
            self._bounds.pop(index, None)
            return norm(grad)
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
            if self.floor:
                second = second.clamp(min=whole.mean() * self.floor)
            return norm(grad / second.sqrt().add_(eps)) / factor
        least, below = self._bound(index, state["step"], whole)
        pairs = zip(flatten(grad).split(CHUNK), flatten(second).split(CHUNK), strict=True)
        single = second.dtype == torch.float32 and grad.dtype in SINGLE
        if single and eps < NEGLIGIBLE * math.sqrt(least):
            squares = torch.stack(list(self._squares(pairs, least if below else None)))
            return squares.sum().sqrt() / factor
        parts = [norm(self._divided(g, v, eps, least if below else None)) for g, v in pairs]
        return torch.linalg.vector_norm(torch.stack(parts)) / factor

    def _bound(self, index: int, step: Any, second: Tensor) -> tuple[float, bool]:
        """The least v that counts, and whether there are any below it."""
        if not self.floor:
            return 0.0, False
        now = int(step) // self.REFRESH
        when, floor, least, below = self._bounds.get(index, (-1, 0.0, 0.0, False))
        if self._was_replaced(index, step) or (when, floor) != (now, self.floor):
            least = float(second.mean()) * self.floor
            # (a v that is not below it yet may shrink by beta at each of the next steps)
            below = bool(second.min() < 2.0 * least)
            self._bounds[index] = (now, self.floor, least, below)
        return least, below

    def _was_replaced(self, index: int, step: Any) -> bool:
        """Whether the state is another one (a state dict was loaded) than at the last look."""
        if self._mirror is not None or not isinstance(step, Tensor):
            return False  # a mirror's is another one after every step
        before = self._bounds_of.get(index)
        self._bounds_of[index] = step
        return before is not None and before is not step

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
