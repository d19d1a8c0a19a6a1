"""Blocks in every combination: which blocks, which sharding inside, which rule on which side.

A *run* is four ranks (or another number) as some machines of some ranks each. The ranks of a
machine train as one worker, in one of the SHARDINGS; the machines synchronize in blocks.
"""

import itertools
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint  # slow, so that ranks have it when they are forked
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

import manyhands as mh

EVERY = 3
BLOCKS = {
    "LocalSGD": lambda o, **more: mh.LocalSGD(o, every=EVERY, **more),
    "BMUF": lambda o, **more: mh.BMUF(
        o, block_momentum=0.5, global_sync_iter=EVERY, warmup_iterations=2, **more
    ),
    "SlowMo": lambda o, **more: mh.SlowMo(o, every=EVERY, **more),
    "DiLoCo": lambda o, **more: mh.DiLoCo(o, every=EVERY, codec="int8", overlap=1, **more),
}
SHARDINGS = ("one level", "DDP", "OSS", "ShardedDataParallel", "FSDP", "fully_shard")
INNER: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (SGD, {"lr": 0.05, "momentum": 0.9}),
    "AdamW": (AdamW, {"lr": 0.02}),
}
RULES = ("none", "inside", "outside")
MEASURED = {"SGD": mh.AdaScale, "AdamW": mh.AdamScale}
ALL = [  # that train: AdamScale goes around an Adam, not around blocks
    each
    for each in itertools.product(BLOCKS, SHARDINGS, RULES, INNER)
    if each[2:] != ("outside", "AdamW")
]
FEW = [  # each value of each of the four
    ("DiLoCo", "one level", "inside", "AdamW"),
    ("SlowMo", "DDP", "outside", "SGD"),
    ("BMUF", "OSS", "none", "AdamW"),
    ("DiLoCo", "ShardedDataParallel", "inside", "SGD"),
    ("LocalSGD", "FSDP", "outside", "SGD"),
    ("DiLoCo", "fully_shard", "none", "AdamW"),
]


class Model(nn.Module):
    """Odd sizes, so that nothing divides evenly; one parameter rests, and one is a number."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first: nn.Module = nn.Linear(5, 7)
        self.last = nn.Linear(7, 3)
        self.gain = nn.Parameter(torch.ones(1))
        self.rests = nn.Parameter(torch.full((3,), 1.0 + seed), requires_grad=False)
        self.double()

    def forward(self, x):
        return self.gain * self.last(self.first(x).tanh()) + self.rests


class Groups:
    """The ranks as `machines` of equally many each."""

    def __init__(self, machines):
        self.inside = dist.get_world_size() // machines
        self.machines = machines
        self.mesh = init_device_mesh(
            "cpu", (machines, self.inside), mesh_dim_names=("machines", "inside")
        )
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None
        self.machine, self.place = coordinate

    def group(self, name):
        return self.mesh[name].get_group()


class Run:
    """One rank's model and optimizer."""

    def __init__(self, combination, groups, seed=0):
        blocks, self.sharding, rule, inner = combination
        self.groups = groups
        self.module = module = Model(seed)
        self.model: nn.Module
        cls, options = INNER[inner]
        inside = groups.group("inside")
        options_of_blocks = {"process_group": groups.group("machines")}
        if self.sharding in ("DDP", "OSS", "ShardedDataParallel"):
            options_of_blocks["inner_group"] = inside
        if self.sharding == "fully_shard":
            fully_shard(module.first, mesh=groups.mesh["inside"])
            fully_shard(module, mesh=groups.mesh["inside"])
            self.model = module
        elif self.sharding == "FSDP":
            module.first = mh.FSDP(module.first, process_group=inside)
            self.model = mh.FSDP(module, process_group=inside)
        if self.sharding in ("OSS", "ShardedDataParallel"):
            self.inner = mh.OSS(
                module.parameters(), optim=cls, group=inside, bucket_size=64, **options
            )
        else:
            self.inner = cls(module.parameters(), **options)
        if self.sharding == "ShardedDataParallel":
            self.model = mh.ShardedDataParallel(module, self.inner, process_group=inside)
        elif self.sharding in ("DDP", "OSS"):
            self.model = DistributedDataParallel(module, process_group=inside)
        elif self.sharding == "one level":
            assert groups.inside == 1
            self.model = module

        def ruled(optimizer):
            more = {"world_size": 1} if groups.inside == 1 else {"process_group": inside}
            return MEASURED[inner](optimizer, **more)

        optimizer = ruled(self.inner) if rule == "inside" else self.inner
        optimizer = self.blocks = BLOCKS[blocks](optimizer, **options_of_blocks)
        self.optimizer = ruled(optimizer) if rule == "outside" else optimizer

    def train(self, steps, start=0):
        per = 12 // self.groups.inside
        part = slice(per * self.groups.place, per * (self.groups.place + 1))
        for step in range(start, start + steps):
            draw = torch.Generator().manual_seed(100 * step + self.groups.machine)
            x = torch.randn(12, 5, generator=draw, dtype=torch.float64)[part]
            self.optimizer.zero_grad()
            (self.model(x) - x[:, :3].sin()).square().mean().backward()
            self.optimizer.step()
        return self

    def given(self):
        return {"model": self.model, "optimizer": self.optimizer}

    # -- what is held, as whole tensors by name --------------------------------------------------

    def params(self):
        return {
            name.replace("_fsdp_wrapped_module.", ""): whole(param)
            for name, param in self.module.named_parameters()
        }

    @torch.no_grad()
    def outer(self):
        """Return anchor and memories by parameter; `restore_params` writes them there."""
        anchor = self.blocks._sync.anchor
        if self.blocks.alone:
            return {}
        kept = [(param, param.detach().clone()) for param in self.module.parameters()]
        anchors = [bucket.anchor for bucket in anchor.buckets]
        found: dict[str, torch.Tensor] = {}
        for number in range(-1, anchor.outer.memories):
            for bucket, value in zip(anchor.buckets, anchors, strict=True):
                bucket.anchor = value if number < 0 else bucket.memories[number]
            anchor.restore_params()
            what = "anchor" if number < 0 else f"memory {number}"
            found |= {f"{what} of {name}": value for name, value in self.params().items()}
        for bucket, value in zip(anchor.buckets, anchors, strict=True):
            bucket.anchor = value
        for param, value in kept:
            param.copy_(value)
        return found

    def state(self):
        """Return the inner optimizer's state as whole tensors; each machine has its own."""
        if isinstance(self.inner, mh.OSS):
            self.inner.consolidate_state_dict(-1)
        packed = self.inner.state_dict()
        names = [name for name, _ in self.module.named_parameters()]
        return {
            f"{entry} of {names[number].replace('_fsdp_wrapped_module.', '')}": whole(value)
            for number, entries in packed["state"].items()
            for entry, value in entries.items()
            if value is not None
        }

    def residuals(self):
        """Return what rounding has cut off, on this rank."""
        sync = self.blocks._sync
        for pending in sync.pending:
            pending.background.finished()  # it writes to them
        found = [bucket.residual for bucket in sync.anchor.buckets]
        return {f"residual {i}": r.clone() for i, r in enumerate(found) if r is not None}

    def counts(self):
        shown = self.optimizer.snapshot()
        ours = ("step", "rounds", "every", "left_out", "progress", "gain", "scale", "sqr", "var")
        return {name: shown[name] for name in ours if name in shown}

    def held(self):
        return {**self.params(), **self.outer(), **self.state()}


def whole(tensor):
    tensor = torch.as_tensor(tensor)
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().clone()
