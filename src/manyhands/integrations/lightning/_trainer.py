"""Ask a Trainer, check it, and change it while it fits: for callbacks and strategies.

    passes      `LightningAccumulation`: the number of passes of a step, and the last one
    checks      `check_...`: an error before the first step
    clipping    `replace_clipping`: `gradient_clip_val` where Lightning's own clipping cannot work

Lightning's clipping cannot work in two cases:

    loss scale  With "16-mixed" Lightning refuses to clip for an optimizer that unscales its
                gradients itself, as rules and blocks do. Here gradients are unscaled first.
    sharded     torch's clip_grad_norm_ would take the norm of this rank's shard. Under
                ShardedDataParallel the OSS knows the norm of the whole gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer

from manyhands._optimizers.wrappers import find_layer, params_of, supports_amp
from manyhands.scaling._progress import ProgressScheduler
from manyhands.sharding.zero._oss import OSS

OURS = "manyhands.integrations.lightning"


class LightningAccumulation:
    """Tell the number of passes of a Trainer's step: see `scaling/_settings.py`."""

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
            f"{what} works with one optimizer, and configure_optimizers returned {len(made)}. With "
            "several, wrap each in configure_optimizers yourself."
        )
    return made[0]


# -- checks ----------------------------------------------------------------------------------------


def check_strategy(trainer: Trainer, what: str) -> None:
    """Raise unless gradients are averaged in a way that a rule can measure."""
    strategy = trainer.strategy
    known = isinstance(strategy, SingleDeviceStrategy | DDPStrategy)
    if not known or isinstance(strategy, DeepSpeedStrategy):  # which is a DDPStrategy
        raise TypeError(
            f"{what} cannot see the gradients of {type(strategy).__name__}. Use strategy='ddp', or "
            f"of {OURS} ShardedDDPStrategy() (ZeRO-2) or FullyShardedStrategy() (ZeRO-3)."
        )
    if any(isinstance(each, StochasticWeightAveraging) for each in callbacks_of(trainer)):
        raise ValueError(
            f"{what} needs a gradient in every step, and StochasticWeightAveraging runs an epoch "
            "without any. Use Lightning's WeightAveraging callback."
        )


def check_no_averages(trainer: Trainer, reason: str) -> None:
    """Raise for a callback that keeps averaged weights beside the model's."""
    for each in callbacks_of(trainer):
        if isinstance(each, WeightAveraging):
            raise ValueError(f"{type(each).__name__} does not work here: {reason}")


def check_schedules(configs: Sequence[LRSchedulerConfig], by_progress: Sequence[bool]) -> None:
    """Raise if a checkpoint's schedule follows the progress, and this run's does not."""
    for config, followed in zip(configs, by_progress, strict=False):
        if followed and not isinstance(config.scheduler, ProgressScheduler):
            raise ValueError(
                "the checkpoint's schedule follows the progress. Set by_progress=True, as in the "
                "run that saved it."
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
        """Clip gradients as Lightning would, unscaled before, and over all ranks."""
        if clip_val is None or clip_val <= 0:
            return
        scaler = getattr(plugin, "scaler", None)
        if scaler is not None and supports_amp(optimizer):
            scaler.unscale_(optimizer)
        if str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)) == "value":
            for param in params_of(optimizer.param_groups):
                if param.grad is not None:
                    param.grad.clamp_(-clip_val, clip_val)
            return
        oss = find_layer(optimizer, OSS)
        if oss is not None and oss.shards_gradients:
            oss.clip_grad_norm(float(clip_val))
        else:
            plugin.clip_grad_by_norm(optimizer, clip_val)

    plugin.clip_gradients = clip_gradients  # type: ignore[method-assign]


def restore_clipping(plugin: Precision) -> None:
    """Give the plugin its own method back."""
    if "clip_gradients" in plugin.__dict__:
        del plugin.clip_gradients
