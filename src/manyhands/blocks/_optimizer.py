"""`Blocks`: an optimizer wrapper that trains in blocks of local steps.

`Blocks.step` runs the inner optimizer's step and then `Sync.after_step` (`_sync.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands._arguments import explained, flag, one_of, real, whole
from manyhands._optimizers.several import check_same_optimizers, optimizers_in
from manyhands._optimizers.wrappers import (
    OptimizerWrapper,
    ScalerSignals,
    apply_signals,
    params_of,
    supports_amp,
    unscale,
)
from manyhands._ranks.ranks import RankGroup
from manyhands._ranks.stop_notice import stop_notice
from manyhands.blocks import _saving
from manyhands.blocks._anchor import Anchor, Average, Outer
from manyhands.blocks._block_state import BlockState
from manyhands.blocks._checks import (
    Value,
    check_optimizers,
    describe_outer,
    make_members,
    rename_options,
)
from manyhands.blocks._samples import SampleRounds
from manyhands.blocks._schedule import Every, Schedule, check_schedule
from manyhands.blocks._start import start_blocks
from manyhands.blocks._sync import Sync
from manyhands.blocks.averaging._codec import CODECS
from manyhands.blocks.averaging._payload import STATE_OPTIONS, Extras, trainable_params
from manyhands.blocks.averaging._round import ElasticMembers
from manyhands.blocks.crew._crew import Crew

BUFFER_OPTIONS = ("average", "broadcast", "keep")

Closure = Callable[[], object]  # computes the gradients and returns the loss
Step = Callable[..., object]


class Blocks(OptimizerWrapper):
    """Take local steps on each worker, and synchronize all workers once per block.

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> optimizer = mh.Blocks(optimizer, every=16, codec="int8")
    >>> model(torch.ones(4, 2)).sum().backward()
    >>> optimizer.step()

    The wrapper replaces the optimizer or list of optimizers. Do not wrap the model in
    `DistributedDataParallel`: parameters differ between workers until the next sync round.
    `LocalSGD`, `BMUF`, `SlowMo` and `DiLoCo` are `Blocks` with the outer step of that name. With a
    single worker and no crew, training is bitwise equal to the bare optimizer.

    The constructor sets parameters and buffers to worker 0's values. Every worker must call `step`
    equally often, unless `every` is a `Seconds` with `own_steps=True`. At the end of training, and
    before evaluating or saving a model for all workers, call `synchronize()` on every worker, or
    use `at_anchor()`.

    Subclass `Outer` to define a different outer step:

    >>> from manyhands.blocks import Outer
    >>> class Signs(Outer):
    ...     memories = 0
    ...     def step(self, anchor, gradient, memories):
    ...         anchor.sub_(gradient.sign(), alpha=0.01)
    >>> optimizer = mh.Blocks(optimizer.optimizer, Signs(), every=16)

    Args:
        optimizer: the inner optimizer, or a list of optimizers with separate parameters, such as
            Muon and AdamW.
        outer: the outer step, which computes the next anchor from the workers' mean. By default
            the mean is the next anchor.
        every: number of steps between two sync rounds, or `Seconds`.
        codec: encoding of the differences: "float32", "bfloat16", "int8", "int4" or "ternary". The
            rounding error is added to the next difference.
        overlap: number of steps for which training continues while a mean is in flight.
        mix: weight α of this worker's parameters when a mean is merged, as in Streaming DiLoCo:
            `(1 - mix) * anchor + mix * parameters`. 0 discards the steps of the overlap. By default
            these steps are added to the anchor.
        fragments: number of parts of the model, which are synchronized at equal intervals within a
            block.
        state: treatment of the inner optimizer's state at a sync round: "keep", "average" over the
            workers, or "reset". "average_moments" averages Adam's moments only, like fairseq.
        buffers: treatment of the model's buffers: "average", "broadcast" from worker 0, or "keep".
        warmup: number of initial steps in which gradients are averaged, as in DDP.
        local_warmup: take the warm-up steps along local gradients, then take worker 0's parameters,
            like fairseq.
        anchor_on_host: store anchor and outer memories in host memory.
        model: the model with the buffers. By default the model is found by its parameters, which
            fails after `gc.freeze()`.
        process_group: the workers; by default all ranks.
        inner_group: ranks with equal parameters on a fast network, as under DDP, which form a
            single worker. Each rank synchronizes a slice of the parameters. `process_group` must
            then contain the ranks with equal rank in each inner group; a crew creates this group.
        crew: elastic membership instead of a process group; see `Crew`.
        shared_memory: exchange differences through shared memory if possible: between workers on a
            single host with Linux, without a crew, with parameters on the CPU and codec="float32".
    """

    layer = "blocks"
    #: Maps the names of the engine's options to the subclass's names (`_checks.py`).
    _names: ClassVar[Mapping[str, str]] = {}
    _described: Outer | None = None  # the outer step to save, if different

    @explained
    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        outer: Outer | None = None,
        *,
        every: int | Every = 16,
        codec: str = "float32",
        overlap: int = 0,
        mix: float | None = None,
        fragments: int = 1,
        state: str = "keep",
        buffers: str = "average",
        warmup: int = 0,
        local_warmup: bool = False,
        anchor_on_host: bool = False,
        model: nn.Module | None = None,
        process_group: dist.ProcessGroup | None = None,
        inner_group: dist.ProcessGroup | None = None,
        crew: Crew | None = None,
        shared_memory: bool = True,
    ) -> None:
        outer = outer or Average()
        self._inner = check_optimizers(type(self).__name__, optimizer, Blocks)
        interval = every if isinstance(every, Every) else Every(every)
        one_of("buffers", buffers, BUFFER_OPTIONS)
        overlap = whole("overlap", overlap)
        mix = None if mix is None else real("mix", mix, least=0, most=1)
        fragments = whole("fragments", fragments, 1)
        one_of("codec", codec, list(CODECS))
        one_of("state", state, STATE_OPTIONS)
        warmup = whole("warmup", warmup, why="It is a number of steps.")
        local_warmup = flag("local_warmup", local_warmup)
        anchor_on_host = flag("anchor_on_host", anchor_on_host)
        inner = RankGroup() if inner_group is None else RankGroup.of(inner_group)
        members = make_members(type(self).__name__, process_group, inner, crew)
        check_schedule(interval, overlap, fragments, ranks_per_worker=members.inner.size)
        shared_memory = flag("shared_memory", shared_memory)
        self._supports_amp = supports_amp(self._inner)
        self._options: dict[str, Value] = {
            **describe_outer(self._described or outer),
            "every": repr(interval),
            "codec": codec,
            "overlap": overlap,
            "mix": mix,
            "fragments": fragments,
            "state": state,
            "buffers": buffers,
            "warmup": warmup,
            "local_warmup": local_warmup,
        }
        self._sync = Sync(
            members,
            Anchor(outer, CODECS[codec], fragments, anchor_on_host, inner),
            Schedule(interval, fragments, overlap, warmup),
            BlockState.begin(warmup, local_warmup),
            Extras(self._inner, model, buffers, state, local_warmup and warmup > 0),
            self._options,
            mix,
        )
        self._begin(shared_memory)

    def _bound(self) -> Optimizer:
        return self._inner

    def _begin(self, shared_memory: bool) -> None:
        self._scheduled = {self._inner, *optimizers_in(self._inner)}
        if not params_of(self._inner.param_groups):
            raise ValueError("the optimizer has no parameters: every group is empty.")
        if self.alone:
            return
        params = trainable_params(self._inner)
        self._known = set(map(id, params))
        self._extend_anchor(params)
        name = type(self).__name__
        start_blocks(
            self._sync, self._inner, self._options, self._names, name, shared_memory=shared_memory
        )

    # -- state for users -------------------------------------------------------------------------

    @property
    def gradient_ranks(self) -> RankGroup:
        """Ranks of this worker; gradients are averaged over these ranks."""
        return self._sync.members.inner

    @property
    def alone(self) -> bool:
        """Whether there is no other worker, now or later."""
        return self._sync.members.alone

    @property
    def steps(self) -> int:
        """Number of steps. A worker that joins later continues from the run's number of steps.

        With `own_steps=True`, `steps` is the workers' mean, equal on all workers at sync rounds.
        """
        return self._sync.state.steps

    @property
    def own_steps(self) -> int:
        """Number of steps of this worker."""
        return self._sync.state.own

    @property
    def rounds(self) -> int:
        """Number of completed sync rounds."""
        return self._sync.state.rounds

    @property
    def outer(self) -> Outer:
        """The outer step, which computes the next anchor from the workers' mean."""
        return self._sync.anchor.outer

    @property
    def left_out(self) -> list[int]:
        """Workers excluded from the last mean, because some of their values were not finite.

        The list contains ranks of the process group, or numbers of a crew's workers.
        """
        return list(self._sync.stats.left_out)

    def snapshot(self) -> dict[str, Any]:
        """Return plain numbers about the last sync rounds, for logs and `Record`."""
        sync = self._sync
        stats = sync.stats
        inner = {}
        if hasattr(self._inner, "snapshot"):
            inner = self._inner.snapshot()
        return {
            **inner,
            "step": sync.state.steps,
            "workers": stats.workers or sync.members.workers.size,
            "members": " ".join(map(str, stats.members)),
            "rounds": sync.state.rounds,
            "every": sync.schedule.length,
            "own_every": sync.schedule.own,  # of this worker
            "own_steps": sync.state.own,
            **stats.drift._asdict(),
            "left_out": stats.left_out_ever,
            "undone": stats.undone,
            "dropped": sync.state.dropped,  # steps of this worker that entered no mean
            "waited": stats.waited,
        }

    # -- stepping ------------------------------------------------------------------------------

    def step(self, closure: Closure | None = None, *args: object, **kwargs: object) -> Any:
        """Step the inner optimizer, and synchronize with the other workers when a round is due.

        Steps that a `GradScaler` skips count too.
        """
        sync = self._sync
        if closure is not None:
            closure = self._in_step(closure)
        # A scaler sets signals on this wrapper or on the inner optimizer.
        signals = ScalerSignals.read_from(self, self._inner)
        if sync.state.steps_together and not self.alone:
            result = self._step_together(signals, closure, *args, **kwargs)
        else:
            if not self.alone:
                self._add_unfrozen_params()
            result = self._step_inner(signals, closure, *args, **kwargs)
        for each in self._scheduled:
            each._opt_called = True  # type: ignore[attr-defined]  # else torch's schedulers warn
        sync.count_step()
        if not self.alone:
            with torch.no_grad():
                sync.after_step()
        return result

    step.hooked = True  # type: ignore[attr-defined]  # the inner step runs the step hooks; torch must not repeat them

    def _step_inner(
        self, signals: ScalerSignals, closure: Closure | None, *args: object, **kwargs: object
    ) -> object:
        # `bool` synchronizes with the device, so it is a last resort.
        if signals.present and not self._supports_amp and bool(signals.found_inf):
            return None
        positional = args if closure is None else (closure, *args)
        step: Step = self._inner.step
        with apply_signals(signals, self._inner, self._supports_amp):
            return step(*positional, **kwargs)

    def _step_together(
        self, signals: ScalerSignals, closure: Closure | None, *args: object, **kwargs: object
    ) -> object:

        def average() -> bool:
            if signals.grad_scale is not None:
                unscale(self.param_groups, signals.grad_scale)
            return self._sync.average_gradients(trainable_params(self._inner))

        step: Step = self._inner.step
        if closure is None:
            return step(*args, **kwargs) if average() else None

        def closure_with_mean() -> object:
            with torch.enable_grad():
                loss = closure()
            if not average():  # no worker has a finite gradient
                self._inner.zero_grad()
            return loss

        return step(closure_with_mean, *args, **kwargs)

    def _add_unfrozen_params(self) -> None:
        new = [param for param in trainable_params(self._inner) if id(param) not in self._known]
        if new:
            self._known.update(map(id, new))
            with torch.no_grad():
                # Rounds in flight lack the new parameters: merge these rounds first.
                self._sync.merge_pending()
                self._extend_anchor(new)

    def _extend_anchor(self, params: Sequence[Tensor]) -> None:
        for each in optimizers_in(self._inner):
            own = set(map(id, params_of(each.param_groups)))
            self._sync.anchor.extend([param for param in params if id(param) in own])

    def count_samples(self, samples: int) -> None:
        """Weight the next step by a number of samples (or tokens). Repeated calls add up.

        Each worker's weight in the mean of a sync round is then the number of samples since the
        last round. Call it before every step on every worker, or never. Without calls, workers
        have equal weights, or with `own_steps=True` weights proportional to their steps.

        >>> import torch, manyhands as mh
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = mh.DiLoCo(torch.optim.SGD(model.parameters(), lr=0.1), every=20)
        >>> batch = torch.ones(8, 2)
        >>> model(batch).sum().backward()
        >>> optimizer.count_samples(len(batch))
        >>> optimizer.step()
        """
        self._sync.samples.count(whole("samples", samples))

    def zero_grad(self, *args: bool, **kwargs: bool) -> None:
        """Clear the gradients."""
        self._inner.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the optimizer of a single worker."""
        if not self.alone:
            raise RuntimeError(
                "add_param_group() needs a single worker without a crew. Pass all parameters to "
                "the optimizer's constructor, and set requires_grad of parameters that train later."
            )
        self._inner.add_param_group(param_group)

    # -- sync rounds outside of the schedule --------------------------------------------------

    @torch.no_grad()
    def synchronize(self) -> None:
        """Synchronize now, on every worker. Parameters are equal on all workers afterwards.

        In a crew, call it at equal `steps` on every worker, including new members.
        """
        if not self.alone:
            self._sync.sync_now()

    @contextmanager
    def at_anchor(self) -> Iterator[None]:
        """Set the parameters to the anchor, which is equal on all workers, inside this context.

        >>> import torch, manyhands as mh
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = mh.Blocks(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> with optimizer.at_anchor():
        ...     loss = model(torch.ones(1, 2)).sum()

        No collective runs, so a single worker may call it.
        """
        sync = self._sync
        if self.alone or not sync.state.anchor_in_use:  # in a warm-up the parameters are equal
            yield
            return
        if sync.anchor.inner.size > 1:
            raise RuntimeError(
                "with an inner_group each rank has only a slice of the anchor. Call "
                "optimizer.synchronize() on every worker: it sets the parameters to the anchor."
            )
        params = sync.anchor.params
        with torch.no_grad():
            kept = [param.detach().clone() for param in params]
            sync.anchor.restore_params()
        try:
            yield
        finally:
            with torch.no_grad():
                for param, value in zip(params, kept, strict=True):
                    param.copy_(value)

    def finish(self) -> None:
        """Synchronize a last time at the end of training, and leave the crew.

        If other members of the crew continue, this worker's steps since the last round are lost.
        """
        if isinstance(self._sync.members, ElasticMembers):
            if stop_notice.received:  # other members may need more time than this worker has
                crew = self._sync.members.crew
                crew.patience = min(crew.patience, stop_notice.seconds_left / 2)
            with torch.no_grad():
                # In this order: a member that has left takes part in no further round.
                self._sync.close()
            self._sync.members.leave()
        else:
            self.synchronize()

    def block_samples(self) -> SampleRounds | None:
        """Return the interface for a `Cursor`, or None without other workers."""
        return None if self.alone else SampleRounds(self._sync)

    # -- stopping before the end ---------------------------------------------------------------

    def stop_agreed(self) -> bool | None:
        """Return whether to stop here, or None if other workers may not know the answer."""
        if self.alone:
            if isinstance(self._inner, OptimizerWrapper):
                return self._inner.stop_agreed()
            return None
        if not self.in_crew:
            return self._sync.stats.stop  # all workers have read all reports
        if self.gradient_ranks.size > 1:
            return None  # the ranks of this worker must agree among themselves
        return stop_notice.received and self.may_stop_here()

    def may_stop_here(self) -> bool:
        """Return whether a crew member should stop now.

        Inside a block, where this worker's steps would be lost, stop only if the block would take
        more than half of the remaining time.
        """
        if not self.in_crew or self._sync.between_blocks:
            return True
        return self._sync.seconds_to_merge() > stop_notice.seconds_left / 2

    @property
    def in_crew(self) -> bool:
        """Whether this worker is in a crew."""
        return isinstance(self._sync.members, ElasticMembers)

    @property
    def joined_late(self) -> bool:
        """Whether this worker joined a crew during training, and has not stepped since."""
        return self._sync.state.joined_late

    # -- saving and loading --------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state, with the state of the blocks under "blocks".

        Each worker has a different state. If each worker loads the state that it saved, training
        continues bit for bit. A mean in flight, with `overlap`, is not saved: the next round
        includes its steps. Any number of workers can load worker 0's state; with `overlap`, call
        `synchronize()` on every worker before, or other workers' steps of the block are lost.
        """
        state = self._inner.state_dict()
        state[_saving.KEY] = {"options": self._options, **_saving.save_worker(self._sync)}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a `state_dict`, after loading the model's.

        Raises an error if options of the blocks differ from the saved options, and explains how to
        change options on purpose.
        """
        check_same_optimizers(self._inner, state_dict)
        saved = self.checked_state(state_dict.get(_saving.KEY))
        # All checks precede changes.
        inner = dict(state_dict)
        inner.pop(_saving.KEY, None)
        self._inner.load_state_dict(inner)
        _saving.load_saved(saved, self._sync)

    def checked_state(self, saved: object) -> _saving.SavedWorker | None:
        """Return the blocks' part of a state dict, or raise if it does not fit this optimizer."""
        state = _saving.check_saved(saved, self._options, self._names)
        # Accelerate loads an optimizer's current state back into it: `steps` is then equal.
        if self.joined_late and (state is None or state["steps"] != self.steps):
            raise RuntimeError(
                "this worker has joined a running job and received its state. Load an earlier "
                "state only at the start of a run, if optimizer.steps == 0. (mh.load and job.load "
                "may be called on every worker: they preserve the received state.)"
            )
        if state is not None:
            _saving.check_fits(state, self._sync)
        return state

    def state_parts(self) -> _saving.OuterStateParts:
        """Return the interface for `mh.save` and `mh.load`."""
        return _saving.OuterStateParts(self._sync, self._options)

    def __repr__(self) -> str:
        workers = self._sync.members.workers.size
        options = [f"workers={workers}"]
        for name, value in rename_options(self._options, self._names).items():
            options.append(f"{name}={value}")
        return f"{type(self).__name__}({', '.join(options)})\n{self._inner!r}"
