"""The Hugging Face Trainer: a scaling rule around its optimizer, and what the rule has to know.

In a loop of your own you give a rule these things. Here they are found in the Trainer:

    passes      Trainer fetches the micro-batches of a step before it runs them, and the last step
                of an epoch may have fewer. The rule is given their number.
    tokens      If the model takes `num_items_in_batch`, a step's loss is a sum over all of its
                tokens, divided by their number. Micro-batches then count by their tokens
                (`scaling/_weighted_mean.py`).
    loss scale  The accelerator's gradient scaler.
    progress    If asked, the schedule follows the progress, and `max_steps` is counted in it.

`Attachment` replaces these methods of the Trainer, on the instance:

    create_scheduler                puts the rule around the optimizer: Trainer calls this when the
                                    optimizer has been prepared, and before it loads a checkpoint
    get_batch_samples               fetches a step's micro-batches; the rule is given their number
    log                             adds the gain, the scale and the progress
    _save_optimizer_and_scheduler   lets every rank take part (`OSS`), where Trainer asks rank 0
                                    alone, and saves what the optimizer's file leaves out
    _load_optimizer_and_scheduler   loads what the optimizer's file leaves out

and with a `Ramp`, whose steps do not all have the same number of micro-batches, also these:

    set_initial_training_values     says how many epochs there are: as many as the progress takes
    _init_training_state            finds the place in the epoch at which a checkpoint was saved
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length

from manyhands._core.wrappers import find_layer
from manyhands.integrations._step_passes import StepPasses
from manyhands.integrations._transformers_checks import (
    check_for_ramp,
    check_layers,
    check_ramp,
    check_trainer,
)
from manyhands.ramp import Ramp
from manyhands.scaling._optimizer import rule_of
from manyhands.scaling._progress import ProgressScheduler
from manyhands.scaling._rule_base import ScalingRuleBase
from manyhands.scaling._weighted_mean import WeightedMean
from manyhands.sharding.zero._oss import OSS

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from manyhands.scaling._settings import RuleOptions

__all__ = ["Attachment", "attach"]

STATE_FILE = "manyhands.pt"  # in a checkpoint: what is not in the optimizer's state there

Batch: TypeAlias = Mapping[str, Tensor]  # a micro-batch: the arguments of the model's forward
MakeRamp: TypeAlias = Callable[[ScalingRuleBase], Ramp]


def attach(
    trainer: Trainer,
    rule: Callable[..., ScalingRuleBase] | None = None,
    *,
    by_progress: bool = False,
    ramp: MakeRamp | None = None,
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
        rule: `AdaScale`, `AdamScale`, or a function that is called with the optimizer and the
            options, and returns a rule. Leave it out if Trainer's optimizer has a rule already
            (`optimizers=(rule, None)`), or if there is no rule, only `OSS`.
        by_progress: count `max_steps` in progress: write the number of steps that you would train
            for at the small batch. The schedule is made for so many steps, and follows the
            progress. Training ends when the progress has reached them, after fewer optimizer steps.
        ramp: a function that is called with the rule and returns a `Ramp`, which then sets the
            number of passes: `lambda rule: mh.Ramp(rule, max_scale=64)`. Leave
            `gradient_accumulation_steps` at 1, and count by progress. If the last micro-batches of
            an epoch are fewer than a step has, they are left out.
        options: further arguments of the rule.
    """
    check_trainer(trainer, by_progress)
    if ramp is not None:
        check_for_ramp(trainer, by_progress)
    if any(isinstance(each, Attachment) for each in trainer.callback_handler.callbacks):
        raise RuntimeError("this trainer has been attached to already. Call attach() once.")
    attachment = Attachment(trainer, rule, by_progress, ramp, options)
    trainer.add_callback(attachment)
    return attachment


class Attachment(TrainerCallback):
    """What `attach` puts into a Trainer, and returns: `rule` is the scaling rule.

    >>> import manyhands as mh, torch
    >>> from manyhands.integrations.transformers import attach
    >>> from transformers import Trainer, TrainingArguments
    >>> args = TrainingArguments(use_cpu=True, report_to=[])
    >>> attached = attach(Trainer(torch.nn.Linear(2, 1), args), mh.AdaScale)
    >>> attached.rule is None  # it is made in `train()`
    True

    Some of its methods replace Trainer's own; Trainer calls the others as a callback's.
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
        """The rule, once `train()` has made the optimizer; None if there is only `OSS`."""
        self.ramp: Ramp | None = None
        """The ramp, if there is one, from the same moment on."""
        self._make_ramp = make_ramp
        self._scale = 1.0  # of the last step
        self._taken = 0  # with a ramp: the micro-batches of this epoch that were fetched
        self._mean: WeightedMean | None = None  # of the step's tokens, if they are counted
        self._replaced: dict[str, Callable[..., Any]] = {}
        names = [
            "create_scheduler",
            "get_batch_samples",
            "log",
            "_save_optimizer_and_scheduler",
            "_load_optimizer_and_scheduler",
        ]
        if make_ramp is not None:
            names += ["set_initial_training_values", "_init_training_state"]
        for name in names:
            self._replaced[name] = getattr(trainer, name)
            setattr(trainer, name, getattr(self, name))

    # -- before the first step ---------------------------------------------------------------

    def create_scheduler(
        self, num_training_steps: int, *args: object, **kwargs: object
    ) -> LRScheduler | ProgressScheduler:
        """Put the rule around the optimizer, which has been prepared, and make the schedule."""
        trainer = self._trainer
        check_trainer(trainer, self._by_progress)
        self.rule = self._find_or_make_rule()
        check_layers(trainer, self.rule, self.ramp, self._by_progress)
        if self._make_ramp is not None and self.ramp is None:
            assert self.rule is not None
            self.ramp = self._make_ramp(self.rule)
            check_ramp(self.ramp)
        scheduler = self._replaced["create_scheduler"](num_training_steps, *args, **kwargs)
        if self._by_progress and not isinstance(scheduler, ProgressScheduler):
            assert self.rule is not None
            scheduler = ProgressScheduler(scheduler, self.rule, end=num_training_steps)
            trainer.lr_scheduler = scheduler
        return scheduler

    def _find_or_make_rule(self) -> ScalingRuleBase | None:
        trainer = self._trainer
        passes = trainer.args.gradient_accumulation_steps
        made = rule_of(trainer.optimizer)
        if made is None and self._make_rule is None:
            return None
        if made is None:
            assert self._make_rule is not None
            # The prepared optimizer keeps its place in Trainer: the rule replaces its methods
            # (`scaling/_binding.py`), and finds the accelerator's scaler in it.
            made = self._make_rule(
                trainer.optimizer, num_gradients_to_accumulate=passes, **self._options
            )
        assert isinstance(made, ScalingRuleBase)
        # A rule around a prepared optimizer would ask accelerate for the number of passes. Trainer
        # counts them on its own, and leaves accelerate at one pass a step.
        made._batch.accumulation = None
        if made is self.rule:  # in another call of `train`, which counts from 0 again
            made.set_progress(0.0)
            if self.ramp is None:
                _set_passes(made, passes)
        elif made.passes != passes:
            raise ValueError(
                f"gradient_accumulation_steps={passes} in TrainingArguments, and the "
                f"{type(made).__name__} has num_gradients_to_accumulate={made.passes}. Write the "
                "same number in both."
            )
        elif made._batch.scale is not None:  # a step with fewer passes then has a smaller scale
            made.set_scale_per_pass(made._batch.scale / passes)
        return made

    # -- one step ----------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], Tensor | int | None]:
        """Fetch a step's micro-batches, and give the rule their number and their sizes."""
        passes = num_batches if self.ramp is None else self.ramp.passes
        batches, items = self._replaced["get_batch_samples"](epoch_iterator, passes, device)
        self._mean = None
        if self.ramp is not None:
            if len(batches) < passes:
                return [], None  # too few for a step: Trainer goes on to the next epoch
            # Trainer steps where its count of the epoch's batches can be divided by this number.
            steps = StepPasses(passes, start=self._taken)
            self._trainer.args.gradient_accumulation_steps = steps
            self._taken += passes
        if self.rule is not None and batches:
            if len(batches) != self.rule.passes:
                _set_passes(self.rule, len(batches))
            if items is not None:
                self._mean = self._weigh(batches, float(items))
        return batches, items

    def _weigh(self, batches: list[Batch], items: float) -> WeightedMean:
        """Return the mean over all of the step's tokens; `items` is Trainer's count of them."""
        trainer = self._trainer
        counts = torch.stack([_count_tokens(trainer, batch) for batch in batches]).tolist()
        mean = WeightedMean(counts, trainer.optimizer)
        if mean.total != items:
            raise RuntimeError(
                f"the labels of this step have {mean.total:g} tokens, and {type(trainer).__name__} "
                f"counts {items:g}. A scaling rule has to know how many tokens each micro-batch "
                "has: do not override _get_num_items_in_batch()."
            )
        return mean

    def on_step_begin(self, *_: object, **__: object) -> None:
        """Announce the first pass of a step."""
        self.on_substep_end()

    def on_substep_end(self, *_: object, **__: object) -> None:
        """Announce the next pass, if there is one."""
        if self._mean is not None and self._mean.passes_left:
            self._mean._begin_pass()

    def on_pre_optimizer_step(self, *_: object, **__: object) -> None:
        """Keep the scale of this step, for the logs: a ramp sets the next one's in `step`."""
        if self.rule is not None:
            self._scale = self.rule.scale

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """End the training when the progress has reached its end."""
        schedule = self._trainer.lr_scheduler
        if self._by_progress and schedule.done:
            state.max_steps = state.global_step + 1  # Trainer counts this step afterwards

    def on_train_begin(self, *_: object, train_dataloader: DataLoader[Batch], **__: object) -> None:
        """Check that an epoch has enough micro-batches for the largest step."""
        if self.ramp is None or not has_length(train_dataloader):
            return
        most = len(train_dataloader) * self.ramp.scale / self.ramp.passes
        if self.ramp.max_scale > most:
            raise ValueError(
                f"max_scale={self.ramp.max_scale:g} of the Ramp is more than the {most:g} small "
                "batches of an epoch, and Trainer's steps do not go over its end. Lower it."
            )

    def on_epoch_begin(self, *_: object, **__: object) -> None:
        """Leave the time since the last step out of the ramp's measurements."""
        if self.ramp is not None:
            self.ramp.skip_time()

    on_evaluate = on_save = on_epoch_begin

    def set_initial_training_values(self, *args: object, **kwargs: object) -> tuple[object, ...]:
        """Let epochs go on until the progress has reached its end."""
        self._trainer.args.gradient_accumulation_steps = 1  # not those of the last step
        _, *others = self._replaced["set_initial_training_values"](*args, **kwargs)
        return (sys.maxsize, *others)

    def _init_training_state(
        self, max_steps: int, epoch_batches: int, *args: object, **kwargs: object
    ) -> tuple[int, int]:
        """Return the epochs, and the micro-batches of this one, that were done at a checkpoint."""
        trainer = self._trainer
        self._replaced["_init_training_state"](max_steps, epoch_batches, *args, **kwargs)
        self._taken = 0
        if not trainer.state.global_step:
            return 0, 0
        epochs, taken = divmod(round(trainer.state.epoch * epoch_batches), epoch_batches)
        self._taken = 0 if trainer.args.ignore_data_skip else taken
        return epochs, self._taken

    def on_epoch_end(self, *_: object, **__: object) -> None:
        """Drop passes without a step: data of unknown length has ended in the middle of one."""
        self._taken = 0
        if self.rule is not None:
            self._trainer.model.zero_grad()  # the prepared optimizer's leaves them in mid-step
            self.rule.zero_grad()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Warn if the training has ended before the progress had reached its end."""
        schedule = self._trainer.lr_scheduler
        if self._by_progress and not schedule.done:
            assert self.rule is not None
            warnings.warn(
                f"training has ended at a progress of {self.rule.progress:.1f} small-batch steps "
                f"of {args.max_steps}: something other than the progress has stopped it.",
                stacklevel=2,
            )

    def log(self, logs: dict[str, float], *args: object, **kwargs: object) -> None:
        """Add the gain, the scale and the progress to a training step's values."""
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
        self._replaced["_load_optimizer_and_scheduler"](checkpoint)
        file = None if checkpoint is None else os.path.join(checkpoint, STATE_FILE)
        if file is None or not os.path.exists(file):
            return
        state = torch.load(file, weights_only=True)
        if self.rule is not None and "rule" in state:
            self.rule.load_scaling_state_dict(state["rule"])
        if self.ramp is not None and "ramp" in state:
            self.ramp.load_state_dict(state["ramp"])


def _set_passes(rule: ScalingRuleBase, passes: int) -> None:
    """Set the next step's number of passes. A smoothing that the user has set stays."""
    rule.set_num_gradients_to_accumulate(passes, update_smoothing=rule._batch.smoothing is None)


def _count_tokens(trainer: Trainer, batch: Batch) -> Tensor:
    """Return how many labels of a micro-batch count, as `Trainer._get_num_items_in_batch` does."""
    labels: Tensor
    if "shift_labels" in batch:
        labels = batch["shift_labels"]
    else:
        labels = batch["labels"][..., 1:] if trainer._loss_shifts_labels else batch["labels"]
    return labels.ne(-100).sum()
