"""The optimizer wrapper: step on your own, and meet the others once in a block.

`step` is the inner optimizer's step; what comes after it is in `_sync.py`. Here is what a user
sees: the options, their meaning, saving and loading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands._core import amp as _amp
from manyhands._core.dtensor import local
from manyhands._core.ranks import RankGroup
from manyhands._core.wrapper import OptimizerWrapper, Shared
from manyhands.blocks import _state
from manyhands.blocks._anchor import Anchor
from manyhands.blocks._arguments import flag, whole
from manyhands.blocks._checks import (
    check_agreement,
    check_choice,
    check_counts,
    check_groups,
    check_outer,
    check_shared_memory,
    checked_optimizer,
)
from manyhands.blocks._codec import codec_of
from manyhands.blocks._joiners import welcome
from manyhands.blocks._other_averaging import check_not_averaged
from manyhands.blocks._outer import Average, Outer
from manyhands.blocks._schedule import Every, Schedule
from manyhands.blocks._state import as_named, settings_of, sorted_out
from manyhands.blocks._sync import Sync
from manyhands.blocks.averaging._extras import Buffers, numbered, rows_of, trained
from manyhands.blocks.averaging._gradients import average_gradients
from manyhands.blocks.crew._membership import ElasticMembers, FixedMembers
from manyhands.blocks.crew._terms import Terms

STATES = ("keep", "average", "reset", "average_moments")
BUFFERS = ("average", "broadcast", "keep")


class Blocks(OptimizerWrapper):
    """Let workers take steps of their own, and bring them together once in a block.

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> optimizer = mh.Blocks(optimizer, every=16, codec="int8")
    >>> model(torch.ones(4, 2)).sum().backward()
    >>> optimizer.step()

    It goes around any optimizer, and takes its place. Leave the model without
    `DistributedDataParallel`: each worker follows its own gradients, and parameters differ until
    the next meeting. `LocalSGD`, `BMUF`, `SlowMo` and `DiLoCo` are this class with the outer step
    that the name says. One worker without a crew is bitwise the bare optimizer.

    When it is made, every worker takes worker 0's parameters and buffers. Every worker has to call
    `step` equally often. At the end of training, and before the model is evaluated or saved as
    the common one, call `synchronize()` on all of them, or look at it `at_anchor()`.

    An outer step of your own:

    >>> class Signs(mh.Outer):
    ...     memories = 0
    ...     def step(self, anchor, gradient, memories):
    ...         anchor.sub_(gradient.sign(), alpha=0.01)
    >>> optimizer = mh.Blocks(optimizer.optimizer, Signs(), every=16)

    Args:
        optimizer: what each worker steps with.
        outer: what becomes of the workers' mean; by default it is the next common point.
        every: steps from one meeting to the next, or `Seconds`, or `ByDrift`.
        codec: how differences travel: "float32", "bfloat16", "int8", "int4". What is lost in
            rounding is kept and sent with the next.
        overlap: steps for which training goes on while a mean is on its way. 0 waits for it.
        fragments: parts of the model that meet one after the other, evenly over a block.
        state: of the inner optimizer at a meeting: "keep" it, "average" it over the workers, or
            "reset" it. "average_moments" averages Adam's only, as fairseq does.
        buffers: of the model: "average" them, "broadcast" worker 0's, or "keep" each its own.
        warmup: steps at the beginning in which gradients are averaged, as in DDP.
        local_warmup: in these steps workers are on their own instead, and take worker 0's
            parameters at the end, as in fairseq.
        anchor_on_host: keep the common point and the outer memories in the host's memory.
        model: whose buffers they are. It is found without, except after `gc.freeze()`.
        process_group: who meet; all, by default.
        inner_group: workers that have the same parameters, joined by a fast network, as under
            DDP. Each of them meets for its share of the parameters. `process_group` is then
            the group of those with the same rank in each inner group; a crew makes it itself.
        crew: who meet, where workers come and go: see `Crew`.
        shared_memory: workers of one host, with parameters on the CPU and codec="float32", read
            each other's memory, and nothing is sent. By default they do where they can (Linux);
            True: it is an error where they cannot; False: they do not.
    """

    _known = Shared[set[int]]()
    #: Options that a subclass calls otherwise (`_state.py`).
    _names: ClassVar[Mapping[str, str]] = {}
    _described: Outer | None = None  # the outer step that options tell of, if not the one taken

    def __init__(
        self,
        optimizer: Optimizer,
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
        process_group: Any = None,
        inner_group: Any = None,
        crew: Any = None,
        shared_memory: bool | None = None,
    ) -> None:
        outer = Average() if outer is None else outer
        self._inner = checked_optimizer(type(self).__name__, optimizer, Blocks)
        interval = every if isinstance(every, Every) else Every(every)
        check_outer(outer)
        check_choice("state", state, STATES)
        check_choice("buffers", buffers, BUFFERS)
        overlap, fragments = whole("overlap", overlap), whole("fragments", fragments, 1)
        warmup = whole("warmup", warmup, why="It is a number of steps.")
        local_warmup = flag("local_warmup", local_warmup)
        anchor_on_host = flag("anchor_on_host", anchor_on_host)
        if shared_memory is not None:
            shared_memory = flag("shared_memory", shared_memory)
        check_counts(overlap, fragments, interval)
        inner = RankGroup() if inner_group is None else RankGroup.of(inner_group)
        check_groups(type(self).__name__, crew, process_group, inner, interval)
        check_shared_memory(shared_memory, codec, crew, optimizer)
        self._heeds_scaler = _amp.supports_amp(optimizer)
        self._options = {
            **settings_of(self._described or outer),
            "every": repr(interval),
            "codec": codec,
            "overlap": overlap,
            "fragments": fragments,
            "state": state,
            "buffers": buffers,
            "warmup": warmup,
            "local_warmup": local_warmup,
        }
        self._model = found = Buffers(optimizer, model)
        start = interval.first_start(warmup)
        self._sync = Sync(
            optimizer,
            FixedMembers(RankGroup.of(process_group)) if crew is None else ElasticMembers(crew),
            Anchor(outer, codec_of(codec), fragments, anchor_on_host, inner),
            interval,
            Schedule(interval.first, fragments, overlap, start),
            warmup=warmup,
            local_warmup=local_warmup,
            state=state,
            buffers=None if buffers == "keep" else found,
            first_buffers_only=buffers == "broadcast",
            options=self._options,
        )
        self._shared_memory = shared_memory
        self._begin(model)

    def _begin(self, model: nn.Module | None) -> None:
        """Agree with the others, and have the same parameters as they."""
        sync = self._sync
        params = trained(self._inner_optimizer)
        if not any(group["params"] for group in self.param_groups):
            raise ValueError("the optimizer has no parameters: every group is empty.")
        if self.alone:
            return
        buffers = sync.buffer_tensors
        self._known = {id(param) for param in params}
        sync.point.extend(params)
        if isinstance(sync.team, ElasticMembers):
            every = [param for group in self.param_groups for param in group["params"]]
            terms = Terms.of(self._options, every, buffers, self._model.modules)
            sync.team.join(-1, terms)
            welcome(sync)
            sync.come_together(sync.owed)
            return
        self._given = workers = sync.team.workers
        check_not_averaged(type(self).__name__, workers, self._inner_optimizer, model)
        everything = [param for group in self.param_groups for param in group["params"]]
        self._check_agreement(everything, buffers)
        sync.team.workers = self._who_meet(workers)
        workers.broadcast_from_first([local(tensor) for tensor in [*everything, *buffers]])
        sync.point.begin()

    def _who_meet(self, workers: RankGroup) -> RankGroup:
        """The workers, and how they reach each other in a meeting."""
        if self._sync.schedule.overlap:  # messages beside training that no others are taken for
            device = next(p.device for group in self.param_groups for p in group["params"])
            workers = workers.with_background_group(device)
        if self._shared_memory is None:
            devices = {p.device for group in self.param_groups for p in group["params"]}
            exact = self._options["codec"] == "float32"
            can = exact and all(d.type == "cpu" and workers.on_gloo(d) for d in devices)
            return workers.with_shared_memory(required=False) if can else workers
        return workers.with_shared_memory() if self._shared_memory else workers

    def _check_agreement(self, params: list[Tensor], buffers: list[Tensor]) -> None:
        check_agreement(
            type(self).__name__,
            self._given,
            self._sync.point.inner,
            {**as_named(self._options, self._names), "shared_memory": self._shared_memory},
            params,
            buffers,
            self._model.modules,
        )

    # -- what is known -------------------------------------------------------------------------

    @property
    def alone(self) -> bool:
        """Whether there is nobody to meet, ever."""
        return self._sync.alone

    @property
    def steps(self) -> int:
        """Steps taken; a worker that has joined later goes on from the others' number."""
        return self._sync.steps

    @property
    def rounds(self) -> int:
        """Meetings held."""
        return self._sync.rounds

    @property
    def left_out(self) -> list[int]:
        """Workers whose numbers were not finite in the last meeting, and were left out of the mean.

        Ranks in the process group, or a crew's numbers.
        """
        return list(self._sync.news.left_out)

    def snapshot(self) -> dict[str, Any]:
        """The state of the synchronisation in plain numbers, for logs and `Record`."""
        sync, news = self._sync, self._sync.news
        inner = self._inner_optimizer
        return {
            **(inner.snapshot() if hasattr(inner, "snapshot") else {}),
            "step": sync.steps,
            "workers": news.workers or sync.team.workers.size,  # of the last meeting
            "rounds": sync.rounds,
            "every": sync.schedule.length,
            "distance": news.drift.distance,
            "spread": news.drift.spread,
            "cosine": news.drift.cosine,
            "left_out": news.left_out_ever,
            "undone": news.undone,
            "waited": news.waited,
        }

    # -- stepping ------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Step the inner optimizer, and meet the others if it is time.

        A step that a `GradScaler` skips is counted, so that workers stay together.
        """
        sync = self._sync
        if closure is not None:
            closure = self._in_step(closure)
        news = _amp.ScalerSignals.read_from(self, self._inner_optimizer)
        if self.alone or sync.steps >= sync.warmup or sync.local_warmup:
            if not self.alone:
                self._take_in_what_has_thawed()
            result = self._step_inner(news, closure, *args, **kwargs)
        else:
            result = self._step_together(news, closure, *args, **kwargs)
        vars(self._inner_optimizer)["_opt_called"] = True  # a scheduler of the inner optimizer asks
        sync.steps, sync.is_new, sync.apart = sync.steps + 1, False, True
        if not self.alone:
            with torch.no_grad():
                sync.after_step()
        return result

    step.hooked = True  # type: ignore[attr-defined]  # hooks run in the inner optimizer's step

    def _step_inner(self, news: _amp.ScalerSignals, closure: Any, *args: Any, **kwargs: Any) -> Any:
        if news.present and not self._heeds_scaler and bool(news.found_inf):
            return None
        positional = args if closure is None else (closure, *args)
        with _amp.apply_signals(news, self._inner_optimizer, self._heeds_scaler):
            return self._inner_optimizer.step(*positional, **kwargs)

    def _step_together(
        self, news: _amp.ScalerSignals, closure: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """A step along the mean of all workers' gradients."""

        def averaged() -> bool:
            if news.grad_scale is not None:
                _amp.unscale(self.param_groups, news.grad_scale)
            return average_gradients(self._sync, trained(self._inner_optimizer))

        if closure is None:
            return self._inner_optimizer.step(*args, **kwargs) if averaged() else None

        def together() -> Any:
            with torch.enable_grad():
                loss = closure()
            if not averaged():  # nobody has a gradient to step along
                self._inner_optimizer.zero_grad()
            return loss

        return self._inner_optimizer.step(together, *args, **kwargs)

    def _take_in_what_has_thawed(self) -> None:
        new = [p for p in trained(self._inner_optimizer) if id(p) not in self._known]
        if new:
            self._known |= {id(param) for param in new}
            with torch.no_grad():
                self._sync.land()
                self._sync.point.extend(new)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients."""
        self._inner_optimizer.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, on every worker; they become worker 0's."""
        if isinstance(self._sync.team, ElasticMembers):
            raise RuntimeError("a crew's workers need all parameters from the beginning.")
        self._inner_optimizer.add_param_group(param_group)
        if self.alone:
            return
        with torch.no_grad():
            self._sync.land()
        try:
            self._check_agreement([p for g in self.param_groups for p in g["params"]], [])
        except ValueError:
            self.param_groups.pop()
            raise
        self._given.broadcast_from_first([local(p) for p in self.param_groups[-1]["params"]])
        self._take_in_what_has_thawed()

    # -- meeting outside of the schedule -------------------------------------------------------

    @torch.no_grad()
    def synchronize(self) -> None:
        """Meet now, on every worker: parameters are the same on all of them afterwards."""
        if not self.alone:
            self._sync.meet_now()

    @torch.no_grad()
    def average_parameters(self) -> None:
        """Set every worker's parameters to their mean, with no outer step."""
        if not self.alone:
            self._sync.land()
            rows = rows_of(numbered(trained(self._inner_optimizer)))
            while self._sync.hold(rows) is None:  # undone: with those who are there now
                pass
            self._sync.come_together()

    @contextmanager
    def at_anchor(self) -> Iterator[None]:
        """Inside, the parameters are the last common point, the same on all workers.

        >>> import torch, manyhands as mh
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = mh.Blocks(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> with optimizer.at_anchor():
        ...     loss = model(torch.ones(1, 2)).sum()

        Nobody is asked, so one worker may do it by itself. Costs a copy of the parameters.
        """
        sync = self._sync
        if self.alone or not sync.agreed or sync.steps < sync.warmup:
            yield
            return
        if sync.point.inner.size > 1:
            raise RuntimeError(
                "with an inner_group each worker has a share of the common point only. Call "
                "optimizer.synchronize() on every worker: the parameters are the common point then."
            )
        params = sync.point.params
        with torch.no_grad():
            kept = [param.detach().clone() for param in params]
            sync.point.go_back()
        try:
            yield
        finally:
            with torch.no_grad():
                for param, value in zip(params, kept, strict=True):
                    param.copy_(value)

    def finish(self) -> None:
        """Meet a last time, and leave the crew: training is over on this worker.

        A crew's worker that is done while others train on leaves without a meeting: they lose
        nothing, and its steps since the last one are lost.
        """
        if isinstance(self._sync.team, ElasticMembers):
            with torch.no_grad():
                self._sync.close()
            self._sync.team.leave()
        else:
            self.synchronize()

    # -- saving and loading --------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, with what the synchronisation needs under "blocks".

        Each worker has its own: parameters differ between meetings. With each one's own files
        training goes on bit for bit; with worker 0's for all of them it goes on from there,
        on any number of workers.
        """
        state: dict[str, Any] = self._inner_optimizer.state_dict()
        state[_state.KEY] = {"options": self._options, **_state.saved(self._sync)}
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], optimizer_overrides: Mapping[str, Any] | None = None
    ) -> None:
        """Continue from a `state_dict`; load the model's first.

        `optimizer_overrides` are options of the parameter groups to have in place of those
        that were saved (`{"lr": 0.01}`), or options of the blocks that have been changed on
        purpose (`{"codec": "int8"}`), which are an error otherwise. These have the names of the
        class that is used. (`lr` and `momentum` are always those of the parameter groups:
        DiLoCo's own are `outer_lr` and `outer_momentum` here.)
        """
        groups = [*self.param_groups, *state_dict.get("param_groups", ())]
        given = self._with_engine_values(optimizer_overrides or {})
        changed, overrides = sorted_out(
            type(self).__name__, given, self._options, self._names, groups
        )
        ours = self.checked_state(state_dict.get(_state.KEY), changed)
        inner = {key: value for key, value in state_dict.items() if key != _state.KEY}
        self._inner_optimizer.load_state_dict(inner)
        for group in self.param_groups:
            group.update(overrides)
        self.load_common_state(ours)

    def _with_engine_values(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Overrides whose values a subclass gives otherwise, as the engine has them."""
        return dict(overrides)

    def common_state_dict(self) -> dict[str, Any]:
        """The blocks' part of a state dict alone, without what is only this worker's.

        For checkpoints of your own that all workers continue from. (`mh.save` needs no such.)
        """
        _state.check_together(self._sync)
        _state.check_whole(self._sync)
        return {"options": self._options, **_state.common(self._sync)}

    def checked_state(self, ours: Any, changed: Mapping[str, Any] | None = None) -> Any:
        """The blocks' part of a state dict, if it fits; an error otherwise."""
        ours = _state.checked(ours, self._options, changed or {}, self._names)
        if ours is not None:
            _state.check_fits(ours, self._sync)
        return ours

    @torch.no_grad()
    def load_common_state(self, ours: Any) -> None:
        """Go on from what `checked_state` gave; from the parameters as they are, if it is None."""
        _state.load(ours, self._sync)

    def __repr__(self) -> str:
        workers = self._sync.team.workers.size
        options = ", ".join(
            f"{name}={value}" for name, value in as_named(self._options, self._names).items()
        )
        return f"{type(self).__name__}(workers={workers}, {options})\n{self._inner_optimizer!r}"
