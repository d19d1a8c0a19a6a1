"""The objects of a run: send their state to joiners, and restore them before a repeated step."""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from manyhands._optimizers.wrappers import params_of
from manyhands._tensors.random_state import RandomSnapshot
from manyhands.checkpoint._values import HasState, RunObjects, has_state
from manyhands.data._cursor import BaseCursor, MapCursor


class SavedBuffer(NamedTuple):
    buffer: Tensor
    copy: Tensor
    version: int  # torch's count of changes


@dataclass
class StepStart:
    """State before a step that a forward pass changes: random generators and buffers."""

    random: RandomSnapshot = field(default_factory=RandomSnapshot)
    buffers: dict[int, SavedBuffer] = field(default_factory=dict)  # by position in the model


@dataclass
class BeforeRepeat:
    """State after a failed step, which the rest of the loop's body may change."""

    groups: list[list[dict[str, Any]]]  # options of each optimizer's parameter groups
    objects: list[Any]  # state dicts


class RunState:
    def __init__(self, model: nn.Module, run: RunObjects) -> None:
        self.model = model
        self.optimizers = list(run.optimizers)
        self._objects: list[HasState] = [*run.schedulers]
        self.scalers = []
        cursors = []
        for value in run.values.values():
            if isinstance(value, BaseCursor):
                cursors.append(value)
            elif has_state(value):
                self._objects.append(value)
            if isinstance(value, torch.amp.GradScaler):
                self.scalers.append(value)
        self.cursor = check_cursor(cursors)
        self._start = StepStart()

    # -- joiners -------------------------------------------------------------------------------

    def pack(self) -> Tensor:
        saved = {
            "model": self.model.state_dict(),
            "buffers": list(self.model.buffers()),  # includes buffers that no state dict contains
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "objects": [each.state_dict() for each in self._objects],
            "cursor": self.cursor.state_dict(),
        }
        file = io.BytesIO()
        torch.save(saved, file)
        return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)

    @torch.no_grad()
    def unpack(self, data: Tensor) -> None:
        # `weights_only`: never run code from the network.
        file = io.BytesIO(data.numpy().tobytes())
        saved: Any = torch.load(file, "cpu", weights_only=True)
        self.model.load_state_dict(saved["model"])
        for buffer, value in zip(self.model.buffers(), saved["buffers"], strict=True):
            buffer.copy_(value)
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        for each, state in zip(self._objects, saved["objects"], strict=True):
            each.load_state_dict(state)
        self.cursor.load_state_dict(saved["cursor"])
        self._start.buffers.clear()

    # -- repeated steps ------------------------------------------------------------------------

    def begin_step(self) -> None:
        self._start.random = RandomSnapshot()
        for number, buffer in enumerate(self.model.buffers()):
            known = self._start.buffers.get(number)
            if known is None or known.buffer is not buffer or known.version != buffer._version:
                copied = SavedBuffer(buffer, buffer.detach().clone(), buffer._version)
                self._start.buffers[number] = copied

    def clear_gradients(self) -> None:
        # Zero instead of None: a gradient scaler raises if no parameter has a gradient.
        for optimizer in self.optimizers:
            for param in params_of(optimizer.param_groups):
                if param.grad is not None:
                    param.grad.zero_()

    @torch.no_grad()
    def undo_forward(self) -> None:
        """Restore the buffers that the forward pass of a failed step has changed."""
        for number, buffer in enumerate(self.model.buffers()):
            if number in self._start.buffers:
                buffer.copy_(self._start.buffers[number].copy)
        self._start.buffers.clear()

    def before_repeat(self) -> BeforeRepeat:
        """Return the state that the rest of the loop's body may change after a failed step."""
        groups = []
        for optimizer in self.optimizers:
            groups.append([_options(group) for group in optimizer.param_groups])
        objects = [copy.deepcopy(each.state_dict()) for each in self._objects]
        return BeforeRepeat(groups, objects)

    def restore(self, before: BeforeRepeat) -> None:
        for each, state in zip(self._objects, before.objects, strict=True):
            each.load_state_dict(copy.deepcopy(state))
        for optimizer, options in zip(self.optimizers, before.groups, strict=True):
            for group, option in zip(optimizer.param_groups, options, strict=True):
                group.update(copy.deepcopy(option))
        self._start.random.restore()


def check_cursor(cursors: Sequence[BaseCursor]) -> MapCursor:
    found = ", ".join(map(repr, cursors)) or "none"
    if len(cursors) != 1 or not isinstance(cursors[0], MapCursor):
        raise ValueError(
            "survive=True needs a single Cursor over a dataset with a length, which repeats the "
            f"samples of a failed step, got {found}. Pass job.load(..., cursor=cursor)."
        )
    if cursors[0].optimizer is None:
        raise ValueError(
            "survive=True needs a Cursor whose batches count after the optimizer's step. Create it "
            "with optimizer=."
        )
    if cursors[0].keep != "batch":
        raise ValueError(
            'survive=True needs a Cursor with keep="batch", whose steps do not depend on the '
            f"number of ranks, got keep={cursors[0].keep!r}. Pass batch_size for all ranks "
            "together."
        )
    return cursors[0]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
