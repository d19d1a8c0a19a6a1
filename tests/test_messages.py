"""Calls of public names with wrong arguments, and what objects show of themselves.

A message states the requirement, the given value and the remedy.
"""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import manyhands as mh
from helpers.ranks import on_ranks, run_ranks
from manyhands import adaptdl
from manyhands._arguments import shown

DATA = TensorDataset(torch.ones(8, 2))


def model():
    return nn.Linear(2, 1)


def sgd():
    return SGD(model().parameters(), lr=0.1)


def rule():
    return mh.AdaScale(sgd())


def oss():
    return mh.OSS(model().parameters(), SGD, lr=0.1)


def scheduler():
    return StepLR(sgd(), 1)


def loader():
    return DataLoader(DATA, batch_size=4)


NO_OPTIMIZER = "optimizer must be a torch.optim.Optimizer, got"
NO_PATH = "must be a str or an os.PathLike, got"

MESSAGES = [
    # A loader, a list, None or a model where a dataset is expected.
    (
        lambda: mh.Cursor(loader()),
        "Pass the loader's dataset and options: Cursor(loader.dataset, ba",
    ),
    (
        lambda: mh.Cursor(loader(), 4),
        "Pass the loader's dataset and options: Cursor(loader.dataset, ba",
    ),
    (lambda: mh.Cursor(DATA), "Cursor needs batch_size: the number of samples per step, see `k"),
    (lambda: mh.Cursor(None, 4), "dataset must be a dataset with a length, got None."),
    (lambda: adaptdl.AdaptiveDataLoader(loader(), 4), "AdaptiveDataLoader(loader.dataset, batch_s"),
    (lambda: adaptdl.AdaptiveDataLoader(None, 4), "a dataset with a length, got None."),
    (lambda: mh.largest_micro_batch(model(), None, loader(), 4), "a batch of the loader, with"),
    # Anything else where an optimizer is expected.
    (lambda: mh.Cursor(DATA, 4, optimizer=model()), NO_OPTIMIZER),
    (lambda: mh.Cursor(DATA, 4, optimizer=[sgd()]), "got list. From a list, pass the last one"),
    (lambda: mh.Cursor(DATA, 4, optimizer=scheduler()), f"{NO_OPTIMIZER} StepLR."),
    (lambda: mh.StepTiming(model()), NO_OPTIMIZER),
    (lambda: mh.StepTiming(None), f"{NO_OPTIMIZER} None."),
    (lambda: mh.stopping(scheduler()), f"{NO_OPTIMIZER} StepLR."),
    (lambda: mh.WeightedMean([4], [sgd()]), f"{NO_OPTIMIZER} list."),
    (lambda: mh.ShardedDataParallel(model(), model()), NO_OPTIMIZER),
    (lambda: mh.start(process_group=False).save(optimizer=3), f"{NO_OPTIMIZER} 3."),
    (lambda: mh.start(process_group=False).load(optimizer=model()), NO_OPTIMIZER),
    (lambda: mh.ProgressScheduler(scheduler(), sgd()), "got SGD. Write ProgressScheduler(schedule"),
    (lambda: mh.ProgressScheduler(None, rule()), "scheduler must be a torch scheduler, got None"),
    (lambda: mh.shard(sgd(), model()), "takes the model, and then the optimizer; got SGD"),
    (lambda: mh.NoiseScale(model()), NO_OPTIMIZER),
    (lambda: mh.NoiseScale([sgd()]), "got list. From a list, pass the last one"),
    (lambda: mh.NoiseScale(None), f"{NO_OPTIMIZER} None."),
    # Anything else where parameters, a class or a model are expected.
    (lambda: mh.OSS(model(), SGD), "got Linear. Write OSS(model.parameters(), optim=..., lr=...)"),
    (lambda: mh.OSS(None, SGD), "params must be parameters or parameter groups, got NoneType."),
    (
        lambda: mh.WholeTensorOptimizer(model(), SGD),
        "Write WholeTensorOptimizer(model.parameters()",
    ),
    (
        lambda: mh.WholeTensorOptimizer(model().parameters(), sgd()),
        "optim is an optimizer instance",
    ),
    (lambda: mh.ShardedDataParallel([model()], oss()), "module must be a torch.nn.Module, got ["),
    (lambda: mh.ShardedDataParallel(None, oss()), "module must be a torch.nn.Module, got None."),
    (lambda: adaptdl.AdaptiveDataParallel(sgd(), model()), "model must be a torch.nn.Module, got"),
    (
        lambda: mh.largest_micro_batch(sgd(), None, 1, 4),
        "model must be a torch.nn.Module, got SGD.",
    ),
    (lambda: mh.FSDP(sgd()), "module must be a torch.nn.Module, got SGD."),
    (
        lambda: mh.plan(SGD, model()),
        "must be a torch.nn.Module, or a function that returns one, got <class",
    ),
    (lambda: mh.plan(model(), sgd), "optimizer must be a name, a class or an optimizer, got funct"),
    (lambda: mh.load_weights(sgd(), {}), "model must be a torch.nn.Module, got SGD."),
    (lambda: mh.save("run", scheduler=model()), "scheduler must be a scheduler, got Linear."),
    (lambda: mh.save("run", scheduler=sgd()), "scheduler must be a scheduler, got SGD."),
    # Anything else where a path is expected.
    (lambda: mh.save(None), f"path {NO_PATH} None. It is the folder of the checkpoints."),
    (lambda: mh.load(model()), f"path {NO_PATH} Linear(in_features=2, out_features=1, bias=True)."),
    (lambda: mh.start(checkpoints=3), f"path {NO_PATH} 3."),
    (lambda: mh.save(b"run"), f"path {NO_PATH} b'run'."),
    (lambda: mh.Record(sgd()), f"path {NO_PATH} SGD. Write Record(path, source, ...)."),
    (lambda: mh.read_record(None), f"path {NO_PATH} None."),
    (lambda: mh.save_weights("out", model()), "Write save_weights(model, folder)."),
    (lambda: mh.load_weights(model(), None), "got None. Or give a dict of tensors."),
]
VALUES = [
    (
        lambda: mh.Cursor(DATA, 4, num_workers=None),
        "num_workers must be a whole number of at leas",
    ),
    (lambda: mh.WeightedMean(4), "counts must be a list with one number of at least 0 for each"),
    (lambda: mh.WeightedMean([sgd()]), "micro-batch, got"),
    (lambda: mh.Crew(model()), 'store is "host:port", such as "10.0.0.1:29400", got Linear('),
    (lambda: mh.Ramp(loader(), rule()), "max_scale must be a finite number above 0, got AdaScale."),
]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [(call, TypeError, message) for call, message in MESSAGES]
    + [(call, ValueError, message) for call, message in VALUES],
    ids=[message[:48] for _, message in [*MESSAGES, *VALUES]],
)
def test_a_wrong_argument_is_named_with_what_is_needed(call, error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=re.escape(message)) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_value_in_a_message_is_short():
    assert shown([1, 2]) == "[1, 2]"
    assert shown(nn.Sequential(*(nn.Linear(2, 2) for _ in range(9)))) == "Sequential"
    assert shown(sgd()) == "SGD"
    assert shown(object()) == "object"


@on_ranks(2, raises=(TypeError, ValueError), match="DataLoader", timeout=20)
def test_a_loader_on_one_rank_is_an_error_on_all():
    mh.Cursor(loader() if dist.get_rank() else DATA, batch_size=4)


# -- sharding --------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["auto", 0, 1])
def test_a_level_with_ddp_and_no_process_group_names_start(level):
    module = model()
    with pytest.raises(ValueError, match=r"needs a process group.*Call manyhands\.start\(\)"):
        mh.shard(module, SGD(module.parameters(), lr=0.1), level)
    assert not dist.is_initialized()
    mh.shard(module, SGD(module.parameters(), lr=0.1), level=2)  # nothing was changed


def on_meta(level):
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    return mh.shard(module, AdamW(module.parameters()), level)


ADVICE = r"^4 tensors of the model, such as 0.weight, are on the meta device.*load_weights.*to_e"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("level", ["auto", 0, 1, 2, 3])
@on_ranks("ranks", raises=RuntimeError, match=ADVICE, timeout=20)
def test_a_model_without_memory_is_told_how_to_get_it(level, ranks):
    sharded, _ = on_meta(level)
    sharded(torch.ones(1, 2))


def test_sharded_data_parallel_of_a_model_without_memory():
    module = nn.Linear(2, 1, device="meta")
    optimizer = mh.OSS(module.parameters(), SGD, lr=0.1)
    with pytest.raises(RuntimeError, match="has no memory"):
        mh.ShardedDataParallel(module, optimizer)


def test_a_model_that_gets_memory_after_the_error_trains():
    def train():
        sharded, optimizer = on_meta(3)
        with pytest.raises(RuntimeError, match="has no memory"):
            sharded(torch.ones(1, 2))
        mh.load_weights(sharded, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).state_dict())
        sharded(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    for ranks in (1, 2):
        run_ranks(ranks, train)


# -- what is shown ---------------------------------------------------------------------------------


def test_a_job_shows_its_engine_and_place():
    job = mh.start(process_group=False, checkpoints="runs/a")
    assert repr(job) == "Job(engine='none', rank=0, world_size=1, checkpoints='runs/a')"


def test_a_dry_run_shows_what_it_has_counted():
    with mh.dry_run(4) as counted:
        assert repr(counted) == "DryRun(store requests: 0 (0 B))"
        dist.all_reduce(torch.ones(1024))
        dist.all_reduce(torch.ones(1024))
    assert repr(counted) == "DryRun(all_reduce: 2 (12.0 KiB), store requests: 0 (0 B))"


def test_a_plan_shows_its_table():
    found = mh.plan(model(), AdamW, workers=4)
    assert repr(found) == str(found)
    assert repr(found.rows[0]) == "Row('DDP', 64 B per worker, 18 B sent per step)"
