"""What a callback or a strategy asks a Trainer, checks in it, and changes in it while it fits.

    passes      `LightningAccumulation`: how many passes a step has, and which is the last one
    checks      `check_...`: an error before the first step, which says what to use instead
    clipping    `replace_clipping`: `gradient_clip_val` where Lightning's own clipping cannot work

Lightning's clipping cannot work in two cases:

    loss scale  With "16-mixed" Lightning refuses to clip for an optimizer that unscales its
                gradients itself, as rules and blocks do. Here gradients are unscaled first.
    sharded     torch's clip_grad_norm_ would take the norm of this rank's shard. Under
                ShardedDataParallel the OSS knows the norm of the whole gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer

from manyhands._core.wrappers import find_layer, supports_amp
from manyhands.scaling._progress import ProgressScheduler
from manyhands.sharding.zero._oss import OSS

OURS = "manyhands.integrations.lightning"


class LightningAccumulation:
    """Say how many passes a step has in a Trainer: see `scaling/_settings.py`."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @property
    def gradient_accumulation_steps(self) -> int:
        return int(self._trainer.accumulate_grad_batches)

    @property
    def sync_gradients(self) -> bool:
        # the same question that Lightning's loop asks before it steps
        return not self._trainer.fit_loop._should_accumulate()


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """Return a Trainer's callbacks."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set, not declared
    return callbacks


def only_optimizer(optimizers: list[Optimizer], what: str) -> Optimizer:
    """Return the only optimizer, or raise."""
    # Lightning puts a `_MockOptimizer` where configure_optimizers returns None.
    made = [each for each in optimizers if type(each).__name__ != "_MockOptimizer"]
    if len(made) != 1:
        raise ValueError(
            f"{what} works with one optimizer, and configure_optimizers returned {len(made)}. "
            "Return one optimizer with a parameter group for each part of the model. In manual "
            "optimization with several optimizers, wrap each in configure_optimizers yourself: "
            "mh.AdaScale(optimizer)."
        )
    return made[0]


# -- checks ----------------------------------------------------------------------------------------


def check_strategy(trainer: Trainer, what: str) -> None:
    """Raise unless gradients are averaged in a way that a rule can measure."""
    strategy = trainer.strategy
    name = type(strategy).__name__
    known = isinstance(strategy, SingleDeviceStrategy | DDPStrategy)
    if not known or isinstance(strategy, DeepSpeedStrategy):  # which is a DDPStrategy
        advice = {
            "FSDPStrategy": "FullyShardedStrategy()",
            "ModelParallelStrategy": "FullyShardedStrategy()",
            "DeepSpeedStrategy": "ShardedDDPStrategy() (ZeRO-2) or FullyShardedStrategy() (ZeRO-3)",
        }.get(name, "'ddp'")
        where = "" if advice == "'ddp'" else f" of {OURS}"
        raise TypeError(
            f"{what} cannot see the gradients of {name}, which keeps them, or the optimizer's "
            f"state, in a form of its own. Use strategy={advice}{where}."
        )
    # The option, not the averager: Lightning makes the averager after the optimizers.
    if getattr(strategy, "_model_averaging_period", None) is not None:
        raise ValueError(
            f"{what} cannot see what model_averaging_period averages. Use BlocksStrategy of "
            f"{OURS}: BlocksStrategy(mh.LocalSGD, every=...)."
        )


def check_callbacks(trainer: Trainer, what: str) -> None:
    """Raise for a callback that steps without a gradient."""
    if any(isinstance(each, StochasticWeightAveraging) for each in callbacks_of(trainer)):
        raise ValueError(
            f"{what} measures the gradient of every step, and StochasticWeightAveraging runs an "
            "epoch without any. Use Lightning's WeightAveraging callback for averaged weights."
        )


def check_no_averages(trainer: Trainer, reason: str) -> None:
    """Raise for a callback that keeps averaged weights beside the model's."""
    for each in callbacks_of(trainer):
        if isinstance(each, WeightAveraging):
            raise ValueError(f"{type(each).__name__} does not work here: {reason}")


def check_manual(module: LightningModule, by_progress: bool, what: str) -> None:
    """Raise if schedulers that training_step steps would have to follow the progress."""
    if by_progress and not module.automatic_optimization:
        raise ValueError(
            f"{what}(by_progress=True) steps the schedulers, and with automatic_optimization=False "
            "training_step does. Leave by_progress out, and use mh.ProgressScheduler in "
            "training_step."
        )


def check_automatic(module: LightningModule, what: str) -> None:
    """Raise if training_step calls backward() by itself, inside the forward of a sharded model."""
    if not module.automatic_optimization:
        raise ValueError(
            f"{what} calls training_step inside the forward of the sharded model, which averages "
            "gradients in a backward after that. With automatic_optimization=False the backward "
            "comes before. Leave it at True, or use ShardedDDPStrategy."
        )


def check_passes(module: LightningModule, options: Mapping[str, object], what: str) -> None:
    """Raise if the number of passes is given twice."""
    if module.automatic_optimization and "num_gradients_to_accumulate" in options:
        raise ValueError(
            f"{what} finds how many batches make a step: leave num_gradients_to_accumulate out, "
            "and set Trainer(accumulate_grad_batches=...)."
        )


def check_schedules(configs: Sequence[LRSchedulerConfig], by_progress: Sequence[bool]) -> None:
    """Raise if a checkpoint's schedule follows the progress, and this run's does not."""
    for config, followed in zip(configs, by_progress, strict=False):
        if followed and not isinstance(config.scheduler, ProgressScheduler):
            raise ValueError(
                "the checkpoint's schedule follows the progress, and this run's follows the steps. "
                "Set by_progress=True, as in the run that saved it."
            )


# -- clipping --------------------------------------------------------------------------------------


def replace_clipping(plugin: Precision) -> None:
    """Let a precision plugin clip gradients that are sharded, or multiplied by the loss scale.

    A LightningModule clips through the plugin's `clip_gradients`. It is replaced on the instance.
    """

    # Lightning passes an enum or a string, depending on who clips.
    def clip_gradients(
        optimizer: Optimizer,
        clip_val: float | None = 0.0,
        gradient_clip_algorithm: Enum | str = "norm",
    ) -> None:
        if clip_val is None or clip_val <= 0:
            return
        scaler = getattr(plugin, "scaler", None)
        if scaler is not None and supports_amp(optimizer):
            scaler.unscale_(optimizer)
        if str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)) == "value":
            for group in optimizer.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.grad.clamp_(-clip_val, clip_val)
        elif (oss := find_layer(optimizer, OSS)) is not None and oss._reducer is not None:
            oss.clip_grad_norm(float(clip_val))
        else:
            plugin.clip_grad_by_norm(optimizer, clip_val)

    vars(plugin)["clip_gradients"] = clip_gradients


def restore_clipping(plugin: Precision) -> None:
    """Give the plugin its own method back."""
    vars(plugin).pop("clip_gradients", None)
