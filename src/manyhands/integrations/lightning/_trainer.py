"""Read, check and modify a Trainer, for callbacks and strategies.

    passes      `LightningAccumulation`: the number of passes of a step, and the last one
    checks      `check_...`: errors before the first step
    clipping    `replace_clipping`: support for `gradient_clip_val`

Lightning's clipping fails in two cases:

    loss scale  With "16-mixed", Lightning does not clip for an optimizer that unscales gradients,
                such as rules and blocks. Our replacement unscales the gradients first.
    sharded     torch's clip_grad_norm_ computes the norm of this rank's shard. Under
                ShardedDataParallel, the OSS computes the norm of the full gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from lightning.pytorch import Trainer
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
    """The passes per step of a Trainer (an `Accumulation`, see `scaling/_batch.py`)."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @property
    def gradient_accumulation_steps(self) -> int:
        return int(self._trainer.accumulate_grad_batches)

    @property
    def sync_gradients(self) -> bool:
        # Lightning's loop uses this condition before a step.
        return not self._trainer.fit_loop._should_accumulate()


def only_optimizer(optimizers: list[Optimizer], name: str) -> Optimizer:
    # Lightning creates a `_MockOptimizer` if configure_optimizers returns None.
    made = [each for each in optimizers if type(each).__name__ != "_MockOptimizer"]
    if len(made) != 1:
        raise ValueError(
            f"{name} needs exactly 1 optimizer, but configure_optimizers returned {len(made)}. "
            "Wrap multiple optimizers in configure_optimizers instead."
        )
    return made[0]


# -- checks ----------------------------------------------------------------------------------------


def check_strategy(trainer: Trainer, name: str) -> None:
    """Raise an error unless a rule can measure the gradients under this strategy."""
    strategy = trainer.strategy
    known = isinstance(strategy, SingleDeviceStrategy | DDPStrategy)
    if not known or isinstance(strategy, DeepSpeedStrategy):  # a subclass of DDPStrategy
        raise TypeError(
            f"{name} cannot measure the gradients of {type(strategy).__name__}. Use "
            f"strategy='ddp', or ShardedDDPStrategy() (ZeRO-2) or FullyShardedStrategy() (ZeRO-3) "
            f"of {OURS}."
        )
    for each in trainer.callbacks:  # type: ignore[attr-defined]  # set, but not declared
        if isinstance(each, StochasticWeightAveraging):
            raise ValueError(
                f"{name} needs a gradient in every step, but StochasticWeightAveraging runs an "
                "epoch without gradients. Use Lightning's WeightAveraging callback."
            )


def check_no_averages(trainer: Trainer, reason: str) -> None:
    for each in trainer.callbacks:  # type: ignore[attr-defined]  # set, but not declared
        if isinstance(each, WeightAveraging):
            raise ValueError(f"{type(each).__name__} does not work here: {reason}")


def check_schedules(configs: Sequence[LRSchedulerConfig], by_progress: Sequence[bool]) -> None:
    """Raise an error if only the checkpoint's schedule follows the progress."""
    for config, followed in zip(configs, by_progress, strict=False):
        if followed and not isinstance(config.scheduler, ProgressScheduler):
            raise ValueError(
                "the checkpoint's schedule follows the progress. Set by_progress=True, as in the "
                "run that saved it."
            )


# -- clipping --------------------------------------------------------------------------------------


def replace_clipping(plugin: Precision) -> None:
    """Replace `clip_gradients` of a precision plugin, for sharded or scaled gradients."""

    # Lightning passes an enum or a string.
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
    if "clip_gradients" in plugin.__dict__:
        del plugin.clip_gradients
