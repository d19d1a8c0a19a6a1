"""Strategies for Lightning's Trainer: sharding and blocks, against the plain loop."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW

import manyhands as mh
from helpers.lightning_runs import (
    MARKS,
    Alone,
    adamw,
    assert_alike,
    cosine,
    data,
    fit,
    loss_of,
    module_of,
    net,
    own_loader,
    scaling,
    sgd,
    trainer_of,
    values,
)
from helpers.ranks import on_ranks, raises_on_ranks, run_ranks

pytestmark = MARKS


def strategy_of(name, *args, **options):
    import manyhands.integrations.lightning as ml

    return getattr(ml, name)(*args, **options)


SHARDINGS = {
    "ShardedDDP": partial(strategy_of, "ShardedDDPStrategy"),
    "ShardedDDP whole": partial(strategy_of, "ShardedDDPStrategy", layout="whole"),
    "FSDP": partial(strategy_of, "FullyShardedStrategy"),
    "FSDP by layer": partial(strategy_of, "FullyShardedStrategy", policy={nn.Linear}),
}


@pytest.mark.parametrize("rule", [False, True])
@pytest.mark.parametrize("name", SHARDINGS)
def test_training_is_that_of_the_plain_loop(name, rule):
    """Accumulated (with a short last step), clipped by the whole norm, and scheduled."""

    def train():
        module = module_of(adamw, cosine)
        trainer = trainer_of(
            SHARDINGS[name](),
            max_epochs=2,
            accumulate_grad_batches=3,
            gradient_clip_val=0.5,
            callbacks=[scaling()] if rule else [],
        )
        return fit(module, trainer, batches=6 if not rule else 7)

    alone = Alone(adamw, cosine, mh.AdaScale if rule else None)
    for _ in range(2):
        alone.epoch(7 if rule else 6, 2, 3, clip=0.5)
    assert_alike(run_ranks(2, train), alone, rtol=1e-4, atol=1e-5)


def test_one_device_is_the_plain_loop(tmp_path):
    file = str(tmp_path / "half.ckpt")

    def train(name, epochs, **files):
        strategy = strategy_of("BlocksStrategy", every=3) if name == "blocks" else SHARDINGS[name]()
        trainer = trainer_of(
            strategy,
            max_epochs=epochs,
            accumulate_grad_batches=3,
            gradient_clip_val=0.5,
            callbacks=[scaling()],
        )
        return fit(module_of(adamw, cosine), trainer, **files)

    def both(name):
        train(name, 1, save=file)
        return train(name, 2, resume=file)

    alone = Alone(adamw, cosine, mh.AdaScale)
    alone.epoch(8, 1, 3, clip=0.5)
    alone.losses = [[], []]
    alone.epoch(8, 1, 3, clip=0.5)
    for name in ("ShardedDDP", "FSDP by layer", "blocks"):
        assert_alike(run_ranks(1, both, name), alone)


def manual_step(self, batch, _):
    """Manual optimization; it returns nothing."""
    optimizer = self.optimizers()
    optimizer.zero_grad()
    loss = loss_of(self.net, batch)
    self.losses.append(loss.item())
    self.manual_backward(loss)
    self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
    optimizer.step()


def test_manual_optimization_is_the_plain_loop():
    def train():
        module = module_of(adamw, training_step=manual_step)
        module.automatic_optimization = False
        return fit(module, trainer_of(SHARDINGS["ShardedDDP"](), max_epochs=2))

    alone = Alone(adamw)
    alone.epoch(8, 2, 1, clip=0.5).epoch(8, 2, 1, clip=0.5)
    assert_alike(run_ranks(2, train), alone, rtol=1e-4, atol=1e-5)


@on_ranks(2, raises=ValueError, match="manual optimization .* Use ShardedDDPStrategy")
def test_manual_optimization_in_a_sharded_model_is_an_error():
    """Its backward would come before the model's forward ends, which averages no gradients then."""
    module = module_of(sgd, training_step=manual_step)
    module.automatic_optimization = False
    fit(module, trainer_of(SHARDINGS["FSDP"](), max_epochs=1))


@pytest.mark.parametrize("name", ["FSDP", "blocks"])
@on_ranks(2, raises=ValueError, match="EMAWeightAveraging does not work here")
def test_averaged_weights_are_an_error_where_devices_differ(name):
    from lightning.pytorch.callbacks import EMAWeightAveraging

    make = SHARDINGS.get(name, partial(strategy_of, "BlocksStrategy"))
    fit(module_of(sgd), trainer_of(make(), max_epochs=1, callbacks=[EMAWeightAveraging()]))


@pytest.mark.parametrize("name", ["ShardedDDP", "FSDP"])
def test_gradients_are_clipped_by_value_too(name):
    def train():
        trainer = trainer_of(
            SHARDINGS[name](),
            max_epochs=1,
            gradient_clip_val=0.01,
            gradient_clip_algorithm="value",
        )
        return fit(module_of(sgd), trainer)

    alone = Alone(sgd)
    clip = nn.utils.clip_grad_norm_
    try:
        nn.utils.clip_grad_norm_ = nn.utils.clip_grad_value_
        alone.epoch(8, 2, 1, clip=0.01)
    finally:
        nn.utils.clip_grad_norm_ = clip
    assert_alike(run_ranks(2, train), alone)


@pytest.mark.parametrize("rule", [False, True])
@pytest.mark.parametrize("name", ["ShardedDDP", "FSDP by layer"])
@pytest.mark.parametrize("before, after", [(2, 1), (1, 2), (2, 2)])
def test_a_checkpoint_is_the_plain_one(name, before, after, rule, tmp_path):
    """Saved under a strategy, and loaded without it on one device; the other way round."""
    file = str(tmp_path / "half.ckpt")

    def train(epochs, **files):
        strategy = SHARDINGS[name]() if dist.get_world_size() == 2 else "auto"
        callbacks = [scaling()] if rule else []
        trainer = trainer_of(strategy, max_epochs=epochs, callbacks=callbacks)
        return fit(module_of(adamw, cosine), trainer, **files)

    run_ranks(before, train, 1, save=file)
    saved = torch.load(file, weights_only=True)
    assert list(saved["state_dict"]) == [f"net.{key}" for key in net().state_dict()]
    got = run_ranks(after, train, 2, resume=file)
    alone = Alone(adamw, cosine, mh.AdaScale if rule else None)
    alone.epoch(8, before, 1)
    alone.losses = [[], []]
    alone.epoch(8, after, 1)
    assert_alike(got, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["ShardedDDP", "FSDP by layer"])
def test_a_model_is_validated_in_training_and_after_it(name, tmp_path):
    def train():
        trainer = trainer_of(SHARDINGS[name](), max_epochs=1)
        module = module_of(adamw)
        result = fit(module, trainer, validate=True)
        during = float(trainer.callback_metrics["val_loss"])
        file = str(tmp_path / "last.ckpt")
        trainer.save_checkpoint(file)
        losses = [
            trainer.validate(module, own_loader(8), ckpt_path=path, verbose=False)[0]["val_loss"]
            for path in (None, file)
        ]
        with torch.no_grad():
            new = module_of(adamw)
            other = trainer_of(SHARDINGS[name]())
            losses += [
                other.validate(new, own_loader(8), ckpt_path=file, verbose=False)[0]["val_loss"]
            ]
        return result, during, *losses

    alone = Alone(adamw).epoch(8, 2, 1)
    with torch.no_grad():
        expected = torch.stack([loss_of(alone.model, b) for b in data(8).flatten(0, 1)]).mean()
    got = run_ranks(2, train)
    assert_alike([result for result, *_ in got], alone, rtol=1e-4, atol=1e-5)
    for _, *losses in got:
        assert losses == pytest.approx([float(expected)] * 4, rel=1e-4)


@pytest.mark.parametrize("name", ["ShardedDDP", "FSDP"])
@pytest.mark.parametrize("rule", [False, True])
def test_float16_skips_on_all_ranks_together(name, rule):
    def train():
        from lightning.pytorch.plugins.precision import MixedPrecision

        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
        plugin = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
        trainer = trainer_of(
            SHARDINGS[name](),
            max_epochs=5,
            plugins=[plugin],
            gradient_clip_val=0.5,
            callbacks=[scaling()] if rule else [],
        )
        result = fit(module_of(sgd), trainer)
        return result["params"], result["losses"], plugin.scaler.get_scale()

    first, second = run_ranks(2, train)
    torch.testing.assert_close(first[0], second[0], rtol=0, atol=0)
    assert first[2] == second[2] < 2.0**32
    assert all(torch.isfinite(param).all() for param in first[0])
    assert sum(first[1][-8:]) < 0.8 * sum(first[1][:8])


def test_modules_that_are_wrapped_already_stay_wrapped():
    def configure_model(self):
        if not isinstance(self.net[0], mh.FSDP):
            self.net[0] = mh.FSDP(self.net[0])

    def train():
        module = module_of(adamw, configure_model=configure_model)
        return fit(module, trainer_of(SHARDINGS["FSDP"](), max_epochs=1))

    assert_alike(run_ranks(2, train), Alone(adamw).epoch(8, 2, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["ShardedDDP", "FSDP by layer"])
def test_a_second_fit_trains_the_same_model_on(name):
    def train():
        module = module_of(partial(SGD, lr=0.05))  # whose optimizer has no state to lose
        trainer = trainer_of(SHARDINGS[name](), max_epochs=1)
        fit(module, trainer)
        module.losses = []
        trainer.fit_loop.max_epochs = 2
        return fit(module, trainer)

    alone = Alone(partial(SGD, lr=0.05)).epoch(8, 2, 1)
    alone.losses = [[], []]
    assert_alike(run_ranks(2, train), alone.epoch(8, 2, 1), rtol=1e-4, atol=1e-5)


def test_an_oss_of_configure_optimizers_stays():
    def train():
        make = lambda params: mh.OSS(params, optim=AdamW, lr=0.01)  # noqa: E731
        module = module_of(make)
        result = fit(module, trainer_of(SHARDINGS["ShardedDDP"](), max_epochs=1))
        assert isinstance(module.optimizers().optimizer, mh.OSS)
        return result

    assert_alike(run_ranks(2, train), Alone(adamw).epoch(8, 2, 1), rtol=1e-4, atol=1e-5)


class Hides(SGD):
    """Its argument is not among its defaults."""

    def __init__(self, params, lr=0.1, secret=3):
        super().__init__(params, lr)


@pytest.mark.parametrize(
    "make, match",
    [
        (Hides, "some arguments of Hides.*mh.OSS"),
        (lambda params: mh.OSS(params, optim=AdamW), "returned an OSS.*layout"),
    ],
)
def test_an_optimizer_that_cannot_become_an_oss_is_an_error(make, match):
    def train():
        fit(module_of(make), trainer_of(SHARDINGS["ShardedDDP whole"](), max_epochs=1))

    raises_on_ranks(1, ValueError, train, match=match)


def test_unknown_options_are_an_error():
    for name, takes in (("ShardedDDPStrategy", "OSS"), ("FullyShardedStrategy", "Fully")):
        with pytest.raises(
            TypeError, match=f"unknown options: colour. It takes the options of {takes}"
        ):
            strategy_of(name, colour="blue")


def test_a_sharded_model_cannot_be_handed_back_to_the_process_that_forked():
    with pytest.raises(ValueError, match="Omit it, or use ShardedDDPStrategy"):
        strategy_of("FullyShardedStrategy", start_method="fork")
    strategy_of("FullyShardedStrategy", start_method="popen")


def test_a_crew_is_an_error_that_says_what_to_do():
    with pytest.raises(ValueError, match=r"a separate Trainer \(devices=1\)"):
        strategy_of("BlocksStrategy", mh.DiLoCo, crew=object())


# -- blocks ------------------------------------------------------------------------------------

BLOCKS = {
    "DiLoCo": (mh.DiLoCo, {"every": 3}),
    "BMUF": (mh.BMUF, {"global_sync_iter": 4}),
    "fragments": (mh.DiLoCo, {"every": 4, "fragments": 2}),
}


def blocks_by_hand(make, options, steps, rule=False, batches=8):
    """Each rank's loop, with a last sync round."""
    model, losses = net(), []
    plain = sgd(model.parameters())
    optimizer = make(mh.AdaScale(plain, world_size=1) if rule else plain, **options)
    for i in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, data(batches)[dist.get_rank(), i % batches])
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    optimizer.synchronize()
    return values(model), losses, optimizer.rounds


@pytest.mark.parametrize("rule", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_those_of_the_plain_loop(name, rule):
    make, options = BLOCKS[name]

    def both():
        module = module_of(sgd)
        trainer = trainer_of(
            strategy_of("BlocksStrategy", make, **options),
            max_epochs=2,
            callbacks=[scaling()] if rule else [],
        )
        result = fit(module, trainer)
        ran = result["params"], result["losses"], module.optimizers().rounds
        return ran, blocks_by_hand(make, options, 16, rule)

    first, second = run_ranks(2, both)
    for ran, expected in (first, second):
        torch.testing.assert_close(ran, expected, rtol=0, atol=0)
    torch.testing.assert_close(first[0][0], second[0][0], rtol=0, atol=0)
    assert first[0][1] != second[0][1]


@pytest.mark.parametrize("before, after", [(2, 2), (2, 1), (1, 2)])
def test_blocks_are_saved_and_validated_synchronized(before, after, tmp_path):
    file = str(tmp_path / "half.ckpt")

    def train(epochs, **files):
        module = module_of(partial(SGD, lr=0.05))  # without a state of each device's own
        trainer = trainer_of(strategy_of("BlocksStrategy", mh.DiLoCo, every=3), max_epochs=epochs)
        result = fit(module, trainer, validate=True, **files)
        return result["params"], float(trainer.callback_metrics["val_loss"])

    halves = run_ranks(before, train, 1, save=file)
    saved = torch.load(file, weights_only=True)
    for params, loss in halves:
        torch.testing.assert_close(list(saved["state_dict"].values()), params, rtol=0, atol=0)
        assert loss == halves[0][1]
    got = run_ranks(after, train, 2, resume=file)
    assert len({loss for _, loss in got}) == 1
    if before == after:
        whole = run_ranks(after, train, 2)
        torch.testing.assert_close(got[0], whole[0], rtol=0, atol=0)
