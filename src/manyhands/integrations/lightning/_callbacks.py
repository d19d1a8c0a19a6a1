"""Callbacks that wrap the optimizer of Lightning's Trainer in a scaling rule, and adapt the batch.

The rule receives these values from the Trainer:

    passes      the batches of a step: Trainer's number, or fewer at the end of an epoch
    loss scale  from the precision plugin's gradient scaler
    progress    optional: limits and schedulers count progress instead of steps

`on_fit_start` replaces the optimizer of `configure_optimizers` by the rule: after the strategy has
created the optimizers, and before Lightning loads a checkpoint.

`BatchRamp` adds a `Ramp`, which sets the number of batches of the next step. Lightning counts
`accumulate_grad_batches` from the start of an epoch; `StepPasses` counts from the start of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import SGD, Adam, Optimizer
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
from manyhands.scaling._rules import AdaScale

MakeRule = Callable[..., ScalingRuleBase]


class Scaling(Callback):
    """Wrap the optimizer from `configure_optimizers` in a scaling rule.

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

    The small batch is the batch of a single device. The callback reads the number of devices,
    batches per step and loss scale from the Trainer. It logs gain, progress and scale; the progress
    bar shows gain and progress. A shorter last step of an epoch averages its batches, and is scaled
    as a smaller batch.

    Checkpoints of a bare optimizer can be loaded. Their steps count as progress.

    Args:
        rule: a rule's class, or a function of the optimizer and the options that returns a rule.
            Default: `AdaScale` for SGD, Adam and AdamW.
        by_progress: count `max_steps`, `max_epochs` and schedules in steps of the small batch on a
            single device. Training ends at this progress, after fewer optimizer steps (and possibly
            more epochs).
        log: whether to log gain, progress and scale after each step.
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
        self._steps = 0  # steps of the rule until the last batch
        self._bare: StateDict | None = None  # checkpoint of a bare optimizer, to be loaded
        self._schedules: list[bool] = []  # whether each schedule in the checkpoint follows progress
        self._end: float | None = None  # the progress at which training ends
        # Trainer's `max_steps` and `max_epochs`, if progress replaces them
        self._limits: tuple[int, int | None] | None = None

    @property
    def rule(self) -> ScalingRuleBase:
        """The rule, created at the start of `fit`."""
        if self._rule is None:
            raise RuntimeError("there is no rule yet. Trainer.fit() creates the rule.")
        return self._rule

    # -- before the first step -----------------------------------------------------------------

    def make_rule(
        self, trainer: Trainer, optimizer: Optimizer, **options: object
    ) -> ScalingRuleBase:
        """Return a rule around this optimizer, for this Trainer. `BlocksStrategy` also calls it."""
        module = trainer.lightning_module
        check_strategy(trainer, type(self).__name__)
        if not module.automatic_optimization:
            raise ValueError(
                "Scaling needs automatic optimization. In manual optimization, wrap the optimizer "
                "in a rule in configure_optimizers."
            )
        if "num_gradients_to_accumulate" in self._options:
            raise ValueError(
                "num_gradients_to_accumulate is Trainer's accumulate_grad_batches. Omit it here."
            )
        if self._rule is not None:  # from an earlier fit
            self._rule.unhook()
        found = {
            "num_gradients_to_accumulate": LightningAccumulation(trainer),
            "grad_scaler": getattr(trainer.precision_plugin, "scaler", None),
        }
        make = self._make or _default_rule(optimizer)
        self._rule = make(optimizer, **{**found, **options, **self._options})
        return self._rule

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Discard data that an earlier call of the Trainer, such as `validate`, has loaded."""
        self._bare = None
        self._schedules = []

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: StateDict
    ) -> None:
        """Store the state of a bare optimizer, which a rule cannot load."""
        self._schedules = [is_by_progress(each) for each in checkpoint.get("lr_schedulers", [])]
        states = checkpoint.get("optimizer_states", [])
        if len(states) == 1 and KEY not in states[0]:
            self._bare = {**checkpoint}
            checkpoint["optimizer_states"] = []  # for Lightning

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
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
        rule = self.rule
        if find_layer(trainer.strategy.optimizers[0], Blocks) is not None:
            raise ValueError(
                "in blocks, progress differs between devices, which would stop at different steps. "
                "Omit by_progress=."
            )
        trainer.fit_loop.setup_data()  # determines the number of batches
        epoch = trainer.num_training_batches * rule.scale / rule.passes
        ends: list[float] = [trainer.max_steps] if trainer.max_steps >= 0 else []
        if trainer.max_epochs is not None and trainer.max_epochs >= 0:
            ends += [trainer.max_epochs * epoch]
        self._end = float(min(ends)) if ends else None
        by_epoch = any(config.interval == "epoch" for config in trainer.lr_scheduler_configs)
        if not math.isfinite(epoch) and (by_epoch or self._end == math.inf):
            raise ValueError(
                "by_progress=True needs the length of an epoch, but the data has no length. Set "
                'max_steps of the Trainer, and interval="step" for schedulers.'
            )
        # Lightning's limits would count steps that the scaler skips.
        self._limits = trainer.max_steps, trainer.max_epochs
        trainer.fit_loop.epoch_loop.max_steps = -1
        trainer.fit_loop.max_epochs = -1
        for config in trainer.lr_scheduler_configs:
            if config.reduce_on_plateau or isinstance(config.scheduler, ProgressScheduler):
                continue
            every = config.frequency * (epoch if config.interval == "epoch" else 1)
            config.scheduler = cast(
                LRScheduler,  # Lightning uses only methods that both classes have
                ProgressScheduler(config.scheduler, rule, every=every, end=self._end),
            )
            config.interval = "step"
            config.frequency = 1

    # -- in the loop ---------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps = self.rule.port.steps
        self._stop_at_the_end(trainer)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        if self.rule.port.steps == self._steps:
            return
        self._steps = self.rule.port.steps
        self._stop_at_the_end(trainer)
        if self._log and not trainer.barebones:
            shown = {"gain": self.rule.gain(), "progress": self.rule.progress}
            pl_module.log_dict(shown, prog_bar=True)
            pl_module.log("scale", self.rule.scale)

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
        restore_clipping(trainer.precision_plugin)
        if self._limits is not None:
            trainer.fit_loop.epoch_loop.max_steps, trainer.fit_loop.max_epochs = self._limits
            self._limits = None


def _default_rule(optimizer: Optimizer) -> MakeRule:
    plain = OptimizerLayers.of(optimizer).plain
    if isinstance(plain, SGD | Adam):
        return AdaScale
    raise TypeError(
        "Scaling() has a default rule for SGD, Adam and AdamW, got "
        f"{type(plain).__name__}. Pass a rule: Scaling(mh.SqrtScale)."
    )


# -- adaptive batch --------------------------------------------------------------------------------


class BatchRamp(Scaling):
    """`Scaling` with a `Ramp`, which adapts the number of batches per step.

    >>> import lightning, torch, manyhands as mh
    >>> from manyhands.integrations.lightning import BatchRamp
    >>> ramp = BatchRamp(max_scale=16, goal="samples")
    >>> trainer = lightning.Trainer(
    ...     accelerator="cpu", callbacks=[ramp], logger=False, enable_checkpointing=False
    ... )

    The first step has `accumulate_grad_batches` batches of the Trainer. `Ramp` sets the number for
    later steps.

    Args:
        max_scale: the largest batch, over all devices and passes, in small batches.
        rule: as in `Scaling`.
        by_progress: as in `Scaling`.
        log: as in `Scaling`.
        options: `goal` and `efficiency` of `Ramp`, and further arguments of the rule.
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
        self._loaded: StateDict | None = None  # state to load when the ramp exists
        self._own_passes: int | None = None  # Trainer's `accumulate_grad_batches`, before `fit`
        self._begins = True  # whether the next batch is the first of a step

    @property
    def ramp(self) -> Ramp:
        """The ramp, created at the start of `fit`."""
        if self._ramp is None:
            raise RuntimeError("there is no ramp yet. Trainer.fit() creates the ramp.")
        return self._ramp

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._loaded = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not pl_module.automatic_optimization:
            raise ValueError(
                "BatchRamp needs automatic optimization. In manual optimization, use mh.Ramp in "
                "training_step."
            )
        self._own_passes = trainer.accumulate_grad_batches
        super().on_fit_start(trainer, pl_module)
        if find_layer(trainer.strategy.optimizers[0], Blocks) is not None:
            raise ValueError(
                "blocks need equal numbers of steps on all devices, but BatchRamp would choose "
                "different numbers. Use Scaling."
            )
        self._ramp = Ramp(self.rule, self._max_scale, **self._ramp_options)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning loads callbacks before it creates the optimizers, and loads the optimizers'
        # state after `on_fit_start`.
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
        self._begins = self.rule.port.steps != self._steps  # the base class updates `_steps`
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pause()

    def _pause(self) -> None:
        """Exclude the time since the last step from the ramp's measurements."""
        if self._ramp is not None:
            self._ramp.skip_time()

    def _restore(self, trainer: Trainer) -> None:
        super()._restore(trainer)
        if self._own_passes is not None:
            trainer.accumulate_grad_batches = self._own_passes

    def state_dict(self) -> StateDict:
        return {} if self._ramp is None else self._ramp.state_dict()

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Store the state until the ramp exists."""
        self._loaded = state_dict or None
