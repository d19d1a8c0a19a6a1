"""Sharding on a GPU, over NCCL with one rank: equal to torch's optimizer without it."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import manyhands as mh
from helpers.sharding_oracle import (
    AROUND_OSS,
    OPTIMIZERS,
    assert_same,
    copied,
    loss_of,
    make_batches,
    make_model,
    oss,
    plain,
    wrap,
)

pytestmark = pytest.mark.gpu

STEPS = 4
KINDS = {"SGD": (SGD, {"lr": 0.05, "momentum": 0.9}), "AdamW": (AdamW, {"lr": 0.02})}


def batches(device, dtype=torch.float64):
    x, y = make_batches(STEPS, 1, 1, dtype=dtype)
    return [(x[step, 0, 0].to(device), y[step, 0, 0].to(device)) for step in range(STEPS)]


def train(model, optimizers, device, dtype=torch.float64):
    for x, y in batches(device, dtype):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, x, y).backward()
        for optimizer in optimizers:
            optimizer.step()


def whole(params):
    return [getattr(p, "full_tensor", lambda p=p: p)().detach().cpu() for p in params]


@pytest.mark.parametrize("way", AROUND_OSS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_oss_trains_as_its_optimizer_does(way, kind, device, group):
    build = OPTIMIZERS[kind]
    alone = make_model().to(device)
    train(alone, build(alone, plain), device)
    module = make_model().to(device)
    optimizers = build(module, oss)
    train(wrap(way, module, optimizers), optimizers, device)
    assert_same([copied(module.parameters())], copied(alone.parameters()))


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_every_level_trains_as_torch_alone(level, kind, device, group):
    make, options = KINDS[kind]
    alone = make_model().to(device)
    train(alone, [make(alone.parameters(), **options)], device)
    model = make_model().to(device)
    model, optimizer = mh.shard(model, make(model.parameters(), **options), level)
    train(model, [optimizer], device)
    assert_same([whole(model.parameters())], whole(alone.parameters()))


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("rule", [False, True])
def test_fsdp_in_wraps_of_its_own(reshard, rule, device, group):
    """With AdaScale, whose gradients are where the engine has put them."""

    def trained(sharded):
        model = make_model().to(device)
        if sharded:
            for at in (0, 2):
                model[at] = mh.FSDP(model[at], reshard_after_forward=reshard)
            model = mh.FSDP(model, reshard_after_forward=reshard)
        optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
        if rule:
            optimizer = mh.AdaScale(optimizer, measure_every=1)
        train(model, [optimizer], device)
        return whole(model.parameters())

    assert_same([trained(True)], trained(False), rtol=1e-7)


@pytest.mark.parametrize("level", [2, 3])
def test_parameters_in_bfloat16(level, device, group):
    """One rank has nothing to sum, so the numbers are torch's, to the bit."""
    alone = make_model(torch.bfloat16).to(device)
    train(alone, [AdamW(alone.parameters(), lr=0.02)], device, torch.bfloat16)
    model = make_model(torch.bfloat16).to(device)
    model, optimizer = mh.shard(model, AdamW(model.parameters(), lr=0.02), level)
    train(model, [optimizer], device, torch.bfloat16)
    assert_same([whole(model.parameters())], whole(alone.parameters()), rtol=0, atol=0)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_a_real_overflow_skips_the_step_at_every_level(level, device, group):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 3)).to(device)
    model, optimizer = mh.shard(model, AdamW(model.parameters(), lr=0.02), level)
    scaler = mh.ShardedGradScaler(device=device, init_scale=2.0**40, backoff_factor=2.0**-15)
    x, y = batches(device, torch.float32)[0]
    skipped = 0
    for _ in range(6):
        before, scale = copied(whole(model.parameters())), scaler.get_scale()
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16):
            loss = nn.functional.mse_loss(model(x), y.half())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        equal = all(map(torch.equal, before, whole(model.parameters())))
        assert equal == (scaler.get_scale() < scale)
        skipped += equal
    assert 1 <= skipped <= 4


def test_clipping(device, group):
    results = []
    for level in (None, 0, 1, 2, 3):
        model = make_model().to(device)
        optimizer = SGD(model.parameters(), lr=0.05)
        if level is not None:
            model, optimizer = mh.shard(model, optimizer, level)
        for x, y in batches(device):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            if hasattr(model, "clip_grad_norm_"):
                model.clip_grad_norm_(0.1)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        results.append(whole(model.parameters()))
    for found in results[1:]:
        assert_same([found], results[0])


@pytest.mark.filterwarnings("ignore")  # the compiler warns of its own code
@pytest.mark.parametrize("level", [2, 3])
def test_a_compiled_model(level, device, group):
    def trained(compiled):
        model = make_model().to(device)
        model, optimizer = mh.shard(model, AdamW(model.parameters(), lr=0.02), level)
        train(torch.compile(model) if compiled else model, [optimizer], device)
        return whole(model.parameters())

    assert_same([trained(True)], trained(False), rtol=1e-6, atol=1e-9)


def test_auto_takes_the_cards_free_memory(cuda, group):
    model = make_model().to(cuda)
    model, optimizer = mh.shard(model, AdamW(model.parameters(), lr=0.02))
    train(model, [optimizer], cuda)


# -- checkpoints ----------------------------------------------------------------------------------


def level_and_optimizer(level, device, seed=0):
    model = make_model().to(device)
    if seed:
        for p in model.parameters():
            nn.init.constant_(p, float(seed))
    return mh.shard(model, AdamW(model.parameters(), lr=0.02), level)


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("level", [0, 2, 3])
def test_a_checkpoint_has_the_step_it_was_taken_at(level, wait, device, group, tmp_path):
    """The parameters go on changing on the device while a save is in the background."""
    model, optimizer = level_and_optimizer(level, device)
    train(model, [optimizer], device)
    expected = copied(whole(model.parameters()))
    if device == "cuda":
        torch.cuda._sleep(50_000_000)  # work that is not done when `save` begins
    saving = mh.save(tmp_path, model=model, optimizer=optimizer, step=STEPS, wait=wait)
    train(model, [optimizer], device)
    saving.wait()
    again, other = level_and_optimizer(level, device, seed=3)
    assert mh.load(tmp_path, model=again, optimizer=other)["step"] == STEPS
    assert_same([whole(again.parameters())], expected, rtol=0, atol=0)
    train(again, [other], device)
    assert_same([whole(again.parameters())], whole(model.parameters()), rtol=0, atol=0)


@pytest.mark.parametrize("to", ["cpu", "cuda"])
def test_a_checkpoint_moves_between_devices(to, cuda, group, tmp_path):
    there = {"cpu": "cuda", "cuda": "cpu"}[to]
    model, optimizer = level_and_optimizer(1, there)
    train(model, [optimizer], there)
    mh.save(tmp_path, model=model, optimizer=optimizer, step=1)
    again, other = level_and_optimizer(2, to, seed=3)
    mh.load(tmp_path, model=again, optimizer=other)
    assert_same([whole(again.parameters())], whole(model.parameters()), rtol=0, atol=0)
    train(again, [other], to)
    train(model, [optimizer], there)
    assert_same([whole(again.parameters())], whole(model.parameters()), rtol=1e-9)


def test_a_model_is_loaded_into_a_copy_on_the_gpu(device, group, tmp_path):
    model = make_model().to(device)
    mh.save(tmp_path, model=model)
    again = copy.deepcopy(model)
    nn.init.zeros_(again[0].weight)
    mh.load(tmp_path, model=again)
    assert torch.equal(again[0].weight, model[0].weight)
    assert again[0].weight.device.type == device
