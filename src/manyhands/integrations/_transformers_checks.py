"""What a Hugging Face Trainer cannot do under a rule: an error that says what to use instead.

`attach` checks the Trainer. `train()` checks it again, since its settings may have been changed in
between, and then also the optimizer that it has made.
"""

from __future__ import annotations

from collections.abc import Iterator

from accelerate.utils import DistributedType
from transformers import Trainer
from transformers.training_args import ParallelMode

from manyhands._core.modules import ModuleWrapper
from manyhands._core.wrappers import find_layer
from manyhands.blocks._optimizer import Blocks
from manyhands.ramp import Ramp
from manyhands.scaling._rule_base import ScalingRuleBase

SHARD = "fsdp= with the version 2 in fsdp_config"
METRIC_SCHEDULES = ("reduce_lr_on_plateau", "greedy")  # which Trainer steps with a metric


def check_trainer(trainer: Trainer, by_progress: bool) -> None:
    """Raise for what would make a rule's numbers wrong, or keep it from seeing gradients."""
    for wrong, message in (
        *_hidden_gradients(trainer),
        *_unknown_batches(trainer),
        *_unknown_progress(trainer, by_progress),
    ):
        if wrong:
            raise ValueError(message)


def _hidden_gradients(trainer: Trainer) -> Iterator[tuple[bool, str]]:
    """Yield the ways to train in which a rule does not see each rank's gradients."""
    args, accelerator, mode = trainer.args, trainer.accelerator, trainer.args.parallel_mode
    fsdp_version = getattr(getattr(accelerator.state, "fsdp_plugin", None), "fsdp_version", 1)
    followed = (ParallelMode.NOT_PARALLEL, ParallelMode.NOT_DISTRIBUTED, ParallelMode.DISTRIBUTED)
    other = accelerator.distributed_type in (DistributedType.MEGATRON_LM, DistributedType.XLA)
    shared = {kind: getattr(trainer, f"get_{kind}_size")() for kind in ("tp", "cp", "sp")}
    yield (
        trainer.is_deepspeed_enabled,
        "DeepSpeed reduces gradients and steps its optimizer where a rule does not see it. "
        f"Leave deepspeed= out. To shard, use mh.OSS as the optimizer, or {SHARD}.",
    )
    yield (
        trainer.is_fsdp_enabled and fsdp_version != 2,
        "the first version of FSDP makes flat parameters, which hide the gradients of single "
        f"parameters. Use {SHARD}.",
    )
    yield (
        mode not in followed or other,
        "Trainer on an XLA device, in SageMaker's model parallelism or with Megatron-LM does "
        f"not run the passes that a rule measures. Use DDP or {SHARD}.",
    )
    yield (
        mode == ParallelMode.NOT_DISTRIBUTED,
        f"Trainer would use DataParallel for the {args.n_gpu} GPUs of this process, and the "
        "gradients of single GPUs are never seen. Start a process for each with torchrun.",
    )
    yield (
        max(shared.values()) > 1,
        "ranks that share a micro-batch have no gradients of their own to compare (tensor, "
        f"context and sequence parallelism: {shared}). Use DDP or {SHARD}.",
    )
    yield (
        trainer.is_distributed_loading_by_transformers,
        "the model was sharded when it was loaded (distributed_config=). Load it whole, and "
        f"let Trainer shard it: {SHARD}.",
    )
    yield (
        isinstance(trainer.model, ModuleWrapper),
        f"the model is in {type(trainer.model).__name__}, and Trainer would wrap it in DDP "
        "once more. Give Trainer the model itself. To shard, use mh.OSS as the optimizer, or "
        f"{SHARD}.",
    )


def _unknown_batches(trainer: Trainer) -> Iterator[tuple[bool, str]]:
    """Yield the settings under which a step's gradient is not the mean over a known batch."""
    args, optim = trainer.args, str(trainer.args.optim.value)
    counts_tokens = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    yield (
        "lomo" in optim or optim.endswith("layerwise"),
        f"optim={optim!r} steps inside of backward(), before the gradient of the whole batch "
        "is known. Use another one.",
    )
    yield (
        args.auto_find_batch_size,
        "auto_find_batch_size=True changes the micro-batch, which is the small batch that the "
        "learning rate was tuned for. Find it beforehand, with mh.largest_micro_batch, and "
        "set per_device_train_batch_size.",
    )
    yield (
        args.world_size > 1 and counts_tokens and not args.average_tokens_across_devices,
        "average_tokens_across_devices=False weighs a token by the rank that it is on: the "
        "gradient is not the mean over the step's tokens. Leave it at True.",
    )


def _unknown_progress(trainer: Trainer, by_progress: bool) -> Iterator[tuple[bool, str]]:
    """Yield the settings under which training cannot be counted in progress."""
    args, schedule = trainer.args, str(trainer.args.lr_scheduler_type.value)
    yield (
        by_progress and args.max_steps <= 0,
        "by_progress=True counts max_steps in progress, and max_steps is not set. Set it to "
        "the number of steps that you would train for at the small batch.",
    )
    yield (
        by_progress and schedule in METRIC_SCHEDULES,
        f"lr_scheduler_type={schedule!r} follows a metric, and cannot follow the progress. "
        "Leave by_progress out.",
    )


def check_layers(
    trainer: Trainer, rule: ScalingRuleBase | None, ramp: Ramp | None, by_progress: bool
) -> None:
    """Raise if Trainer's loop cannot drive what is around its optimizer: a rule, or blocks."""
    if rule is None and by_progress:
        raise ValueError(
            "by_progress=True needs the progress of a scaling rule: attach(trainer, mh.AdaScale, "
            "by_progress=True)."
        )
    blocks = find_layer(trainer.optimizer, Blocks)
    if blocks is not None and trainer.args.world_size > 1:
        raise ValueError(
            f"{type(blocks).__name__} is for workers that follow their own gradients, and Trainer "
            "averages them in every step, with DDP. Use Lightning, Accelerate or a loop of your "
            "own, and leave the model unwrapped."
        )
    if rule is not None and rule._observer is not ramp:
        raise ValueError(
            "the rule has a Ramp already, which Trainer does not know of. Let attach() make it: "
            "attach(trainer, ramp=lambda rule: mh.Ramp(rule, max_scale=...))."
        )


def check_for_ramp(trainer: Trainer, by_progress: bool) -> None:
    """Raise for settings that a ramp replaces."""
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


def check_ramp(ramp: Ramp) -> None:
    """Raise for an option of the ramp that only `Ramp.over` acts on."""
    if ramp._probe is not None:
        raise ValueError("a Ramp's probe= is for loops of your own; in Trainer, leave it out.")
