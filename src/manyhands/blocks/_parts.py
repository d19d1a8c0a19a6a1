"""What a checkpoint asks of blocks: `BlocksParts` of `_core/state_parts.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from manyhands._core.state_parts import StatePart
from manyhands.blocks import _state
from manyhands.blocks._sync import Sync


class OuterStateParts:
    """The outer state by parameter, and the counters that all replicas have alike."""

    def __init__(self, sync: Sync, options: Mapping[str, Any]) -> None:
        self._sync = sync
        self._options = options

    @property
    def replica(self) -> int:
        return self._sync.members.workers.rank

    @property
    def layout(self) -> list[Any]:
        workers = self._sync.members.workers
        return [workers.size, workers.rank, *self._sync.anchor.layout()]

    @property
    def memories(self) -> int:
        return self._sync.anchor.outer.memories

    def outer_parts(self) -> list[StatePart]:
        parts = []
        for state in self._sync.anchor.outer_state():
            entries = {"anchor": state.anchor}
            entries |= {f"memory.{n}": memory for n, memory in enumerate(state.memories)}
            if state.residual is not None:
                entries["residual"] = state.residual
            parts.append(StatePart(state.param, entries, state.start))
        return parts

    def save_counters(self) -> dict[str, Any]:
        return _state.save_counters(self._sync, self._options)

    def check_counters(self, saved: Any) -> dict[str, Any] | None:
        return _state.check_saved(saved, self._options, {})

    def load_counters(
        self, saved: Mapping[str, Any], unsaved: Iterable[Tensor], *, residuals: bool
    ) -> None:
        anchor, new = self._sync.anchor, {id(param) for param in unsaved}
        if not residuals:
            anchor.reset_residuals()
        begun = [state for state in anchor.outer_state() if id(state.param) in new]
        _state.load_counters(saved, self._sync, begun)

    @torch.no_grad()
    def begin(self) -> None:
        _state.load_saved(None, self._sync)
