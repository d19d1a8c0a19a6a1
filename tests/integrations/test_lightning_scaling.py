"""Scaling rules as callbacks of Lightning's Trainer, against the plain loop in one process."""

import doctest
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.utils.data import DataLoader

import manyhands as mh
from helpers.lightning_runs import (
    MARKS,
    Alone,
    Resumable,
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
from helpers.pages import ROOT, run_page
from helpers.ranks import on_ranks, raises_on_ranks, run_ranks
from manyhands.ramp import _ramp

pytestmark = MARKS


RULES = {
    "SGD": (sgd, None, mh.AdaScale),
    "AdamW": (adamw, None, mh.AdaScale),
    "linear": (sgd, mh.LinearScale, mh.LinearScale),
    "sqrt": (adamw, partial(mh.SqrtScale, rescale_adam=True), None),
    "legw": (sgd, lambda optimizer, **o: mh.LEGWScale(3, 64, optimizer, batch_size=8, **o), None),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", RULES)
def test_training_is_that_of_the_plain_loop(name, ranks):
    make, rule, default = RULES[name]

    def train():
        module = module_of(make, cosine)
        callbacks = [scaling(*([] if rule is None else [rule]))]
        trainer = trainer_of(
            max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.5, callbacks=callbacks
        )
        return fit(module, trainer)

    alone = Alone(make, cosine, default if rule is None else rule)
    alone.epoch(8, ranks, 2, clip=0.5).epoch(8, ranks, 2, clip=0.5)
    assert_alike(run_ranks(ranks, train), alone)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("batches, passes", [(7, 3), (8, 16), (5, 1)])
def test_a_short_last_step_is_a_smaller_batch(batches, passes, ranks):
    def train():
        module = module_of(sgd, cosine)
        trainer = trainer_of(max_epochs=2, accumulate_grad_batches=passes, callbacks=[scaling()])
        result = fit(module, trainer, batches)
        assert trainer.accumulate_grad_batches == passes
        return result

    alone = Alone(sgd, cosine, mh.AdaScale)
    alone.epoch(batches, ranks, passes).epoch(batches, ranks, passes)
    assert_alike(run_ranks(ranks, train), alone)


class Endless(torch.utils.data.IterableDataset):
    """Data whose length nobody knows."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(data(self.batches)[dist.get_rank()])


def test_a_short_last_step_of_data_without_a_length():
    def train():
        callback = scaling()
        trainer = trainer_of(max_epochs=2, accumulate_grad_batches=3, callbacks=[callback])
        result = fit(module_of(sgd), trainer, 7, loader=lambda n: DataLoader(Endless(n), None))
        return result, callback.rule.snapshot()["short"]

    got = run_ranks(2, train)
    assert [short for _, short in got] == [2, 2]
    alone = Alone(sgd, None, mh.AdaScale)
    for steps in [[range(3), range(3, 6), range(6, 7)]] * 2:
        for batches in steps:
            alone.step([(r, data(7)[r, i]) for i in batches for r in range(2)])
    expected = alone.result(0)
    torch.testing.assert_close(got[0][0]["params"], expected["params"], rtol=1e-5, atol=1e-6)
    assert got[0][0]["progress"] == pytest.approx(expected["progress"])


def test_bfloat16_is_the_plain_loop_under_autocast():
    def train():
        module = module_of(sgd)
        return fit(module, trainer_of(max_epochs=2, precision="bf16-mixed", callbacks=[scaling()]))

    alone = Alone(sgd, None, mh.AdaScale).epoch(8, 2, 1, autocast=True)
    alone.epoch(8, 2, 1, autocast=True)
    assert_alike(run_ranks(2, train), alone, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("init_scale", [16.0, 2.0**40])
def test_float16_is_unscaled_clipped_and_skipped_as_in_the_plain_loop(clip, init_scale):
    """With a scale of 2**40 the first steps overflow, and are skipped."""

    def train():
        from lightning.pytorch.plugins.precision import MixedPrecision

        scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
        plugin = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
        module = module_of(sgd)
        callback = scaling()
        trainer = trainer_of(
            max_epochs=4, plugins=[plugin], gradient_clip_val=clip, callbacks=[callback]
        )
        fit(module, trainer)
        return values(module), callback.rule.progress, callback.rule.snapshot()["skipped"]

    def plain():
        model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=init_scale)
        rule = mh.AdaScale(sgd(model.parameters()), grad_scaler=scaler)
        for batch in list(data(8)[0]) * 4:
            rule.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(model, batch)
            scaler.scale(loss).backward()
            if clip is not None:
                scaler.unscale_(rule)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(rule)
            scaler.update()
        return values(model), rule.progress, rule.snapshot()["skipped"]

    (both,) = run_ranks(1, lambda: [train(), plain()])
    torch.testing.assert_close(both[0], both[1], rtol=0, atol=0)
    assert (both[0][2] > 0) == (init_scale > 16.0)


@pytest.mark.parametrize("before, after", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_a_checkpoint_goes_on_with_another_number_of_devices(before, after, tmp_path):
    file = str(tmp_path / "half.ckpt")

    def train(epochs, **files):
        module = module_of(adamw, cosine)
        trainer = trainer_of(max_epochs=epochs, accumulate_grad_batches=2, callbacks=[scaling()])
        return fit(module, trainer, **files)

    run_ranks(before, train, 1, save=file)
    got = run_ranks(after, train, 2, resume=file)
    alone = Alone(adamw, cosine, mh.AdaScale)
    alone.epoch(8, before, 2)
    alone.losses = [[], []]
    alone.epoch(8, after, 2)
    assert_alike(got, alone)


@pytest.mark.parametrize("name", ["auto", "ShardedDDPStrategy", "FullyShardedStrategy"])
def test_a_run_without_a_rule_goes_on_with_one_and_without_it_again(name, tmp_path):
    first, second = str(tmp_path / "bare.ckpt"), str(tmp_path / "scaled.ckpt")

    def train(epochs, callbacks, **files):
        import manyhands.integrations.lightning as ml

        strategy = name if name == "auto" else getattr(ml, name)()
        trainer = trainer_of(strategy, max_epochs=epochs, callbacks=callbacks)
        return fit(module_of(adamw), trainer, **files)

    run_ranks(2, train, 1, [], save=first)
    run_ranks(2, train, 2, [scaling()], resume=first, save=second)
    got = run_ranks(2, train, 3, [], resume=second)
    alone = Alone(adamw).epoch(8, 2, 1)
    alone.make_rule, alone.options = mh.AdaScale, {"num_gradients_to_accumulate": 2}
    alone.ready(2).set_progress(8.0)
    alone.epoch(8, 2, 1)
    assert alone.rule.progress > 16
    alone.rule.unhook()
    alone.make_rule = alone.rule = None
    alone.losses = [[], []]
    assert_alike(got, alone.epoch(8, 2, 1), rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_model_checkpoint_saves_in_mid_epoch_and_training_goes_on(tmp_path):
    from lightning.pytorch.callbacks import ModelCheckpoint

    saves = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=3, save_top_k=-1)
    options = {"max_epochs": 2, "accumulate_grad_batches": 2}
    fitted = partial(fit, loader=Resumable)
    trainer = trainer_of(callbacks=[scaling(), saves], enable_checkpointing=True, **options)
    whole = fitted(module_of(sgd), trainer)
    file = str(tmp_path / "epoch=0-step=3.ckpt")
    resumed = fitted(module_of(sgd), trainer_of(callbacks=[scaling()], **options), resume=file)
    torch.testing.assert_close(resumed["params"], whole["params"], rtol=0, atol=0)
    assert resumed["progress"] == whole["progress"]


def test_lightnings_own_scheduler_may_change_the_passes():
    def train():
        from lightning.pytorch.callbacks import GradientAccumulationScheduler

        changes = GradientAccumulationScheduler({0: 1, 1: 3})
        trainer = trainer_of(max_epochs=2, callbacks=[scaling(), changes])
        return fit(module_of(sgd), trainer)

    alone = Alone(sgd, None, mh.AdaScale).epoch(8, 2, 1).epoch(8, 2, 3)
    assert_alike(run_ranks(2, train), alone)


# -- counted in progress -----------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_and_schedules_may_be_counted_in_progress(ranks):
    end = 15

    def train():
        module = module_of(sgd, partial(CosineAnnealingLR, T_max=end))
        trainer = trainer_of(
            max_steps=end, accumulate_grad_batches=2, callbacks=[scaling(by_progress=True)]
        )
        return fit(module, trainer)

    alone = Alone(sgd, None, mh.AdaScale)
    rule = alone.ready(2 * ranks)
    alone.schedule = schedule = mh.ProgressScheduler(
        CosineAnnealingLR(alone.plain, T_max=end), rule, end=end
    )
    while not schedule.done:
        for first in range(0, 8, 2):
            now = [(r, data(8)[r, i]) for i in (first, first + 1) for r in range(ranks)]
            if not schedule.done:
                alone.step(now)
    assert 0 < alone.steps < end
    assert alone.result(0)["lr"] == 0.0
    assert_alike(run_ranks(ranks, train), alone)


def test_epochs_counted_in_progress_are_those_of_the_small_batch():
    """Two epochs of 8 batches on 2 devices are 32 small-batch steps."""

    def train(by_progress):
        module = module_of(sgd, partial(StepLR, step_size=1, gamma=0.5), interval="epoch")
        callback = scaling(by_progress=by_progress)
        trainer = trainer_of(max_epochs=2, callbacks=[callback])
        result = fit(module, trainer)
        assert trainer.max_epochs == 2
        return result["progress"], result["lr"], trainer.current_epoch

    (progress, lr, epochs), _ = run_ranks(2, train, True)
    assert 32 <= progress < 34
    assert lr == 0.05 / 4
    assert epochs > 2
    (progress, lr, epochs), _ = run_ranks(2, train, False)
    assert progress < 32
    assert (lr, epochs) == (0.05 / 4, 2)


def test_a_run_counted_in_progress_goes_on_to_the_same_end(tmp_path):
    file = str(tmp_path / "half.ckpt")

    def train(end, **files):
        module = module_of(sgd, partial(CosineAnnealingLR, T_max=30))
        trainer = trainer_of(max_steps=end, callbacks=[scaling(by_progress=True)])
        return fit(module, trainer, **files)

    run_ranks(2, train, 12, save=file)
    for result in run_ranks(1, train, 30, resume=file):
        assert 30 <= result["progress"] < 32
        assert result["lr"] == 0.0
    for result in run_ranks(1, train, 12, resume=file):
        assert result["losses"] == []  # it has got there already


@pytest.mark.parametrize("made", [cosine, partial(StepLR, step_size=1)])
def test_a_schedule_in_steps_goes_on_in_progress_and_not_the_other_way(made, tmp_path):
    steps, progress = str(tmp_path / "steps.ckpt"), str(tmp_path / "progress.ckpt")

    def train(end, callbacks, **files):
        module = module_of(sgd, made)
        return fit(module, trainer_of(max_steps=end, callbacks=callbacks), **files)

    def goes_on():
        before = train(4, [], save=steps)
        after = train(9, [scaling(by_progress=True)], resume=steps, save=progress)
        plain = made(sgd(net().parameters()))
        for _ in range(9):
            plain.optimizer.step()
            plain.step()
        return before["steps"], after["progress"], after["lr"], plain.get_last_lr()[0]

    for done, reached, rate, expected in run_ranks(2, goes_on):
        assert done == 4 and 9 <= reached < 11
        assert rate == pytest.approx(expected)
    raises_on_ranks(
        1, ValueError, train, 20, [scaling()], match="as in the run that saved it", resume=progress
    )


def test_steps_that_overflow_make_no_progress():
    def train():
        from lightning.pytorch.plugins.precision import MixedPrecision

        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
        plugin = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
        callback = scaling(by_progress=True)
        trainer = trainer_of(max_steps=10, plugins=[plugin], callbacks=[callback])
        result = fit(module_of(sgd), trainer)
        assert trainer.max_steps == 10
        return result["progress"], result["steps"], callback.rule.snapshot()["skipped"]

    ((progress, steps, skipped),) = run_ranks(1, train)
    assert skipped > 0
    assert (progress, steps) == (10.0, 10 + skipped)


def test_epochs_without_a_length_cannot_be_counted_in_progress():
    for options, schedule in (({"max_epochs": 2}, None), ({"max_steps": 9, "max_epochs": 2}, 1)):

        def train(options=options, schedule=schedule):
            make = None if schedule is None else partial(StepLR, step_size=1)
            module = module_of(sgd, make, interval="epoch")
            trainer = trainer_of(callbacks=[scaling(by_progress=True)], **options)
            fit(module, trainer, loader=lambda n: DataLoader(Endless(n), None))

        raises_on_ranks(1, ValueError, train, match="needs the length of an epoch")


# -- what is seen ------------------------------------------------------------------------------


def test_gain_and_progress_are_in_the_bar_and_in_the_log(tmp_path):
    def train():
        from lightning.pytorch.callbacks import LearningRateMonitor
        from lightning.pytorch.loggers import CSVLogger

        logger = CSVLogger(tmp_path, name="", version="")
        callback = scaling(by_progress=True)
        trainer = trainer_of(
            max_steps=6,
            accumulate_grad_batches=2,
            callbacks=[callback, LearningRateMonitor()],
            logger=logger,
            log_every_n_steps=1,
        )
        fit(module_of(sgd, cosine), trainer)
        shown = {k: float(v) for k, v in trainer.progress_bar_metrics.items()}
        return shown, callback.rule.gain(), callback.rule.progress

    shown, gain, progress = run_ranks(2, train)[0]
    assert shown == {"gain": pytest.approx(gain), "progress": pytest.approx(progress)}
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    assert len(rows) > 3
    assert {"gain", "progress", "scale", "lr-SGD"} <= set(rows[0].split(","))


def test_a_second_fit_begins_anew():
    def train():
        module, callback = module_of(sgd), scaling()
        trainer = trainer_of(max_epochs=1, callbacks=[callback])
        first = fit(module, trainer)["progress"]
        trainer.fit_loop.max_epochs = 2
        second = fit(module, trainer)["progress"]
        return first, second, callback.rule is module.optimizers().optimizer

    ((first, second, same),) = run_ranks(1, train)
    assert (first, second, same) == (8.0, 8.0, True)


@pytest.mark.filterwarnings("ignore:.*sync_dist=True")
@on_ranks(1)
def test_an_optimizer_that_is_made_once_gets_a_rule_in_every_fit(tmp_path):
    file = str(tmp_path / "bare.ckpt")
    fit(module_of(sgd), trainer_of(max_epochs=1), save=file)
    module, callback = module_of(sgd), scaling()
    optimizer = sgd(module.parameters())
    module.configure_optimizers = lambda: optimizer
    trainer = trainer_of(max_epochs=1, callbacks=[callback])
    first = fit(module, trainer)["progress"]
    # what is loaded to validate is not trained on
    trainer.validate(module, own_loader(8), ckpt_path=file, verbose=False)
    trainer = trainer_of(max_epochs=1, callbacks=[callback])
    second = fit(module, trainer)["progress"]
    assert (first, second, callback.rule is module.optimizers().optimizer) == (8.0, 8.0, True)


# -- the batch that sets itself ----------------------------------------------------------------


RAMP = {"max_scale": 16, "goal": "steps"}


def ramp_by_hand(batches, epochs):
    """Each rank's loop, under DDP."""
    model = net()
    wrapped = DistributedDataParallel(model)
    rule = mh.AdaScale(sgd(model.parameters()))
    ramp = mh.Ramp(rule, **RAMP)
    own, sizes, losses = data(batches)[dist.get_rank()], [], []
    for _ in range(epochs):
        first = 0
        while first < batches:
            passes = min(ramp.passes, batches - first)
            rule._core.batch.passes = passes  # fewer at the end of an epoch
            rule.zero_grad()
            for batch in own[first : first + passes]:
                losses.append(loss_of(wrapped, batch))
                (losses[-1] / passes).backward()
            rule.step()
            first += passes
            sizes.append(passes)
    return values(model), [loss.item() for loss in losses], rule.progress, sizes


@pytest.mark.parametrize("batches", [8, 23])
def test_a_ramp_changes_the_batch_between_steps(batches, monkeypatch):
    monkeypatch.setattr(_ramp, "EVERY", 1)

    def train():
        from manyhands.integrations.lightning import BatchRamp

        callback = BatchRamp(**RAMP)
        trainer = trainer_of(max_epochs=3, callbacks=[callback])
        result = fit(module_of(sgd), trainer, batches)
        assert trainer.accumulate_grad_batches == 1
        return result["params"], result["losses"], result["progress"], result["steps"]

    for got, (*expected, sizes) in run_ranks(2, lambda: (train(), ramp_by_hand(batches, 3))):
        assert sizes[:4] == [1, 2, 4, 1] if batches == 8 else [1, 2, 4, 8]
        torch.testing.assert_close(got[:3], tuple(expected), rtol=1e-5, atol=1e-6)
        assert got[3] == len(sizes)


def test_a_ramp_goes_on_where_it_was(tmp_path):
    file = str(tmp_path / "half.ckpt")

    def train(epochs, **files):
        from manyhands.integrations.lightning import BatchRamp

        callback = BatchRamp(**RAMP)
        result = fit(module_of(sgd), trainer_of(max_epochs=epochs, callbacks=[callback]), **files)
        return result["params"], result["progress"], callback.ramp.passes

    (half, *_) = run_ranks(2, train, 1, save=file)
    resumed = run_ranks(2, train, 2, resume=file)
    whole = run_ranks(2, train, 2)
    assert half[2] > 1
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)
    ((*_, passes),) = run_ranks(1, train, 2, resume=file)
    assert passes == 2 * whole[0][2]  # of one device: the batch stays


# -- what cannot be right ----------------------------------------------------------------------


def failing(match, error=ValueError, ranks=1, **changed):
    def train():
        options = {"callbacks": [scaling()], "max_epochs": 1, **changed.get("trainer", {})}
        options = {name: make() if callable(make) else make for name, make in options.items()}
        module = module_of(changed.get("make", sgd), **changed.get("methods", {}))
        for name, value in changed.get("attributes", {}).items():
            setattr(module, name, value)
        try:
            fit(module, trainer_of(**options))
        finally:
            assert module.losses == []  # before the first step

    raises_on_ranks(ranks, error, train, match=match)


def two_optimizers(self):
    return [SGD([param], lr=0.1) for param in list(self.net.parameters())[:2]]


def with_averaged_weights():
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    return [scaling(), StochasticWeightAveraging(swa_lrs=0.1)]


BY_HAND = {"automatic_optimization": False}
MISTAKES = {
    "several optimizers": (
        "configure_optimizers returned 2.*Wrap multiple optimizers in configure_optimizers",
        {"methods": {"configure_optimizers": two_optimizers}, "attributes": BY_HAND},
    ),
    "no rule for this optimizer": (
        r"got Adagrad. Pass a rule: Scaling\(mh.SqrtScale\)",
        {"error": TypeError, "make": torch.optim.Adagrad},
    ),
    "a rule in configure_optimizers as well": (
        "wraps already",
        {"error": TypeError, "make": lambda params: mh.AdaScale(sgd(params))},
    ),
    "averaged weights of Lightning's kind": (
        "Use Lightning's WeightAveraging",
        {"trainer": {"callbacks": with_averaged_weights}},
    ),
    "manual optimization": (
        "Scaling needs automatic optimization",
        {"attributes": BY_HAND},
    ),
    "passes that are said twice": (
        "num_gradients_to_accumulate is .* Omit it",
        {"trainer": {"callbacks": lambda: [scaling(num_gradients_to_accumulate=2)]}},
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_an_error_before_the_first_step(name):
    match, changed = MISTAKES[name]
    failing(match, **changed)


def test_a_ramp_or_progress_in_blocks_is_an_error():
    def in_blocks():
        from manyhands.integrations.lightning import BlocksStrategy

        return BlocksStrategy(mh.DiLoCo, every=2)

    def ramp():
        from manyhands.integrations.lightning import BatchRamp

        return [BatchRamp(max_scale=4)]

    for callbacks, match in (
        (ramp, "BatchRamp would choose different numbers"),
        (lambda: [scaling(by_progress=True)], "in blocks, progress differs between devices"),
    ):
        failing(match, trainer={"strategy": in_blocks, "callbacks": callbacks}, ranks=2)


def test_other_strategies_are_an_error():
    from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy

    from manyhands.integrations.lightning._trainer import check_strategy

    for kind, advice in ((FSDPStrategy, "FullyShardedStrategy"), (DeepSpeedStrategy, "ZeRO-2")):

        class Trainer:
            strategy = kind.__new__(kind)

        with pytest.raises(TypeError, match=advice):
            check_strategy(Trainer, "Scaling")


def test_the_rule_before_fit_is_an_error():
    with pytest.raises(RuntimeError, match="there is no rule yet"):
        _ = scaling().rule


# -- what is written down ----------------------------------------------------------------------


def test_the_page_runs_from_top_to_bottom(tmp_path):
    run_page(ROOT / "docs" / "integrations" / "lightning.md", in_folder=tmp_path)


def test_public_names_are_documented_with_examples_that_run():
    import manyhands.integrations.lightning as public

    def failed():
        finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner()
        for name in public.__all__:
            thing = getattr(public, name)
            assert thing.__module__ == public.__name__
            (test,) = finder.find(thing, name, module=False, globs={})
            assert test.examples, name
            runner.run(test)
        return runner.summarize(verbose=False).failed

    assert run_ranks(1, failed) == [0]
    reference = (ROOT / "docs" / "api.md").read_text()
    for name in public.__all__:
        assert reference.count(f"::: manyhands.integrations.lightning.{name}\n") == 1


def test_which_batches_make_a_step():
    from manyhands.ramp import _micro_batches

    assert doctest.testmod(_micro_batches).failed == 0
    first = 0
    for passes in (1, 3, 2, 2, 7):
        step = _micro_batches.StepPasses(passes, start=first)
        ends = [n for n in range(first + 1, first + passes + 1) if n % step == 0]
        assert (first % step, ends) == (0, [first + passes])
        first += passes
