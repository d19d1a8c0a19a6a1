"""From gradients to norms: what each small batch's gradient measures, and what their mean does.

A hook on every parameter takes |g|^2 where the gradient is made: before it is added to `.grad`
and before any reduction over the workers. When the step's last backward pass is over, and the
gradients have been averaged, |G|^2 is taken once (`_mean.py`). Both leave in one `Sample`.

Tensors we hold, and when
    _lengths     parameter index -> |g| of the running pass
    _pieces      parameter index -> the sum of its gradients, where one sample has several:
                 inside `one_sample`, and for a parameter that several reentrant checkpoints share
    _squares     sum of |g_i|^2 per group, of the passes of this step so far
    sample       the finished numbers, from the step's last pass until `clear`
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from manyhands._comm import Workers
from manyhands.scaling._mean import MeanGradient
from manyhands.scaling._norms import Norms
from manyhands.scaling._passes import BackwardPasses
from manyhands.scaling._sample import Sample


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

    @property
    def gradient_is_sum(self) -> bool:
        return self.declared is None or not self.loss_is_divided


@dataclass(frozen=True)
class _Mark:
    """A parameter's gradient as it was: the same tensor, at the same version."""

    param: Tensor
    grad: Tensor | None
    version: int

    @classmethod
    def of(cls, param: Tensor) -> _Mark:
        return cls(param, param.grad, -1 if param.grad is None else param.grad._version)

    @property
    def unchanged(self) -> bool:
        grad = self.param.grad
        return grad is self.grad and (grad is None or grad._version == self.version)

    @property
    def cleared(self) -> bool:
        """Whether a gradient that was there is gone or zero. Looks at values only if touched."""
        if self.grad is None or self.unchanged:
            return False
        grad = self.param.grad
        if grad is None:
            return True
        values = grad.coalesce().values() if grad.layout == torch.sparse_coo else grad
        return not bool(values.any())


class GradientTap:
    """Hooks on parameters that turn each step's gradients into a `Sample`."""

    def __init__(
        self,
        param_groups: Sequence[dict[str, Any]],
        workers: Workers,
        norms: Norms,
        accumulation: Accumulation,
        *,
        scale: Callable[[int], float],
        loss_scale: Callable[[], Tensor | float] = lambda: 1.0,
        on_sample: Callable[[Sample], None] = lambda sample: None,
    ) -> None:
        self.accumulation = accumulation
        self.mean = MeanGradient(workers, norms)
        self.paused = False
        self.norms = norms
        self._scale = scale
        self._loss_scale = loss_scale
        self._on_sample = on_sample
        me = weakref.proxy(self)  # no cycle: dropping the optimizer drops the hooks at once
        self._passes = BackwardPasses(lambda: me._begin(), lambda: me._end())
        self._handles: list[Any] = []
        self._repeated: set[int] = set()
        self.joined = False
        self.hook(param_groups)

    # -- hooks on parameters -----------------------------------------------------------------

    def hook(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Listen to these parameters instead of any before."""
        self.unhook()
        self._params: list[Tensor] = [p for group in param_groups for p in group["params"]]
        self.mean.cover(param_groups)
        listener = weakref.ref(self)  # so that dropping the optimizer drops the hooks
        for index, param in enumerate(self._params):
            handle = _hook_even_if_frozen(param, partial(_deliver, listener, index))
            if handle is not None:
                self._handles.append(handle)
        self._finalizer = weakref.finalize(self, _remove, self._handles)
        self.clear()

    def unhook(self) -> None:
        _remove(self._handles)

    @property
    def hooked(self) -> bool:
        return bool(self._handles)

    def _gradient(self, index: int, grad: Tensor) -> None:
        if self.paused:
            return
        self._arriving = index
        self._passes.gradient_arrives()
        grad = grad.detach()
        if self.joined or index in self._repeated:
            piece = self._pieces.get(index)
            self._pieces[index] = grad.clone() if piece is None else piece + grad
        elif index not in self._lengths:
            self._lengths[index] = self.norms.one(index, grad)
        else:
            self._second_part(index, grad)

    def _second_part(self, index: int, grad: Tensor) -> None:
        """A gradient comes in parts (a reentrant checkpoint runs its parameter again): add them.

        The first part was measured and let go. It is in `.grad`, alone if its length says so;
        else the step's sample is spoiled, this once, and the parts are kept from now on.
        """
        self._repeated.add(index)
        first = self._params[index].grad
        length = self._lengths.pop(index)
        if first is not None and torch.isclose(self.norms.one(index, first), length, rtol=1e-4):
            self._pieces[index] = first + grad
        else:
            self._usable = False

    # -- one step ----------------------------------------------------------------------------

    def clear(self) -> None:
        """Begin a new step: forget what was measured and not used."""
        self._passes.forget()
        self._start_over()

    def _start_over(self) -> None:
        self.passes = 0
        self.sample: Sample | None = None
        self._lengths: dict[int, Tensor] = {}
        self._pieces: dict[int, Tensor] = {}
        self._squares: Tensor | None = None
        self._usable = True
        self._mark: _Mark | None = None
        self._divided_by = 1

    @property
    def accumulating(self) -> bool:
        """Whether a step is under way whose last backward pass has not been."""
        return self._passes.open or (self.passes > 0 and self.sample is None)

    @property
    def gradient_untouched(self) -> bool:
        """Whether nobody has changed the gradients since the last backward pass."""
        return self._mark is not None and self._mark.unchanged

    def _begin(self) -> None:
        """The first gradient of a backward pass has come, and is in no `.grad` yet."""
        if self.joined and self._pieces:
            return
        if self._mark is not None and self._mark.cleared:
            self._start_over()
        self._lengths, self._pieces = {}, {}
        if self._divided_by > 1:  # the sum was made a mean, and more is coming: undo it
            self.multiply_gradients(self._divided_by)
        self._at_begin = _Mark.of(self._params[self._arriving])

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
        if self._at_begin.unchanged:  # torch.autograd.grad(): nothing went into `.grad`
            self._lengths, self._pieces = {}, {}
            if self._divided_by > 1:
                self.multiply_gradients(1 / self._divided_by)
            return
        self._divided_by = 1
        self._check_not_too_many()
        for index, piece in self._pieces.items():
            self._lengths[index] = self.norms.one(index, piece)
        squares = self.mean.squares_per_group(self._lengths)
        self._squares = squares if self._squares is None else self._squares + squares
        self._lengths, self._pieces = {}, {}
        self.passes += 1
        declared = self.accumulation.declared
        if self._synchronised if declared is None else self.passes == declared:
            self._complete()
        self._mark = _Mark.of(self._params[self._arriving])

    def _check_not_too_many(self) -> None:
        declared = self.accumulation.declared
        if declared is not None and self.passes >= declared:
            raise RuntimeError(
                f"this is backward pass {self.passes + 1} since the last step(), and "
                f"num_gradients_to_accumulate={declared}. Call step() or zero_grad() first, "
                "declare more passes with set_num_gradients_to_accumulate(n), or, where several "
                "losses of the same samples have a backward each, run them inside "
                "`with optimizer.one_sample():`."
            )

    @torch.no_grad()
    def _complete(self) -> None:
        """Measure the mean gradient and send the step's numbers to the other workers."""
        passes = max(self.passes, 1)
        by_user = self.accumulation.declared is not None and self.accumulation.loss_is_divided
        self.sample = self.mean.sample(
            self._squares,
            passes=self.passes,
            scale=self._scale(passes),
            small_batch_divided_by=passes if by_user else 1,
            mean_multiplied_by=1 if by_user else passes,
            loss_scale=self._loss_scale(),
            usable=self._usable,
        )
        if self.accumulation.declared is None and passes > 1:
            self.multiply_gradients(1 / passes)
            self._divided_by = passes
        self._on_sample(self.sample)

    def complete_now(self) -> None:
        """Send what there is: `step` was called although the step's passes are not complete.

        The other workers may be waiting for these numbers. A worker whose own loss used none
        of the parameters, while DDP gave it the others' gradients, has a valid zero to report.
        """
        idle = self.passes == 0 and any(param.grad is not None for param in self._params)
        if idle and self.mean.workers.size > 1:
            self.passes = self.accumulation.declared or 1
        self._complete()

    def multiply_gradients(self, factor: float) -> None:
        with torch.no_grad():
            for param in self._params:
                if param.grad is not None:
                    param.grad.mul_(factor)


def _deliver(listener: weakref.ref[GradientTap], index: int, grad: Tensor) -> None:
    tap = listener()
    if tap is not None:
        tap._gradient(index, grad)


def _hook_even_if_frozen(param: Tensor, hook: Callable[[Tensor], None]) -> Any:
    """Register the hook so that it also fires once a frozen parameter is thawed."""
    if not (param.is_floating_point() or param.is_complex()):
        return None
    frozen = not param.requires_grad
    if frozen:
        param.requires_grad_(True)
    handle = param.register_hook(hook)
    if frozen:
        param.requires_grad_(False)
    return handle


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
