"""Put a scaling rule into Lightning's Trainer, or let the batch set itself, by callbacks.

In a loop of your own you give a rule these things. A callback finds them in the Trainer:

    passes      the batches of a step: Trainer's number, or fewer at the end of an epoch
    loss scale  the precision plugin's gradient scaler
    progress    if asked, Trainer's limits and the schedulers are counted in it

The optimizer of `configure_optimizers` is replaced by the rule around it in `on_fit_start`: after
the strategy has made the optimizers, and before Lightning loads a checkpoint.

`BatchRamp` adds a `Ramp`, which sets the number of batches of the next step. Lightning counts
`accumulate_grad_batches` from the beginning of an epoch; `StepPasses` makes it count from the
beginning of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import SGD, Adam, Optimizer, RMSprop
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import StateDict

from manyhands._optimizers.state_parts import OptimizerLayers
from manyhands._optimizers.wrappers import find_layer
from manyhands.blocks._optimizer import Blocks
from manyhands.integrations.lightning._trainer import (
    LightningAccumulation,
    check_schedules,
    check_strategy,
    only_optimizer,
    replace_clipping,
    restore_clipping,
)
from manyhands.ramp import Ramp
from manyhands.ramp._micro_batches import StepPasses
from manyhands.scaling._binding import KEY
from manyhands.scaling._progress import ProgressScheduler, is_by_progress
from manyhands.scaling._rule_base import ScalingRuleBase
from manyhands.scaling._rules import AdamScale, AdaScale

MakeRule = Callable[..., ScalingRuleBase]


class Scaling(Callback):
    """Put a scaling rule around the optimizer that `configure_optimizers` returns.

    >>> import lightning, torch, manyhands as mh
    >>> from manyhands.integrations.lightning import Scaling
    >>> class Lit(lightning.LightningModule):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.net = torch.nn.Linear(4, 1)
    ...     def training_step(self, batch, _):
    ...         return self.net(batch).square().mean()
    ...     def configure_optimizers(self):
    ...         return torch.optim.SGD(self.parameters(), lr=0.1)
    >>> quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    >>> trainer = lightning.Trainer(
    ...     accelerator="cpu", max_epochs=1, accumulate_grad_batches=4, callbacks=[Scaling()],
    ...     enable_model_summary=False, **quiet
    ... )
    >>> loader = torch.utils.data.DataLoader(torch.randn(128, 4), batch_size=8)
    >>> trainer.fit(lit := Lit(), loader)
    >>> lit.optimizers().scale, trainer.global_step
    (4.0, 4)

    The small batch is one batch of one device. The rule learns from the Trainer how many devices
    there are, how many batches make a step, and the loss scale. The gain, the progress and the
    scale are logged, and shown in the progress bar. The last step of an epoch may have fewer
    batches: its gradient is their mean, and it is scaled as the smaller batch that it is.

    A checkpoint of a run without a rule can be loaded, too. Its steps then count as progress.

    Args:
        rule: a rule's class, or a function that is called with the optimizer and the options, and
            returns a rule. By default `AdaScale` for SGD, `AdamScale` for Adam, AdamW and RMSprop.
        by_progress: count in small-batch steps: `max_steps`, `max_epochs` and the schedulers are
            those of the small batch on one device, and end with the progress, after fewer
            optimizer steps (and perhaps more epochs).
        log: whether to log the gain, the progress and the scale after each step.
        options: further arguments of the rule, such as `smoothing`.
    """

    def __init__(
        self,
        rule: MakeRule | None = None,
        *,
        by_progress: bool = False,
        log: bool = True,
        **options: object,
    ) -> None:
        self._make = rule
        self._options = options
        self._by_progress = by_progress
        self._log = log
        self._rule: ScalingRuleBase | None = None
        self._steps = 0  # the rule's steps, counted after the last batch
        self._bare: StateDict | None = None  # a checkpoint without a rule, to be loaded
        self._schedules: list[bool] = []  # in a checkpoint: which of them follow the progress
        self._end: float | None = None  # the progress to train for
        # Trainer's `max_steps` and `max_epochs`, while progress is counted instead
        self._limits: tuple[int, int | None] | None = None

    @property
    def rule(self) -> ScalingRuleBase:
        """The rule; it exists from the beginning of `fit`."""
        if self._rule is None:
            raise RuntimeError("the rule is made by Trainer.fit(): there is none yet.")
        return self._rule

    # -- before the first step -----------------------------------------------------------------

    def make_rule(
        self, trainer: Trainer, optimizer: Optimizer, **options: object
    ) -> ScalingRuleBase:
        """Return a rule around this optimizer, for this Trainer; a strategy may call it."""
        name = type(self).__name__
        module = trainer.lightning_module
        check_strategy(trainer, name)
        # In manual optimization only training_step knows, so the user gives the number of passes.
        automatic = module.automatic_optimization
        if self._by_progress and not automatic:
            raise ValueError(
                "by_progress=True steps the schedulers, and here training_step does: use "
                "mh.ProgressScheduler in training_step."
            )
        if automatic and "num_gradients_to_accumulate" in self._options:
            raise ValueError(
                "leave num_gradients_to_accumulate out: it is Trainer's accumulate_grad_batches."
            )
        if self._rule is not None:  # of an earlier fit
            self._rule.unhook()
        found = {
            "num_gradients_to_accumulate": LightningAccumulation(trainer) if automatic else 1,
            "grad_scaler": getattr(trainer.precision_plugin, "scaler", None),
            "model": module,
        }
        make = self._make or _default_rule(optimizer)
        self._rule = make(optimizer, **{**found, **options, **self._options})
        return self._rule

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget what an earlier call of the Trainer, such as `validate`, has loaded."""
        self._bare = None
        self._schedules = []

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: StateDict
    ) -> None:
        """Keep the optimizer's state of a run without a rule, which a rule could not load."""
        self._schedules = [is_by_progress(each) for each in checkpoint.get("lr_schedulers", [])]
        states = checkpoint.get("optimizer_states", [])
        if len(states) == 1 and KEY not in states[0]:
            self._bare = {**checkpoint}
            checkpoint["optimizer_states"] = []  # Lightning then loads none

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the rule around the optimizer, which the strategy has made by now."""
        optimizer = only_optimizer(trainer.strategy.optimizers, type(self).__name__)
        if self._bare is not None:
            trainer.strategy.load_optimizer_state_dict(self._bare)
        if self._rule is None or find_layer(optimizer, ScalingRuleBase) is not self._rule:
            trainer.strategy.optimizers = [self.make_rule(trainer, optimizer)]
        if self._bare is not None:
            self.rule.set_progress(self._bare["global_step"])
            self._bare = None
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            replace_clipping(trainer.precision_plugin)
        if self._by_progress:
            self._count_by_progress(trainer)
        check_schedules(trainer.lr_scheduler_configs, self._schedules)

    def _count_by_progress(self, trainer: Trainer) -> None:
        """Count the limits and the schedulers in progress from now on."""
        rule = self.rule
        if find_layer(trainer.strategy.optimizers[0], Blocks) is not None:
            raise ValueError(
                "in blocks each has a progress of its own, and would end at another step. Leave "
                "by_progress out."
            )
        trainer.fit_loop.setup_data()  # so that the number of batches is known
        epoch = trainer.num_training_batches * rule.scale / rule.passes
        ends: list[float] = [trainer.max_steps] if trainer.max_steps >= 0 else []
        if trainer.max_epochs is not None and trainer.max_epochs >= 0:
            ends += [trainer.max_epochs * epoch]
        self._end = float(min(ends)) if ends else None
        by_epoch = any(config.interval == "epoch" for config in trainer.lr_scheduler_configs)
        if not math.isfinite(epoch) and (by_epoch or self._end == math.inf):
            raise ValueError(
                "by_progress=True needs the length of an epoch, and the data has none. Give the "
                'Trainer max_steps, and schedulers with interval="step".'
            )
        # No limits of Lightning's: its count of steps includes those that the scaler has skipped.
        self._limits = trainer.max_steps, trainer.max_epochs
        trainer.fit_loop.epoch_loop.max_steps = -1
        trainer.fit_loop.max_epochs = -1
        for config in trainer.lr_scheduler_configs:
            if config.reduce_on_plateau or isinstance(config.scheduler, ProgressScheduler):
                continue
            every = config.frequency * (epoch if config.interval == "epoch" else 1)
            config.scheduler = cast(
                LRScheduler,  # Lightning asks for no more than its methods
                ProgressScheduler(config.scheduler, rule, every=every, end=self._end),
            )
            config.interval = "step"
            config.frequency = 1

    # -- in the loop ---------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps = self._steps_taken()
        self._stop_at_the_end(trainer)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        """After a batch with which the optimizer has stepped: log, and stop at the progress."""
        steps = self._steps_taken()
        if steps == self._steps:
            return
        self._steps = steps
        self._stop_at_the_end(trainer)
        if self._log and not trainer.barebones:
            shown = {"gain": self.rule.gain(), "progress": self.rule.progress}
            pl_module.log_dict(shown, prog_bar=True)
            pl_module.log("scale", self.rule.scale)

    def _steps_taken(self) -> int:
        return self.rule.port.steps

    def _stop_at_the_end(self, trainer: Trainer) -> None:
        if self._end is not None and self.rule.progress >= self._end:
            trainer.should_stop = True

    # -- after the last step -------------------------------------------------------------------

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._restore(trainer)

    def _restore(self, trainer: Trainer) -> None:
        """Give the Trainer its own settings back."""
        restore_clipping(trainer.precision_plugin)
        if self._limits is not None:
            trainer.fit_loop.epoch_loop.max_steps, trainer.fit_loop.max_epochs = self._limits
            self._limits = None


def _default_rule(optimizer: Optimizer) -> MakeRule:
    """Return the rule for this kind of optimizer."""
    plain = OptimizerLayers.of(optimizer).plain
    if isinstance(plain, Adam | RMSprop):
        return AdamScale
    if isinstance(plain, SGD):
        return AdaScale
    raise TypeError(
        f"Scaling() has rules for SGD, Adam, AdamW and RMSprop, got {type(plain).__name__}. Name "
        "one: Scaling(mh.SqrtScale)."
    )


# -- a batch that sets itself ----------------------------------------------------------------------


class BatchRamp(Scaling):
    """`Scaling` with a `Ramp`: each step accumulates as many batches as pay.

    >>> import lightning, torch, manyhands as mh
    >>> from manyhands.integrations.lightning import BatchRamp
    >>> ramp = BatchRamp(max_scale=16, goal="samples")
    >>> trainer = lightning.Trainer(
    ...     accelerator="cpu", callbacks=[ramp], logger=False, enable_checkpointing=False
    ... )

    The first step has the Trainer's `accumulate_grad_batches`. `Ramp` sets the number of all later
    ones.

    Args:
        max_scale: the largest batch (all devices, all passes) in small batches.
        rule: as in `Scaling`.
        by_progress: as in `Scaling`.
        log: as in `Scaling`.
        options: arguments of `Ramp` (`goal`, `efficiency`); all others
            are the rule's.
    """

    def __init__(
        self,
        max_scale: float,
        rule: MakeRule | None = None,
        *,
        by_progress: bool = False,
        log: bool = True,
        **options: object,
    ) -> None:
        self._max_scale = max_scale
        self._ramp_options: dict[str, Any] = {}
        for name in ("goal", "efficiency"):
            if name in options:
                self._ramp_options[name] = options.pop(name)
        super().__init__(rule, by_progress=by_progress, log=log, **options)
        self._ramp: Ramp | None = None
        self._loaded: StateDict | None = None  # until there is a Ramp to load it
        self._own_passes: int | None = None  # Trainer's `accumulate_grad_batches`, before `fit`
        self._begins = True  # whether the next batch is the first of a step

    @property
    def ramp(self) -> Ramp:
        """The ramp; it exists from the beginning of `fit`."""
        if self._ramp is None:
            raise RuntimeError("the ramp is made by Trainer.fit(): there is none yet.")
        return self._ramp

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget what an earlier call of the Trainer has loaded."""
        super().setup(trainer, pl_module, stage)
        self._loaded = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the rule and the ramp around it, or raise where batches are not ours to choose."""
        if not pl_module.automatic_optimization:
            raise ValueError(
                "BatchRamp sets how many batches Lightning accumulates, and in manual optimization "
                "training_step does that: use mh.Ramp in it."
            )
        self._own_passes = trainer.accumulate_grad_batches
        super().on_fit_start(trainer, pl_module)
        if find_layer(trainer.strategy.optimizers[0], Blocks) is not None:
            raise ValueError(
                "BatchRamp would choose another number of steps for each device, and in blocks all "
                "take equally many. Use Scaling."
            )
        self._ramp = Ramp(self.rule, self._max_scale, **self._ramp_options)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load a checkpoint's ramp, once the optimizers have their state too."""
        # Lightning loads callbacks before the optimizers exist, and the optimizers' state after
        # `on_fit_start`: so here is the first place where the ramp and the rule's state are there.
        if self._loaded is not None:
            self.ramp.load_state_dict(self._loaded)
            self._loaded = None
        self._begins = True
        super().on_train_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begins = True
        self._pause()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int
    ) -> None:
        """As a step begins: tell the Trainer its number of batches."""
        if self._begins:
            self._begins = False
            trainer.accumulate_grad_batches = StepPasses(self.ramp.passes, start=batch_idx)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        """Note whether the step has ended, so that the next batch begins another."""
        self._begins = self._steps_taken() != self._steps  # before the base class compares them
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pause()

    def _pause(self) -> None:
        """Leave the time since the last step out of the ramp's measurements."""
        if self._ramp is not None:
            self._ramp.skip_time()

    def _restore(self, trainer: Trainer) -> None:
        super()._restore(trainer)
        if self._own_passes is not None:
            trainer.accumulate_grad_batches = self._own_passes

    def state_dict(self) -> StateDict:
        """Return the ramp's state, for Lightning's checkpoint."""
        return {} if self._ramp is None else self._ramp.state_dict()

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Keep the state until the ramp is made."""
        self._loaded = state_dict or None
