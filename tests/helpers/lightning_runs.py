"""Runs of Lightning on forked ranks, and the same training written plainly in one process.

The data are those of two ranks. `fit` trains a `Trainer` on the ranks that it is called on, and
`Alone` goes through the same batches, in steps as large, without Lightning and without ranks.
"""

import contextlib
import importlib.util
import logging
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

from helpers.ranks import as_under_torchrun

MARKS = [
    pytest.mark.usefixtures("lightning"),
    pytest.mark.skipif(
        importlib.util.find_spec("lightning") is None,
        reason="lightning is missing: pip install lightning",
    ),
    # Lightning's advice, and what it does that torch 2.13 has other names for by now.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint"),
    pytest.mark.filterwarnings("ignore:.*your dataloader is not resumable"),
    pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated"),
]
sgd = partial(SGD, lr=0.05, momentum=0.9)
adamw = partial(AdamW, lr=0.01)
cosine = partial(CosineAnnealingLR, T_max=20)
QUIET = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")


def import_lightning():
    """Import it once, before the ranks are forked."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import lightning
        import lightning.fabric
        import lightning.pytorch

        import manyhands.integrations.lightning  # noqa: F401
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return lightning


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))


def data(batches):
    """The batches of two ranks."""
    return torch.randn(2, batches, 8, 4, generator=torch.Generator().manual_seed(0))


def values(module):
    return [param.detach().clone() for param in module.parameters()]


def loss_of(model, batch):
    return (model(batch) - batch.sum(dim=1, keepdim=True)).square().mean()


# -- Lightning ---------------------------------------------------------------------------------


def module_of(make_optimizer, make_schedule=None, interval="step", **methods):
    """A LightningModule, which keeps the loss of each batch in `losses`."""
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()
            self.losses = []

        def training_step(self, batch, _):
            loss = loss_of(self.net, batch)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch, _):
            self.log("val_loss", loss_of(self.net, batch), sync_dist=True)

        def configure_optimizers(self):
            optimizer = make_optimizer(self.parameters())
            if make_schedule is None:
                return optimizer
            config = {"scheduler": make_schedule(optimizer), "interval": interval}
            return {"optimizer": optimizer, "lr_scheduler": config}

    return type("Module", (Module,), methods)()


def scaling(*args, **options):
    from manyhands.integrations.lightning import Scaling

    return Scaling(*args, **options)


def trainer_of(strategy="auto", **options):
    import lightning as L

    size = dist.get_world_size()
    if size > 1:
        as_under_torchrun(TORCHELASTIC_RUN_ID="none")  # Lightning must not start ranks
        strategy = "ddp" if strategy == "auto" else strategy
    options = {**dict.fromkeys(QUIET, False), **options}
    return L.Trainer(
        accelerator="cpu",
        devices=size,
        strategy=strategy,
        use_distributed_sampler=False,
        **options,
    )


def own_loader(batches):
    samples: Any = list(data(batches)[dist.get_rank()])  # a list is a dataset, too
    return DataLoader(samples, batch_size=None)


class Resumable:
    """A loader that goes on in mid-epoch, as torchdata's StatefulDataLoader does."""

    def __init__(self, batches):
        self.batches, self.next = list(data(batches)[dist.get_rank()]), 0

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        while self.next < len(self.batches):
            self.next += 1
            yield self.batches[self.next - 1]
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def fit(module, trainer, batches=8, resume=None, save=None, validate=False, loader=own_loader):
    """Train, and return what is compared with `alone`."""
    loaders = [loader(batches)] + [own_loader(batches)] * validate
    trainer.fit(module, *loaders, ckpt_path=resume)
    result = {
        "params": full_values(module, trainer),
        "losses": module.losses,
        "progress": getattr(module.optimizers(), "progress", None),
        "steps": trainer.global_step,
        "lr": module.optimizers().param_groups[0]["lr"],
    }
    if save is not None:
        trainer.save_checkpoint(save)
    return result


def full_values(module, trainer):
    from manyhands import FSDP

    if isinstance(trainer.strategy.model, FSDP):
        return list(trainer.strategy.model.state_dict().values())
    return values(module)


# -- the same in one process, without Lightning ------------------------------------------------


class Alone:
    """One process that goes through the batches of `ranks` ranks."""

    def __init__(self, make_optimizer, make_schedule=None, rule=None, **options):
        self.model = net()
        self.make_rule, self.options = rule, options
        self.plain = make_optimizer(self.model.parameters())
        self.schedule = None if make_schedule is None else make_schedule(self.plain)
        self.rule = None
        self.losses: list[list[float]] = [[], []]
        self.steps = 0

    def epoch(self, batches, ranks, passes, clip=None, autocast=False, step_schedule=None):
        """Train for an epoch; its last step may have fewer passes."""
        for first in range(0, batches, passes):
            now = range(first, min(first + passes, batches))
            self.step([(r, data(batches)[r, i]) for i in now for r in range(ranks)], clip, autocast)
        return self

    def step(self, micro_batches, clip=None, autocast=False):
        optimizer = self.ready(len(micro_batches))
        optimizer.zero_grad()
        for rank, batch in micro_batches:
            with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
                loss = loss_of(self.model, batch)
            self.losses[rank].append(loss.item())
            (loss / len(micro_batches)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        self.steps += 1

    def ready(self, small_batches):
        """The optimizer, whose rule expects so many passes."""
        if self.make_rule is None:
            return self.plain
        if self.rule is None:
            options = {"num_gradients_to_accumulate": small_batches, **self.options}
            self.rule = self.make_rule(self.plain, **options)
        elif self.rule.passes != small_batches:
            self.rule.set_num_gradients_to_accumulate(small_batches)
        return self.rule

    def result(self, rank):
        optimizer = self.rule or self.plain
        return {
            "params": values(self.model),
            "losses": self.losses[rank],
            "progress": getattr(optimizer, "progress", None),
            "steps": self.steps,
            "lr": optimizer.param_groups[0]["lr"],
        }


def assert_alike(got, expected, **tolerances):
    """Each rank's result is that of the run alone."""
    for rank, result in enumerate(got):
        assert result["steps"] == expected.steps
        tolerances = {"rtol": 1e-5, "atol": 1e-6, **tolerances}
        torch.testing.assert_close(result, expected.result(rank), **tolerances)
