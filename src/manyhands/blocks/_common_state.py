"""State that is equal on all workers, for joiners and saved runs.

    Counters            plain numbers: steps, rounds, current block, last drift
    TransferredState    also anchor and outer memories, buffers, samples, and rounds to repeat

`_saving.py` adds the state of a single worker.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.blocks._anchor import Anchor, AnchorState
from manyhands.blocks._block_state import BlockState
from manyhands.blocks._samples import BlockSamples
from manyhands.blocks._schedule import BlockPlan, Schedule
from manyhands.blocks.averaging._payload import Extras
from manyhands.blocks.averaging._round import Drift, RoundStats
from manyhands.data._account import SavedAccount


class Counters(BlockPlan):
    steps: int
    rounds: int
    block: list[int]  # the schedule's start and length
    drifts: list[list[float]]  # a single entry: the fields of `Drift`
    seconds: float  # of a step


class TransferredState(Counters, AnchorState):
    retry: list[int]
    diverged: bool
    ends_warmup: bool
    buffers: list[Tensor]
    samples: SavedAccount | None


@dataclass(frozen=True)
class CommonParts:
    anchor: Anchor
    schedule: Schedule
    stats: RoundStats
    extras: Extras
    samples: BlockSamples

    def counters(self, state: BlockState) -> Counters:
        return {
            "steps": state.steps,
            "rounds": state.rounds,
            "block": [self.schedule.start, self.schedule.length],
            "drifts": [list(self.stats.drift)],
            "seconds": self.stats.seconds,
            **self.schedule.to_state(),
        }

    def load_block(self, saved: Counters) -> None:
        start, length = saved["block"]
        self.schedule.begin(start, length)
        self.schedule.load_state(saved, self.samples.number)
        self.stats.drift = Drift(*saved["drifts"][0])
        self.stats.seconds = saved["seconds"]

    # -- state transfer ------------------------------------------------------------------------

    def pack(self, state: BlockState) -> bytes:
        if not state.anchor_in_use:  # in a warm-up, transfer the parameters
            self.anchor.begin()
        transferred: TransferredState = {
            **self.counters(state),
            **self.anchor.saved(),
            "retry": list(state.retry),
            "diverged": state.diverged,
            "ends_warmup": state.ends_warmup,
            "buffers": [buffer.detach() for buffer in self.extras.buffer_tensors()],
            "samples": self.samples.account.saved(),
        }
        file = io.BytesIO()
        torch.save(transferred, file)
        return file.getvalue()

    def take_over(self, data: bytearray, state: BlockState) -> BlockState:
        # `weights_only`: never run code from the network.
        saved: TransferredState = torch.load(io.BytesIO(data), "cpu", weights_only=True)
        self.anchor.load(saved)
        self.load_block(saved)
        with torch.no_grad():
            for buffer, value in zip(self.extras.buffer_tensors(), saved["buffers"], strict=True):
                buffer.copy_(value)
        self.anchor.restore_params()
        self.samples.account.load(saved["samples"])
        self.samples.joined_late = saved["samples"] is not None
        return state.join(
            saved["steps"],
            saved["rounds"],
            diverged=saved["diverged"],
            ends_warmup=saved["ends_warmup"],
            retry=saved["retry"],
        )
