"""A batch that sets itself, as a callback: `Ramp` says how many batches the next step has.

Lightning counts `accumulate_grad_batches` from the beginning of an epoch; `_step_passes.py` makes
it count from the beginning of a step.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer

from manyhands._core.wrappers import find_layer
from manyhands.blocks._optimizer import Blocks
from manyhands.integrations._step_passes import StepPasses
from manyhands.integrations.lightning._scaling import MakeRule, Scaling
from manyhands.ramp import Ramp

RAMP_OPTIONS = ("goal", "efficiency", "decay", "every", "growth")


class BatchRamp(Scaling):
    """`Scaling`, and `Ramp`: each step accumulates as many batches as pay.

    >>> import lightning, torch, manyhands as mh
    >>> from manyhands.integrations.lightning import BatchRamp
    >>> ramp = BatchRamp(max_scale=16, goal="samples")
    >>> trainer = lightning.Trainer(
    ...     accelerator="cpu", callbacks=[ramp], logger=False, enable_checkpointing=False
    ... )

    The first step has the Trainer's `accumulate_grad_batches`, and all later ones what `Ramp` says.

    Args:
        max_scale: the largest batch (all devices, all passes) in small batches.
        rule: as in `Scaling`.
        by_progress: as in `Scaling`.
        log: as in `Scaling`.
        options: arguments of `Ramp` (`goal`, `efficiency`, `decay`, `every`, `growth`); all others
            are the rule's.
    """

    def __init__(
        self,
        max_scale: float,
        rule: MakeRule | None = None,
        *,
        by_progress: bool = False,
        log: bool = True,
        **options: Any,
    ) -> None:
        ramp = {name: options.pop(name) for name in RAMP_OPTIONS if name in options}
        super().__init__(rule, by_progress=by_progress, log=log, **options)
        self._ramp_options = {"max_scale": max_scale, **ramp}
        self._ramp: Ramp | None = None
        self._loaded: dict[str, Any] | None = None  # until there is a Ramp to load it
        self._own_passes: int | None = None  # Trainer's `accumulate_grad_batches`, before `fit`
        self._begins = True  # whether the next batch is the first of a step

    @property
    def ramp(self) -> Ramp:
        """The ramp; it exists from the beginning of `fit`."""
        if self._ramp is None:
            raise RuntimeError("the ramp is made by Trainer.fit(): there is none yet.")
        return self._ramp

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget what was loaded before."""
        super().setup(trainer, pl_module, stage)
        self._loaded = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not pl_module.automatic_optimization:
            raise ValueError(
                "BatchRamp sets how many batches Lightning accumulates, and with "
                "automatic_optimization=False training_step does that. Use mh.Ramp there."
            )
        self._own_passes = trainer.accumulate_grad_batches
        super().on_fit_start(trainer, pl_module)
        if find_layer(trainer.strategy.optimizers[0], Blocks) is not None:
            raise ValueError(
                "BatchRamp lets each device take steps of its own number in an epoch, and in "
                "blocks all take equally many. Use Scaling and accumulate_grad_batches there."
            )
        self._ramp = Ramp(self.rule, **self._ramp_options)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning loads callbacks before the optimizers exist, and the optimizers after that.
        if self._loaded is not None:
            self.ramp.load_state_dict(self._loaded)
            self._loaded = None
        self._begins = True
        super().on_train_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begins = True
        self._pause()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._begins:
            self._begins = False
            trainer.accumulate_grad_batches = StepPasses(self.ramp.passes, start=batch_idx)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._begins = self._steps_taken() != self._steps
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pause()

    def _pause(self) -> None:
        """Let the time until now be no part of a step."""
        if self._ramp is not None:
            self._ramp.skip_time()

    def _restore(self, trainer: Trainer) -> None:
        super()._restore(trainer)
        if self._own_passes is not None:
            trainer.accumulate_grad_batches = self._own_passes

    def state_dict(self) -> dict[str, Any]:
        """Return the ramp's state, for Lightning's checkpoint."""
        return {} if self._ramp is None else self._ramp.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until the ramp is made."""
        self._loaded = state_dict or None
