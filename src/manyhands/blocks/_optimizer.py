"""Wrap an optimizer in blocks of local steps: options, their checks, stepping, saving and loading.

`Blocks.step` is the inner optimizer's step, followed by `Sync.after_step` (`_sync.py`), which
decides what is sent and merged.
(`blocks/__init__.py` defines block, sync round, anchor and fragment.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands._arguments import explained, flag, one_of, whole
from manyhands._optimizers.several import SeveralOptimizers, check_same_optimizers, optimizers_in
from manyhands._optimizers.wrappers import (
    OptimizerWrapper,
    ScalerSignals,
    apply_signals,
    supports_amp,
    unscale,
)
from manyhands._ranks.ranks import RankGroup
from manyhands._ranks.received import add_receiver
from manyhands._ranks.stop_notice import stop_notice
from manyhands._tensors.flat import local_shard
from manyhands.blocks import _saving
from manyhands.blocks._anchor import Anchor, Average, Outer
from manyhands.blocks._block_state import BlockState
from manyhands.blocks._checks import (
    Value,
    check_agreement,
    check_not_averaged,
    check_optimizers,
    check_shared_memory,
    describe_outer,
    make_members,
    rename_options,
)
from manyhands.blocks._samples import SampleRounds
from manyhands.blocks._schedule import Every, Schedule, check_schedule
from manyhands.blocks._sync import Sync
from manyhands.blocks.averaging._codec import CODECS
from manyhands.blocks.averaging._payload import STATES, Extras, all_params, trainable_params
from manyhands.blocks.averaging._round import Drift, ElasticMembers
from manyhands.blocks.crew._crew import Crew
from manyhands.blocks.crew._enrollment import MemberFacts
from manyhands.blocks.crew._roster import NO_VERSION

BUFFERS = ("average", "broadcast", "keep")

Closure = Callable[[], object]  # computes the gradients, and returns the loss
Step = Callable[..., object]  # an inner optimizer's, which may have further arguments


class Blocks(OptimizerWrapper):
    """Let each worker take local steps, and synchronize all workers once in a block.

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> optimizer = mh.Blocks(optimizer, every=16, codec="int8")
    >>> model(torch.ones(4, 2)).sum().backward()
    >>> optimizer.step()

    It wraps any optimizer, or a list of several, and takes its place. Do not wrap the model in
    `DistributedDataParallel`: each worker follows its own gradients, and parameters differ until
    the next sync round. `LocalSGD`, `BMUF`, `SlowMo` and `DiLoCo` are this class with the outer
    step of that name. One worker without a crew is bitwise the bare optimizer.

    At construction every worker takes worker 0's parameters and buffers. Every worker has to call
    `step` equally often, unless `every` allows different numbers (`Seconds`). At the end of
    training, and before one model is evaluated or saved for all workers, call `synchronize()` on
    every worker, or use `at_anchor()`.

    Another outer step:

    >>> from manyhands.blocks import Outer
    >>> class Signs(Outer):
    ...     memories = 0
    ...     def step(self, anchor, gradient, memories):
    ...         anchor.sub_(gradient.sign(), alpha=0.01)
    >>> optimizer = mh.Blocks(optimizer.optimizer, Signs(), every=16)

    Args:
        optimizer: the inner optimizer, with which each worker steps. Or a list of several, such as
            Muon and AdamW, each with separate parameters: `step` steps all of them.
        outer: the outer step, from the workers' mean to the next anchor. By default the mean is
            the next anchor.
        every: steps from one sync round to the next, or `Seconds`.
        codec: how differences are encoded: "float32", "bfloat16", "int8", "int4" or "ternary". What
            rounding cuts off is added to the next difference.
        overlap: steps for which training goes on while a mean is in flight. 0 waits for it.
        fragments: parts of the model that are synchronized one after the other, evenly over a
            block.
        state: the inner optimizer's state at a sync round: "keep" it, "average" it over the
            workers, or "reset" it. "average_moments" averages Adam's moments only, as fairseq.
        buffers: "average" the model's buffers, "broadcast" worker 0's, or "keep" each worker's.
        warmup: steps at the beginning in which gradients are averaged, as in DDP.
        local_warmup: do not average gradients in these steps, and take worker 0's parameters
            at their end, as in fairseq.
        anchor_on_host: keep the anchor and the outer memories in the host's memory.
        model: the model with the buffers. Without it, the model is found by its parameters
            (except after `gc.freeze()`).
        process_group: the workers; by default all ranks.
        inner_group: ranks that have the same parameters, joined by a fast network, as under DDP.
            Each of them synchronizes its slice of the parameters. `process_group` is then the
            group of the ranks with the same rank in each inner group; a crew makes it itself.
        crew: elastic membership instead of a process group: see `Crew`.
        shared_memory: workers of one host, with parameters on the CPU and codec="float32", read
            each other's memory instead of sending. None: where it is possible (Linux); True:
            raise where it is not; False: never.
    """

    layer = "blocks"
    #: From the engine's names of options to the subclass's (`_checks.py`).
    _names: ClassVar[Mapping[str, str]] = {}
    _described: Outer | None = None  # the outer step that is saved, if not the one in use

    @explained
    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        outer: Outer | None = None,
        *,
        every: int | Every = 16,
        codec: str = "float32",
        overlap: int = 0,
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
        shared_memory: bool | None = None,
    ) -> None:
        outer = outer or Average()
        self._inner = check_optimizers(type(self).__name__, optimizer, Blocks)
        interval = every if isinstance(every, Every) else Every(every)
        one_of("buffers", buffers, BUFFERS)
        overlap = whole("overlap", overlap)
        fragments = whole("fragments", fragments, 1)
        one_of("codec", codec, list(CODECS))
        one_of("state", state, STATES)
        warmup = whole("warmup", warmup, why="It is a number of steps.")
        local_warmup = flag("local_warmup", local_warmup)
        anchor_on_host = flag("anchor_on_host", anchor_on_host)
        inner = RankGroup() if inner_group is None else RankGroup.of(inner_group)
        members = make_members(type(self).__name__, process_group, inner, crew)
        check_schedule(interval, overlap, fragments, ranks_per_worker=members.inner.size)
        self._shared_memory = check_shared_memory(shared_memory, codec, crew, self._inner)
        self._supports_amp = supports_amp(self._inner)
        self._scheduled = {self._inner, *optimizers_in(self._inner)}
        self._options: dict[str, Value] = {
            **describe_outer(self._described or outer),
            "every": repr(interval),
            "codec": codec,
            "overlap": overlap,
            "fragments": fragments,
            "state": state,
            "buffers": buffers,
            "warmup": warmup,
            "local_warmup": local_warmup,
        }
        resets = state == "reset" or (local_warmup and warmup > 0)
        self._sync = Sync(
            members,
            Anchor(outer, CODECS[codec], fragments, anchor_on_host, inner),
            Schedule(interval, fragments, overlap, warmup),
            BlockState.begin(warmup, local_warmup),
            Extras(self._inner, model, buffers, state, resets),
            self._options,
        )
        self._begin(model)

    def _bound(self) -> Optimizer:
        return self._inner

    def _begin(self, model: nn.Module | None) -> None:
        """Check that all workers agree, and take worker 0's parameters, or a member's in a crew."""
        sync = self._sync
        params = trainable_params(self._inner)
        everything = all_params(self._inner)
        if not everything:
            raise ValueError("the optimizer has no parameters: every group is empty.")
        if self.alone:
            return
        buffers = sync.extras.buffer_tensors()
        self._known = set(map(id, params))
        self._extend_anchor(params)
        if isinstance(sync.members, ElasticMembers):
            facts = MemberFacts.of(self._compared(), everything, buffers, sync.extras.modules)
            sync.members.join(NO_VERSION, facts)
            add_receiver(sync)
            sync.transfer_state()
            sync.regroup()
            return
        workers = sync.members.workers
        self._all_workers = workers
        check_not_averaged(type(self).__name__, workers, self._inner, model)
        self._check_agreement(everything, buffers)
        sync.members.choose_transport(
            [param.device for param in everything],
            background=sync.schedule.overlap > 0,
            shared_memory=self._shared_memory,
            exact=not sync.anchor.codec.rounds,
        )
        workers.broadcast_from_first([local_shard(tensor) for tensor in [*everything, *buffers]])
        sync.anchor.begin()

    def _check_agreement(self, params: list[Tensor], buffers: list[Tensor]) -> None:
        """Raise on every worker if they differ in options, in these parameters or in buffers."""
        options = rename_options(self._compared(), self._names)
        check_agreement(
            type(self).__name__,
            self._all_workers,
            self._sync.anchor.inner,
            {**options, "shared_memory": self._shared_memory},
            params,
            buffers,
            self._sync.extras.modules,
        )

    def _compared(self) -> dict[str, Value]:
        """Return the facts that must be equal on all workers: options, and a list of optimizers."""
        if not isinstance(self._inner, SeveralOptimizers):
            return self._options
        return {**self._options, "optimizers": str(self._inner)}

    # -- state for users -------------------------------------------------------------------------

    @property
    def gradient_ranks(self) -> RankGroup:
        """The ranks whose gradients are averaged for a step: those of this worker."""
        return self._sync.members.inner

    @property
    def alone(self) -> bool:
        """Whether there is no other worker, and never will be."""
        return self._sync.alone

    @property
    def steps(self) -> int:
        """Steps taken. A worker that joins later continues from the number of the run.

        With `own_steps=True` this is the mean of the workers' steps: equal on all workers at each
        sync round.
        """
        return self._sync.state.steps

    @property
    def own_steps(self) -> int:
        """Steps that this worker has taken itself."""
        return self._sync.state.own

    @property
    def rounds(self) -> int:
        """Sync rounds that took place."""
        return self._sync.state.rounds

    @property
    def outer(self) -> Outer:
        """The outer step, from the workers' mean to the next anchor."""
        return self._sync.anchor.outer

    @property
    def left_out(self) -> list[int]:
        """Workers that were left out of the last mean, because not all their values were finite.

        Ranks in the process group, or the numbers of a crew's workers.
        """
        return list(self._sync.stats.left_out)

    def snapshot(self) -> dict[str, Any]:
        """Return plain numbers about the last sync rounds, for logs and `Record`."""
        sync = self._sync
        stats = sync.stats
        drift, *parts = stats.drifts
        drifts = {}
        if isinstance(self._inner, SeveralOptimizers):  # the drift of each: "distance_AdamW"
            parts = parts or [Drift()] * len(self._inner.names)  # before the first round: NaN
            for name, part in zip(self._inner.names, parts, strict=False):
                for field, value in part._asdict().items():
                    drifts[f"{field}_{name}"] = value
        inner = {}
        if hasattr(self._inner, "snapshot"):
            inner = self._inner.snapshot()
        return {
            **inner,
            "step": sync.state.steps,
            "workers": stats.workers or sync.members.workers.size,  # in the last round
            "members": " ".join(map(str, stats.members)),
            "rounds": sync.state.rounds,
            "every": sync.schedule.length,
            "own_every": sync.schedule.own,  # steps of this worker in the present block
            "own_steps": sync.state.own,
            "distance": drift.distance,
            "spread": drift.spread,
            "cosine": drift.cosine,
            "left_out": stats.left_out_ever,
            "undone": stats.undone,
            "dropped": sync.state.dropped,  # steps of this worker that are in no mean
            "waited": stats.waited,
            **drifts,
        }

    # -- stepping ------------------------------------------------------------------------------

    def step(self, closure: Closure | None = None, *args: object, **kwargs: object) -> Any:
        """Step the inner optimizer, and synchronize with the other workers if it is time.

        A step that a `GradScaler` skips is counted, so that all workers count the same steps.
        """
        sync = self._sync
        if closure is not None:
            closure = self._in_step(closure)
        # A scaler leaves them on the optimizer that it was given: this one, or the inner one.
        signals = ScalerSignals.read_from(self, self._inner)
        if sync.state.steps_together and not self.alone:
            result = self._step_together(signals, closure, *args, **kwargs)
        else:
            if not self.alone:
                self._add_unfrozen_params()
                sync.before_step()
            result = self._step_inner(signals, closure, *args, **kwargs)
        for each in self._scheduled:
            each._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers warn without
        sync.count_step()
        if not self.alone:
            began = time.perf_counter()
            with torch.no_grad():
                sync.after_step()
            sync.note_params()
            if isinstance(self._inner, OptimizerWrapper):
                self._inner.after_sync(time.perf_counter() - began)
        return result

    step.hooked = True  # type: ignore[attr-defined]  # torch must not run step hooks twice: the inner step does

    def _step_inner(
        self, signals: ScalerSignals, closure: Closure | None, *args: object, **kwargs: object
    ) -> object:
        """Step the inner optimizer by itself; None if a `GradScaler` wants the step skipped."""
        # `bool` waits for the device: only if the inner optimizer cannot skip by itself.
        if signals.present and not self._supports_amp and bool(signals.found_inf):
            return None
        positional = args if closure is None else (closure, *args)
        step: Step = self._inner.step
        with apply_signals(signals, self._inner, self._supports_amp):
            return step(*positional, **kwargs)

    def _step_together(
        self, signals: ScalerSignals, closure: Closure | None, *args: object, **kwargs: object
    ) -> object:
        """Take a step along the mean of all workers' gradients."""

        def average() -> bool:
            if signals.grad_scale is not None:
                unscale(self.param_groups, signals.grad_scale)
            return self._sync.average_gradients(trainable_params(self._inner))

        step: Step = self._inner.step
        if closure is None:
            return step(*args, **kwargs) if average() else None

        def closure_with_mean() -> object:
            """Compute the gradients in the optimizer's call, and then the workers' mean of them."""
            with torch.enable_grad():
                loss = closure()
            if not average():  # no worker has a finite gradient
                self._inner.zero_grad()
            return loss

        return step(closure_with_mean, *args, **kwargs)

    def _add_unfrozen_params(self) -> None:
        """Give an anchor to parameters that are trained since the last step, on every worker."""
        new = [param for param in trainable_params(self._inner) if id(param) not in self._known]
        if new:
            self._known.update(map(id, new))
            with torch.no_grad():
                # What is in flight was laid out without the new parameters: merge it first.
                self._sync.merge_pending()
                self._extend_anchor(new)

    def _extend_anchor(self, params: Sequence[Tensor]) -> None:
        """Give these parameters an anchor, apart for each optimizer, so that each has a drift."""
        for number, each in enumerate(optimizers_in(self._inner)):
            own = set(map(id, all_params(each)))
            self._sync.anchor.extend([param for param in params if id(param) in own], number)

    def count_samples(self, samples: int) -> None:
        """Weight the next step by this many samples (or tokens); calls before one step add up.

        The mean of a sync round is then weighted by the samples that each worker trained on since
        the last one. Call it before every step on every worker, or never: without it workers have
        equal weights, or with `own_steps=True` the weights of their steps.

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
        """Add parameters, on every worker; worker 0's values hold for all."""
        if isinstance(self._sync.members, ElasticMembers):
            raise RuntimeError(
                "add_param_group() does not work with a crew: give the optimizer all parameters "
                "when it is made."
            )
        # First, so that the check below sees it; a group that differs is taken out again.
        self._inner.add_param_group(param_group)
        if self.alone:
            return
        with torch.no_grad():
            self._sync.end_block()  # of own steps: some workers have held its round already
            self._sync.merge_pending()
        try:
            self._check_agreement(all_params(self._inner), [])
        except ValueError:
            self.param_groups.pop()
            raise
        new = self.param_groups[-1]["params"]
        self._all_workers.broadcast_from_first(list(map(local_shard, new)))
        self._add_unfrozen_params()

    # -- sync rounds outside of the schedule --------------------------------------------------

    @torch.no_grad()
    def synchronize(self) -> None:
        """Synchronize now; call it on every worker. All have the same parameters afterwards.

        In a crew, call it at the same `steps` on every worker. A worker that has joined at that
        step takes part.
        """
        if not self.alone:
            self._sync.sync_now()

    @contextmanager
    def at_anchor(self) -> Iterator[None]:
        """Use the anchor as parameters inside this context: they are equal on all workers.

        >>> import torch, manyhands as mh
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = mh.Blocks(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> with optimizer.at_anchor():
        ...     loss = model(torch.ones(1, 2)).sum()

        No collective runs, so one worker may do it by itself. It costs a copy of the parameters.
        """
        sync = self._sync
        if self.alone or not sync.state.anchor_in_use:  # in a warm-up the parameters are equal
            yield
            return
        if sync.anchor.inner.size > 1:
            raise RuntimeError(
                "with an inner_group each rank has a slice of the anchor only. Call "
                "optimizer.synchronize() on every worker: the parameters are the anchor then."
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
        """Synchronize a last time, and leave the crew: training is over on this worker.

        A crew's worker that is done while others train on leaves without a sync round: its steps
        since the last round are lost.
        """
        if isinstance(self._sync.members, ElasticMembers):
            if stop_notice.received:  # the other members may need longer than this worker has
                crew = self._sync.members.crew
                crew.patience = min(crew.patience, stop_notice.seconds_left / 2)
            with torch.no_grad():
                # In this order: a member that has left holds no further round.
                self._sync.close()
            self._sync.members.leave()
        else:
            self.synchronize()

    def block_samples(self) -> SampleRounds | None:
        """Return the interface for a `Cursor`; None without other workers."""
        return None if self.alone else SampleRounds(self._sync)

    # -- stopping before the end ---------------------------------------------------------------

    def stop_agreed(self) -> bool | None:
        """Return whether to stop here, as all workers know by now; None if they may not know."""
        if self.alone:
            if isinstance(self._inner, OptimizerWrapper):
                return self._inner.stop_agreed()
            return None
        if not self.in_crew:
            return self._sync.stats.stop  # every worker's report has come to all workers
        if self.gradient_ranks.size > 1:
            return None  # the processes of this worker ask each other
        return stop_notice.received and self.may_stop_here()

    def may_stop_here(self) -> bool:
        """In a crew: stop between two blocks, or inside one at the loss of this worker's steps."""
        if not self.in_crew or self._sync.between_blocks:
            return True
        return self._sync.seconds_to_merge() > stop_notice.seconds_left / 2

    @property
    def in_crew(self) -> bool:
        """Whether a crew keeps the workers, and not a process group."""
        return isinstance(self._sync.members, ElasticMembers)

    @property
    def joined_late(self) -> bool:
        """Whether this worker came into a crew that trains already, and has taken no step since."""
        return self._sync.state.joined_late

    # -- saving and loading --------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state, with the blocks' own under "blocks".

        Each worker has its own, because parameters differ inside a block. If each worker loads its
        own, training continues bit for bit; worker 0's can be loaded by any number of workers.
        """
        state = self._inner.state_dict()
        state[_saving.KEY] = {"options": self._options, **_saving.save_worker(self._sync)}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; load the model's first.

        Options of the blocks that differ from the saved run's are an error, which says how to
        change them on purpose.
        """
        check_same_optimizers(self._inner, state_dict)
        saved = self.checked_state(state_dict.get(_saving.KEY))
        # After all checks: a state that does not fit has no effect.
        inner = dict(state_dict)
        inner.pop(_saving.KEY, None)
        self._inner.load_state_dict(inner)
        _saving.load_saved(saved, self._sync)

    def checked_state(self, saved: object) -> _saving.SavedWorker | None:
        """Return the blocks' part of a state dict if it fits this optimizer, or raise."""
        state = _saving.check_saved(saved, self._options, self._names)
        # Accelerate loads an optimizer's own state into it, which is of the same step.
        if self.joined_late and (state is None or state["steps"] != self.steps):
            raise RuntimeError(
                "this worker has joined a run that goes on, and received its state. Load an "
                "earlier state only where the run begins: if optimizer.steps == 0. (mh.load and "
                "job.load may be called on every worker: they keep the state that was received.)"
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
