"""Put a scaling rule around the optimizer of the Hugging Face Trainer.

Trainer runs the loop, so what a loop of your own would tell the rule has to be found in Trainer:

    passes      Trainer fetches the micro-batches of a step before it runs them, and an epoch's last
                step may have fewer. The rule is given their number.
    tokens      If the model is told `num_items_in_batch`, a step's loss is a sum over all of its
                tokens, divided by their number. Micro-batches then count by their tokens
                (`scaling/_weighted_mean.py`). With `loss_is_scaled_for_ga = False` they count
                the same: Trainer takes the mean of their means.
    loss scale  The accelerator's gradient scaler.
    progress    If asked, the schedule follows the progress, and `max_steps` is counted in it.

Methods of Trainer that are replaced on the instance, by those of `Attachment`:

    create_scheduler                is called when the optimizer has been prepared, and before a
                                    checkpoint is loaded: the moment to put the rule around it
    get_batch_samples               fetches a step's micro-batches
    log                             adds the gain, the scale and the progress
    _wrap_model                     leaves `DistributedDataParallel` out in blocks, and with `wrap=`
    _maybe_log_save_evaluate        ends a block first, if the model is evaluated or saved there
    _save_optimizer_and_scheduler   lets every rank take part, where Trainer asks rank 0 alone
                                    (OSS), and saves what the optimizer's file leaves out
    _load_optimizer_and_scheduler   loads that, too; a run without a rule has made one small-batch
                                    step of progress in each step

and, with a `Ramp`, whose steps do not all have the same number of micro-batches:

    set_initial_training_values     sets the number of epochs: no limit, the progress ends the run
    _init_training_state            finds the place in the epoch at which a checkpoint was saved
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
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
from manyhands.sharding.zero._ddp import ShardedDataParallel
from manyhands.sharding.zero._oss import OSS

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from manyhands.scaling._settings import RuleOptions

__all__ = ["Attachment", "attach", "use_cursor"]

STATE_FILE = "manyhands.pt"  # in a checkpoint: what is not in the optimizer's state there

MakeRamp: TypeAlias = Callable[[ScalingRuleBase], Ramp]
Wrap: TypeAlias = Callable[[nn.Module, Optimizer], nn.Module]


def attach(
    trainer: Trainer,
    rule: Callable[..., ScalingRuleBase] | None = None,
    *,
    by_progress: bool = False,
    ramp: MakeRamp | None = None,
    wrap: Wrap | None = None,
    **options: Unpack[RuleOptions],
) -> Attachment:
    """Put a scaling rule around the optimizer of a Trainer. Call it before `train()`.

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
    >>> attached = attach(trainer, mh.AdamScale)
    >>> steps, *_ = trainer.train()
    {...}
    >>> attached.rule.scale
    4.0

    The number of backward passes is Trainer's `gradient_accumulation_steps`, and the small batch is
    one micro-batch of one process. The last step of an epoch may have fewer passes: it is measured,
    and scaled, as the smaller batch that it is.

    Args:
        trainer: a `Trainer`, or an object of a class derived from it.
        rule: `AdaScale`, `AdamScale`, another rule's class, or a function that is called with the
            optimizer and the options, and returns a rule. Leave it out if Trainer's optimizer has a
            rule inside already, as when it was given as `optimizers=(rule, None)`, or if there is
            no rule, only `OSS` or blocks.
        by_progress: count `max_steps` in progress: write the number of steps that you would train
            for at the small batch. The schedule is made for so many, and follows the progress;
            training ends when the progress has reached them, after fewer optimizer steps.
        ramp: a function that is called with the rule, and returns a `Ramp`, which then sets the
            number of passes: `lambda rule: mh.Ramp(rule, max_scale=64)`. Leave
            `gradient_accumulation_steps` at 1, and count by progress. The last micro-batches of an
            epoch are left out, if they are fewer than a step has.
        wrap: `mh.ShardedDataParallel`, or a function that is called with the model and the
            optimizer, an `OSS`, and returns one. It takes the place of `DistributedDataParallel`.
        options: further arguments of the rule.
    """
    _check_trainer(trainer, by_progress)
    if ramp is not None and (trainer.args.gradient_accumulation_steps != 1 or not by_progress):
        raise ValueError(
            "a Ramp sets gradient_accumulation_steps: leave it at 1, and set by_progress=True."
        )
    if any(isinstance(each, Attachment) for each in trainer.callback_handler.callbacks):
        raise RuntimeError("this trainer has been attached to already.")
    attachment = Attachment(trainer, rule, by_progress, ramp, wrap, options)
    trainer.add_callback(attachment)
    return attachment


class Attachment(TrainerCallback):
    """What `attach` has put into a Trainer, and returns: `rule` is the scaling rule.

    >>> import manyhands as mh, torch
    >>> from manyhands.integrations.transformers import attach
    >>> from transformers import Trainer, TrainingArguments
    >>> args = TrainingArguments(use_cpu=True, report_to=[])
    >>> attached = attach(Trainer(torch.nn.Linear(2, 1), args), mh.AdaScale)
    >>> attached.rule is None  # it is made in `train()`
    True

    Its methods take the place of some of Trainer's, and are called at each of its steps.
    """

    def __init__(
        self,
        trainer: Trainer,
        make_rule: Callable[..., ScalingRuleBase] | None,
        by_progress: bool,
        make_ramp: MakeRamp | None,
        wrap: Wrap | None,
        options: RuleOptions,
    ) -> None:
        self._trainer = trainer
        self._make_rule = make_rule
        self._by_progress = by_progress
        self._options = options
        self.rule: ScalingRuleBase | None = None
        """The rule, once `train()` has made the optimizer; None if there is only `OSS`."""
        self.ramp: Ramp | None = None
        """The ramp, once `train()` has made the rule; None without `ramp=`."""
        self._make_ramp = make_ramp
        self._wrap = wrap
        self._scale = 1.0  # of the last step
        self._taken = 0  # micro-batches of this epoch, by a ramp
        self._mean: WeightedMean | None = None  # of the step's tokens, if they are counted
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
        """Wrap the model for training. What is returned as prepared gets no DDP."""
        trainer = self._trainer
        in_blocks = training and find_layer(trainer.optimizer, Blocks) is not None
        if training:
            expect_slices(trainer.optimizer)
        if not training or not (in_blocks or self._wrap):
            return self._replaced["_wrap_model"](model, training, *args, **kw)
        if self._wrap is not None:
            if in_blocks or find_layer(trainer.optimizer, OSS) is None:
                raise TypeError(
                    f"wrap= needs an OSS as the optimizer, got {type(trainer.optimizer).__name__}. "
                    "Set optimizer_cls_and_kwargs=(mh.OSS, {...}), or leave wrap= out."
                )
            if not isinstance(model, ModuleWrapper):
                model = self._wrap(model, trainer.optimizer)
                if not isinstance(model, ShardedDataParallel):
                    raise TypeError(
                        f"wrap= must return a ShardedDataParallel, got {type(model).__name__}."
                    )
        return prepare_without_ddp(trainer.accelerator, model)

    def create_scheduler(self, num_training_steps: int, *args: Any, **kwargs: Any) -> Any:
        """Put the rule around the optimizer, which has been prepared, and make the schedule."""
        trainer = self._trainer
        _check_trainer(trainer, self._by_progress)
        before = self.rule
        self.rule = self._find_or_make_rule()
        if self.rule is not before:  # `model_init=` makes a model, and so an optimizer, each time
            self.ramp = None
        blocks = find_layer(trainer.optimizer, Blocks)
        if blocks is not None:
            # Each worker has the mean over its own tokens, and nothing to send before a step.
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
        """Return the rule that is around the optimizer, or put the asked one there; or None."""
        trainer = self._trainer
        passes = trainer.args.gradient_accumulation_steps
        made = rule_of(trainer.optimizer)
        if made is None:
            if self._make_rule is None:
                return None
            if find_layer(trainer.optimizer, Blocks) is not None:
                raise ValueError(
                    "a rule goes into the blocks: mh.DiLoCo(mh.AdamScale(optimizer, world_size=1, "
                    f"num_gradients_to_accumulate={passes}), every=...), and attach(trainer)."
                )
            # The prepared optimizer's own methods become the rule's (`scaling/_binding.py`), and
            # its scaler is found.
            made = self._make_rule(
                trainer.optimizer, num_gradients_to_accumulate=passes, **self._options
            )
        assert isinstance(made, ScalingRuleBase)
        # Trainer counts on its own: to accelerate it says that each step has one pass.
        made.port.follow(None)
        if made is self.rule:  # in another call of `train`, which counts from 0 again
            made.set_progress(0.0)
            if self.ramp is None:
                _set_passes(made, passes)
        else:
            if made.passes != passes:
                raise ValueError(
                    f"gradient_accumulation_steps={passes} in TrainingArguments, and the rule has "
                    f"num_gradients_to_accumulate={made.passes}."
                )
            scale = made.port.batch.scale
            if scale is not None:  # a step with fewer passes then has a smaller scale
                made.set_scale_per_pass(scale / passes)
        return made

    # -- one step ----------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """Fetch a step's micro-batches, and tell the rule their number and sizes."""
        passes = num_batches if self.ramp is None else self.ramp.passes
        fetched = self._replaced["get_batch_samples"](epoch_iterator, passes, device)
        batches, items = fetched
        self._mean = None
        if self.ramp is not None:
            if len(batches) < passes:
                return [], None
            steps = StepPasses(passes, start=self._taken)
            self._trainer.args.gradient_accumulation_steps = steps
            self._taken += passes
        if self.rule is not None and batches:
            if len(batches) != self.rule.passes:
                _set_passes(self.rule, len(batches))
            if items is not None and self._trainer.loss_is_scaled_for_ga is not False:
                self._mean = self._weigh(batches, float(items))
        return fetched

    def _weigh(self, batches: list[Any], items: float) -> WeightedMean:
        """Return the mean over all of the step's tokens, of which Trainer says the number."""
        trainer = self._trainer
        counts = torch.stack([_count_tokens(trainer, batch) for batch in batches]).tolist()
        mean = WeightedMean(counts, trainer.optimizer)
        if mean.total != items:
            raise RuntimeError(
                f"the labels of this step have {mean.total:g} tokens, and {type(trainer).__name__} "
                f"counts {items:g}: do not override _get_num_items_in_batch()."
            )
        return mean

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        """Announce the next pass, if there is one."""
        if self._mean is not None and self._mean.passes_left:
            self._mean.begin_pass()

    on_step_begin = on_substep_end

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Keep the scale of this step, for the logs: a ramp sets the next one's in `step`."""
        if self.rule is not None:
            self._scale = self.rule.scale

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **__: Any) -> None:
        """End the training when the progress is there."""
        schedule = self._trainer.lr_scheduler
        if self._by_progress and schedule.done:
            state.max_steps = state.global_step + 1  # the step that is being counted

    def on_train_begin(self, *_: Any, train_dataloader: Any, **__: Any) -> None:
        """Check that an epoch has enough micro-batches for the largest step."""
        if self.ramp is None or not has_length(train_dataloader):
            return
        most = len(train_dataloader) * self.ramp.scale / self.ramp.passes
        if self.ramp.max_scale > most:
            raise ValueError(
                f"max_scale={self.ramp.max_scale:g} of the Ramp is more than the {most:g} small "
                "batches of an epoch, over whose end no step goes. Lower it."
            )

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        """Leave the time until now out of the ramp's measurements."""
        if self.ramp is not None:
            self.ramp.skip_time()

    on_evaluate = on_epoch_begin
    on_save = on_epoch_begin

    def set_initial_training_values(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Let epochs go on until the progress is there."""
        self._trainer.args.gradient_accumulation_steps = 1  # not those of the last step
        _, *others = self._replaced["set_initial_training_values"](*args, **kwargs)
        return (sys.maxsize, *others)

    def _init_training_state(
        self, max_steps: int, epoch_batches: int, *args: Any, **kwargs: Any
    ) -> tuple[int, int]:
        """Return the epochs, and the micro-batches of the next, before a checkpoint."""
        trainer = self._trainer
        self._replaced["_init_training_state"](max_steps, epoch_batches, *args, **kwargs)
        self._taken = 0
        if not trainer.state.global_step:
            return 0, 0
        epochs, taken = divmod(round(trainer.state.epoch * epoch_batches), epoch_batches)
        self._taken = 0 if trainer.args.ignore_data_skip else taken
        return epochs, self._taken

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        """Drop passes that no step has followed, as when data without a length has run out."""
        self._taken = 0
        if self.rule is not None:
            self._trainer.model.zero_grad()  # the prepared optimizer's leaves them in mid-step
            self.rule.zero_grad()

    def on_train_end(self, args: Any, state: Any, control: Any, **__: Any) -> None:
        """Warn if the training ends before its progress."""
        schedule = self._trainer.lr_scheduler
        if self._by_progress and not schedule.done:
            assert self.rule is not None
            warn(
                f"training has ended at a progress of {self.rule.progress:.1f} small-batch steps "
                f"of {args.max_steps}: something else than the progress has stopped it.",
            )

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """End a block first, if the model is evaluated or saved, or the training ends."""
        trainer = self._trainer
        control = self._trainer.control
        state = self._trainer.state
        blocks = find_layer(trainer.optimizer, Blocks)
        used = control.should_evaluate or control.should_save
        ends = control.should_training_stop or state.global_step >= state.max_steps
        # the workers of a crew end a block together, and do not all save at the same step
        if blocks is not None and not blocks.in_crew and (used or ends):
            blocks.synchronize()
        self._replaced["_maybe_log_save_evaluate"](*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the gain, the scale and the progress to a training step's values."""
        if self.rule is not None and "loss" in logs:
            gain = self.rule.noise.gain(self._scale)
            logs.update(gain=gain, scale=self._scale, progress=self.rule.progress)
        self._replaced["log"](logs, *args, **kwargs)

    # -- checkpoints -------------------------------------------------------------------------

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save as Trainer does, with a sharded state collected, and rule and ramp beside it."""
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
        """Load as Trainer does, and then the rule and the ramp; without one, count its steps."""
        trainer = self._trainer
        if checkpoint is not None:
            _check_schedule_saved(trainer.lr_scheduler, os.path.join(checkpoint, SCHEDULER_NAME))
        self._replaced["_load_optimizer_and_scheduler"](checkpoint)
        if checkpoint is None:
            return
        file = os.path.join(checkpoint, STATE_FILE)
        state = torch.load(file, weights_only=True) if os.path.exists(file) else {}
        if self.rule is not None and "rule" in state:
            self.rule.load_scaling_state_dict(state["rule"])
        if self.ramp is not None and "ramp" in state:
            self.ramp.load_state_dict(state["ramp"])
        if self.rule is not None and self.rule.progress == 0.0:  # the run had no rule
            self.rule.set_progress(float(trainer.state.global_step))


# -- checks ----------------------------------------------------------------------------------------
# All come before the first step, on every process.

SHARD = "mh.OSS as the optimizer or fsdp= (version 2) to shard"


def _check_trainer(trainer: Trainer, by_progress: bool) -> None:
    """Raise for what would make a rule's numbers wrong, or keep it from seeing gradients."""
    args = trainer.args
    optim = str(args.optim.value)
    schedule = str(args.lr_scheduler_type.value)
    found = _sharing_without_gradients(trainer)
    if found:
        raise ValueError(
            f"a rule sees no gradients of single ranks under {found}. Use torchrun, and {SHARD}."
        )
    if "lomo" in optim or optim.endswith("layerwise"):
        raise ValueError(f"optim={optim!r} steps inside of backward(). Use another one.")
    if args.auto_find_batch_size:
        raise ValueError("auto_find_batch_size=True changes the small batch. Set its size.")
    if by_progress and args.max_steps <= 0:
        raise ValueError("by_progress=True counts max_steps in progress, and max_steps is not set.")
    if by_progress and schedule in ("reduce_lr_on_plateau", "greedy"):
        raise ValueError(f"lr_scheduler_type={schedule!r} follows a metric: leave by_progress out.")


def _sharing_without_gradients(trainer: Trainer) -> str:
    """Return how devices share the work, if it is in a way that a rule cannot see; else ""."""
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
        "a model that was sharded when loaded": trainer.is_distributed_loading_by_transformers,
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
    """Raise for an optimizer that Trainer's loop cannot drive."""
    args = trainer.args
    blocks = find_layer(trainer.optimizer, Blocks)
    if blocks is not None and (by_progress or trainer.is_fsdp_enabled):
        raise ValueError(
            "in blocks each process has a model and a progress of its own. Leave fsdp= and "
            "by_progress= out, and count steps."
        )
    if rule is None and by_progress:
        raise ValueError("by_progress=True needs a rule: attach(trainer, mh.AdaScale, ...).")
    counts_tokens = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    weighed_by_rank = counts_tokens and not args.average_tokens_across_devices
    if rule is not None and blocks is None and args.world_size > 1 and weighed_by_rank:
        raise ValueError(
            "average_tokens_across_devices=False weighs tokens by their rank. Leave it at True."
        )
    if rule is not None and rule.port.observer is not ramp:
        raise ValueError("Trainer does not know the rule's Ramp. Let attach() make it: ramp=...")


def _check_schedule_saved(schedule: LRScheduler, file: str) -> None:
    """Raise if a checkpoint's schedule follows the progress, and this run's does not."""
    if isinstance(schedule, ProgressScheduler) or not os.path.exists(file):
        return
    if is_by_progress(torch.load(file, weights_only=True)):
        raise ValueError("Set by_progress=True, as in the run that saved it.")


# -- helpers ---------------------------------------------------------------------------------------


def _set_passes(rule: ScalingRuleBase, passes: int) -> None:
    """Set the number of passes of the next step. A smoothing that was set stays."""
    rule.set_num_gradients_to_accumulate(passes, update_smoothing=rule.port.batch.smoothing is None)


def _count_tokens(trainer: Trainer, batch: Any) -> Tensor:
    """Count the labels of a micro-batch as `Trainer._get_num_items_in_batch` does."""
    labels: Tensor
    if "shift_labels" in batch:
        labels = batch["shift_labels"]
    else:
        labels = batch["labels"][..., 1:] if trainer._loss_shifts_labels else batch["labels"]
    return labels.ne(-100).sum()
