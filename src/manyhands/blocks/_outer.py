"""The outer steps: from the anchor and the workers' mean to the next anchor.

An outer step gets the *anchor* and the *gradient* (the anchor minus the mean of the workers'
parameters: the movement of a block with its sign turned, as an optimizer expects), and changes the
anchor in place:

    Average          anchor -= gradient                  McDonald et al., 2010: the mean itself
    BlockMomentum    s = η s + ζ gradient
                     anchor -= s                         Chen & Huo, 2016
      nesterov       anchor -= ζ gradient + η s          Chen & Huo, 2016; as DiLoCo (Douillard et
                                                         al., 2023), outer lr ζ and momentum η
      use_nbm        anchor -= s + η s                   fairseq's, which is not Nesterov's
    SlowMomentum     u = β u + gradient / γ              Wang et al., 2020, with inner
                     anchor -= α γ u                     learning rate γ

A subclass of `Outer` is an outer step of your own. It says how many tensors of the anchor's size it
keeps (`memories`), and how it moves the anchor (`step`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor


class Outer:
    """How the anchor moves once the workers' mean is known. Subclass it for a step of your own.

    >>> import torch, manyhands as mh
    >>> from manyhands.blocks import Outer
    >>> class Half(Outer):
    ...     def step(self, anchor, gradient, memories):
    ...         anchor.sub_(gradient, alpha=0.5)  # half of the way to the workers' mean
    >>> param = torch.nn.Parameter(torch.zeros(1))
    >>> optimizer = mh.Blocks(torch.optim.SGD([param], lr=0.1), every=50, outer=Half())
    """

    memories: ClassVar[int] = 0  # tensors like the anchor, kept from block to block
    overwrites: ClassVar[bool] = True  # whether `step` may change `gradient`; False saves a copy

    def step(self, anchor: Tensor, gradient: Tensor, memories: Sequence[Tensor]) -> None:
        """Move `anchor` in place. Memories begin as zeros.

        All tensors have one shape (elements,). It is called with one slice of the model after
        another, so it has to work element by element.
        """
        raise NotImplementedError

    def __repr__(self) -> str:
        """Describe all settings: workers, and a resumed run, are compared by this text."""
        settings = ", ".join(f"{name}={value!r}" for name, value in sorted(vars(self).items()))
        return f"{type(self).__name__}({settings})"

    def at(self, lr: float) -> Outer:
        """Return this outer step for the inner learning rate `lr`."""
        return self


@dataclass(frozen=True)
class Average(Outer):
    """The workers' mean is the next anchor."""

    overwrites: ClassVar[bool] = False

    def step(self, anchor: Tensor, gradient: Tensor, memories: Sequence[Tensor]) -> None:
        anchor.sub_(gradient)


@dataclass(frozen=True)
class BlockMomentum(Outer):
    """A momentum of blocks: `lr` is fairseq's block_lr, `momentum` its block_momentum."""

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
                "which equals plain momentum with a larger step."
            )

    def step(self, anchor: Tensor, gradient: Tensor, memories: Sequence[Tensor]) -> None:
        (momentum,) = memories
        momentum.mul_(self.momentum).add_(gradient, alpha=self.lr)
        if self.nesterov:
            anchor.sub_(gradient, alpha=self.lr).sub_(momentum, alpha=self.momentum)
        else:
            anchor.sub_(momentum, alpha=1 + self.momentum if self.use_nbm else 1)


@dataclass(frozen=True)
class SlowMomentum(Outer):
    """A slow momentum, in units of the inner learning rate."""

    inner_lr: float | None = None  # None: that of the inner optimizer's first group
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
        return (
            self if self.inner_lr is not None else replace(self, inner_lr=max(lr, 1e-12))
        )  # a schedule may end at 0
