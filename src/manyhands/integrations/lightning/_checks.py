"""What cannot be right in a Trainer: an error before the first step, which says what to use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from torch.optim import Optimizer

OURS = "manyhands.integrations.lightning"


def only_optimizer(optimizers: list[Optimizer], what: str) -> Optimizer:
    """Return the only optimizer, or raise."""
    made = [each for each in optimizers if type(each).__name__ != "_MockOptimizer"]
    if len(made) != 1:
        raise ValueError(
            f"{what} works with one optimizer, and configure_optimizers returned {len(made)}. Give "
            "it one with a parameter group for each part of the model; or, in manual optimization "
            "with several, wrap each of them yourself in configure_optimizers, as in "
            "mh.AdaScale(optimizer)."
        )
    return made[0]


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
    # Not yet made: Lightning makes the averager after the optimizers.
    if getattr(strategy, "_model_averaging_period", None) is not None:
        raise ValueError(
            f"{what} cannot see what model_averaging_period averages. Use BlocksStrategy of "
            f"{OURS}: BlocksStrategy(mh.LocalSGD, every=...)."
        )


def callbacks_of(trainer: Any) -> list[Callback]:
    """Return a Trainer's callbacks, an attribute that its class does not declare."""
    callbacks: list[Callback] = trainer.callbacks
    return callbacks


def check_callbacks(trainer: Trainer, what: str) -> None:
    """Raise for a callback that steps without a gradient."""
    if any(isinstance(each, StochasticWeightAveraging) for each in callbacks_of(trainer)):
        raise ValueError(
            f"{what} measures the gradient of every step, and StochasticWeightAveraging runs an "
            "epoch without any. Use Lightning's WeightAveraging callback for averaged weights."
        )


def check_manual(module: LightningModule, by_progress: bool, what: str) -> None:
    """Raise if a loop that is not Lightning's would have to follow the progress."""
    if by_progress and not module.automatic_optimization:
        raise ValueError(
            f"{what}(by_progress=True) steps the schedulers, and with automatic_optimization=False "
            "training_step does. Leave it out, and use mh.ProgressScheduler there."
        )


def check_passes(module: LightningModule, options: Mapping[str, object], what: str) -> None:
    """Raise if the number of passes is said twice."""
    if module.automatic_optimization and "num_gradients_to_accumulate" in options:
        raise ValueError(
            f"{what} finds how many batches make a step: leave num_gradients_to_accumulate out, "
            "and set Trainer(accumulate_grad_batches=...)."
        )
