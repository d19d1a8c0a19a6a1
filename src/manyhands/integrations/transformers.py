"""Wrap the optimizer of the Hugging Face Trainer in a scaling rule.

The rule receives these values from Trainer:

    passes      Trainer fetches the micro-batches of a step in advance. The last step of an epoch
                may have fewer.
    tokens      If the model receives `num_items_in_batch`, the loss of a step is a sum over tokens,
                divided by the number of tokens. Micro-batches are then weighted by tokens
                (`scaling/_weighted_mean.py`). With `loss_is_scaled_for_ga = False`, Trainer
                averages the means of the micro-batches, so their weights are equal.
    loss scale  from the accelerator's gradient scaler.
    progress    optional: the schedule follows the progress, which also replaces the step count for
                `max_steps`.

`Attachment` replaces these methods of the Trainer instance:

    create_scheduler                makes the rule: the optimizer is prepared, and no checkpoint is
                                    loaded yet
    get_batch_samples               sets passes and tokens of the step
    log                             adds gain, scale and progress
    _wrap_model                     omits `DistributedDataParallel` in blocks
    _maybe_log_save_evaluate        synchronizes blocks before evaluation and saving
    _save_optimizer_and_scheduler   gathers the state of an OSS from all ranks, and saves the state
                                    of rule and ramp that Trainer does not save
    _load_optimizer_and_scheduler   loads this state. If the checkpoint has no rule, each step
                                    counts as progress 1

With a `Ramp`, the number of micro-batches varies, and two further methods are replaced:

    set_initial_training_values     sets no limit of epochs, because progress ends the run
    _init_training_state            restores the position in the epoch from a checkpoint
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback
from transformers.trainer import SCHEDULER_NAME
from transformers.trainer_utils import has_length
from transformers.training_args import ParallelMode

from manyhands._optimizers.modules import ModuleWrapper
from manyhands._optimizers.wrappers import find_layer
from manyhands._warn import warn
from manyhands.blocks._optimizer import Blocks
from manyhands.integrations._trainer_cursor import use_cursor
from manyhands.integrations.accelerate import expect_slices, prepare_without_ddp
from manyhands.ramp import Ramp
from manyhands.ramp._micro_batches import StepPasses
from manyhands.scaling._progress import ProgressScheduler, is_by_progress
from manyhands.scaling._rule_base import ScalingRuleBase, rule_of
from manyhands.scaling._weighted_mean import WeightedMean
from manyhands.sharding.zero._oss import OSS

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from manyhands.scaling._rule_base import RuleOptions

__all__ = ["Attachment", "attach", "use_cursor"]

STATE_FILE = "manyhands.pt"  # in a checkpoint: state of rule and ramp that Trainer does not save

MakeRamp: TypeAlias = Callable[[ScalingRuleBase], Ramp]


def attach(
    trainer: Trainer,
    rule: Callable[..., ScalingRuleBase] | None = None,
    *,
    by_progress: bool = False,
    ramp: MakeRamp | None = None,
    **options: Unpack[RuleOptions],
) -> Attachment:
    """Wrap the optimizer of a Trainer in a scaling rule. Call it before `train()`.

    >>> import manyhands as mh
    >>> from manyhands.integrations.transformers import attach
    >>> from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
    >>> sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1)
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    >>> data = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 16
    >>> args = TrainingArguments(
    ...     max_steps=2, gradient_accumulation_steps=4, per_device_train_batch_size=2, use_cpu=True,
    ...     report_to=[], save_strategy="no", disable_tqdm=True,
    ... )
    >>> trainer = Trainer(model, args, train_dataset=data)
    >>> attached = attach(trainer, mh.AdaScale)
    >>> steps, *_ = trainer.train()
    {...}
    >>> attached.rule.scale
    4.0

    `gradient_accumulation_steps` is the number of backward passes per step. The small batch is the
    micro-batch of a process. A shorter last step of an epoch is measured and scaled as a smaller
    batch.

    Args:
        trainer: a `Trainer`, or an object of a derived class.
        rule: a rule's class, such as `AdaScale`, or a function of the optimizer and the options
            that returns a rule. Omit it if the optimizer already contains a rule, as with
            `optimizers=(rule, None)`, or if there is only `OSS` or blocks.
        by_progress: count `max_steps` in small-batch steps. The schedule follows the progress, and
            training ends when the progress reaches `max_steps`, after fewer optimizer steps.
        ramp: a function of the rule that returns a `Ramp`, which sets the number of passes:
            `lambda rule: mh.Ramp(rule, max_scale=64)`. Requires `by_progress=True` and
            `gradient_accumulation_steps=1`. Remaining micro-batches at the end of an epoch are
            skipped if a step needs more.
        options: further arguments of the rule.
    """
    _check_trainer(trainer, by_progress)
    if ramp is not None and (trainer.args.gradient_accumulation_steps != 1 or not by_progress):
        raise ValueError(
            "ramp= sets the number of passes and needs gradient_accumulation_steps=1 and "
            "by_progress=True, got "
            f"{trainer.args.gradient_accumulation_steps} and by_progress={by_progress}."
        )
    if any(isinstance(each, Attachment) for each in trainer.callback_handler.callbacks):
        raise RuntimeError("this trainer is attached to already. Call attach() once per Trainer.")
    attachment = Attachment(trainer, rule, by_progress, ramp, options)
    trainer.add_callback(attachment)
    return attachment


class Attachment(TrainerCallback):
    """The scaling rule and ramp of a Trainer. Returned by `attach`.

    >>> import manyhands as mh, torch
    >>> from manyhands.integrations.transformers import attach
    >>> from transformers import Trainer, TrainingArguments
    >>> args = TrainingArguments(use_cpu=True, report_to=[])
    >>> attached = attach(Trainer(torch.nn.Linear(2, 1), args), mh.AdaScale)
    >>> attached.rule is None  # created by `train()`
    True

    Other methods replace methods of the Trainer, or are callbacks.
    """

    def __init__(
        self,
        trainer: Trainer,
        make_rule: Callable[..., ScalingRuleBase] | None,
        by_progress: bool,
        make_ramp: MakeRamp | None,
        options: RuleOptions,
    ) -> None:
        self._trainer = trainer
        self._make_rule = make_rule
        self._by_progress = by_progress
        self._options = options
        self.rule: ScalingRuleBase | None = None
        """The rule, after `train()` has created the optimizer. None without a rule."""
        self.ramp: Ramp | None = None
        """The ramp, after `train()` has created the rule. None without `ramp=`."""
        self._make_ramp = make_ramp
        self._scale = 1.0  # of the last step
        self._position = 0  # micro-batches of this epoch that steps with a ramp have used
        self._mean: WeightedMean | None = None  # over the step's tokens, if Trainer counts tokens
        self._replaced: dict[str, Callable[..., Any]] = {}
        names = [
            "create_scheduler",
            "get_batch_samples",
            "log",
            "_wrap_model",
            "_maybe_log_save_evaluate",
            "_save_optimizer_and_scheduler",
            "_load_optimizer_and_scheduler",
        ]
        if make_ramp is not None:
            names += ["set_initial_training_values", "_init_training_state"]
        for name in names:
            self._replaced[name] = getattr(trainer, name)
            setattr(trainer, name, getattr(self, name))

    # -- before the first step ---------------------------------------------------------------

    def _wrap_model(self, model: nn.Module, training: bool = True, *args: Any, **kw: Any) -> Any:
        trainer = self._trainer
        if training:
            expect_slices(trainer.optimizer)
            if find_layer(trainer.optimizer, Blocks) is not None:
                return prepare_without_ddp(trainer.accelerator, model)
        return self._replaced["_wrap_model"](model, training, *args, **kw)

    def create_scheduler(self, num_training_steps: int, *args: Any, **kwargs: Any) -> Any:
        trainer = self._trainer
        _check_trainer(trainer, self._by_progress)
        before = self.rule
        self.rule = self._find_or_make_rule()
        if self.rule is not before:  # `model_init=` creates a model and optimizer in each `train()`
            self.ramp = None
        if find_layer(trainer.optimizer, Blocks) is not None:
            # Each worker averages over local tokens, without communication.
            trainer.args.average_tokens_across_devices = False
        _check_drivable(trainer, self.rule, self.ramp, self._by_progress)
        if self._make_ramp is not None and self.ramp is None:
            assert self.rule is not None
            self.ramp = self._make_ramp(self.rule)
        scheduler = self._replaced["create_scheduler"](num_training_steps, *args, **kwargs)
        if self._by_progress and not isinstance(scheduler, ProgressScheduler):
            assert self.rule is not None
            scheduler = ProgressScheduler(scheduler, self.rule, end=num_training_steps)
            trainer.lr_scheduler = scheduler
        return scheduler

    def _find_or_make_rule(self) -> ScalingRuleBase | None:
        """Return the existing or a new rule around the optimizer, or None."""
        trainer = self._trainer
        passes = trainer.args.gradient_accumulation_steps
        made = rule_of(trainer.optimizer)
        if made is None:
            if self._make_rule is None:
                return None
            if find_layer(trainer.optimizer, Blocks) is not None:
                raise ValueError(
                    "blocks contain the rule: mh.DiLoCo(mh.AdaScale(optimizer, world_size=1, "
                    f"num_gradients_to_accumulate={passes}), every=...), then attach(trainer)."
                )
            # The rule replaces methods of the prepared optimizer (`scaling/_binding.py`), and finds
            # the scaler.
            made = self._make_rule(
                trainer.optimizer, num_gradients_to_accumulate=passes, **self._options
            )
        assert isinstance(made, ScalingRuleBase)
        # Trainer counts passes, and always sets Accelerate's number to 1.
        made.port.follow(None)
        if made is self.rule:  # repeated `train()`, which counts from 0
            made.set_progress(0.0)
            if self.ramp is None:
                _set_passes(made, passes)
        else:
            if made.passes != passes:
                raise ValueError(
                    f"gradient_accumulation_steps={passes} in TrainingArguments, but the rule has "
                    f"num_gradients_to_accumulate={made.passes}. Set equal numbers."
                )
            scale = made.port.batch.scale
            if scale is not None:  # so that a step with fewer passes has a smaller scale
                made.set_scale_per_pass(scale / passes)
        return made

    # -- one step ----------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        passes = num_batches if self.ramp is None else self.ramp.passes
        fetched = self._replaced["get_batch_samples"](epoch_iterator, passes, device)
        batches, items = fetched
        self._mean = None
        if self.ramp is not None:
            if len(batches) < passes:
                return [], None
            steps = StepPasses(passes, start=self._position)
            self._trainer.args.gradient_accumulation_steps = steps
            self._position += passes
        if self.rule is not None and batches:
            if len(batches) != self.rule.passes:
                _set_passes(self.rule, len(batches))
            if items is not None and self._trainer.loss_is_scaled_for_ga is not False:
                self._mean = self._weigh(batches, float(items))
        return fetched

    def _weigh(self, batches: list[Any], items: float) -> WeightedMean:
        trainer = self._trainer
        counts = torch.stack([_count_tokens(trainer, batch) for batch in batches]).tolist()
        mean = WeightedMean(counts, trainer.optimizer)
        if mean.total != items:
            raise RuntimeError(
                f"the labels of this step have {mean.total:g} tokens, but {type(trainer).__name__} "
                f"counts {items:g}. Do not override _get_num_items_in_batch()."
            )
        return mean

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        """Set the weight of the next pass, if any."""
        if self._mean is not None and self._mean.passes_left:
            self._mean.begin_pass()

    on_step_begin = on_substep_end

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Store the scale for the logs, because a ramp sets the next scale in `step`."""
        if self.rule is not None:
            self._scale = self.rule.scale

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **__: Any) -> None:
        if self._by_progress and self._trainer.lr_scheduler.done:
            state.max_steps = state.global_step + 1  # Trainer has not counted this step yet

    def on_train_begin(self, *_: Any, train_dataloader: Any, **__: Any) -> None:
        if self.ramp is None or not has_length(train_dataloader):
            return
        most = len(train_dataloader) * self.ramp.scale / self.ramp.passes
        if self.ramp.max_scale > most:
            raise ValueError(
                f"max_scale of the Ramp must be at most {most:g}, the small batches of an epoch, "
                f"got {self.ramp.max_scale:g}. A step does not continue in the next epoch."
            )

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        """Exclude the time until now from the ramp's measurements."""
        if self.ramp is not None:
            self.ramp.skip_time()

    on_evaluate = on_epoch_begin
    on_save = on_epoch_begin

    def set_initial_training_values(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        self._trainer.args.gradient_accumulation_steps = 1  # an earlier `train()` changed it
        _, *others = self._replaced["set_initial_training_values"](*args, **kwargs)
        return (sys.maxsize, *others)

    def _init_training_state(
        self, max_steps: int, epoch_batches: int, *args: Any, **kwargs: Any
    ) -> tuple[int, int]:
        """Return the checkpoint's complete epochs, and the micro-batches in the current epoch."""
        trainer = self._trainer
        self._replaced["_init_training_state"](max_steps, epoch_batches, *args, **kwargs)
        self._position = 0
        if not trainer.state.global_step:
            return 0, 0
        epochs, batches = divmod(round(trainer.state.epoch * epoch_batches), epoch_batches)
        if not trainer.args.ignore_data_skip:
            self._position = batches
        return epochs, self._position

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        """Discard passes that no step has used, at the end of data with unknown length."""
        self._position = 0
        if self.rule is not None:
            self._trainer.model.zero_grad()  # a prepared optimizer ignores zero_grad() in mid-step
            self.rule.zero_grad()

    def on_train_end(self, args: Any, state: Any, control: Any, **__: Any) -> None:
        if self._by_progress and not self._trainer.lr_scheduler.done:
            assert self.rule is not None
            warn(
                f"training ended at a progress of {self.rule.progress:.1f} small-batch steps of "
                f"{args.max_steps}. A different limit or callback stopped the Trainer.",
            )

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        control = self._trainer.control
        state = self._trainer.state
        blocks = find_layer(self._trainer.optimizer, Blocks)
        used = control.should_evaluate or control.should_save
        ends = control.should_training_stop or state.global_step >= state.max_steps
        # Workers of a crew may save at different steps, but synchronize together.
        if blocks is not None and not blocks.in_crew and (used or ends):
            blocks.synchronize()
        self._replaced["_maybe_log_save_evaluate"](*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if self.rule is not None and "loss" in logs:
            gain = self.rule.noise.gain(self._scale)
            logs.update(gain=gain, scale=self._scale, progress=self.rule.progress)
        self._replaced["log"](logs, *args, **kwargs)

    # -- checkpoints -------------------------------------------------------------------------

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        trainer = self._trainer
        sharded = find_layer(trainer.optimizer, OSS)
        if sharded is not None:
            sharded.consolidate_state_dict()
        self._replaced["_save_optimizer_and_scheduler"](output_dir)
        state = {}
        if self.rule is not None and trainer.is_fsdp_enabled:
            state["rule"] = self.rule.scaling_state_dict()
        if self.ramp is not None:
            state["ramp"] = self.ramp.state_dict()
        if state and trainer.args.should_save:
            torch.save(state, os.path.join(output_dir, STATE_FILE))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        schedule = _load(checkpoint, SCHEDULER_NAME)
        follows = isinstance(self._trainer.lr_scheduler, ProgressScheduler)
        if schedule and is_by_progress(schedule) and not follows:
            raise ValueError(
                "the checkpoint's schedule follows the progress. Set by_progress=True, as in the "
                "run that saved it."
            )
        self._replaced["_load_optimizer_and_scheduler"](checkpoint)
        state = _load(checkpoint, STATE_FILE)
        if self.rule is not None and "rule" in state:
            self.rule.load_scaling_state_dict(state["rule"])
        if self.ramp is not None and "ramp" in state:
            self.ramp.load_state_dict(state["ramp"])
        if self.rule is not None and self.rule.progress == 0.0:  # saved without a rule
            self.rule.set_progress(float(self._trainer.state.global_step))


# -- checks ----------------------------------------------------------------------------------------
# Called before the first step, on every process.

SHARD = "mh.OSS as the optimizer or fsdp= (version 2) to shard"


def _check_trainer(trainer: Trainer, by_progress: bool) -> None:
    """Raise an error for settings under which a rule cannot measure gradients correctly."""
    args = trainer.args
    optim = str(args.optim.value)
    schedule = str(args.lr_scheduler_type.value)
    hidden = _hidden_gradients(trainer)
    if hidden:
        raise ValueError(
            f"a rule cannot measure the gradients of a rank under {hidden}. Use torchrun, with "
            f"{SHARD}."
        )
    if "lomo" in optim or optim.endswith("layerwise"):
        raise ValueError(f"optim={optim!r} steps inside backward(). Use a different optimizer.")
    if args.auto_find_batch_size:
        raise ValueError(
            "auto_find_batch_size=True changes the small batch. Set per_device_train_batch_size."
        )
    if by_progress and args.max_steps <= 0:
        raise ValueError("by_progress=True needs max_steps, the progress at which training ends.")
    if by_progress and schedule in ("reduce_lr_on_plateau", "greedy"):
        raise ValueError(f"lr_scheduler_type={schedule!r} follows a metric. Omit by_progress=.")


def _hidden_gradients(trainer: Trainer) -> str:
    """Return the kind of parallelism that hides gradients from a rule, or an empty text."""
    accelerator = trainer.accelerator
    mode = trainer.args.parallel_mode
    fsdp_version = getattr(getattr(accelerator.state, "fsdp_plugin", None), "fsdp_version", 1)
    parallel = {kind: getattr(trainer, f"get_{kind}_size")() for kind in ("tp", "cp", "sp")}
    followed = (ParallelMode.NOT_PARALLEL, ParallelMode.NOT_DISTRIBUTED, ParallelMode.DISTRIBUTED)
    other = accelerator.distributed_type in (DistributedType.MEGATRON_LM, DistributedType.XLA)
    ways = {
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "the first version of FSDP": trainer.is_fsdp_enabled and fsdp_version != 2,
        "XLA, SageMaker or Megatron-LM": mode not in followed or other,
        "DataParallel": mode == ParallelMode.NOT_DISTRIBUTED,
        f"tensor, context or sequence parallelism ({parallel})": max(parallel.values()) > 1,
        "sharded loading of the model": trainer.is_distributed_loading_by_transformers,
        # Trainer would wrap it in DDP again.
        f"a model in {type(trainer.model).__name__}": isinstance(trainer.model, ModuleWrapper),
    }
    for way, found in ways.items():
        if found:
            return way
    return ""


def _check_drivable(
    trainer: Trainer, rule: ScalingRuleBase | None, ramp: Ramp | None, by_progress: bool
) -> None:
    args = trainer.args
    blocks = find_layer(trainer.optimizer, Blocks)
    if blocks is not None and (by_progress or trainer.is_fsdp_enabled):
        raise ValueError(
            "in blocks, model and progress differ between processes. Omit fsdp= and by_progress=."
        )
    if rule is None and by_progress:
        raise ValueError("by_progress=True needs a rule: attach(trainer, mh.AdaScale, ...).")
    counts_tokens = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    weighed_by_rank = counts_tokens and not args.average_tokens_across_devices
    if rule is not None and blocks is None and args.world_size > 1 and weighed_by_rank:
        raise ValueError(
            "average_tokens_across_devices=False gives tokens of different ranks different "
            "weights. Leave it at True."
        )
    if rule is not None and rule.port.observer is not ramp:
        raise ValueError(
            "the rule has a Ramp that Trainer does not follow. Pass ramp= to attach() instead."
        )


# -- helpers ---------------------------------------------------------------------------------------


def _load(checkpoint: str, name: str) -> dict[str, Any]:
    """Load a file of a checkpoint; return {} if the file does not exist."""
    file = os.path.join(checkpoint, name)
    if not os.path.exists(file):
        return {}
    state: dict[str, Any] = torch.load(file, weights_only=True)
    return state


def _set_passes(rule: ScalingRuleBase, passes: int) -> None:
    """Set the passes of the next step. A user's smoothing remains."""
    rule.set_num_gradients_to_accumulate(passes, update_smoothing=rule.port.batch.smoothing is None)


def _count_tokens(trainer: Trainer, batch: Any) -> Tensor:
    """Count labels of a micro-batch as `Trainer._get_num_items_in_batch` does."""
    labels: Tensor
    if "shift_labels" in batch:
        labels = batch["shift_labels"]
    else:
        labels = batch["labels"][..., 1:] if trainer._loss_shifts_labels else batch["labels"]
    return labels.ne(-100).sum()
