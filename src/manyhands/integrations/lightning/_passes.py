"""How many passes does a step have, and which one is its last? What Lightning says about it."""

from __future__ import annotations

from lightning.pytorch import Trainer


class LightningAccumulation:
    """Says how many passes a step has in a Trainer: see `scaling/_settings.py`."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @property
    def gradient_accumulation_steps(self) -> int:
        return int(self._trainer.accumulate_grad_batches)

    @property
    def sync_gradients(self) -> bool:
        return not self._trainer.fit_loop._should_accumulate()
