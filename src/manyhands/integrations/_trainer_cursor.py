"""Train on a Cursor in the Hugging Face Trainer: `use_cursor`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from manyhands.data._cursor import BaseCursor, MapCursor


def use_cursor(trainer: Trainer, cursor: BaseCursor) -> None:
    """Train a Trainer on the batches of a Cursor. Call it before `train()`.

    A checkpoint of the Trainer then includes the position of the cursor, and
    `train(resume_from_checkpoint=...)` continues after the last trained sample, on any number of
    processes.

    >>> import manyhands as mh
    >>> from manyhands.integrations.transformers import use_cursor
    >>> from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
    >>> sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1)
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    >>> data = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 16
    >>> args = TrainingArguments(
    ...     num_train_epochs=1, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True
    ... )
    >>> trainer = Trainer(model, args)
    >>> cursor = mh.Cursor(data, batch_size=4, collate_fn=trainer.data_collator)
    >>> use_cursor(trainer, cursor)
    >>> steps, *_ = trainer.train()
    {...}
    >>> steps, cursor
    (4, Cursor(samples=16, batch_size=4, epoch=0, position=16))

    Args:
        trainer: a `Trainer`, or an object of a derived class. `per_device_train_batch_size`,
            `train_dataset` and the `dataloader_` arguments have no effect on the training data.
        cursor: a `Cursor` with `keep="batch"`, and without `max_local_batch_size`.
            Each batch is one micro-batch: with `gradient_accumulation_steps`, a step uses
            `gradient_accumulation_steps * batch_size` samples.
    """
    if not isinstance(cursor, MapCursor):
        raise TypeError(
            "use_cursor needs a Cursor over a dataset with a length, got "
            f"{type(cursor).__name__}. The Trainer counts the batches of an epoch."
        )
    if cursor.passes != 1:
        raise ValueError(
            f"use_cursor needs a Cursor with a single pass per batch, got {cursor.passes} passes. "
            "Omit max_local_batch_size, and set gradient_accumulation_steps of the Trainer."
        )
    passes = trainer.args.gradient_accumulation_steps
    if len(cursor) % passes:
        raise ValueError(
            f"the {len(cursor)} batches of an epoch must be divisible by "
            f"gradient_accumulation_steps={passes}. Choose a different batch_size for the Cursor."
        )
    trainer.args.ignore_data_skip = True  # the Trainer must not skip batches after a resume
    loader = EpochLoader(cursor)
    # A method of the object, because the class is the user's.
    trainer.get_train_dataloader = lambda: loader
    trainer.add_callback(CursorPosition(cursor))


class EpochLoader:
    """The data loader that the Trainer sees. Each iteration yields the rest of an epoch.

    The Trainer requests exactly `len(loader)` batches before it starts the next iteration. A Cursor
    begins the next epoch only when its iteration ends.
    """

    def __init__(self, cursor: MapCursor) -> None:
        self._cursor = cursor
        self.dataset = cursor.dataset

    def __len__(self) -> int:
        return len(self._cursor)

    def __iter__(self) -> Iterator[Any]:
        at_end = True
        for batch in self._cursor:
            at_end = False
            yield batch
        if at_end:
            yield from self._cursor


class CursorPosition(TrainerCallback, ExportableState):
    """Saves the position of a Cursor in the Trainer's state, and loads it."""

    def __init__(self, cursor: MapCursor) -> None:
        self._cursor = cursor

    def state(self) -> dict[str, Any]:
        """Return this callback's entry in the Trainer's state."""
        settings = {"batch_size": self._cursor.batch_size}
        return {"args": settings, "attributes": self._cursor.state_dict()}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Continue from the position of the checkpoint."""
        saved: Any = state.stateful_callbacks
        entry = saved.get(type(self).__name__)
        if entry is None:
            raise ValueError(
                "the checkpoint has no position of a Cursor: a run without use_cursor saved it. "
                "Resume without use_cursor, or start a new run."
            )
        batch_size = entry["args"]["batch_size"]
        if batch_size != self._cursor.batch_size:
            raise ValueError(
                f"the checkpoint has batches of {batch_size} samples on all processes together, "
                f"and the Cursor has {self._cursor.batch_size}. The Trainer counts steps, so set "
                f'batch_size={batch_size} and keep="batch".'
            )
        self._cursor.load_state_dict(entry["attributes"])
