"""Mistakes of the caller: each raises before anything has changed."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import manyhands as mh
from helpers.checkpoint_oracle import Setup, assert_equal
from helpers.forge import complete
from helpers.ranks import on_ranks, raises_on_ranks
from manyhands.checkpoint import _format


def other_model(change):
    setup = Setup("plain", seed=3).train(1)
    change(setup.module)
    return setup


def add_layer(module):
    module.more = nn.Linear(2, 2)


def drop_layer(module):
    del module.image


def widen(module):
    module.frozen = nn.Parameter(torch.ones(5), requires_grad=False)


def as_integers(module):
    module.norm.running_mean = module.norm.running_mean.long()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (add_layer, "only the model here has 'more.bias', 'more.weight'"),
        (drop_layer, "only the checkpoint has 'image.bias', 'image.weight'"),
        (widen, "'frozen' is (4,) in the checkpoint and (5,) here"),
        (as_integers, "'norm.running_mean' is float32 in the checkpoint and torch.int64 here"),
    ],
)
def test_another_model_is_an_error(change, message, tmp_path):
    mh.save(tmp_path, **Setup("plain").train(1).given())
    setup = other_model(change)
    before = {name: t.clone() for name, t in setup.module.state_dict().items()}
    with pytest.raises(ValueError, match=re.escape(message)):
        mh.load(tmp_path, model=setup.model)
    for name, tensor in setup.module.state_dict().items():
        assert torch.equal(tensor, before[name])


def group_of(module, **options):
    return {"params": list(module.parameters()), **options}


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda m: torch.optim.SGD(m.parameters()), ValueError, "the state of AdamW"),
        (lambda m: torch.optim.AdamW(m.parameters()), ValueError, "2 parameter groups"),
        (
            lambda m: torch.optim.AdamW([group_of(m.first), group_of(m.last)]),
            ValueError,
            "only here 'first.bias'",
        ),
        (
            lambda m: torch.optim.AdamW([nn.Parameter(torch.ones(2))]),
            ValueError,
            "is not in the model",
        ),
        (lambda m: mh.OSS(m.parameters()), ValueError, "is SGD"),
        (lambda m: nn.Linear(1, 1), TypeError, "must be a torch.optim.Optimizer"),
    ],
)
def test_another_optimizer_is_an_error(make, error, message, tmp_path):
    mh.save(tmp_path, **Setup("plain").train(1).given())
    setup = Setup("plain", seed=3).train(1)
    before = setup.held()
    with pytest.raises(error, match=message):
        mh.load(tmp_path, model=setup.model, optimizer=make(setup.module))
    assert_equal(setup.held(), before)


def test_a_parameter_outside_of_the_model_is_told_its_place(tmp_path):
    model, temperature = nn.Linear(2, 1), nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*model.parameters(), temperature])
    with pytest.raises(ValueError, match=r"model\.register_parameter\(name, parameter\)"):
        mh.save(tmp_path, model=model, optimizer=optimizer)
    model.register_parameter("temperature", temperature)
    mh.save(tmp_path, model=model, optimizer=optimizer)


def test_a_rule_needs_a_saved_rule_but_not_the_other_way_round(tmp_path):
    bare, ruled = Setup("plain").train(1), Setup("plain", rule=mh.AdamScale).train(1)
    mh.save(tmp_path / "bare", **bare.given())
    mh.save(tmp_path / "ruled", **ruled.given())
    with pytest.raises(ValueError, match="load the checkpoint before wrapping"):
        mh.load(tmp_path / "bare", **ruled.given())
    mh.load(tmp_path / "ruled", **bare.given())
    assert_equal(bare.held(), ruled.held())
    other = Setup("plain", rule=lambda o: mh.LinearScale(o)).train(1)
    with pytest.raises(ValueError, match="gradients must be"):
        mh.load(tmp_path / "ruled", **other.given())


def test_another_scheduler_and_other_values(tmp_path):
    setup = Setup("plain").train(1)
    mh.save(tmp_path / "bare", model=setup.model)
    mh.save(tmp_path, **setup.given(), one=1)
    step = torch.optim.lr_scheduler.StepLR(setup.optimizer, 2)
    with pytest.raises(ValueError, match="state of a CosineAnnealingLR, but the scheduler here"):
        mh.load(tmp_path, scheduler=step)
    with pytest.raises(ValueError, match=r"1 scheduler\(s\), but 2"):
        mh.load(tmp_path, scheduler=[step, step])
    with pytest.raises(ValueError, match=r"saved without optimizer=\. Load it without optimizer="):
        mh.load(tmp_path / "bare", optimizer=setup.optimizer)
    with pytest.raises(
        ValueError, match=r"saved without scheduler=\. .* Pass scheduler= to mh\.save"
    ):
        mh.load(tmp_path / "bare", scheduler=step)
    with pytest.raises(ValueError, match="has no 'scaler', but 'one'"):
        mh.load(tmp_path, scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(TypeError, match=r"one= must have state_dict\(\)"):
        mh.load(tmp_path, one=2)
    mh.save(tmp_path, model=setup.model)
    with pytest.raises(ValueError, match="has no 'one', and no other value"):
        mh.load(tmp_path, one=nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"keep": 0}, ValueError, "keep must be a whole number of at least 1"),
        ({"step": -1}, ValueError, "step must be a whole number"),
        ({"model": [nn.Linear(1, 1)]}, TypeError, "nn.ModuleDict"),
        ({"model": nn.Linear(1, 1, device="meta")}, ValueError, "to_empty"),
        ({"scheduler": 3}, TypeError, "scheduler must have"),
        ({"value": object()}, TypeError, "value/value is a builtins.object"),
        ({"value": torch.ones(1, dtype=torch.complex128)}, TypeError, "do not support"),
        ({"sgd": torch.optim.SGD([torch.ones(1)])}, TypeError, "optimizer=.first, second"),
        ({"optimizer": torch.optim.SGD([torch.ones(1)])}, ValueError, "model=model"),
    ],
)
def test_invalid_arguments_of_save_are_an_error(given, error, message, tmp_path):
    with pytest.raises(error, match=message):
        mh.save(tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


def test_paths_without_a_checkpoint_are_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        mh.load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        mh.load(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        mh.load(tmp_path / "file")
    (tmp_path / "index.json").write_text('{"weight_map": {}}')
    with pytest.raises(ValueError, match="not an index of a manyhands checkpoint"):
        mh.load(tmp_path)
    with pytest.raises(ValueError, match="is a single checkpoint"):
        mh.save(tmp_path, value=1)


def test_a_newer_format_is_an_error(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(_format, "VERSION", 3)
        mh.save(tmp_path, value=1)
    with pytest.raises(ValueError, match="format version 3, but this release reads version 2"):
        mh.load(tmp_path)


@pytest.mark.parametrize("call", [mh.save, mh.load])
@on_ranks(2, raises=TypeError, match="Use mh.FSDP or torch's fully_shard")
def test_torchs_older_fsdp_is_an_error(call, tmp_path):
    mh.save(tmp_path, model=nn.Linear(4, 2))
    cpu = torch.device("cpu")
    model = torch.distributed.fsdp.FullyShardedDataParallel(nn.Linear(4, 2), device_id=cpu)
    call(tmp_path, model=model)


@on_ranks(2, raises=ValueError, match="step: rank 0: 0; rank 1: 1")
def test_steps_that_differ_are_an_error(tmp_path):
    mh.save(tmp_path, step=dist.get_rank())


@on_ranks(2, raises=ValueError, match="different tensors. The first that differs is model")
def test_shapes_that_differ_are_an_error(tmp_path):
    mh.save(tmp_path, model=nn.Linear(2 + dist.get_rank(), 2))


@on_ranks(2, raises=TypeError, match="builtins.object")
def test_a_wrong_value_on_one_rank_is_an_error_on_all(tmp_path):
    mh.save(tmp_path, value=object() if dist.get_rank() else 1)


def test_an_optimizer_of_a_wrong_type_on_one_rank_is_an_error_on_all(tmp_path):
    def save():
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        given = scheduler if dist.get_rank() else optimizer
        mh.save(tmp_path, model=model, optimizer=given)

    raises_on_ranks(2, TypeError, save, match="got StepLR", timeout=20)
    assert complete(tmp_path) == []
