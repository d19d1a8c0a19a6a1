"""The outer steps: from the last common point and the workers' mean to the next one.

All of them see the *anchor* (the last common point) and the *gradient* (the anchor less the mean of
the workers' parameters: where a block of inner steps has led, turned around), and change the
anchor in place. In units of these:

    Average          anchor -= gradient                  McDonald et al., 2010: the mean itself
    BlockMomentum    s = η s + ζ gradient
                     anchor -= s                         Chen & Huo, 2016
      nesterov       anchor -= ζ gradient + η s          Chen & Huo, 2016; as DiLoCo (Douillard et
                                                         al., 2023), outer lr ζ and momentum η
      use_nbm        anchor -= s + η s                   fairseq's, which is not Nesterov's
    SlowMo           u = β u + gradient / γ              Wang et al., 2020, with inner
                     anchor -= α γ u                     learning rate γ

A step of your own is a subclass: how many tensors of the anchor's size it remembers, and what it
does with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor


class Outer:
    """What becomes of the common point once the workers' mean is known."""

    memories: ClassVar[int] = 0  # tensors like the anchor that are kept from block to block
    overwrites: ClassVar[bool] = True  # whether `step` may change `gradient`; False saves a copy

    def step(self, anchor: Tensor, gradient: Tensor, memories: Sequence[Tensor]) -> None:
        """Move `anchor` in place. Memories begin as zeros.

        It is called with parts of the whole, one after the other.
        """
        raise NotImplementedError

    def __repr__(self) -> str:
        """By which workers see whether all have the same, and a resumed run, too."""
        settings = ", ".join(f"{name}={value!r}" for name, value in sorted(vars(self).items()))
        return f"{type(self).__name__}({settings})"

    def at(self, lr: float) -> Outer:
        """This step where the inner learning rate is `lr`."""
        return self


@dataclass(frozen=True)
class Average(Outer):
    """The workers' mean is the next common point."""

    overwrites: ClassVar[bool] = False

    def step(self, anchor: Tensor, gradient: Tensor, memories: Sequence[Tensor]) -> None:
        anchor.sub_(gradient)


@dataclass(frozen=True)
class BlockMomentum(Outer):
    """A momentum of blocks: `lr` is the documented block_lr, `momentum` the block_momentum."""

    lr: float = 1.0
    momentum: float = 0.875
    nesterov: bool = False
    use_nbm: bool = False

    memories: ClassVar[int] = 1
    overwrites: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.nesterov and self.use_nbm:
            raise ValueError(
                "nesterov=True and use_nbm=True exclude each other: use_nbm is fairseq's form, "
                "which equals a longer step of plain momentum."
            )

    def step(self, anchor: Tensor, gradient: Tensor, memories: Sequence[Tensor]) -> None:
        (momentum,) = memories
        momentum.mul_(self.momentum).add_(gradient, alpha=self.lr)
        if self.nesterov:
            anchor.sub_(gradient, alpha=self.lr).sub_(momentum, alpha=self.momentum)
        else:
            anchor.sub_(momentum, alpha=1 + self.momentum if self.use_nbm else 1)


@dataclass(frozen=True)
class SlowMo(Outer):
    """A slow momentum, in units of the inner learning rate."""

    inner_lr: float | None = None  # None: as the inner optimizer's first group has it
    slow_lr: float = 1.0
    momentum: float = 0.7

    memories: ClassVar[int] = 1
    overwrites: ClassVar[bool] = False

    def step(self, anchor: Tensor, gradient: Tensor, memories: Sequence[Tensor]) -> None:
        (slow,) = memories
        assert self.inner_lr is not None
        slow.mul_(self.momentum).add_(gradient, alpha=1 / self.inner_lr)
        anchor.sub_(slow, alpha=self.slow_lr * self.inner_lr)

    def at(self, lr: float) -> Outer:
        return self if self.inner_lr is not None else replace(self, inner_lr=max(lr, 1e-12))
