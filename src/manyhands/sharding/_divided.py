"""Step an optimizer of the tensors that this rank owns: the base class of OSS."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from manyhands._optimizers.state_parts import SavedState, ShardedOptimizer, options_of
from manyhands._optimizers.wrappers import ParamGroup
from manyhands._ranks.agreement import agree, run_on_all
from manyhands._ranks.ranks import RankGroup
from manyhands.sharding._agreement import ADVICE, facts_of_groups, facts_of_options


class DividedOptimizer(ShardedOptimizer):
    """Base class of optimizers that divide tensors among ranks.

    `optim` steps this rank's tensors, or the parameters on a single rank.
    """

    _workers: RankGroup

    @property
    def shards_state(self) -> bool:
        return self._workers.size > 1

    def __repr__(self) -> str:
        name = type(self).__name__
        groups = super().__repr__().removeprefix(name)
        return f"{name} of {self.optimizer_class.__name__}{groups}"

    def _make(self, groups: Sequence[ParamGroup]) -> Optimizer:
        """Make an optimizer; raise on all ranks if this fails on any rank."""
        make = partial(self.optimizer_class, groups, **self.optimizer_arguments)
        return run_on_all(self._workers, make)

    def _adopt_options(self) -> None:
        """Copy the options that `optim` has filled in, such as betas; ranks must agree."""
        self.defaults = self.optim.defaults
        copy_options(self.optim.param_groups, self.param_groups)
        agree(self._workers, facts_of_options(self.param_groups, self.defaults), ADVICE)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a parameter group, as for any optimizer. Call it on every rank."""
        super().add_param_group(param_group)
        number = len(self.param_groups) - 1
        added = self.param_groups[number:]
        try:
            self._check_params(added[0]["params"])
            if self.optim is None:  # the constructor divides all groups together
                return
            facts = facts_of_groups(added, first=number)
            facts.update(facts_of_options(added, self.defaults, first=number))
            agree(self._workers, facts, ADVICE)
            self._take_in_last_group()
        except Exception:
            del self.param_groups[number:]
            raise

    def load_parts(self, packed: StateDict) -> None:
        """Load the state of this rank's tensors, in the format of the state dict of `optim`."""
        self.optim.load_state_dict(packed)
        copy_options(self.optim.param_groups, self.param_groups)

    def _check_params(self, params: Sequence[Tensor]) -> None:
        """Raise a TypeError if these parameters cannot be divided."""

    def _take_in_last_group(self) -> None:
        """Divide the last group's parameters, and add this rank's tensors to `optim`."""
        raise NotImplementedError

    def step(self, closure: Callable[[], object] | None = None, **kwargs: Any) -> Any:
        """Step this rank's tensors, then give the new values to all ranks.

        Call it on every rank. A `closure` is called once, beforehand, and the loss is returned. (On
        a single rank `optim` calls it.)
        """
        self._begin_step()
        # Schedulers change `self.param_groups`.
        copy_options(self.param_groups, self.optim.param_groups)
        if self._workers.size == 1:
            result = self.optim.step(*([] if closure is None else [closure]), **kwargs)
        else:
            result = None
            if closure is not None:
                # The caller may have disabled gradients.
                with torch.enable_grad():
                    result = closure()
            self._step(**kwargs)
        # Some optimizers count steps in their groups.
        copy_options(self.optim.param_groups, self.param_groups)
        return result

    def _begin_step(self) -> None:
        """Prepare for a step, before options are copied."""

    def _step(self, **kwargs: Any) -> None:
        """Step the tensors of this rank, and exchange the new values."""
        raise NotImplementedError


def copy_options(sources: Sequence[SavedState], targets: Sequence[dict[str, Any]]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.update(options_of(source))


def check_params_and_class(owner: str, params: object, optim: object) -> None:
    for name, given in (("params", params), ("optim", optim)):
        if isinstance(given, Optimizer):
            raise TypeError(
                f"{name} is an optimizer instance, and {owner} makes a new optimizer. Write "
                f"{owner}(model.parameters(), optim={type(given).__name__}, lr=...), or pass the "
                "instance to mh.shard(model, optimizer)."
            )
    if isinstance(params, nn.Module) or not isinstance(params, Iterable):
        raise TypeError(
            f"params must be parameters or parameter groups, got {type(params).__name__}. "
            f"Write {owner}(model.parameters(), optim=..., lr=...)."
        )
    if not (isinstance(optim, type) and issubclass(optim, Optimizer)):
        raise TypeError(
            f"optim must be an optimizer class, got {type(optim).__name__}. Pass the optimizer's "
            f"arguments by name: {owner}(params, optim=AdamW, lr=1e-3)."
        )
