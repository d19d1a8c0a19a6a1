"""The Trainer with a Cursor: every sample is used once per epoch, across stops and rank counts."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import manyhands as mh
from helpers.ranks import as_under_torchrun, run_ranks

with warnings.catch_warnings():  # once, before ranks are forked
    warnings.simplefilter("ignore")
    import transformers
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

from manyhands.integrations.transformers import use_cursor

transformers.utils.logging.set_verbosity_error()

pytestmark = [
    pytest.mark.filterwarnings("ignore:OMP_NUM_THREADS"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]

SAMPLES = 32
BATCH = 4
EPOCHS = 3


class Net(nn.Module):
    """A model that records which samples it has seen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.seen = []

    def forward(self, inputs, index):
        self.seen += index.tolist()
        return {"loss": (self.layers(inputs) - inputs.sum(1, keepdim=True)).square().mean()}


class Stop(TrainerCallback):
    """Saves and stops after a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            control.should_save = True
            control.should_training_stop = True


def data():
    inputs = torch.randn(SAMPLES, 2, generator=torch.Generator().manual_seed(1))
    return [{"inputs": inputs[index], "index": index} for index in range(SAMPLES)]


def make(folder, stop=None, passes=1, batch=BATCH):
    args = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=EPOCHS,
        gradient_accumulation_steps=passes,
        learning_rate=0.1,
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        report_to=[],
        ddp_find_unused_parameters=False,
    )
    net = Net()
    trainer = Trainer(net, args, callbacks=[Stop(stop)])
    cursor = mh.Cursor(data(), batch, collate_fn=trainer.data_collator)
    use_cursor(trainer, cursor)
    return net, trainer


def train(folder, stop=None, resume=False, **options):
    if dist.is_initialized():
        as_under_torchrun()
    net, trainer = make(folder, stop, **options)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)) if resume else None)
    weights = nn.utils.parameters_to_vector(net.parameters()).detach()
    return net.seen, weights, trainer.state.global_step


def uses(results):
    """The number of uses of each sample, in the order of the samples."""
    seen = [index for rank in results for index in rank[0]]
    return torch.bincount(torch.tensor(seen), minlength=SAMPLES)


@pytest.mark.parametrize(
    "stop", [pytest.param(3, id="first epoch"), pytest.param(8, id="end"), pytest.param(13, id="2")]
)
@pytest.mark.parametrize("starts", [(2, 2), (1, 2), (4, 2)])
def test_every_sample_is_used_once_per_epoch(starts, stop, tmp_path):
    first = run_ranks(starts[0], train, tmp_path, stop)
    second = run_ranks(starts[1], train, tmp_path, resume=True)
    assert torch.equal(uses(first) + uses(second), torch.full((SAMPLES,), EPOCHS))
    assert {rank[2] for rank in second} == {EPOCHS * SAMPLES // BATCH}


@pytest.mark.parametrize("passes", [1, 2])
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_run(passes, tmp_path):
    whole = run_ranks(2, train, tmp_path / "whole", passes=passes)
    run_ranks(2, train, tmp_path / "parts", 6 // passes, passes=passes)
    resumed = run_ranks(2, train, tmp_path / "parts", resume=True, passes=passes)
    for rank in range(2):
        assert torch.equal(resumed[rank][1], whole[rank][1])


def test_a_checkpoint_without_a_cursor_is_refused(tmp_path):
    _, trainer = make(tmp_path, stop=2)
    plain = Trainer(Net(), trainer.args, train_dataset=data(), callbacks=[Stop(2)])
    plain.train()
    _, trainer = make(tmp_path)
    with pytest.raises(ValueError, match="no position of a Cursor"):
        trainer.train(resume_from_checkpoint=get_last_checkpoint(str(tmp_path)))


def test_another_batch_size_is_refused_after_a_resume(tmp_path):
    train(tmp_path, stop=2)
    with pytest.raises(ValueError, match=r"batches of 4 samples .* the Cursor has 8"):
        train(tmp_path, resume=True, batch=8)


def test_an_epoch_that_steps_do_not_divide_is_refused(tmp_path):
    with pytest.raises(ValueError, match="8 batches of an epoch must be divisible by"):
        make(tmp_path, passes=3)


def test_a_cursor_with_several_passes_is_refused(tmp_path):
    _, trainer = make(tmp_path)
    cursor = mh.Cursor(data(), BATCH, max_local_batch_size=BATCH // 2)
    with pytest.raises(ValueError, match="single pass per batch, got 2 passes"):
        use_cursor(trainer, cursor)


def test_a_stream_is_refused(tmp_path):
    _, trainer = make(tmp_path)
    with pytest.raises(TypeError, match="over a dataset with a length, got list"):
        use_cursor(trainer, [])
