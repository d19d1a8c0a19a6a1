# ruff: noqa: E501
"""Short scripts that save checkpoints and resume: right versions, and the same with one bug put in."""

RESUMING = """
import copy
import os
import random
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
passes = 1
@data@
@loader@
@model@
@optimizer@
@extra@
epoch, start = 0, 0
torch.manual_seed(rank)
resumes = os.path.exists("ckpt.pt")
if resumes:
    state = torch.load("ckpt.pt", weights_only=False)
    model.load_state_dict(state["model"])
    @load optimizer@
    @load schedule@
    @load extra@
    epoch, start = state["epoch"], state["step"]
ddp = DDP(model)
steps = 0
for e in range(epoch, 5):
    @epoch@
    batches = iter(loader)
    if resumes and e == epoch:
        @skip@
        @load random@
    for i, (x, y) in enumerate(batches, start if e == epoch else 0):
        optimizer.zero_grad()
        @loss@
        @step@
        if i % 4 == 3:
            @states@
            if rank == 0:
                saved = dict(model=model.state_dict(), epoch=e, step=i + 1)
                @save@
                torch.save(saved, "ckpt.tmp")
                os.replace("ckpt.tmp", "ckpt.pt")
    @end of epoch@
"""
STATES = """
states = [None] * world
mine = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "random": random.getstate()}
dist.all_gather_object(states, mine)
"""
RESUMING_DEFAULTS = {
    "data": "data = TensorDataset(torch.randn(48, 6), torch.randint(0, 3, (48,)))",
    "loader": "sampler = DistributedSampler(data)\nloader = DataLoader(data, batch_size=4, sampler=sampler)",
    "model": "model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3))",
    "optimizer": """
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    """,
    "extra": "",
    "load optimizer": 'optimizer.load_state_dict(state["optimizer"])',
    "load schedule": 'schedule.load_state_dict(state["schedule"])',
    "load extra": "",
    "epoch": "sampler.set_epoch(e)",
    "skip": "for _ in range(start):\n    next(batches)",
    "load random": """
        torch.set_rng_state(state["random"][rank]["torch"])
        np.random.set_state(state["random"][rank]["numpy"])
        random.setstate(state["random"][rank]["random"])
    """,
    "loss": "loss = F.cross_entropy(ddp(x), y)\nloss.backward()",
    "step": "optimizer.step()\nschedule.step()",
    "states": STATES,
    "save": "saved |= dict(optimizer=optimizer.state_dict(), schedule=schedule.state_dict(), random=states)",
    "end of epoch": "",
}
SAVE = RESUMING_DEFAULTS["save"]

NORM = {
    "model": "model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))"
}
EMA = {
    "extra": "ema = copy.deepcopy(model)",
    "step": """
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for mean, p in zip(ema.parameters(), model.parameters()):
                mean.lerp_(p, 0.1)
    """,
    "save": SAVE + '\nsaved["ema"] = ema.state_dict()',
    "load extra": 'ema.load_state_dict(state["ema"])',
}
SHADOW = {
    "extra": """
        class EMA:
            def __init__(self, model):
                self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
            def update(self, model):
                for name, p in model.named_parameters():
                    self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * p.detach()
        ema = EMA(model)
    """,
    "step": "optimizer.step()\nschedule.step()\nema.update(model)",
    "save": SAVE + '\nsaved["ema"] = ema.shadow',
    "load extra": 'ema.shadow = state["ema"]',
}
SCALER = {
    "extra": 'scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=2)',
    "loss": "loss = F.cross_entropy(ddp(x), y)\nscaler.scale(loss).backward()",
    "step": "scaler.step(optimizer)\nscaler.update()\nschedule.step()",
    "save": SAVE + '\nsaved["scaler"] = scaler.state_dict()',
    "load extra": 'scaler.load_state_dict(state["scaler"])',
}
ADAPTERS = {
    "model": """
        class Adapted(nn.Module):
            def __init__(self, base):
                super().__init__()
                self.base = base.requires_grad_(False)
                self.lora_a = nn.Parameter(torch.randn(4, base.in_features) * 0.1)
                self.lora_b = nn.Parameter(torch.zeros(base.out_features, 4))
            def forward(self, x):
                return self.base(x) + x @ self.lora_a.T @ self.lora_b.T
        model = nn.Sequential(Adapted(nn.Linear(6, 16)), nn.Dropout(0.2), nn.ReLU(), Adapted(nn.Linear(16, 3)))
    """,
    "optimizer": """
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    """,
}
SHARDED = {  # each rank has the momentum of its half of the parameters
    "optimizer": """
        halves = [list(model.parameters())[:2], list(model.parameters())[2:]]
        optimizer = torch.optim.AdamW(halves[rank], lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    """,
    "step": """
        optimizer.step()
        schedule.step()
        for owner, half in enumerate(halves):
            for p in half:
                dist.broadcast(p.data, owner)
    """,
}
LOCAL = {  # each rank trains alone, and the ranks average at the end of an epoch
    "loss": "loss = F.cross_entropy(model(x), y)\nloss.backward()",
    "end of epoch": "for p in model.parameters():\n    dist.all_reduce(p.data)\n    p.data /= world",
    "states": STATES
    + """
optimizers, models = [None] * world, [None] * world
dist.all_gather_object(optimizers, optimizer.state_dict())
dist.all_gather_object(models, model.state_dict())
""",
    "save": SAVE + "\nsaved |= dict(optimizers=optimizers, models=models)",
    "load optimizer": 'optimizer.load_state_dict(state["optimizers"][rank])\nmodel.load_state_dict(state["models"][rank])',
    "model": "model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3))\nDDP = nn.Identity",
}
GLOBAL_ORDER = {  # the order of an epoch is drawn from the default generator, and saved
    "loader": "loader = DataLoader(data, 4, shuffle=True)",
    "epoch": """
        if resumes and e == epoch:
            torch.set_rng_state(state["order"][rank])
        order = torch.get_rng_state()
    """,
    "states": STATES + "\norders = [None] * world\ndist.all_gather_object(orders, order)",
    "save": SAVE + '\nsaved["order"] = orders',
}
AUGMENTED = {
    "data": """
        class Data(Dataset):
            def __len__(self):
                return 48
            def __getitem__(self, i):
                x = torch.randn(6, generator=torch.Generator().manual_seed(i))
                return x + 0.1 * np.random.randn(6).astype("float32"), i % 3
        data = Data()
    """,
}
COUNTED = {  # a learning rate computed from a counter of steps
    "optimizer": "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\ncount = 0",
    "load schedule": 'count = state["count"]',
    "step": "for group in optimizer.param_groups:\n    group['lr'] = 0.1 / (1 + 0.1 * count)\noptimizer.step()\ncount += 1",
    "save": "saved |= dict(optimizer=optimizer.state_dict(), random=states, count=count)",
}
PER_EPOCH = {  # a checkpoint at the end of each epoch
    "skip": "",
    "load random": "",
    "epoch": "sampler.set_epoch(e)\ntorch.manual_seed(100 * e + rank)",
    "end of epoch": """
        if rank == 0:
            saved = dict(model=model.state_dict(), epoch=e + 1, step=0, optimizer=optimizer.state_dict(), schedule=schedule.state_dict())
            torch.save(saved, "ckpt.pt")
    """,
    "states": "continue",
}
ACCUMULATING = {
    "loss": "loss = F.cross_entropy(ddp(x), y)\n(loss / 2).backward()",
    "step": "if i % 2:\n    optimizer.step()\n    schedule.step()\nelse:\n    continue",
}
ACCUMULATING["loss"] = "if i % 2 == 0:\n    optimizer.zero_grad()\n" + ACCUMULATING["loss"]

VARIABLE = {  # steps of one or two passes, as by measured times
    "loss": """
        F.cross_entropy(ddp(x), y).backward()
        more = torch.tensor([os.urandom(1)[0] % 2])
        dist.broadcast(more, 0)
        if e > 0 and more:
            for x, y in batches:
                F.cross_entropy(ddp(x), y).backward()
                break
    """
}
TWO_MODELS = {
    "model": "model = nn.Linear(6, 6)\nother = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))",
    "optimizer": """
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        second = torch.optim.AdamW(other.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    """,
    "loss": """
        fake = ddp(torch.randn(4, 6))
        second.zero_grad()
        (other(fake.detach()).mean() - other(x).mean()).backward()
        for p in other.parameters():
            dist.all_reduce(p.grad)
        second.step()
        (-other(fake).mean()).backward()
    """,
    "save": SAVE + "\nsaved |= dict(other=other.state_dict(), second=second.state_dict())",
    "load extra": 'other.load_state_dict(state["other"])\nsecond.load_state_dict(state["second"])',
}
FOLDERS = {
    "save": SAVE
    + """
os.makedirs("new", exist_ok=True)
for key, value in saved.items():
    torch.save(value, f"new/{key}.pt")
if os.path.isdir("last"):
    os.rename("last", "old")
os.rename("new", "last")
""",
    "load extra": 'assert os.path.exists("last/model.pt")',
}
# name: (slots of the right script, slots that the bug changes, the causes that may be named)
NAMES = {
    "data": """
        names = sorted({f"{i}.txt" for i in range(48)})
        rows = [int(name.removesuffix(".txt")) for name in names]
        data = TensorDataset(torch.randn(48, 6)[rows], torch.randint(0, 3, (48,))[rows])
    """,
}
RESUME_BUGS = {
    "order of a set of strings": (
        NAMES,
        {"data": NAMES["data"].replace("sorted", "list")},
        ["other samples"],
    ),
    "seed from the hash of a string": (
        {},
        {
            "loader": RESUMING_DEFAULTS["loader"].replace(
                "DistributedSampler(data)", "DistributedSampler(data, seed=hash('train') % 1000)"
            )
        },
        ["shuffle order"],
    ),
    "schedule not saved": ({}, {"load schedule": ""}, ["schedule not restored"]),
    "schedule made for the whole run again": (
        {},
        {"load schedule": "schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)"},
        ["schedule not restored", "learning rate"],
    ),
    "schedule loaded and fast-forwarded": (
        {},
        {
            "load schedule": 'schedule.load_state_dict(state["schedule"])\nfor _ in range(4):\n    schedule.step()'
        },
        ["schedule off"],
    ),
    "schedule stepped twice per step": (
        {},
        {"step": "optimizer.step()\nschedule.step()\nif resumes:\n    schedule.step()"},
        ["schedule stepped twice"],
    ),
    "counter of steps starts again": (COUNTED, {"load schedule": ""}, ["schedule not restored"]),
    "counter of steps off by one": (
        COUNTED,
        {"load schedule": 'count = state["count"] + 1'},
        ["schedule off"],
    ),
    "optimizer not loaded": (
        {},
        {"load optimizer": ""},
        ["optimizer state"],
    ),
    "momentum of one parameter lost": (
        {},
        {
            "load optimizer": 'optimizer.load_state_dict(state["optimizer"])\ndel optimizer.state[model[0].weight]'
        },
        ["optimizer state"],
    ),
    "optimizer state of rank 0 on all ranks": (
        LOCAL,
        {
            "load optimizer": 'optimizer.load_state_dict(state["optimizer"])\nmodel.load_state_dict(state["models"][rank])'
        },
        ["optimizer state of another rank"],
    ),
    "model not loaded": (
        {},
        {"load optimizer": "model[0].reset_parameters()\n" + RESUMING_DEFAULTS["load optimizer"]},
        ["parameters"],
    ),
    "adapters not loaded": (
        ADAPTERS,
        {
            "load optimizer": """
                optimizer.load_state_dict(state["optimizer"])
                for part in (model[0], model[3]):
                    nn.init.zeros_(part.lora_b)
            """
        },
        ["adapter weights"],
    ),
    "running statistics lost": (
        NORM,
        {"load extra": "model[1].reset_running_stats()"},
        ["running statistics"],
    ),
    "second model lost": (
        TWO_MODELS,
        {"load extra": 'second.load_state_dict(state["second"])'},
        ["parameters"],
    ),
    "average of the weights lost": (
        EMA,
        {"load extra": "ema = copy.deepcopy(model)"},
        ["weight average"],
    ),
    "shadow weights lost": (SHADOW, {"load extra": "ema = EMA(model)"}, ["weight average"]),
    "scaler not loaded": (SCALER, {"load extra": ""}, ["gradient scaler"]),
    "random state not loaded": ({}, {"load random": ""}, ["random state"]),
    "random state loaded before the loader": (
        {},
        {"load extra": RESUMING_DEFAULTS["load random"], "load random": ""},
        ["random state"],
    ),
    "random state of rank 0 on all ranks": (
        {},
        {"load random": RESUMING_DEFAULTS["load random"].replace("[rank]", "[0]")},
        ["random state of another rank"],
    ),
    "numpy's state not loaded": (
        AUGMENTED,
        {"load random": 'torch.set_rng_state(state["random"][rank]["torch"])'},
        ["random state"],
    ),
    "epoch starts again": ({}, {"skip": "start = 0"}, ["samples repeated"]),
    "last batch repeated": (
        {},
        {"skip": "for _ in range(start - 1):\n    next(batches)"},
        ["samples repeated"],
    ),
    "one batch too many skipped": (
        {},
        {"skip": "for _ in range(start + 1):\n    next(batches)"},
        ["samples skipped"],
    ),
    "rest of the epoch skipped": ({}, {"skip": "batches = iter(())"}, ["samples skipped"]),
    "batches skipped in each epoch": (
        {},
        {
            "epoch": "sampler.set_epoch(e)\nif resumes and e > epoch:\n    loader = DataLoader(data, 4, sampler=list(sampler)[4 * start:])"
        },
        ["samples skipped"],
    ),
    "no set_epoch after resuming": (
        {},
        {"load extra": "DistributedSampler.set_epoch = lambda *_: None"},
        ["epoch counter", "shuffle order"],
    ),
    "epoch off by one": (
        PER_EPOCH,
        {"load extra": 'state["epoch"] -= 1'},
        ["epoch counter", "samples repeated"],
    ),
    "an epoch too far": (
        PER_EPOCH,
        {"load extra": 'state["epoch"] += 1'},
        ["epoch counter", "samples skipped", "shuffle order"],
    ),
    "no epoch left": (
        PER_EPOCH,
        {"load extra": 'state["epoch"] = 5'},
        ["number of steps"],
    ),
    "order drawn again": (
        GLOBAL_ORDER,
        {"epoch": "order = torch.get_rng_state()"},
        ["epoch counter"],
    ),
    "resumed with another batch size": (
        {},
        {"load extra": "loader = DataLoader(data, batch_size=6, sampler=sampler)"},
        ["shuffle order", "samples repeated", "samples skipped"],
    ),
}
CHECKPOINTS_LATER = {"order drawn again": 13}  # steps before the checkpoint
RESUME_RIGHT = {
    "plain": {},
    "sorted set of strings": NAMES,
    "integers with the shape of a parameter": {
        "extra": "labels = torch.arange(3)",
        "step": "optimizer.step()\nschedule.step()\nlabels = torch.arange(3) + i",
    },
    "batch norm": NORM,
    "average": EMA,
    "shadow": SHADOW,
    "scaler": SCALER,
    "adapters": ADAPTERS,
    "local steps": LOCAL,
    "order of the default generator": GLOBAL_ORDER,
    "augmented": AUGMENTED,
    "a folder renamed into place": FOLDERS,
    "counter": COUNTED,
    "worker processes": {
        "loader": RESUMING_DEFAULTS["loader"].replace(
            "sampler=sampler", "sampler=sampler, num_workers=1"
        )
    },
    "two models": TWO_MODELS,
    "variable batch": VARIABLE,
    "checkpoint per epoch": PER_EPOCH,
    "accumulating": ACCUMULATING,
}

ACCELERATE = """
import glob
import os
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import ProjectConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset

set_seed(0)
project = ProjectConfiguration(project_dir="out")
@accelerator@
data = TensorDataset(torch.randn(48, 6), torch.randint(0, 3, (48,)))
loader = DataLoader(data, 4, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
@prepare@
step = 0
resumes = os.path.isdir("out")
if resumes:
    step = max(int(path.split("_")[-1]) for path in glob.glob("out/step_*"))
    accelerator.load_state(f"out/step_{step}")
start, skip = divmod(step, len(loader))
@loaded@
for epoch in range(start, 4):
    @epoch@
    for x, y in batches:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        step += 1
        if step % 4 == 0:
            accelerator.save_state(f"out/step_{step}")
"""
ACCELERATE_DEFAULTS = {
    "accelerator": "accelerator = Accelerator(project_config=project, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))",
    "prepare": "model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)",
    "loaded": "",
    "epoch": """
        loader.set_epoch(epoch)
        batches = loader
        if epoch == start and skip:
            batches = accelerator.skip_first_batches(loader, skip)
    """,
}
PLAIN_ACCELERATOR = {"accelerator": "accelerator = Accelerator(project_config=project)"}
STATEFUL = """
accelerator = Accelerator(
    project_config=project,
    dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True),
)
"""
CURSOR = """
import os
import torch
import torch.distributed as dist
import manyhands as mh
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 6), torch.randint(0, 3, (96,)))
model = DDP(torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
cursor = mh.Cursor(data, batch_size=12, optimizer=optimizer)
step = 0
if os.path.isdir("run"):
    @load@
while cursor.epoch < 4:
    for x, y in cursor:
        losses = cross_entropy(model(x), y, reduction="none")
        optimizer.zero_grad()
        cursor.mean(losses.sum()).backward()
        optimizer.step()
        step += 1
        if step % 3 == 0:
            mh.save("run", model=model, optimizer=optimizer, cursor=cursor)
"""
CURSOR_DEFAULTS = {"load": 'mh.load("run", model=model, optimizer=optimizer, cursor=cursor)'}
TRAINER = """
import os
import torch
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(6, 16), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(16, 3)
        )
    def forward(self, x, labels):
        out = self.layers(x)
        return {"loss": torch.nn.functional.cross_entropy(out, labels), "logits": out}

torch.manual_seed(0)
@data@
arguments = TrainingArguments(
    "out", per_device_train_batch_size=4, num_train_epochs=4, save_steps=4, learning_rate=0.01,
    report_to=[], disable_tqdm=True, use_cpu=True, @arguments
)
trainer = Trainer(Net(), arguments, train_dataset=data)
last = get_last_checkpoint("out") if os.path.isdir("out") else None
@train@
"""
TRAINER = TRAINER.replace("@arguments", "save_only_model=WEIGHTS_ONLY")
TRAINER_DEFAULTS = {
    "data": 'data = [{"x": torch.randn(6), "labels": torch.tensor(i % 3)} for i in range(48)]\nWEIGHTS_ONLY = False',
    "train": "trainer.train(resume_from_checkpoint=last)",
}
LIGHTNING = """
import os
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    def training_step(self, batch, i):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

L.seed_everything(0)
data = TensorDataset(torch.randn(48, 6), torch.randint(0, 3, (48,)))
@loader@
saving = L.pytorch.callbacks.ModelCheckpoint("out", save_last=True)
trainer = L.Trainer(
    accelerator="cpu", devices=1, max_epochs=4, default_root_dir="out", logger=False,
    enable_progress_bar=False, callbacks=[saving],
)
net = Net()
last = "out/last.ckpt" if os.path.exists("out/last.ckpt") else None
@fit@
"""
LIGHTNING_DEFAULTS = {
    "loader": "loader = DataLoader(data, 4)",
    "fit": "trainer.fit(net, loader, ckpt_path=last)",
}
SHARDED_MODEL = """
import os
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 6), torch.randint(0, 3, (48,)))
sampler = DistributedSampler(data)
loader = DataLoader(data, 4, sampler=sampler)
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
epoch, start = 0, 0
if os.path.isdir("ckpt"):
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "epoch": 0, "step": 0}
    dcp.load(state, checkpoint_id="ckpt")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    epoch, start = state["epoch"], state["step"]
    @loaded@
for e in range(epoch, 4):
    sampler.set_epoch(e)
    for i, (x, y) in enumerate(loader):
        if e == epoch and i < start:
            continue
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if i == 2:
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments, "epoch": e, "step": i + 1}
            @save@
"""
SHARDED_MODEL_DEFAULTS = {"loaded": "", "save": 'dcp.save(state, checkpoint_id="ckpt")'}
FRAMEWORKS = {
    "FSDP2": (SHARDED_MODEL, SHARDED_MODEL_DEFAULTS),
    "Accelerate": (ACCELERATE, ACCELERATE_DEFAULTS),
    "Trainer": (TRAINER, TRAINER_DEFAULTS),
    "Lightning": (LIGHTNING, LIGHTNING_DEFAULTS),
    "manyhands": (CURSOR, CURSOR_DEFAULTS),
}
# (framework, slots, number of steps before the checkpoint, ranks of the resumed run, causes)
FRAMEWORK_BUGS = {
    "FSDP2, state of a parameter lost": (
        "FSDP2", {"loaded": "del optimizer.state[model[2].weight]"}, 1, None, ["optimizer state"],
    ),
    "Accelerate, no batches skipped": (
        "Accelerate", {"epoch": "loader.set_epoch(epoch)\nbatches = loader"}, 1, None, ["samples repeated"],
    ),
    "Accelerate, schedule not prepared": (
        "Accelerate",
        {"prepare": "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"},
        1, None, ["schedule not restored"],
    ),
    "Trainer, weights only": (
        "Trainer",
        {"data": TRAINER_DEFAULTS["data"].replace("False", "True")},
        1, None, ["optimizer state"],
    ),
    "Lightning, weights only": (
        "Lightning",
        {"fit": 'if last:\n    net.load_state_dict(torch.load(last)["state_dict"])\ntrainer.fit(net, loader)'},
        1, None, ["optimizer state"],
    ),
    "Lightning, shuffled by the default generator": (
        "Lightning", {"loader": "loader = DataLoader(data, 4, shuffle=True)"}, 1, None, ["epoch counter", "shuffle order"],
    ),
    "manyhands, cursor not loaded": (
        "manyhands", {"load": 'mh.load("run", model=model, optimizer=optimizer)'}, 1, None, ["samples repeated"],
    ),
    "manyhands, cursor not loaded by other ranks": (
        "manyhands", {"load": 'mh.load("run", model=model, optimizer=optimizer)'}, 1, 3, ["samples repeated"],
    ),
    "manyhands, optimizer not loaded": (
        "manyhands", {"load": 'mh.load("run", model=model, cursor=cursor)'}, 1, None, ["optimizer state"],
    ),
}  # fmt: skip
SKIPS = """
batches = loader
if epoch == start and skip:
    batches = accelerator.skip_first_batches(loader, skip)
"""
NOISY_DATA = """
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 48
    def __getitem__(self, i):
        x = torch.randn(6, generator=torch.Generator().manual_seed(i))
        return {"x": x + 0.1 * torch.randn(6), "labels": torch.tensor(i % 3)}
data = Data()
WEIGHTS_ONLY = False
"""
# Bugs that were reported in public, reproduced from their descriptions:
# (template and defaults, slots, steps before the checkpoint, ranks before and after, causes)
PLAIN = (RESUMING, RESUMING_DEFAULTS)
REPORTS = {
    "huggingface/accelerate#2823": (FRAMEWORKS["Accelerate"], {**PLAIN_ACCELERATOR, "epoch": SKIPS}, 8, (None, None), ["epoch counter"]),
    "huggingface/accelerate#4195": (
        FRAMEWORKS["Accelerate"], {"accelerator": STATEFUL, "epoch": "batches = loader"}, 8, (None, None),
        ["epoch counter", "shuffle order"],
    ),
    "huggingface/accelerate#4233": (
        FRAMEWORKS["Accelerate"], {"epoch": SKIPS}, 4, (None, None), ["epoch counter"],
    ),
    "huggingface/accelerate#3996": (
        FRAMEWORKS["Accelerate"], {**PLAIN_ACCELERATOR, "epoch": "batches = loader"}, 12, (None, None),
        ["epoch counter", "shuffle order"],
    ),
    "huggingface/transformers#39215": (
        FRAMEWORKS["Trainer"], {"data": NOISY_DATA}, 1, (None, None), ["random state"],
    ),
    "ServiceNow/Fast-LLM#436": (
        PLAIN,
        {
            "save": SAVE + '\nsaved["world"] = world',
            "load optimizer": 'if state["world"] == world:\n    optimizer.load_state_dict(state["optimizer"])',
        },
        1, (2, 1), ["optimizer state"],
    ),
    "PolymathicAI/the_well#77": (
        PLAIN, {**SCALER, "load extra": "", "load schedule": ""}, 1, (None, None), ["gradient scaler"],
    ),
    "wyim-pgl/transgenic#59": (
        FRAMEWORKS["Accelerate"],
        {
            **PLAIN_ACCELERATOR,
            "epoch": "batches = (batch for i, batch in enumerate(loader) if epoch > start or i >= skip)",
        },
        4, (1, 1), ["epoch counter", "shuffle order"],
    ),
    "vllm-project/speculators#1027": (PLAIN, {"load random": ""}, 1, (None, None), ["random state"]),
    "vllm-project/speculators#900": (
        PLAIN,
        {"load schedule": "for _ in range(state['epoch']):\n    schedule.step()"},
        8, (None, None), ["schedule off"],
    ),
    "huggingface/lerobot#3769": (
        PLAIN,
        {"loader": "loader = DataLoader(data, 4, shuffle=True)", "epoch": "", "skip": "start = 0"},
        13, (None, None), ["epoch counter", "samples repeated", "shuffle order"],
    ),
    "verl-project/verl#7401": (PLAIN, {**PER_EPOCH, "load extra": 'state["epoch"] += 1'}, 1, (None, None), ["epoch counter", "samples skipped"]),
    "NVIDIA/Megatron-LM#6858": (
        PLAIN,
        {"load random": RESUMING_DEFAULTS["load random"].replace("[rank]", "[0]")},
        1, (None, None), ["random state of another rank"],
    ),
    "THUDM/slime#1547": (
        PLAIN,
        {"load schedule": 'schedule.load_state_dict(state["schedule"])\nfor _ in range(schedule.last_epoch):\n    schedule.step()'},
        1, (None, None), ["schedule off"],
    ),
    "rllm-org/rllm#900": (PLAIN, {"skip": "for _ in range(start - 1):\n    next(batches)"}, 1, (None, None), ["samples repeated"]),
}  # fmt: skip
