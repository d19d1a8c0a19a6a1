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

# name: (slots of the right script, slots that the bug changes, the causes that may be named)
RESUME_BUGS = {
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
    "order drawn again": (
        GLOBAL_ORDER,
        {"epoch": "order = torch.get_rng_state()"},
        ["shuffle order"],
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
    "batch norm": NORM,
    "average": EMA,
    "shadow": SHADOW,
    "scaler": SCALER,
    "adapters": ADAPTERS,
    "local steps": LOCAL,
    "order of the default generator": GLOBAL_ORDER,
    "augmented": AUGMENTED,
    "counter": COUNTED,
    "checkpoint per epoch": PER_EPOCH,
    "accumulating": ACCUMULATING,
}
