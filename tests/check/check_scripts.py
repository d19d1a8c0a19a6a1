# ruff: noqa: E501
"""Short training scripts with slots: right versions, and the same with one bug put in."""

import textwrap
from pathlib import Path

SCRIPT = """
import math
import os
import random
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

@start@
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
passes = 1
@data@
@loader@
@model@
@wrap@
@optimizer@
for epoch in range(6):
    @epoch@
    for i, (x, y) in enumerate(loader):
        @clear@
        @loss@
        @backward@
        @clip@
        @step@
"""
DEFAULTS = dict(
    start='dist.init_process_group("gloo")',
    data="data = TensorDataset(torch.randn(48, 6), torch.randint(0, 3, (48,)))",
    loader="sampler = DistributedSampler(data)\nloader = DataLoader(data, batch_size=4, sampler=sampler)",
    model="model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))",
    wrap="model = DDP(model)",
    optimizer="optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
    epoch="sampler.set_epoch(epoch)",
    clear="optimizer.zero_grad()",
    loss="loss = F.cross_entropy(model(x), y)",
    backward="loss.backward()",
    clip="",
    step="optimizer.step()",
)


def fill(script=SCRIPT, defaults=DEFAULTS, **slots):
    """Return a script with its slots filled."""
    unknown = {name for name in slots if f"@{name}@" not in script}
    assert not unknown, unknown
    lines = []
    for line in script.splitlines():
        slot = line.strip().strip("@")
        if line.strip().startswith("@"):
            text = textwrap.dedent({**defaults, **slots}[slot]).strip("\n") or "pass"
            line = textwrap.indent(text, line[: len(line) - len(line.lstrip())])
        lines.append(line)
    return "\n".join(lines)


def written(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(text)
    return str(path)


AVERAGE = """
for p in model.parameters():
    dist.all_reduce(p.grad)
    p.grad /= world
"""
BY_HAND = dict(wrap="", backward="loss.backward()\n" + AVERAGE)
ACCUMULATE = dict(
    wrap="model = DDP(model)\npasses = 3",
    clear="last = (i + 1) % passes == 0\nmodel.require_backward_grad_sync = last",
    backward="(loss / passes).backward()",
    step="if last:\n    optimizer.step()\n    optimizer.zero_grad()",
)
TOKENS = dict(
    data="""
        tokens = torch.randint(1, 11, (48, 9))
        lengths = torch.randint(2, 10, (48,))
        targets = torch.where(torch.arange(9) < lengths[:, None], tokens.roll(-1, 1), -100)
        data = TensorDataset(tokens, targets)
    """,
    model="model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))",
    loss="""
        count = (y != -100).sum()
        dist.all_reduce(count)
        total = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum")
        loss = total * world / count
    """,
)
PART_IGNORED_BY_DDP = dict(
    wrap="DDP._set_params_and_buffers_to_ignore_for_model(model, ['2.weight'])\nmodel = DDP(model)",
    backward="loss.backward()\nhead = model.module[2].weight\ndist.all_reduce(head.grad)\nhead.grad /= world",
)
# All batches of a step are read first, so that its number of tokens is known.
GROUPED = dict(
    loader="""
        sampler = DistributedSampler(data)
        batches = DataLoader(data, batch_size=4, sampler=sampler)
        loader = []
        passes = 3
    """,
    epoch="""
        sampler.set_epoch(epoch)
        for group in zip(*[iter(batches)] * passes):
            optimizer.zero_grad()
            count = sum((y != -100).sum() for _, y in group)
            dist.all_reduce(count)
            for i, (x, y) in enumerate(group):
                model.require_backward_grad_sync = i == passes - 1
                total = F.cross_entropy(
                    model(x).flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum"
                )
                loss = total * world / count
                loss.backward()
            optimizer.step()
    """,
)
CLIP = dict(clip="nn.utils.clip_grad_norm_(model.parameters(), 0.1)")
SCHEDULE = dict(
    optimizer="""
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    """,
    step="optimizer.step()\nschedule.step()",
)
HEAD = dict(
    model="model = nn.Sequential(nn.Linear(6, 16), nn.Tanh())\nhead = nn.Linear(16, 3)",
    wrap="model, head = DDP(model), DDP(head)",
    optimizer="optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)",
    loss="loss = F.cross_entropy(head(model(x)), y)",
)

# A teacher that follows the model, and whose predictions hardly change the gradient.
TEACHER = dict(
    model=DEFAULTS["model"]
    + """
import copy
teacher = copy.deepcopy(model).requires_grad_(False)""",
    loss="""
        with torch.no_grad():
            soft = teacher(x).softmax(1)
        out = model(x)
        loss = F.cross_entropy(out, y) + 1e-9 * F.cross_entropy(out, soft)
    """,
    step="""
        optimizer.step()
        for a, b in zip(teacher.parameters(), model.parameters()):
            a.data.mul_(0.9).add_(b.data, alpha=0.1)
    """,
)
ON_RANK_0 = """
    optimizer.step()
    for a, b in zip(teacher.parameters(), model.parameters()):
        a.data.mul_(0.9).add_(b.data, alpha=0.1 if rank == 0 else 0.0)
"""
CENTER = dict(
    optimizer=DEFAULTS["optimizer"] + "\ncenter, running = torch.zeros(3), torch.zeros(())",
    loss="""
        out = model(x)
        loss = F.cross_entropy(out - 1e-9 * center, y)
        running = 0.9 * running + 0.1 * loss.detach()  # for a log only
        mean = out.detach().mean(0)
    """,
    step="""
        optimizer.step()
        dist.all_reduce(mean)
        center = 0.9 * center + 0.1 * mean / world
    """,
)
LABELS = dict(  # the loss depends on a statistic of the labels
    optimizer=DEFAULTS["optimizer"] + "\ncenter = torch.zeros(())",
    loss="""
        mean = y.double().mean()
        dist.all_reduce(mean)
        center = 0.9 * center + 0.1 * mean / world
        loss = F.cross_entropy(model(x) * (1 + 1e-9 * center), y)
    """,
)
MANUAL = dict(
    optimizer="",
    clear="model.zero_grad()",
    step="for p in model.parameters():\n    p.data -= 0.1 * p.grad",
)
# All gradients in one message, in an order that must not depend on hashes of strings.
FLAT = """
    loss.backward()
    named = dict(model.named_parameters())
    names = sorted(named)
    flat = torch.cat([named[name].grad.reshape(-1) for name in names])
    dist.all_reduce(flat)
    for name, part in zip(names, flat.split([named[name].numel() for name in names])):
        named[name].grad.copy_(part.view_as(named[name]) / world)
"""
GENERATOR = dict(
    optimizer=DEFAULTS["optimizer"] + "\nmade = torch.Generator().manual_seed(rank)",
    loss="noise = torch.randn(len(x), 6, generator=made)\nloss = F.cross_entropy(model(x + noise), y)",
)

# name: (what the right script has, what the bug changes in it, the cause that is to be named)
AUGMENTED = """
class Data(Dataset):
    def __len__(self):
        return 48
    def __getitem__(self, i):
        x = torch.randn(6, generator=torch.Generator().manual_seed(i))
        return x + 0.1 * torch.randn(6), i % 3
data = Data()
"""
LARGE = "data = TensorDataset(torch.randn(4800, 6), torch.randint(0, 3, (4800,)))"
SEEDED = dict(  # augmentation draws other numbers on each rank
    loader=DEFAULTS["loader"] + "\ntorch.manual_seed(rank)",
    model="own = torch.get_rng_state()\ntorch.manual_seed(0)\n" + DEFAULTS["model"],
    wrap="model = DDP(model)\ntorch.set_rng_state(own)",
)
RARE = dict(  # an optimizer that steps after every third batch only
    wrap="other = DDP(nn.Linear(6, 3))\nmodel = DDP(model)\nrare = torch.optim.AdamW(other.parameters(), lr=0.01)",
    step="optimizer.step()\nif i % 3 == 2:\n    rare.zero_grad()\n    F.cross_entropy(other(x), y).backward()\n    rare.step()",
)
PROBED = dict(loader=DEFAULTS["loader"] + "\nx0, y0 = next(iter(loader))")
BUGS = {
    "no set_epoch, augmented": (
        {**SEEDED, "data": AUGMENTED, "loader": SEEDED["loader"].replace("=4", "=12")},
        dict(epoch=""),
        "same order",
    ),
    "not sharded, augmented": (
        {**SEEDED, "data": AUGMENTED},
        dict(loader="loader = DataLoader(data, 4)\ntorch.manual_seed(rank)", epoch=""),
        "not sharded",
    ),
    "no set_epoch of a batch sampler": (
        dict(
            loader="sampler = DistributedSampler(data)\nbatches = torch.utils.data.BatchSampler(sampler, 12, False)\nloader = DataLoader(data, batch_sampler=batches)"
        ),
        dict(epoch=""),
        "same order",
    ),
    "all samples shuffled by the rank": (
        dict(data=LARGE),
        dict(
            loader="loader = DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(rank))",
            epoch="",
        ),
        "seen twice",
    ),
    "rare optimizer, loss divided by the world size": (
        RARE,
        dict(step=RARE["step"].replace("y).backward", "y).div(world).backward")),
        "constant factor",
    ),
    "ranks' losses weighted, a batch looked at before": (
        PROBED,
        dict(backward="(loss * (1.5 if rank else 0.5)).backward()"),
        "ranks weighted",
    ),
    "teacher that rank 0 updates": (TEACHER, dict(step=ON_RANK_0), "state differs"),
    "statistic of the rank": (
        CENTER,
        dict(step="optimizer.step()\ncenter = 0.9 * center + 0.1 * mean"),
        "state differs",
    ),
    "statistic of the rank's labels": (
        LABELS,
        dict(loss=LABELS["loss"].replace("dist.all_reduce(mean)", "mean *= world")),
        "state differs",
    ),
    "order of hashes": (
        dict(
            wrap="",
            model="model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(5)], nn.Linear(6, 3))",
            backward=FLAT,
        ),
        dict(backward=FLAT.replace("sorted(named)", "list(set(named))")),
        ("not averaged", "some not averaged"),  # some may have one place in both orders
    ),
    "no optimizer, loss divided by the world size": (
        MANUAL,
        dict(backward="(loss / world).backward()"),
        "constant factor",
    ),
    "generator of the rank, loss divided by the world size": (
        GENERATOR,
        dict(backward="(loss / world).backward()"),
        "constant factor",
    ),
    "loss divided by the world size": (
        {},
        dict(backward="(loss / world).backward()"),
        "constant factor",
    ),
    "loss summed over the batch": (
        {"loss": 'loss = F.cross_entropy(model(x), y, reduction="sum") / len(x)'},
        dict(loss='loss = F.cross_entropy(model(x), y, reduction="sum")/ (len(x) * world)'),
        "constant factor",
    ),
    "gradients summed, not averaged": (
        BY_HAND,
        dict(backward="loss.backward()\nfor p in model.parameters():\n    dist.all_reduce(p.grad)"),
        "constant factor",
    ),
    "averaged once more after DDP": (
        {},
        dict(backward="loss.backward()\nfor p in model.parameters():\n    p.grad /= world"),
        "constant factor",
    ),
    "loss multiplied by the world size": (
        {},
        dict(backward="(loss * world).backward()"),
        "constant factor",
    ),
    "not averaged at all": (BY_HAND, dict(backward="loss.backward()"), "not averaged"),
    "module called past DDP": (
        {},
        dict(loss="loss = F.cross_entropy(model.module(x), y)"),
        "not averaged",
    ),
    "always in no_sync": (
        ACCUMULATE,
        dict(clear=ACCUMULATE["clear"].replace("= last", "= False")),
        "not averaged",
    ),
    "one parameter left out of the average": (
        BY_HAND,
        dict(
            backward="loss.backward()\n"
            + AVERAGE.replace("parameters()", "[2].parameters()").replace("model.[", "model[")
        ),
        "some not averaged",
    ),
    "head outside DDP": (HEAD, dict(wrap="model = DDP(model)"), "some not averaged"),
    "head outside DDP and its start": (
        HEAD,
        dict(wrap="torch.manual_seed(rank)\nhead = nn.Linear(16, 3)\nmodel = DDP(model)"),
        ("different start", "some not averaged"),
    ),
    "different start": (
        BY_HAND,
        dict(model="torch.manual_seed(rank)\n" + DEFAULTS["model"]),
        "different start",
    ),
    "different start of a part that DDP ignores": (
        PART_IGNORED_BY_DDP,
        dict(model="torch.manual_seed(rank)\n" + DEFAULTS["model"]),
        "different start",
    ),
    "averaged on every pass": (
        {
            **ACCUMULATE,
            "wrap": "passes = 3",
            "clear": "last = (i + 1) % passes == 0",
            "backward": "(loss / passes).backward()\nif last:" + textwrap.indent(AVERAGE, "    "),
        },
        dict(
            backward="(loss / passes).backward()"
            + AVERAGE.replace("p.grad /= world", "p.grad /= 1")
        ),
        "passes weighted",
    ),
    "only the last pass is averaged": (
        {
            **ACCUMULATE,
            "wrap": "passes = 3\nkept = None",
            "clear": "last = (i + 1) % passes == 0",
            "backward": "(loss / passes).backward()\nif last:" + textwrap.indent(AVERAGE, "    "),
        },
        dict(
            backward="""
            before = [p.grad.clone() if p.grad is not None else 0 for p in model.parameters()]
            (loss / passes).backward()
            if last:
                for p, b in zip(model.parameters(), before):
                    p.grad -= b
                    dist.all_reduce(p.grad)
                    p.grad = p.grad / world + b / world
                    dist.broadcast(p.grad, 0)
        """
        ),
        ("other weights", "passes weighted", "ranks weighted"),
    ),
    "gradients not cleared": ({}, dict(clear=""), "gradients not cleared"),
    "mean of means of tokens": (
        TOKENS,
        dict(loss="loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())"),
        "token weights",
    ),
    "tokens of the rank": (
        TOKENS,
        dict(
            loss=TOKENS["loss"]
            .replace("        dist.all_reduce(count)\n", "")
            .replace("* world ", "")
        ),
        "token weights",
    ),
    "mean of means over passes": (
        {**TOKENS, **GROUPED},
        dict(
            epoch=GROUPED["epoch"].replace(
                "total * world / count", "total / (y != -100).sum() / passes"
            )
        ),
        "token weights",
    ),
    "tokens of one pass": (
        {**TOKENS, **GROUPED},
        dict(
            epoch=GROUPED["epoch"].replace(
                "loss = total * world / count",
                "count = (y != -100).sum()\n                dist.all_reduce(count)\n                loss = total * world / count / passes",
            )
        ),
        "token weights",
    ),
    "clipping norm times the ranks": (
        CLIP,
        dict(clip="nn.utils.clip_grad_norm_(model.parameters(), 0.1 / world)"),
        ("clipping norm", "other update"),
    ),
    "clipped before the average": (
        {**BY_HAND, **CLIP},
        dict(backward="loss.backward()", clip=CLIP["clip"] + "\n" + AVERAGE),
        "clipping norm",
    ),
    "clipping norm of the rank": (
        CLIP,
        dict(
            clip="""
        norm = torch.stack([p.grad.norm() for p in list(model.parameters())[rank::world]]).norm()
        dist.broadcast(norm, 0)
        for p in model.parameters():
            p.grad *= min(1.0, 0.1 / float(norm))
        """
        ),
        ("clipping norm", "constant factor"),
    ),
    "not sharded": ({}, dict(loader="loader = DataLoader(data, 4)", epoch=""), "not sharded"),
    "sampler of one replica": (
        {},
        dict(loader=DEFAULTS["loader"].replace("(data)", "(data, num_replicas=1, rank=0)")),
        "not sharded",
    ),
    "shuffled by the rank": (
        {},
        dict(
            loader="torch.manual_seed(rank)\nloader = DataLoader(data, 4, shuffle=True)",
            epoch="",
            model="torch.manual_seed(0)\n" + DEFAULTS["model"],
        ),
        ("seen twice", "not sharded"),
    ),
    "overlapping shards": (
        dict(
            loader="part = torch.utils.data.Subset(data, range(rank * 24, rank * 24 + 24))\nloader = DataLoader(part, 4)",
            epoch="",
        ),
        dict(
            loader="part = torch.utils.data.Subset(data, range(rank * 12, rank * 12 + 24))\nloader = DataLoader(part, 4)"
        ),
        ("seen twice", "not sharded"),
    ),
    "no set_epoch": (
        dict(loader=DEFAULTS["loader"].replace("=4", "=12")),
        dict(epoch=""),
        "same order",
    ),
    "schedule stepped by every rank": (
        SCHEDULE,
        dict(step="optimizer.step()\nfor _ in range(world):\n    schedule.step()"),
        "schedule",
    ),
    "rate of the rank": (
        {},
        dict(optimizer="optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / (1 + rank))"),
        "learning rate differs",
    ),
    "weight decay times the ranks": (
        dict(
            optimizer="optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)"
        ),
        dict(
            optimizer="optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1 * world)"
        ),
        "other update",
    ),
    "momentum of the rank": (
        {},
        dict(
            optimizer="optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9 if rank else 0.8)"
        ),
        "drift",
    ),
    "step on rank 0 alone": (
        BY_HAND,
        dict(step="if rank == 0 or i % 2:\n    optimizer.step()"),
        ("unequal steps", "drift", "hang", "not averaged"),
    ),
    "plateau of a local loss": (
        {},
        dict(
            step='optimizer.step()\nfor g in optimizer.param_groups:\n    g["lr"] = 0.1 / (1 + float(loss))'
        ),
        "learning rate differs",
    ),
    "rank 1 left out": (
        BY_HAND,
        dict(
            backward="loss.backward()\nfor p in model.parameters():\n    dist.broadcast(p.grad, 0)"
        ),
        "ranks missing",
    ),
    "ranks' losses weighted": (
        {},
        dict(backward="(loss * (1.5 if rank else 0.5)).backward()"),
        "ranks weighted",
    ),
    "some doubled": (
        {},
        dict(
            backward="loss.backward()\nfor p in model.module[2].parameters():\n    dist.all_reduce(p.grad)"
        ),
        "factor of some",
    ),
    "head detached on the ranks": (
        {},
        dict(
            loss="h = model.module[:2](x)\nloss = F.cross_entropy(model.module[2](h.detach()) if world > 1 else model(x), y)",
            backward="loss.backward()\n"
            + "for p in model.parameters():\n    if p.grad is not None:\n        dist.all_reduce(p.grad)\n        p.grad /= world",
        ),
        "no gradient",
    ),
    "trained by one rank's loss": (
        dict(loss="loss = F.cross_entropy(model(x), y)"),
        dict(loss="loss = F.cross_entropy(model(x), y) * (rank == 0)"),
        "ranks missing",
    ),
    "noisy parameters": (
        {},
        dict(
            step="optimizer.step()\nwith torch.no_grad():\n    model.module[0].weight.add_(0.01 * rank)"
        ),
        "drift",
    ),
}

NET = "model = nn.Sequential(nn.Linear(6, 16), {}, nn.Linear(16, 3))"
OPTIMIZERS = {
    "SGD": "lr=0.1",
    "Adam": "lr=0.01",
    "AdamW": "lr=0.01, weight_decay=0.1",
    "RMSprop": "lr=0.01",
    "Adagrad": "lr=0.05",
    "NAdam": "lr=0.01",
    "Adadelta": "lr=0.01",
    "Adamax": "lr=0.01",
    "RAdam": "lr=0.01",
    "Adafactor": "lr=0.01",
    "ASGD": "lr=0.1",
    "Rprop": "lr=0.01",
}
SCHEDULES = (
    "StepLR(optimizer, 2)",
    "ExponentialLR(optimizer, 0.9)",
    "OneCycleLR(optimizer, 0.1, total_steps=40)",
    "LambdaLR(optimizer, lambda n: min(1.0, n / 3 + 0.1))",
    "CosineAnnealingWarmRestarts(optimizer, 4)",
)
CONVS = dict(
    data="data = TensorDataset(torch.randn(48, 3, 8, 8), torch.randint(0, 3, (48,)))",
    model="model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))",
)
OF_EACH = {  # right scripts, by what is special in them
    **{
        f"optimizer {name}": dict(
            optimizer=f"optimizer = torch.optim.{name}(model.parameters(), {options})"
        )
        for name, options in OPTIMIZERS.items()
    },
    **{
        f"schedule {name.split('(')[0]}": dict(
            optimizer=f"optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nschedule = torch.optim.lr_scheduler.{name}",
            step="optimizer.step()\nschedule.step()",
        )
        for name in SCHEDULES
    },
    **{
        f"layer {name}": dict(model=NET.format(layer))
        for name, layer in {
            "synchronized batch norm": "nn.SyncBatchNorm(16), nn.ReLU(inplace=True)",
            "alpha dropout": "nn.SELU(), nn.AlphaDropout(0.2)",
        }.items()
    },
    "autocast": dict(
        loss='with torch.autocast("cpu", dtype=torch.bfloat16):\n    loss = F.cross_entropy(model(x), y)'
    ),
    "cuda": dict(
        start='dist.init_process_group("nccl")\ntorch.cuda.set_device(int(os.environ["LOCAL_RANK"]))',
        model=DEFAULTS["model"] + ".cuda()",
        wrap="model = DDP(model, device_ids=[rank])",
        loss="loss = F.cross_entropy(model(x.cuda()), y.cuda(non_blocking=True))",
    ),
    "tokens of passes": {**TOKENS, **GROUPED},
    "clipping by value": dict(clip="nn.utils.clip_grad_value_(model.parameters(), 0.01)"),
    "convolutions": CONVS,
    "shuffled shard": dict(
        loader="loader = DataLoader(torch.utils.data.Subset(data, range(rank, 48, world)), 4, shuffle=True)",
        epoch="",
    ),
    "no loader": dict(
        loader="""
        def batches():
            made = torch.Generator().manual_seed(rank)
            for _ in range(12):
                rows = torch.randint(0, 48, (4,), generator=made)
                yield data.tensors[0][rows], data.tensors[1][rows]
    """,
        epoch="loader = batches()",
    ),
    "two groups": dict(
        optimizer="optimizer = torch.optim.AdamW([dict(params=model.module[0].parameters(), lr=0.01), dict(params=model.module[2].parameters(), lr=0.001)])"
    ),
    "closure": dict(
        clear="",
        loss="""
        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss
    """,
        backward="",
        step="optimizer.step(closure)",
    ),
    "regression": dict(loss="loss = F.mse_loss(model(x), F.one_hot(y, 3).float())"),
}


RIGHT_SLOTS = {
    "part of a global batch": dict(
        loader="loader = DataLoader(data, batch_size=8)",
        epoch="",
        loss="x, y = x[rank::world], y[rank::world]\nloss = F.cross_entropy(model(x), y)",
    ),
    "every other batch": dict(
        loader="loader = DataLoader(data, batch_size=4)",
        epoch="",
        clear="if i % world != rank:\n    continue\noptimizer.zero_grad()",
    ),
    "replacement": dict(
        loader="draws = torch.utils.data.WeightedRandomSampler(torch.ones(48), 480, generator=torch.Generator().manual_seed(rank))\nloader = DataLoader(data, 4, sampler=draws)",
        epoch="",
    ),
    "equal samples": dict(
        data="data = TensorDataset(torch.randint(0, 2, (480, 6)).double(), torch.randint(0, 3, (480,)))"
    ),
    "evaluation before, with gradients": dict(
        wrap="model = DDP(model)\nfor x, y in DataLoader(data, 4):\n    F.cross_entropy(model.module(x), y)"
    ),
    "coupled, a batch looked at before": {
        **PROBED,
        "loss": "out = model(x)\nloss = F.cross_entropy(out @ out.T, torch.arange(len(x)))",
    },
    "optimizer that is never used": dict(
        optimizer=DEFAULTS["optimizer"] + "\nlater = torch.optim.SGD(nn.Linear(2, 2).parameters())"
    ),
    "plain": {},
    "by hand": BY_HAND,
    "accumulation": ACCUMULATE,
    "tokens": TOKENS,
    "clipping": CLIP,
    "clipping and accumulation": {
        **ACCUMULATE,
        "step": "if last:\n    nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n    optimizer.step()\n    optimizer.zero_grad()",
    },
    "schedule": SCHEDULE,
    "head": HEAD,
    "uneven last batch": dict(loader=DEFAULTS["loader"].replace("=4", "=10")),
    "uneven last batch, accumulation": {
        **ACCUMULATE,
        "loader": DEFAULTS["loader"].replace("=4", "=5"),
    },
    "padded by the sampler": dict(
        data="data = TensorDataset(torch.randn(27, 6), torch.randint(0, 3, (27,)))"
    ),
    "bf16": dict(
        loss='with torch.autocast("cuda", dtype=torch.bfloat16):\n    loss = F.cross_entropy(model(x), y)'
    ),
    "scaler": dict(
        optimizer=DEFAULTS["optimizer"] + '\nscaler = torch.amp.GradScaler("cuda")',
        backward="scaler.scale(loss).backward()",
        clip="scaler.unscale_(optimizer)",
        step="scaler.step(optimizer)\nscaler.update()",
    ),
    "model in bfloat16": dict(
        wrap="model = DDP(model.to(torch.bfloat16))",
        loss="loss = F.cross_entropy(model(x.to(torch.bfloat16)), y)",
    ),
    "checkpointing": dict(
        model="""
            from torch.utils.checkpoint import checkpoint
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 3)
                def forward(self, x):
                    return self.b(checkpoint(lambda v: self.a(v).relu(), x, use_reentrant=False))
            model = Net()
        """
    ),
    "tied weights": {
        **TOKENS,
        "model": TOKENS["model"].replace("nn.Linear(8, 11)", "nn.Linear(8, 11, bias=False)")
        + "\nmodel[1].weight = model[0].weight",
    },
    "dropout": dict(
        model="model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 3))"
    ),
    "dropout of the rank": dict(
        wrap="model = DDP(model)\ntorch.manual_seed(rank)",
        model="model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 3))",
    ),
    "batch norm": dict(
        model="model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))"
    ),
    "synchronized batch norm": dict(
        model="model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))",
        wrap="model = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(model))",
    ),
    "group norm": dict(
        model="model = nn.Sequential(nn.Linear(6, 16), nn.GroupNorm(4, 16), nn.ReLU(), nn.Linear(16, 3))"
    ),
    "layer norm": dict(
        model="model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))"
    ),
    "rate times the ranks": dict(
        optimizer="optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * world)"
    ),
    "rate times the root": dict(
        optimizer="optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * world**0.5)"
    ),
    "one cycle": dict(
        optimizer="optimizer = torch.optim.AdamW(model.parameters())\nschedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=6 * len(loader))",
        step="optimizer.step()\nschedule.step()",
    ),
    "steps from the world size": dict(
        optimizer="optimizer = torch.optim.AdamW(model.parameters())\nschedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=6 * len(data) // (4 * world))",
        step="optimizer.step()\nschedule.step()",
    ),
    "iterable": dict(
        data="""
            class Stream(IterableDataset):
                def __iter__(self):
                    g = torch.Generator().manual_seed(7)
                    for i in range(100):
                        sample = torch.randn(6, generator=g), torch.randint(0, 3, (), generator=g)
                        if i % world == rank:
                            yield sample
        """,
        loader="loader = DataLoader(Stream(), batch_size=4)",
        epoch="",
    ),
    "own data of the rank": dict(
        data="torch.manual_seed(100 + rank)\n" + DEFAULTS["data"],
        loader="loader = DataLoader(data, 4, shuffle=True)",
        epoch="",
        model="torch.manual_seed(0)\n" + DEFAULTS["model"],
    ),
    "workers": dict(
        loader=DEFAULTS["loader"].replace("sampler=sampler)", "sampler=sampler, num_workers=2)")
    ),
    "noise": dict(loss="x = x + 0.1 * torch.randn_like(x)\nloss = F.cross_entropy(model(x), y)"),
    "mixup": dict(
        loss="lam = np.random.beta(1.0, 1.0)\nother = torch.randperm(len(x))\nout = model(lam * x + (1 - lam) * x[other])\nloss = lam * F.cross_entropy(out, y) + (1 - lam) * F.cross_entropy(out, y[other])"
    ),
    "diffusion": dict(
        model="model = nn.Sequential(nn.Linear(7, 16), nn.SiLU(), nn.Linear(16, 6))",
        loss="t = torch.randint(0, 100, (len(x),))\nnoise = torch.randn_like(x)\na = (1 - t / 100).unsqueeze(1)\nloss = F.mse_loss(model(torch.cat([a * x + (1 - a) * noise, a], 1)), noise)",
    ),
    "unused parameters": dict(
        model="class Net(nn.Sequential):\n    def forward(self, x):\n        return self[0](x)\nmodel = Net(nn.Linear(6, 3), nn.Linear(6, 3))",
        wrap="model = DDP(model, find_unused_parameters=True)",
    ),
    "frozen": dict(
        wrap="for p in model[0].parameters():\n    p.requires_grad_(False)\nmodel = DDP(model)"
    ),
    "no sync": {
        **ACCUMULATE,
        "clear": "last = (i + 1) % passes == 0",
        "loss": "import contextlib\nwith contextlib.nullcontext() if last else model.no_sync():\n    (F.cross_entropy(model(x), y) / passes).backward()",
        "backward": "",
    },
    "ema": dict(
        optimizer=DEFAULTS["optimizer"]
        + "\nema = torch.optim.swa_utils.AveragedModel(model.module)",
        step="optimizer.step()\nema.update_parameters(model.module)",
    ),
    # As in timm, the average requires gradients and belongs to the called module.
    "ema that the first update overwrites": dict(
        model="""
            class Task(nn.Module):
                def __init__(self, network):
                    super().__init__()
                    self.network = network
                    self.average = copy.deepcopy(network)
                def forward(self, x):
                    return self.network(x)
            import copy
            torch.manual_seed(rank)
            model = Task(nn.Linear(6, 3))
            nn.init.normal_(model.average.weight)
            decay = 0.0
        """,
        wrap="model.network = DDP(model.network)",
        optimizer="optimizer = torch.optim.SGD(model.network.parameters(), lr=0.1, momentum=0.9)",
        step="""
            optimizer.step()
            with torch.no_grad():
                for a, p in zip(model.average.parameters(), model.network.parameters()):
                    a.lerp_(p, 1 - decay)
            decay = 0.9
        """,
    ),
    "evaluation": dict(
        epoch="sampler.set_epoch(epoch)\nmodel.eval()\nwith torch.no_grad():\n    for x, y in DataLoader(data, 16):\n        model(x)\nmodel.train()"
    ),
    "evaluation on rank 0": dict(
        epoch="sampler.set_epoch(epoch)\nif rank == 0:\n    with torch.no_grad():\n        for x, y in DataLoader(data, 16):\n            model.module(x)\ndist.barrier()"
    ),
    "gradient as bucket view": dict(
        wrap="model = DDP(model, gradient_as_bucket_view=True, static_graph=True)"
    ),
    "zero": dict(
        optimizer="from torch.distributed.optim import ZeroRedundancyOptimizer\noptimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)"
    ),
    "fsdp2": dict(
        wrap="from torch.distributed.fsdp import fully_shard\nfor layer in (model[0], model[2]):\n    fully_shard(layer)\nfully_shard(model)",
        optimizer="optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)",
    ),
    "fsdp2, clipped": dict(
        wrap="from torch.distributed.fsdp import fully_shard\nfully_shard(model)",
        clip="nn.utils.clip_grad_norm_(model.parameters(), 0.1)",
        optimizer="optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)",
    ),
    "spatial": dict(
        data="data = TensorDataset(torch.randn(48, 3, 6, 6), torch.randint(0, 3, (48,)))",
        model="model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(), nn.Flatten(), nn.Linear(128, 3))",
    ),
    "attention": dict(
        data="data = TensorDataset(torch.randn(48, 5, 8), torch.randint(0, 3, (48,)))",
        model="class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.t, self.h = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 3)\n    def forward(self, x):\n        return self.h(self.t(x).mean(1))\nmodel = Net()",
        optimizer="optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)",
    ),
    "lstm": dict(
        data="data = TensorDataset(torch.randn(48, 5, 8), torch.randint(0, 3, (48,)))",
        model="class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.r, self.h = nn.LSTM(8, 8, 2, dropout=0.1, batch_first=True), nn.Linear(8, 3)\n    def forward(self, x):\n        return self.h(self.r(x)[0][:, -1])\nmodel = Net()",
    ),
    "float32 by name": dict(
        loss="loss = F.cross_entropy(model(x.float().to(torch.float32)).float(), y)"
    ),
    "seed of the rank": dict(model="torch.manual_seed(rank)\n" + DEFAULTS["model"]),
    "compiled": dict(wrap="model = DDP(torch.compile(model))"),
    "named batches": dict(
        data="class Data(Dataset):\n    def __len__(self):\n        return 48\n    def __getitem__(self, i):\n        g = torch.Generator().manual_seed(i)\n        return {'x': torch.randn(6, generator=g), 'name': f's{i}'}, i % 3\ndata = Data()",
        loss="loss = F.cross_entropy(model(x['x']), y)",
    ),
    "ragged": dict(
        data="class Data(Dataset):\n    def __len__(self):\n        return 48\n    def __getitem__(self, i):\n        g = torch.Generator().manual_seed(i)\n        return torch.randn(1 + i % 5, 6, generator=g), i % 3\ndata = Data()\ncollate = lambda items: (nn.utils.rnn.pad_sequence([a for a, _ in items], True), torch.tensor([b for _, b in items]))",
        loader=DEFAULTS["loader"].replace("sampler=sampler", "sampler=sampler, collate_fn=collate"),
        loss="loss = F.cross_entropy(model(x).sum(1), y)",
    ),
}
for _name, (_right, _bug, _cause) in BUGS.items():
    BUGS[_name] = _right, _bug, _cause if isinstance(_cause, tuple) else (_cause,)
RIGHT = {name: fill(**slots) for name, slots in {**OF_EACH, **RIGHT_SLOTS}.items()}

# nanoGPT's way: data drawn with a seed of the rank, and passes divided among the ranks.
GET_BATCH = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
passes = 4
ddp = int(os.environ.get("RANK", -1)) != -1
rank, world = 0, 1
if ddp:
    dist.init_process_group("nccl")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = f"cuda:{os.environ['LOCAL_RANK']}"
    torch.cuda.set_device(device)
    assert passes % world == 0
    passes //= world
torch.manual_seed(1337 + rank)
text = torch.randint(0, 11, (400,))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.h = nn.Embedding(11, 8), nn.Linear(8, 11)
    def forward(self, x, y):
        out = self.h(self.e(x))
        return out, F.cross_entropy(out.view(-1, 11), y.view(-1))
model = Net().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if ddp:
    model = DDP(model, device_ids=[0])
def get_batch():
    ix = torch.randint(len(text) - 8, (3,))
    x = torch.stack([text[i : i + 8] for i in ix]).pin_memory()
    y = torch.stack([text[i + 1 : i + 9] for i in ix])
    return x.to(device, non_blocking=True), y.to(device)
x, y = get_batch()
for step in range(20):
    for i in range(passes):
        if ddp:
            model.require_backward_grad_sync = i == passes - 1
        _, loss = model(x, y)
        x, y = get_batch()
        (loss / passes).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
"""
# No loader, and the targets never enter a module.
SLICES = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
xs, ys = torch.randn(64, 6), torch.randn(64, 2)
model = DDP(nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    rows = torch.arange(step * 8 + rank * 4, step * 8 + rank * 4 + 4)
    optimizer.zero_grad()
    loss = ((model(xs[rows]) - ys[rows]) ** 2).mean()
    loss.backward()
    optimizer.step()
"""
RIGHT["get_batch"], RIGHT["slices"] = GET_BATCH, SLICES
RIGHT["slices of a global batch"] = SLICES.replace(
    "+ rank * 4, step * 8 + rank * 4 + 4)", ", step * 8 + 8)[rank::world]"
)
RIGHT["slices, averaged by hand"] = SLICES.replace(
    "DDP(nn.Linear(6, 2))", "nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))"
).replace("    optimizer.step()", AVERAGE.replace("\n", "\n    ") + "optimizer.step()")

# Rank 0 draws more than the others, for an evaluation: the ranks part after their first batch.
SAME_SEED = GET_BATCH.replace("1337 + rank", "1337").replace(
    "for step in", "if rank == 0:\n    get_batch()\nfor step in"
)

# The targets have a row for each token, and no loader gave them.
FLAT_TARGETS = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
criterion = nn.CrossEntropyLoss()
made = torch.Generator().manual_seed(dist.get_rank())
for step in range(6):
    for i in range(2):
        model.set_requires_gradient_sync(i == 1)
        tokens = torch.randint(0, 11, (3, 9), generator=made)
        loss = criterion(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        (loss / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
RIGHT["targets for each token"] = FLAT_TARGETS
FSDP2_BUG = FLAT_TARGETS.replace("(loss / 2)", "(loss / 2 / dist.get_world_size())")

# Batches of token numbers that each collation pads to another width.
PADDED = fill(
    data="data = [torch.randint(1, 11, (n,)) for n in torch.randint(2, 9, (48,)).tolist()]",
    loader="""
        def collate(rows):
            x = nn.utils.rnn.pad_sequence(rows, batch_first=True)
            return dict(input_ids=x, labels=x.masked_fill(x == 0, -100))
        sampler = DistributedSampler(data)
        loader = DataLoader(data, 4, sampler=sampler, collate_fn=collate)
    """,
    model=TOKENS["model"],
    loss='x, y = batch["input_ids"], batch["labels"]' + textwrap.dedent(TOKENS["loss"]),
).replace("(x, y) in", "batch in")
PADDED_PAIRS = (
    PADDED.replace("dict(input_ids=x, labels=", "(x, ")
    .replace('batch["input_ids"]', "batch[0]")
    .replace('batch["labels"]', "batch[1]")
)

# Each sample is compared with the others of its batch.
COUPLED = fill(loss="out = model(x)\nloss = F.cross_entropy(out @ out.T, torch.arange(len(x)))")
