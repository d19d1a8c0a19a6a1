"""Our optimizers inside of Lightning and Fabric, as somebody would use them there.

The plain loop is the oracle, bit for bit. Every training runs in forked ranks (also that of one
device), so that nothing of a Trainer's is left in the process of the other tests.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

import manyhands as mh
from helpers import lightning_runs
from helpers.lightning_runs import MARKS, cosine, data, loss_of, net, own_loader, trainer_of, values
from helpers.pages import ROOT, run_page
from helpers.ranks import as_under_torchrun, on_ranks, raises_on_ranks, run_ranks

pytestmark = MARKS

BATCHES, EPOCHS = 8, 2
RULES = {
    "AdaScale": lambda params, k: mh.AdaScale(
        SGD(params, lr=0.05, momentum=0.9), num_gradients_to_accumulate=k
    ),
    "AdamScale": lambda params, k: mh.AdamScale(AdamW(params), num_gradients_to_accumulate=k),
    "LinearScale": lambda params, k: mh.LinearScale(
        SGD(params, lr=0.05), num_gradients_to_accumulate=k
    ),
    "SqrtScale": lambda params, k: mh.SqrtScale(
        AdamW(params), num_gradients_to_accumulate=k, rescale_adam=True
    ),
    "LEGWScale": lambda params, k: mh.LEGWScale(
        3, 64, SGD(params, lr=0.05), num_gradients_to_accumulate=k, batch_size=8
    ),
    "OSS": lambda params, k: mh.OSS(params, optim=AdamW, lr=0.05),
    "AdaScale of OSS": lambda params, k: mh.AdaScale(
        mh.OSS(params, optim=SGD, lr=0.05), num_gradients_to_accumulate=k
    ),
}
BLOCKS = {
    "DiLoCo": lambda params, k: mh.DiLoCo(AdamW(params), every=2),
    "BMUF": lambda params, k: mh.BMUF(SGD(params, lr=0.05), global_sync_iter=2),
    "SlowMo": lambda params, k: mh.SlowMo(SGD(params, lr=0.05), every=2),
    "LocalSGD": lambda params, k: mh.LocalSGD(SGD(params, lr=0.05), every=2),
}
ALL = {**RULES, **BLOCKS}
CHEAP = ["AdaScale", "AdaScale of OSS", "DiLoCo"]
SETTINGS = {"plain": (1, "32-true", None), "all": (2, "bf16-mixed", 0.05)}


def cheap_first(names):
    return [name if name in CHEAP else pytest.param(name, marks=pytest.mark.long) for name in names]


def batches():
    """This rank's."""
    return list(data(BATCHES)[dist.get_rank()])


def plain(make, passes, precision, clip, steps=EPOCHS * BATCHES, averaged=True):
    """The loop that somebody would write; gradients averaged by DDP if there are several ranks."""
    model = net()
    wrapped = DistributedDataParallel(model) if averaged and dist.get_world_size() > 1 else model
    optimizer = make(model.parameters(), passes)
    schedule = cosine(optimizer)
    own = batches()
    for i in range(steps):
        last = (i + 1) % passes == 0
        if i % passes == 0:
            optimizer.zero_grad()
        unaveraged = not last and wrapped is not model
        with wrapped.no_sync() if unaveraged else contextlib.nullcontext():
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
                loss = loss_of(wrapped, own[i % BATCHES]) / passes
            loss.backward()
        if last:
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            schedule.step()
    return values(model), getattr(optimizer, "progress", None)


# -- Lightning --------------------------------------------------------------------------------


def strategy_of(averaged):
    from lightning.pytorch.strategies import DDPStrategy

    class OnTheirOwn(DDPStrategy):
        def configure_ddp(self):
            pass

    return "auto" if averaged or dist.get_world_size() == 1 else OnTheirOwn()


def module_of(make, passes, **methods):
    def validation_step(self, batch, _):  # without a log, whose mean would be a collective
        loss_of(self.net, batch)

    methods = {"validation_step": validation_step, **methods}
    return lightning_runs.module_of(lambda params: make(params, passes), cosine, **methods)


def loaders():
    """To train and to validate with."""
    return [own_loader(BATCHES)] * 2


def fit(make, passes, precision, clip, epochs=EPOCHS, averaged=True, **files):
    trainer = trainer_of(
        strategy_of(averaged),
        max_epochs=epochs,
        accumulate_grad_batches=passes,
        precision=precision,
        gradient_clip_val=clip,
    )
    module = module_of(make, passes)
    result = lightning_runs.fit(module, trainer, BATCHES, validate=True, **files)
    return result["params"], result["progress"]


def assert_same(ranks, expected):
    for (params, progress), (plain_params, plain_progress) in zip(ranks, expected, strict=True):
        torch.testing.assert_close(params, plain_params, rtol=0, atol=0)
        assert progress == plain_progress


@pytest.mark.sample("AdaScale-plain", "AdaScale of OSS-plain", "DiLoCo-all")
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", cheap_first(ALL))
def test_one_device_is_the_plain_loop_and_a_resumed_run_the_whole_one(name, setting, tmp_path):
    make, file = ALL[name], str(tmp_path / "half.ckpt")

    def all_three():
        fit(make, *SETTINGS[setting], epochs=1, save=file)
        whole, resumed = fit(make, *SETTINGS[setting]), fit(make, *SETTINGS[setting], resume=file)
        return [whole, resumed], [plain(make, *SETTINGS[setting])] * 2

    ((ran, expected),) = run_ranks(1, all_three)
    assert_same(ran, expected)


@pytest.mark.parametrize("name", cheap_first(ALL))
def test_two_devices_are_the_plain_loop(name):
    make, averaged = ALL[name], name in RULES

    def both():
        setting = SETTINGS["all"]
        return fit(make, *setting, averaged=averaged), plain(make, *setting, averaged=averaged)

    ran, expected = zip(*run_ranks(2, both), strict=True)
    assert_same(ran, expected)


@pytest.mark.sample("AdaScale-True", "SlowMo-False")
@pytest.mark.parametrize(
    "name, averaged",
    [("AdaScale", True), ("OSS", True), ("AdaScale of OSS", True), ("SlowMo", False)],
)
def test_a_resumed_run_on_two_devices_is_the_whole_one(name, averaged, tmp_path):
    """Blocks are saved after a meeting: rank 0's file is for all."""
    make, file = ALL[name], str(tmp_path / "half.ckpt")

    def both():
        setting = (2, "32-true", None)
        fit(make, *setting, epochs=1, averaged=averaged, save=file)
        resumed = fit(make, *setting, averaged=averaged, resume=file)
        return resumed, fit(make, *setting, averaged=averaged)

    resumed, whole = zip(*run_ranks(2, both), strict=True)
    assert_same(resumed, whole)


def test_progress_ends_the_training():
    end = 5.0

    def configure_optimizers(self):
        optimizer = mh.AdaScale(SGD(self.parameters(), lr=0.05), num_gradients_to_accumulate=2)
        schedule = mh.ProgressScheduler(CosineAnnealingLR(optimizer, T_max=5), optimizer, end=end)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_batch_end(self, *_):
        self.trainer.should_stop = self.lr_schedulers().done

    def train():
        methods = (configure_optimizers, on_train_batch_end)
        module = module_of(None, 2, **{method.__name__: method for method in methods})
        trainer = trainer_of(max_epochs=20, accumulate_grad_batches=2)
        trainer.fit(module, *loaders())
        rule = module.optimizers()
        return rule.progress, trainer.global_step, rule.param_groups[0]["lr"]

    ((progress, steps, rate),) = run_ranks(1, train)
    assert end <= progress < end + 2.0
    assert steps <= end + 1
    assert rate == 0.0


@on_ranks(1)
def test_what_is_asked_of_and_set_on_lightnings_optimizer_is_the_rules():
    def training_step(self, batch, i):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss_of(self.net, batch))
        optimizer.step()
        if i == 3:
            optimizer.set_progress(100.0)

    module = module_of(RULES["AdaScale"], 1, training_step=training_step)
    module.automatic_optimization = False
    trainer_of(max_epochs=1).fit(module, *loaders())
    used, rule = module.optimizers(), module.optimizers().optimizer
    assert used.progress == rule.progress == 104.0
    assert used.snapshot() == rule.snapshot()


@on_ranks(1, raises=RuntimeError, match=r"step\(\) after 2 of 3 backward passes")
def test_fewer_passes_at_the_end_of_an_epoch_are_an_error():
    fit(RULES["AdaScale"], 3, "32-true", None)


def half(**methods):
    """Train in float16, with a scaler that works on the CPU too."""
    from lightning.pytorch.plugins.precision import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    plugin = MixedPrecision("16-mixed", device="cpu", scaler=scaler)

    def make(params, passes):
        return mh.AdaScale(SGD(params, lr=0.05), grad_scaler=scaler)

    module = module_of(make, 1, **methods)
    clip = None if methods else 0.05
    trainer = trainer_of(max_epochs=EPOCHS, plugins=[plugin], gradient_clip_val=clip)
    trainer.fit(module, *loaders())
    return values(module), module.optimizers().progress


def test_float16_is_clipped_in_a_hook():
    def on_before_optimizer_step(self, optimizer):
        self.trainer.precision_plugin.scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(self.parameters(), max_norm=0.05)

    def loop():
        model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=16.0)
        optimizer = mh.AdaScale(SGD(model.parameters(), lr=0.05), grad_scaler=scaler)
        schedule = cosine(optimizer)
        for x in batches() * EPOCHS:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(model, x)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.05)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
        return values(model), optimizer.progress

    def both():
        return half(on_before_optimizer_step=on_before_optimizer_step), loop()

    ran, expected = zip(*run_ranks(1, both), strict=True)
    assert_same(ran, expected)
    raises_on_ranks(1, RuntimeError, half, match="does not allow for gradient clipping")


# -- Fabric -----------------------------------------------------------------------------------


def fabric_loop(make, passes, precision, clip, steps, averaged=True, save=None, resume=None):
    import lightning as L

    size = dist.get_world_size()
    if size > 1:
        as_under_torchrun(TORCHELASTIC_RUN_ID="none")
    strategy = "ddp" if size > 1 else "auto"
    fabric = L.Fabric(accelerator="cpu", devices=size, strategy=strategy, precision=precision)
    fabric.launch()
    model = net()
    optimizer = make(model.parameters(), passes)
    schedule = cosine(optimizer)
    if averaged:
        model, optimizer = fabric.setup(model, optimizer)
    else:
        optimizer = fabric.setup_optimizers(optimizer)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}
    if resume is not None:
        fabric.load(resume, state)
    own = batches()
    for i in steps:
        last = (i + 1) % passes == 0
        if i % passes == 0:
            optimizer.zero_grad()
        unaveraged = averaged and size > 1 and not last
        with fabric.no_backward_sync(model) if unaveraged else contextlib.nullcontext():
            with contextlib.nullcontext() if averaged else fabric.autocast():
                loss = loss_of(model, own[i % BATCHES]) / passes
            fabric.backward(loss)
        if last:
            if clip is not None and averaged:
                fabric.clip_gradients(model, optimizer, max_norm=clip)
            optimizer.step()
            schedule.step()
    if save is not None:
        fabric.save(save, state)
    return values(model), getattr(optimizer, "progress", None)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", cheap_first(ALL))
def test_fabric_on_one_device_is_the_plain_loop_and_goes_on(name, setting, tmp_path):
    make, file = ALL[name], str(tmp_path / "half.ckpt")

    def all_three():
        everything = range(EPOCHS * BATCHES)
        whole = fabric_loop(make, *SETTINGS[setting], everything)
        fabric_loop(make, *SETTINGS[setting], everything[:BATCHES], save=file)
        resumed = fabric_loop(make, *SETTINGS[setting], everything[BATCHES:], resume=file)
        return [whole, resumed], [plain(make, *SETTINGS[setting])] * 2

    ((ran, expected),) = run_ranks(1, all_three)
    assert_same(ran, expected)


@pytest.mark.parametrize("name", ["AdaScale", "AdaScale of OSS", "DiLoCo"])
def test_fabric_on_two_devices_is_the_plain_loop_and_goes_on(name, tmp_path):
    make, averaged, file = ALL[name], name in RULES, str(tmp_path / "half.ckpt")
    setting = SETTINGS["all"] if averaged else SETTINGS["plain"]

    def all_three():
        everything = range(EPOCHS * BATCHES)
        ran = [fabric_loop(make, *setting, everything, averaged)]
        if averaged:  # what rank 0 saves of Adam under DiLoCo is not what the others had
            fabric_loop(make, *setting, everything[:BATCHES], averaged, save=file)
            later = everything[BATCHES:]
            ran.append(fabric_loop(make, *setting, later, averaged, resume=file))
        return ran, [plain(make, *setting, averaged=averaged)] * len(ran)

    for ran, expected in run_ranks(2, all_three):
        assert_same(ran, expected)


# -- the page ---------------------------------------------------------------------------------


def test_the_page_runs_from_top_to_bottom(tmp_path):
    run_page(ROOT / "docs" / "integrations" / "fabric.md", in_folder=tmp_path)
