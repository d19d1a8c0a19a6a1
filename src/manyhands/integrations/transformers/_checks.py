"""What Trainer's arguments, its model and its optimizer cannot do with a rule, a Ramp or blocks.

Every check raises an error that says what to use instead. They come in this order, each as soon as
what it reads is there:

    in `attach`         the trainer's arguments and its model; what a `Ramp` asks of the arguments
    in `train()`        the model's wrapper; the arguments once more, and what goes with the
                        optimizer: the rule and its passes, the `Ramp`; a checkpoint's schedule;
                        whether an epoch is long enough for the `Ramp`

All of them come before the first step, on every process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from accelerate.utils import DistributedType
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import Trainer
from transformers.training_args import ParallelMode

from manyhands._core.modules import ModuleWrapper
from manyhands._core.wrappers import find_layer
from manyhands.blocks._optimizer import Blocks
from manyhands.ramp import Ramp
from manyhands.scaling._progress import ProgressScheduler, is_by_progress
from manyhands.scaling._rule_base import ScalingRuleBase
from manyhands.sharding.zero._ddp import ShardedDataParallel
from manyhands.sharding.zero._oss import OSS

SHARD = "fsdp= with the version 2 in fsdp_config"
METRIC_SCHEDULES = ("reduce_lr_on_plateau", "greedy")  # which Trainer steps with a metric


def check_trainer(trainer: Trainer, by_progress: bool) -> None:
    """Raise for what would make a rule's numbers wrong, or keep it from seeing gradients."""
    for wrong, message in (*_ways_of_sharing(trainer), *_arguments(trainer, by_progress)):
        if wrong:
            raise ValueError(message)


def _ways_of_sharing(trainer: Trainer) -> Sequence[tuple[bool, str]]:
    """Return what is wrong if several devices share the work in a way that a rule cannot see."""
    args, accelerator, mode = trainer.args, trainer.accelerator, trainer.args.parallel_mode
    fsdp_version = getattr(getattr(accelerator.state, "fsdp_plugin", None), "fsdp_version", 1)
    shared = {kind: getattr(trainer, f"get_{kind}_size")() for kind in ("tp", "cp", "sp")}
    followed = (ParallelMode.NOT_PARALLEL, ParallelMode.NOT_DISTRIBUTED, ParallelMode.DISTRIBUTED)
    other = accelerator.distributed_type in (DistributedType.MEGATRON_LM, DistributedType.XLA)
    return (
        (
            trainer.is_deepspeed_enabled,
            "DeepSpeed reduces gradients and steps its optimizer where a rule does not see it. "
            f"Leave deepspeed= out. To shard, use mh.OSS as the optimizer, or {SHARD}.",
        ),
        (
            trainer.is_fsdp_enabled and fsdp_version != 2,
            "the first version of FSDP makes flat parameters, in which the gradients of single "
            f"parameters cannot be told apart. Use {SHARD}.",
        ),
        (
            mode not in followed or other,
            "Trainer on an XLA device, in SageMaker's model parallelism or with Megatron-LM does "
            f"not run the passes that a rule measures. Use DDP or {SHARD}.",
        ),
        (
            mode == ParallelMode.NOT_DISTRIBUTED,
            f"Trainer would use DataParallel for the {args.n_gpu} GPUs of this process, and the "
            "gradients of single GPUs are never seen. Start a process for each with torchrun.",
        ),
        (
            max(shared.values()) > 1,
            "ranks that share a micro-batch have no gradients of their own to compare (tensor, "
            f"context and sequence parallelism: {shared}). Use DDP or {SHARD}.",
        ),
        (
            trainer.is_distributed_loading_by_transformers,
            "the model was sharded when it was loaded (distributed_config=). Load it whole, and "
            f"let Trainer shard it: {SHARD}.",
        ),
        (
            isinstance(trainer.model, ModuleWrapper),
            f"the model is in {type(trainer.model).__name__}, and Trainer would wrap it in DDP "
            "once more. Give Trainer the model itself. To shard, use mh.OSS as the optimizer, with "
            f"attach(trainer, ..., wrap=mh.ShardedDataParallel) for the gradients, or {SHARD}.",
        ),
    )


def _arguments(trainer: Trainer, by_progress: bool) -> Sequence[tuple[bool, str]]:
    """Return what is wrong if Trainer's arguments do not go with a rule."""
    args = trainer.args
    optim, schedule = str(args.optim.value), str(args.lr_scheduler_type.value)
    return (
        (
            "lomo" in optim or optim.endswith("layerwise"),
            f"optim={optim!r} steps inside of backward(), before the gradient of the whole batch "
            "is known. Use another one.",
        ),
        (
            args.auto_find_batch_size,
            "auto_find_batch_size=True changes the micro-batch, which is the small batch that the "
            "learning rate was tuned for. Find it beforehand, with mh.largest_micro_batch, and "
            "set per_device_train_batch_size.",
        ),
        (
            by_progress and args.max_steps <= 0,
            "by_progress=True counts max_steps in progress, and max_steps is not set. Set it to "
            "the number of steps that you would train for at the small batch.",
        ),
        (
            by_progress and schedule in METRIC_SCHEDULES,
            f"lr_scheduler_type={schedule!r} follows a metric, and cannot follow the progress. "
            "Leave by_progress out.",
        ),
    )


def check_for_ramp(trainer: Trainer, by_progress: bool) -> None:
    """Raise for arguments that a `Ramp` cannot go with."""
    passes = trainer.args.gradient_accumulation_steps
    if passes != 1:
        raise ValueError(
            f"gradient_accumulation_steps={passes}, and a Ramp sets the number of passes itself. "
            "Leave it at 1."
        )
    if not by_progress:
        raise ValueError(
            "with a Ramp, the number of optimizer steps says little about how far the training "
            "is. Set by_progress=True, and max_steps to the steps at the small batch."
        )


def check_wrap(trainer: Trainer, in_blocks: bool) -> None:
    """Raise if the optimizer is not one that the module of `wrap=` works with."""
    if in_blocks:
        raise ValueError(
            "wrap= averages gradients in every step, and in blocks each worker follows its own. "
            "Leave wrap= out, or the blocks."
        )
    if find_layer(trainer.optimizer, OSS) is None:
        raise TypeError(
            f"wrap= shards the gradients of an OSS, and the optimizer is a "
            f"{type(trainer.optimizer).__name__}. Let Trainer make an OSS: "
            "optimizer_cls_and_kwargs=(mh.OSS, {'optim': torch.optim.AdamW, 'lr': ...})."
        )


def check_wrapped(model: nn.Module) -> None:
    """Raise for what `wrap=` has returned, unless Trainer's loop can drive it."""
    if not isinstance(model, ShardedDataParallel):
        raise TypeError(
            f"wrap= must return a ShardedDataParallel, got {type(model).__name__}. To shard the "
            f"parameters as well, use {SHARD}."
        )


def check_no_blocks(trainer: Trainer) -> None:
    """Raise if a rule would go around blocks."""
    blocks = find_layer(trainer.optimizer, Blocks)
    if blocks is not None:
        name, passes = type(blocks).__name__, trainer.args.gradient_accumulation_steps
        raise ValueError(
            f"the rule goes into the blocks, where each worker has a batch of its own: mh.{name}("
            f"mh.AdamScale(optimizer, world_size=1, num_gradients_to_accumulate={passes}), "
            "every=...). Then attach(trainer) without a rule."
        )


def check_same_passes(rule: ScalingRuleBase, passes: int) -> None:
    """Raise if a rule that Trainer was given was made for other passes than Trainer's."""
    if rule.passes != passes:
        raise ValueError(
            f"gradient_accumulation_steps={passes} in TrainingArguments, and the "
            f"{type(rule).__name__} has num_gradients_to_accumulate={rule.passes}. Write the same "
            "number in both."
        )


def check_drivable(
    trainer: Trainer, rule: ScalingRuleBase | None, ramp: Ramp | None, by_progress: bool
) -> None:
    """Raise for an optimizer that Trainer's loop cannot drive."""
    args = trainer.args
    blocks = find_layer(trainer.optimizer, Blocks)
    if blocks is not None and by_progress:
        raise ValueError(
            "by_progress=True would end the training at another step on each process: in blocks "
            "each has a progress of its own. Leave it out, and count steps."
        )
    if rule is None and by_progress:
        raise ValueError(
            "by_progress=True needs the progress of a scaling rule: attach(trainer, mh.AdaScale, "
            "by_progress=True)."
        )
    counts_tokens = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    weighed_by_rank = counts_tokens and not args.average_tokens_across_devices
    if rule is not None and blocks is None and args.world_size > 1 and weighed_by_rank:
        raise ValueError(
            "average_tokens_across_devices=False weighs a token by the rank that it is on: the "
            "gradient is not the mean over the step's tokens. Leave it at True."
        )
    if blocks is not None and trainer.is_fsdp_enabled:
        raise ValueError(
            f"{type(blocks).__name__} is for workers that have a model each, and fsdp= divides one "
            "among them. Leave fsdp= out, or the blocks."
        )
    if rule is not None and rule._observer is not ramp:
        raise ValueError(
            "the rule has a Ramp already, of which Trainer does not know. Let attach() make it: "
            "attach(trainer, ramp=lambda rule: mh.Ramp(rule, max_scale=...))."
        )


def check_ramp(ramp: Ramp) -> None:
    """Raise for a `Ramp` that needs a loop of its own."""
    if ramp._probe is not None:
        raise ValueError("a Ramp's probe= is for loops of your own; in Trainer, leave it out.")


def check_schedule_saved(schedule: LRScheduler, file: str) -> None:
    """Raise if a checkpoint's schedule follows the progress, and this run's does not."""
    if isinstance(schedule, ProgressScheduler) or not os.path.exists(file):
        return
    if is_by_progress(torch.load(file, weights_only=True)):
        raise ValueError(
            "the checkpoint's schedule follows the progress, and this run's follows the steps. Set "
            "by_progress=True, as in the run that saved it."
        )


def check_epoch(ramp: Ramp, micro_batches: int) -> None:
    """Raise if an epoch has fewer micro-batches than the largest step."""
    most = micro_batches * ramp.scale / ramp.passes
    if ramp.max_scale > most:
        raise ValueError(
            f"max_scale={ramp.max_scale:g} of the Ramp is more than the {most:g} small batches of "
            "an epoch, and Trainer's steps do not go over its end. Lower it."
        )
