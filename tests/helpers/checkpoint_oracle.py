"""One model trained in each of the ways, and what it holds, as whole tensors by name.

A *setup* is a model, wrapped, with its optimizer, in one of the WAYS. Its dimensions are odd, so
that nothing divides evenly, one layer is laid out in another order of memory, and two are tied.
"""

from typing import Any

import torch
import torch.distributed.checkpoint  # slow, so that ranks have it when they are forked
from torch import nn
from torch.distributed.fsdp import fully_shard

import manyhands as mh
from helpers.sharding_oracle import Lamb, everyone
from helpers.ways import WAYS

ADAMW = (torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.1})
SGD = (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9})
LAMB = (Lamb, {"lr": 0.02})
ADAFACTOR = (torch.optim.Adafactor, {"lr": 0.02})


def set_memory_format(module: nn.Module, memory_format: torch.memory_format) -> None:
    # An overload that torch's types lack.
    module.to(memory_format=memory_format)  # type: ignore[call-overload]


class Model(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(5, 13)
        self.norm = nn.BatchNorm1d(13).eval()  # the same whoever has which part of a batch
        if self.norm.running_mean is not None:
            self.norm.running_mean.normal_()
        self.passes: torch.Tensor
        self.register_buffer("passes", torch.tensor(0))
        self.pair = nn.ModuleList([nn.Linear(13, 13), nn.Linear(13, 13)])
        self.pair[1].weight = self.pair[0].weight
        self.image = nn.Conv2d(2, 3, (2, 3))
        set_memory_format(self.image, torch.channels_last)
        self.last = nn.Linear(13, 3)
        self.frozen = nn.Parameter(torch.full((4,), 1.0 + seed), requires_grad=False)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x):
        self.passes += 1
        hidden = self.norm(self.first(x)).tanh()
        for layer in self.pair:
            hidden = layer(hidden).tanh()
        seen = self.image(hidden[:, :12].reshape(-1, 2, 2, 3)).mean(dim=(2, 3))
        return self.last(hidden) + seen


class Setup:
    """A model and an optimizer on this worker."""

    def __init__(self, way, kind=ADAMW, seed=0, rule=None, **options):
        _, workers = everyone()
        cls, given = kind
        self.way = way if workers > 1 or way in ("plain", "OSS") else "plain"
        self.module = Model(seed)

        def params() -> list[dict[str, Any]]:
            matrices = [p for p in self.module.parameters() if p.dim() > 1]
            rest = [p for p in self.module.parameters() if p.dim() <= 1]
            return [{"params": matrices}, {"params": rest, "lr": 0.01}]

        self.model: nn.Module = self.module
        self.optimizer: Any
        if self.way == "fully_shard":
            set_memory_format(self.module.image, torch.contiguous_format)  # the only one it takes
            fully_shard(self.module.last)
            fully_shard(self.module)
            self.optimizer = cls(params(), **given)
        elif workers > 1:
            self.model, self.optimizer = WAYS[self.way](
                self.module, params, cls, **given, **options
            )
        elif self.way == "OSS":
            self.optimizer = mh.OSS(params(), optim=cls, bucket_size=64, **given, **options)
        else:
            self.optimizer = cls(params(), **given)
        if rule is not None:
            self.optimizer = rule(self.optimizer)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)

    def train(self, steps, start=0, draw=False):
        """Whole batches of 24, shared out; with `draw`, noise from the workers' own generators."""
        rank, workers = everyone()
        for step in range(start, start + steps):
            generator = torch.Generator().manual_seed(step)
            x, y = (torch.randn(24, n, generator=generator) for n in (5, 3))
            x, y = x[rank::workers], y[rank::workers]
            if draw:
                x = x + 0.1 * torch.randn_like(x)
            self.optimizer.zero_grad()
            nn.functional.mse_loss(self.model(x), y).backward()
            self.optimizer.step()
            self.scheduler.step()
        return self

    def given(self):
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def held(self):
        """Parameters, buffers and state by name, whole, on every worker."""
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        result = {}
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            result[plain(name)] = whole(tensor)
        if isinstance(inner, mh.OSS):
            inner.consolidate_state_dict(-1)
        packed = inner.state_dict()
        names = {id(p): plain(name) for name, p in self.module.named_parameters()}
        for group, packed_group in zip(inner.param_groups, packed["param_groups"], strict=True):
            for param, number in zip(group["params"], packed_group["params"], strict=True):
                for entry, value in packed["state"].get(number, {}).items():
                    result[f"{entry} of {names[id(param)]}"] = whole(torch.as_tensor(value))
        result["lr"] = torch.tensor([float(group["lr"]) for group in inner.param_groups])
        return result


def plain(name):
    return name.replace("_fsdp_wrapped_module.", "")


def whole(tensor):
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().clone()


def assert_equal(mine, expected, where="", **near):
    assert set(mine) == set(expected), (where, set(mine) ^ set(expected))
    for name, value in expected.items():
        if near:
            try:
                torch.testing.assert_close(mine[name], value, **near)
            except AssertionError as error:
                raise AssertionError(f"{where} {name}: {error}") from None
        else:
            same = mine[name].dtype == value.dtype and torch.equal(mine[name], value)
            assert same, f"{where}: {name}\n{mine[name]}\n{value}"
