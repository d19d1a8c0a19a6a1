"""From gradients to norms: what each small batch's gradient measures, and what their mean does.

A hook on every parameter takes |g|^2 where the gradient is made: before it is added to `.grad`
and before any reduction over the workers. When the step's last backward pass is over, and the
gradients have been averaged, |G|^2 is taken once (`_mean_gradient.py`). Both leave in one
`StepStats`.
Under `fully_shard` gradients are made on other tensors than the optimizer's (`_fsdp_params.py`).

Tensors we hold, and when
    _lengths     parameter index -> |g| of the running pass
    _pieces      parameter index -> the sum of its gradients, where one sample has several:
                 inside `one_sample`, and for a parameter that several reentrant checkpoints share
    _squares     sum of |g_i|^2 per group, of the passes of this step so far
    sample       the finished numbers, from the step's last pass until `clear`
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from manyhands._core.backward import BackwardPasses, current_task
from manyhands._core.dtensor import is_dtensor, local
from manyhands._core.ranks import RankGroup
from manyhands._core.sharded_gradient import ShardedGradient
from manyhands.scaling._fsdp_params import unsharded_parameters
from manyhands.scaling._late_ranks import (
    NO_BACKWARD,
    NOT_AVERAGED,
    Doubt,
    wait_in,
    without_gradient,
)
from manyhands.scaling._mean_gradient import Length, MeanGradient, StepFacts
from manyhands.scaling._norm_kinds import Norms
from manyhands.scaling._step_stats import StepStats


@dataclass(frozen=True)
class GradientVersion:
    """A parameter's gradient as it was: the same tensor, at the same version."""

    param: Tensor
    grad: Tensor | None
    version: int

    @classmethod
    def of(cls, param: Tensor) -> GradientVersion:
        return cls(param, param.grad, -1 if param.grad is None else _version(param.grad))

    @property
    def unchanged(self) -> bool:
        grad = self.param.grad
        return grad is self.grad and (grad is None or _version(grad) == self.version)


def _version(grad: Tensor) -> int:
    """Changes with every operation in place; on a DTensor, or on what it holds."""
    return grad._version + (local(grad)._version if is_dtensor(grad) else 0)


def has_values(grad: Tensor) -> bool:
    grad = local(grad)
    if isinstance(grad, ShardedGradient):  # of which this worker may hold nothing
        return not grad.zeroed
    return bool((grad.coalesce().values() if grad.layout == torch.sparse_coo else grad).any())


PATIENCE = 2.0  # seconds that a step waits for other workers to announce what this one has


@dataclass
class Accumulation:
    """How the gradients of one step come together.

    `declared` passes make a step, and the user divides: the loss (`loss_is_divided`) or, after
    the last pass, the gradient. Where `declared` is None, passes are counted until one is
    synchronised, and the sum is divided here.
    """

    declared: int | None = 1
    loss_is_divided: bool = True
    synchronised: Callable[[], bool] = lambda: True


class GradientTap:
    """Hooks on parameters that turn each step's gradients into a `StepStats`.

    `scale(passes)`, `history()` and `micro_batch()` (the samples of this rank's first input, 0
    where unknown) are asked when a step is complete. `on_excess` is called
    when there are more passes than declared; by default it raises. `join_in` takes part in the
    averaging of gradients that this worker had no backward pass for.
    """

    def __init__(
        self,
        param_groups: Sequence[dict[str, Any]],
        workers: RankGroup,
        norms: Norms,
        accumulation: Accumulation,
        *,
        scale: Callable[[int], float],
        history: Callable[[], float] = lambda: 0.0,
        micro_batch: Callable[[], float] = lambda: 0.0,
        loss_scale: Callable[[], Tensor | float] = lambda: 1.0,
        on_sample: Callable[[StepStats], Any] = lambda sample: None,
        on_excess: Callable[[str], None] | None = None,
        join_in: Callable[[], None] = lambda: None,
        difference_at_scale_1: bool = True,
        model: nn.Module | None = None,
    ) -> None:
        self.accumulation = accumulation
        self.mean = MeanGradient(workers, norms, difference_at_scale_1=difference_at_scale_1)
        self.norms = norms
        self._length = norms.one
        self.paused = False
        self.joined = False
        self._scale = scale
        self._history = history
        self._micro_batch = micro_batch
        self._loss_scale = loss_scale
        self._on_sample = on_sample
        self._on_excess = on_excess or _raise
        self._join_in = join_in
        self._model = model
        me = weakref.proxy(self)  # no cycle: dropping the optimizer drops the hooks at once
        self._passes = BackwardPasses(lambda: me._begin(), lambda: me._end())
        self._hooks: list[tuple[Any, Any]] = []
        weakref.finalize(self, _remove, self._hooks)
        self._repeated: set[int] = set()
        self.passes = 0
        self.sample: StepStats | None = None
        self._stepped: GradientVersion | None = None
        self.hook(param_groups)

    # -- hooks on parameters -----------------------------------------------------------------

    def hook(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Listen to these parameters instead of any before."""
        self.unhook()
        self._params: list[Tensor] = [p for group in param_groups for p in group["params"]]
        self.mean.cover(param_groups)
        self._unsharded = unsharded_parameters(self._params, self._model)
        # where gradients are made: the parameters, or what stands in for them
        self._makers = [self._unsharded.get(i, p) for i, p in enumerate(self._params)]
        listener = weakref.ref(self)  # so that dropping the optimizer drops the hooks
        for index, param in enumerate(self._makers):
            if param.is_floating_point() or param.is_complex():
                node = _accumulator(param)
                handle = node.register_prehook(partial(_deliver, listener, index))
                self._hooks.append((handle, node))
        self._expected = [i for i, maker in enumerate(self._makers) if maker.requires_grad]
        self.clear()

    def unhook(self) -> None:
        _remove(self._hooks)

    @property
    def hooked(self) -> bool:
        return bool(self._hooks)

    @property
    def moved(self) -> bool:
        """Whether parameters were moved or converted since, which takes their hooks away."""
        if not self.hooked:
            return False
        trained = [p for p in self._makers if p.is_floating_point() or p.is_complex()]
        nodes = [node for _, node in self._hooks]
        return any(_accumulator(p) is not n for p, n in zip(trained, nodes, strict=True))

    def gradient(self, index: int, grad: Tensor) -> None:
        """The gradient of a parameter has come. (Every microsecond here is paid per parameter.)"""
        task = current_task()
        if task != self._passes.task:
            self._first = index
            self._passes.enter(task)
        if grad.requires_grad:
            grad = grad.detach()
        if self.joined or index in self._repeated:
            piece = self._pieces.get(index)
            self._pieces[index] = grad.clone() if piece is None else piece + grad
        elif index not in self._lengths:
            length = self._length(index, grad)
            self._lengths[index] = length.item() if self.mean.on_host else length
        else:
            self._second_part(index, grad)

    def _second_part(self, index: int, grad: Tensor) -> None:
        """A gradient comes in parts (a reentrant checkpoint runs its parameter again): add them.

        The first part was measured and let go. It is in `.grad`, alone if its length says so;
        else the step's sample is spoiled, this once, and the parts are kept from now on.
        """
        self._repeated.add(index)
        first = self._makers[index].grad
        known = float(self._lengths.pop(index))
        length = math.nan if first is None else float(self.norms.one(index, first))
        if first is not None and math.isclose(length, known, rel_tol=1e-4, abs_tol=1e-8):
            self._pieces[index] = first + grad
        else:
            self._usable = False

    # -- one step ----------------------------------------------------------------------------

    def clear(self) -> None:
        """Begin a new step: forget what was measured and not used."""
        self._passes.forget()
        self._stepped = None
        if self._unsharded and self.passes > 0 and self.sample is None:
            for maker in self._unsharded.values():  # zero_grad() of fully_shard leaves these
                maker.grad = None
        self._start_over()

    def stepped(self) -> None:
        """A step was made of the sample; its gradients are to be cleared before the next."""
        self.mean.difference.remember()
        mark = self._mark
        self.clear()
        self._stepped = mark

    def _start_over(self) -> None:
        self.mean.difference.forget()
        self.passes = 0
        self.sample = None
        self._lengths: dict[int, Length] = {}
        self._pieces: dict[int, Tensor] = {}
        self._squares: Tensor | None = None
        self._usable = True
        self.problem: str | None = None
        self._mark: GradientVersion | None = None
        self._divided_by = 1

    @property
    def accumulating(self) -> bool:
        """Whether a step is under way whose last backward pass has not been."""
        return self.passes > 0 and self.sample is None and not self._cleared()

    def check_between_steps(self, what: str) -> None:
        """Raise in the middle of a step."""
        if self.accumulating:
            raise RuntimeError(
                f"{what} in the middle of a step, after {self.passes} of its backward passes. Call "
                "it between step() and the next backward(). If no step will follow these passes, "
                "as at the end of an epoch, call zero_grad() first."
            )

    @property
    def in_backward(self) -> bool:
        return self._passes.open

    @property
    def gradient_untouched(self) -> bool:
        """Whether nobody has changed the gradients since the last backward pass."""
        return self._mark is not None and self._mark.unchanged

    def _cleared(self) -> bool:
        """Whether the gradients of this step's passes are gone. Looks at values if touched."""
        mark = self._mark
        if mark is None or mark.grad is None or mark.unchanged:
            return False
        if mark.param.grad is None:
            return True
        # (Where gradients are sharded, of a worker's share: without a collective, and the same
        # on all but for a gradient that is zero on one and was changed, not cleared.)
        return not self._any_values()

    def _any_values(self) -> bool:
        return any(has_values(p.grad) for p in self._params if p.grad is not None)

    def _begin(self) -> None:
        """The first gradient of a backward pass has come, and is in no `.grad` yet."""
        if self.joined and self._pieces:
            return
        if self._cleared():
            self._start_over()
        if self.mean.announced:  # before DDP's collectives, in which others may wait for us
            self.mean.check_announcements(patience=0.0 if self.passes else PATIENCE)
        self._lengths, self._pieces = {}, {}
        if self._divided_by > 1:  # the sum was made a mean, and more is coming: undo it
            self.multiply_gradients(self._divided_by)
            self._divided_by = 1
        if self.passes == 0 and self._stepped is not None:
            uncleared = self._stepped.grad is not None and self._stepped.unchanged
            if uncleared and self._unsharded:  # foreach operations on DTensors leave no trace
                uncleared = self._any_values()
            self._stepped = None
            if uncleared:
                self.problem = (
                    "the gradients of the step before were not cleared, and this step's were "
                    "added to them. Call zero_grad() after every step()."
                )

    def _end(self) -> None:
        """A backward pass is over, and DDP has averaged the gradients if it was to."""
        self._synchronised = self.accumulation.synchronised()
        if not self.joined:
            self._close_pass()

    @contextmanager
    def one_sample(self) -> Iterator[None]:
        """Several backward passes inside are one small batch's."""
        if self.joined:
            raise RuntimeError("one_sample() is open already; leave it before entering it again.")
        self.joined = True
        passes_before = self._passes.count
        try:
            yield
        except BaseException:
            self.clear()
            raise
        finally:
            self.joined = False
        if self._passes.count > passes_before:
            self._close_pass()

    def _close_pass(self) -> None:
        declared = self.accumulation.declared
        if declared is not None and self.passes >= declared:
            self._on_excess(
                f"this is backward pass {self.passes + 1} since the last step(), and "
                f"num_gradients_to_accumulate={declared}. Clear the gradients of passes that no "
                "step will follow (as at the end of an epoch) with zero_grad(); declare more "
                "passes, if there are more; or, where several losses of the same samples have a "
                "backward each, run them inside `with ....one_sample():`."
            )
            return
        for index, piece in self._pieces.items():
            self._lengths[index] = self.norms.one(index, piece)
        self.passes += 1
        if self._synchronised if declared is None else self.passes == declared:
            self._complete()
        if declared is None or self.passes < declared:
            squares = self.mean.squares_per_group(self._lengths)
            self._squares = squares if self._squares is None else self._squares + squares
        self._lengths, self._pieces = {}, {}
        self._mark = GradientVersion.of(self._params[self._first])

    @torch.no_grad()
    def _complete(self) -> None:
        """Measure the mean gradient and send the step's numbers to the other workers."""
        declared = self.accumulation.declared
        passes = self.passes if declared is None else declared
        if any(i in self._unsharded and self._params[i].grad is None for i in self._lengths):
            self.problem = (
                "after the step's last backward() there are gradients that fully_shard has not "
                "averaged. Was that pass inside no_sync(), or after "
                "set_requires_gradient_sync(False)? Only the passes before it may be."
            )
        elif any(maker.grad is not None for maker in self._unsharded.values()):
            self.problem = (
                "the step's last backward() has left gradients that fully_shard has not averaged: "
                "a module that it was called on ran several times under reentrant checkpoints, "
                "which torch's fully_shard does not follow. Pass use_reentrant=False to "
                "torch.utils.checkpoint.checkpoint, or wrap the module with mh.FSDP."
            )
        by_user = declared is not None and self.accumulation.loss_is_divided
        self.sample = self.mean.sample(
            self._squares,
            self._lengths,
            StepFacts(
                passes=passes,
                seen=self.passes,
                scale=self._scale(passes),
                small_batch_divided_by=passes if by_user else 1,
                mean_multiplied_by=1 if by_user else max(passes, 1),
                loss_scale=self._loss_scale(),
                history=self._history(),
                micro_batch=self._micro_batch(),
                usable=self._usable,
            ),
        )
        doubt = self._doubt()
        if doubt is not None:
            workers = self.mean.workers
            self.sample.wait = partial(
                wait_in, doubt, self.sample.combination, workers.rank, self._params
            )
        if declared is None and passes > 1:
            self.multiply_gradients(1 / passes)
            self._divided_by = passes
        self._on_sample(self.sample)

    def _doubt(self) -> Doubt | None:
        """What is odd in this rank's gradients, if DDP was to average them."""
        workers = self.mean.workers
        if workers.size == 1 or not workers.own_group or self._unsharded:
            return None
        if self.passes == 0:
            return None if any(p.grad is not None for p in self._params) else NO_BACKWARD
        alone = self.passes == 1 and self.mean.not_averaged
        doubt = without_gradient(self._expected, self._lengths, may_be_meant=not alone)
        return doubt or (NOT_AVERAGED if alone else None)

    def complete_now(self) -> StepStats:
        """Send what there is: `step` was called although this worker has not seen all passes.

        The others may be waiting for these numbers. A worker whose own losses used none of the
        parameters, while DDP gave it the others' gradients, has a valid zero to report.
        """
        self._join_in()
        self._complete()
        assert self.sample is not None
        return self.sample

    def placed(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """These gradients, each on its parameter's device."""
        return [
            None if grad is None else grad.to(param.device)
            for grad, param in zip(grads, self._params, strict=False)
        ]

    def multiply_gradients(self, factor: float) -> None:
        with torch.no_grad():
            for param in self._params:
                if param.grad is not None:
                    local(param.grad).mul_(factor)


def _deliver(listener: weakref.ref[GradientTap], index: int, grads: tuple[Tensor | None]) -> None:
    tap, grad = listener(), grads[0]
    if tap is not None and grad is not None and not tap.paused:
        tap.gradient(index, grad)


def _accumulator(param: Tensor) -> Any:
    """The node that adds to `param.grad`.

    Its hooks come after all of the tensor's own, so that they see what these have made of the
    gradient, and before DDP averages. A frozen parameter has one too, for when it thaws.
    """
    frozen = not param.requires_grad
    if frozen:
        param.requires_grad_(True)
    node = get_gradient_edge(param).node
    if frozen:
        param.requires_grad_(False)
    return node


def _raise(message: str) -> None:
    raise RuntimeError(message)


def _remove(hooks: list[tuple[Any, Any]]) -> None:
    for handle, _ in hooks:
        handle.remove()
    hooks.clear()
