"""Save and load the state of blocks.

`save_worker` serves the optimizer's `state_dict`, which differs between workers and may be saved
inside a block. A round in flight is not saved: its differences are part of the next round of their
fragments. `save_counters` and `load_counters` serve checkpoints that all workers share; their
tensors are saved by `checkpoint/_optimizer.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands._optimizers.state_parts import BELOW, SavedEntries, StatePart
from manyhands._tensors.flat import FlatTensors
from manyhands.blocks._anchor import AnchorState, memory_order
from manyhands.blocks._checks import Names, Options, check_options
from manyhands.blocks._common_state import Counters
from manyhands.blocks._sync import Sync
from manyhands.blocks.averaging._payload import Work

KEY = "blocks"
FORMAT = 3


class SavedWorker(Counters, AnchorState):
    """The blocks' entry of a state dict."""

    format: int
    workers: list[int]  # number of workers, and rank of this worker
    diverged: bool
    residual: list[Tensor | None]
    totals: list[int]  # exclusions of workers, and undone rounds
    left_out: list[int]  # of the last mean
    initial_state: dict[object, object]
    clock: list[float]
    own: list[int]  # the state's `own`, `work` and `dropped`; steps in the current block


def save_worker(sync: Sync) -> SavedWorker:
    workers = sync.members.workers
    state = sync.state
    residual: list[Tensor | None] = []
    for bucket in sync.anchor.buckets:
        # A round in flight writes to the residual.
        residual.append(None if sync.pending else bucket.residual)
    return {
        "format": FORMAT,
        **sync.common.counters(state),
        **sync.anchor.saved(),
        "totals": [sync.stats.left_out_ever, sync.stats.undone],
        "left_out": sync.stats.left_out,
        "workers": [workers.size, workers.rank],
        "diverged": state.diverged,
        "residual": residual,
        "initial_state": sync.extras.initial_state,
        # A merge restarts the clock, and the loaded state has no mean to merge.
        "clock": [0.0, 0.0] if sync.pending else sync.clock.elapsed(state.own),
        "own": [state.own, *state.work, state.dropped, sync.schedule.taken],
    }


def check_saved(saved: Any, options: Options, names: Names) -> SavedWorker | None:
    """Return the blocks' entry of a state dict, if any, or raise if it does not fit the options."""
    if saved is None:
        return None
    entries = SavedEntries(saved, "blocks")
    entries.expect({"format": FORMAT})
    if entries.has("options"):
        check_options(entries.part("options").plain, options, names)
    entries.whole("steps")
    entries.whole("rounds")
    entries.wholes("totals", 2)
    if entries.wholes("block", 2)[1] < 1:
        raise entries.wrong("block[1]", "above 0", 0)
    entries.real("seconds")
    drifts = entries.each("drifts")
    for drift in drifts:
        drifts.floats(drift, 3)
    if not entries["drifts"]:
        raise entries.wrong("drifts", "of at least one", [])
    if "plan" in entries:
        entries.reals("pace", 2, least=-BELOW)
        for _, steps in entries.pairs("plan"):
            if steps < 1 or steps % 1:
                raise entries.wrong("plan", "of steps above 0", entries["plan"])
    return saved


def check_fits(state: SavedWorker, sync: Sync) -> None:
    saved = SavedEntries(state, "blocks")
    saved.flag("diverged")
    saved.reals("clock", 2, least=-BELOW)
    saved.wholes("workers", 2)
    saved.wholes("left_out")
    _, steps, counted, *_ = saved.wholes("own", 6)
    if counted > steps:
        raise saved.wrong("own[2]", "at most own[1]", state["own"])
    saved.part("initial_state")
    saved.each("anchor")
    if sync.members.alone or not state["anchor"]:  # a single worker has no anchor
        return
    if saved.real("order") != memory_order(sync.anchor.params):
        raise ValueError(
            "this state dict is from parameters in a different memory order, such as after "
            "model.to(memory_format=torch.channels_last). Use the memory order of the saved model."
        )
    buckets = sync.anchor.buckets
    workers = sync.members.workers
    has_residual = saved["workers"] == [workers.size, workers.rank]
    anchors = saved.each("anchor", len(buckets))
    residuals = saved.each("residual", len(buckets))
    all_memories = saved.each("memories", len(buckets))
    entries = zip(buckets, anchors, residuals, all_memories, strict=True)
    for bucket, anchor, residual, outer in entries:
        anchors.check_tensor(anchor, bucket.anchor)
        memories = all_memories.each(outer, len(bucket.memories))
        for memory in memories:
            memories.check_tensor(memory, bucket.anchor)
        if has_residual and bucket.residual is not None and residuals.has(residual):
            residuals.check_tensor(residual, bucket.anchor)


@torch.no_grad()
def load_saved(saved: SavedWorker | None, sync: Sync) -> None:
    _drop_pending(sync)
    if saved is None:
        sync.anchor.begin()
        sync.restart_clock()
        return
    sync.common.load_block(saved)
    own, *work, dropped, taken = saved["own"]
    sync.state = sync.state.load(
        saved["steps"],
        saved["rounds"],
        diverged=saved["diverged"] and bool(saved["anchor"]),
        own=own,
        work=Work(*work),
        dropped=dropped,
    )
    sync.schedule.taken = taken
    sync.restart_clock()
    if saved["anchor"] and not sync.members.alone:
        sync.anchor.load(saved)
        _load_residuals(saved, sync)
    elif not sync.members.alone:  # saved by a single worker, without blocks
        sync.anchor.begin()
        sync.begin_block()
    sync.stats.left_out_ever, sync.stats.undone = saved["totals"]
    sync.stats.left_out = list(saved["left_out"])
    if saved["initial_state"]:
        sync.extras.initial_state = copy.deepcopy(saved["initial_state"])
    sync.samples.restart(sync.state)


def _drop_pending(sync: Sync) -> None:
    for pending in sync.pending:
        pending.background.finished()  # its thread writes to tensors that are about to be loaded
    sync.pending.clear()
    sync.state = sync.state.forget_rounds()


def _load_residuals(saved: SavedWorker, sync: Sync) -> None:
    # Residuals belong to the slices that a rank rounds, which depend on rank and size.
    sync.anchor.reset_residuals()
    workers = sync.members.workers
    if saved["workers"] != [workers.size, workers.rank]:
        return
    for bucket, residual in zip(sync.anchor.buckets, saved["residual"], strict=True):
        if bucket.residual is not None and residual is not None:
            bucket.residual.copy_(residual)
    sync.restart_clock(*saved["clock"])


# -- for checkpoints -------------------------------------------------------------------------------


class OuterStateParts:
    def __init__(self, sync: Sync, options: Options) -> None:
        self._sync = sync
        self._options = options

    @property
    def peers(self) -> list[int]:
        members = self._sync.members
        if members.elastic or members.workers.size == 1:  # a crew's ranks differ from torch's
            return [dist.get_rank()]
        return members.workers.ranks

    @property
    def layout(self) -> list[object]:
        workers = self._sync.members.workers
        inner = self._sync.anchor.inner
        lengths = [(len(each.vector), *each.span) for each in self._sync.anchor.buckets]
        return [workers.size, workers.rank, inner.size, inner.rank, *lengths]

    @property
    def memories(self) -> int:
        return self._sync.anchor.outer.memories

    def outer_parts(self) -> list[StatePart]:
        return list(self._sync.anchor.outer_parts())

    def save_counters(self) -> dict[str, object]:
        sync = self._sync
        if sync.state.diverged and not sync.members.alone:
            raise RuntimeError(
                "inside a block each worker has its own model. Call optimizer.synchronize() on "
                "every worker first, or save each worker's state_dict()."
            )
        return {
            "format": FORMAT,
            "options": dict(self._options),
            **sync.common.counters(sync.state),
            "alone": sync.members.alone,
            "totals": [sync.stats.left_out_ever, sync.stats.undone],
        }

    @property
    def received_steps(self) -> int | None:
        state = self._sync.state
        return state.steps if state.joined_late else None

    def check_counters(self, saved: object) -> SavedWorker | None:
        return check_saved(saved, self._options, {})

    def load_counters(self, saved: Any, unsaved: Iterable[Tensor], *, residuals: bool) -> None:
        """Continue from checked counters. Anchors of `unsaved` parameters start at the parameters.

        These parameters were frozen, or trained by a single worker.
        """
        sync = self._sync
        new = {id(param) for param in unsaved}
        if not residuals:
            sync.anchor.reset_residuals()
        _drop_pending(sync)
        sync.common.load_block(saved)
        sync.stats.left_out_ever, sync.stats.undone = saved["totals"]
        for part in sync.anchor.outer_parts():
            if id(part.param) in new:
                for entry in part.entries.keys() - {"residual"}:
                    part.entries[entry].zero_()
                FlatTensors([part.param]).read(part.start or 0, part.entries["anchor"])
        sync.state = sync.state.load(saved["steps"], saved["rounds"], own=saved["steps"])
        if saved["alone"]:  # saved by a single worker, without blocks
            sync.begin_block()
        sync.restart_clock()
        sync.samples.restart(sync.state)

    @torch.no_grad()
    def begin(self) -> None:
        load_saved(None, self._sync)
