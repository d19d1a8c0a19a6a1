"""Accelerate's test scripts, with optimizers, models and loaders of manyhands.

The installed functions of `accelerate.test_utils.scripts` run unchanged. Only `Accelerator.prepare`
and `create_dataloader` differ: they substitute objects of manyhands.
"""

import contextlib
import inspect
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

import manyhands as mh
from helpers.ranks import as_under_torchrun, run_ranks
from manyhands.data import BaseCursor
from manyhands.integrations import accelerate as ours

with warnings.catch_warnings():  # once, before ranks are forked
    warnings.simplefilter("ignore")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.test_utils.scripts import test_distributed_data_loop as data_loop
    from accelerate.test_utils.scripts import test_script as script
    from accelerate.test_utils.scripts import test_sync as sync

ORIGINAL = Accelerator.prepare
pytestmark = pytest.mark.filterwarnings("ignore")


def make_oss(optimizer):
    kind = type(optimizer)
    known = inspect.signature(kind).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in known}
    params = optimizer.param_groups[0]["params"]
    return mh.OSS(params, optim=kind, gather_state=True, bucket_size=8, **options)


def substituting(way):
    """Return a `prepare` that replaces the optimizer, its schedule and the model."""

    def prepare(accelerator, *objects):
        optimizer = next((each for each in objects if isinstance(each, Optimizer)), None)
        new = optimizer
        if way == "NoiseScale":
            accelerator.noise = mh.NoiseScale(optimizer)  # measures, and changes no result
        elif optimizer is not None:
            new = make_oss(optimizer)
        given = []
        for each in objects:
            if each is optimizer:
                each = new
            elif isinstance(each, LambdaLR) and new is not optimizer:
                each = LambdaLR(new, each.lr_lambdas[0])
            elif isinstance(each, nn.Module) and way == "ShardedDataParallel":
                each = mh.ShardedDataParallel(each, new)
            given.append(each)
        Accelerator.prepare = ORIGINAL
        try:
            return ours.prepare(accelerator, *given)
        finally:
            Accelerator.prepare = prepare

    return prepare


def on_two_ranks(prepare, check):
    def run():
        AcceleratorState._reset_state(reset_partial_state=True)
        as_under_torchrun(OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true")
        accelerator = Accelerator(cpu=True)
        Accelerator.prepare = prepare
        check(accelerator)

    run_ranks(2, run)


@pytest.mark.parametrize("seedable", [False, True])
@pytest.mark.parametrize("way", ["NoiseScale", "OSS", "ShardedDataParallel"])
def test_training_check(way, seedable):
    on_two_ranks(substituting(way), lambda _: script.training_check(seedable))


@pytest.mark.parametrize("way", ["NoiseScale", "OSS"])  # a sharded gradient is not comparable
def test_gradient_accumulation_with_opt_and_scheduler(way):
    def check(_):
        for split, dispatch, each_batch in itertools.product([False, True], repeat=3):
            sync.test_gradient_accumulation_with_opt_and_scheduler(split, dispatch, each_batch)

    on_two_ranks(substituting(way), check)


# -- Cursor ----------------------------------------------------------------------------------------


def registering(accelerator, cursor):
    """Register a Cursor in place of `prepare`, as docs/integrations/accelerate.md describes."""
    if not isinstance(cursor, BaseCursor):
        return ORIGINAL(accelerator, cursor)
    accelerator.register_for_checkpointing(cursor)
    return cursor


def test_a_cursor_reads_every_sample_in_an_epoch():
    def check(accelerator):
        cursor = mh.Cursor(data_loop.DummyDataset(), 2 * data_loop.BATCH_SIZE)
        data_loop.test_data_loader(cursor, accelerator)

    on_two_ranks(registering, check)


@pytest.mark.parametrize(
    "function",
    [
        data_loop._test_stateful_dataloader_resume,
        data_loop._test_stateful_dataloader_save_state_resume,
    ],
    ids=["state_dict", "save_state"],
)
def test_a_resumed_cursor_reads_the_remaining_samples(function, tmp_path, monkeypatch):
    def create(accelerator, dataset_size, batch_size, iterable, shuffle):
        samples = TensorDataset(torch.arange(dataset_size))
        cursor = mh.Cursor(samples, batch_size * accelerator.num_processes)
        return accelerator.prepare(cursor)

    def check(accelerator):
        # Rank 0 saves the state of the Cursor, so all ranks need the same folder.
        folder = contextlib.nullcontext(str(tmp_path))
        data_loop.tempfile.TemporaryDirectory = lambda: folder
        function(accelerator, iterable=False)

    monkeypatch.setattr(data_loop, "create_dataloader", create)
    on_two_ranks(registering, check)
