"""torch's tests of `fully_shard`, with `mh.FSDP` in its place.

The cases are those of pytorch's `test/distributed/_composable/fsdp/`:
`test_fully_shard_frozen.py` (04fb872), `test_fully_shard_autograd.py` (0bc3de0) and
`test_fully_shard_clip_grad_norm_.py` (0f31e61). The oracle is the plain model, trained on the
samples of all ranks.
"""

import collections
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import manyhands as mh
from helpers.ranks import on_ranks, run_ranks

WORKERS = 2
RESHARD = [False, True]
Named = collections.namedtuple("Named", "x y")


class Pair(nn.Module):
    """Two layers, of which the second may be unused."""

    def __init__(self, uses_second):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.uses_second = uses_second

    def forward(self, x):
        one = self.first(x).relu()
        return (one, self.second(x).relu()) if self.uses_second else one


class Mlp(nn.Module):
    def __init__(self, checkpointed=False):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.checkpointed = checkpointed

    def forward(self, x):
        return (
            checkpoint(self.layers, x, use_reentrant=False) if self.checkpointed else self.layers(x)
        )


class Repeated(nn.Module):
    """Calls a frozen and a trained layer several times, with and without gradients."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.trained = nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x)
        for _ in range(3):
            x = self.frozen(self.trained(x).relu())
            with torch.no_grad():
                x += self.trained(x).relu()
        return x


class Inside(nn.Module):
    """Passes a tensor on in a container."""

    def __init__(self, container, enter=False, leave=False):
        super().__init__()
        self.net = Mlp()
        self.container = container
        self.enter = enter
        self.leave = leave

    def forward(self, given):
        key = "x" if self.container is dict else 0
        out = self.net(given if self.enter else given[key])
        if self.leave:
            return out
        if self.container is dict:
            return {"x": out}
        return Named(out, torch.ones(1)) if self.container is Named else self.container([out])


def compare(make, names, reshard, *, loss=None, steps=6, change=None, forward_only=()):
    """Train the plain and the sharded model; losses and parameters must agree after each step.

    `names` are the modules with a separate wrap, `change(model, step)` freezes parameters, and
    steps in `forward_only` run without gradients.
    """

    def run():
        torch.manual_seed(0)
        plain = make()
        sharded = copy.deepcopy(plain)
        for name in names:
            wrapped = mh.FSDP(getattr(sharded, name), reshard_after_forward=reshard)
            setattr(sharded, name, wrapped)
        sharded = mh.FSDP(sharded, reshard_after_forward=reshard)
        optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (plain, sharded)]
        rank = dist.get_rank()
        for step in range(steps):
            x = torch.randn(2 * WORKERS, 8)
            losses = []
            for module, samples in ((plain, x), (sharded, x[2 * rank : 2 * rank + 2])):
                if change is not None:
                    change(module, step)
                with torch.set_grad_enabled(step not in forward_only):
                    out = module(samples)
                    losses.append(out.sum() if loss is None else loss(out, step))
            if step not in forward_only:
                (losses[0] / WORKERS).backward()
                losses[1].backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=step % 2 == 0)
            total = losses[1].detach().clone()
            dist.all_reduce(total)
            torch.testing.assert_close(total, losses[0].detach())
            state = sharded.state_dict()
            for name, value in plain.state_dict().items():
                torch.testing.assert_close(state[name], value, msg=lambda m, n=name: f"{n}: {m}")

    run_ranks(WORKERS, run)


# -- frozen ----------------------------------------------------------------------------------------


def train_biases(model, step):
    for name, param in model.named_parameters():
        param.requires_grad_("bias" in name)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("reshard", RESHARD)
def test_train_mixed_requires_grad_per_group(reshard, checkpointed):
    def frozen_after_the_wrap():
        return nn.Sequential(*(Mlp(checkpointed) for _ in range(3)))

    def frozen_before():
        model = frozen_after_the_wrap()
        train_biases(model, 0)
        return model

    compare(frozen_before, "012", reshard)
    compare(frozen_after_the_wrap, "012", reshard, change=train_biases)


@pytest.mark.parametrize("unfreeze", [False, True])
@pytest.mark.parametrize("reshard", RESHARD)
def test_train_mixed_requires_grad_across_groups(reshard, unfreeze):
    def make():
        layers = []
        for _ in range(6):
            layers += [nn.Linear(8, 8), nn.ReLU()]
        return nn.Sequential(*layers)

    def change(model, step):
        for name in ("0", "4", "8"):
            getattr(model, name).requires_grad_(unfreeze and step == 2)

    names = [str(2 * i) for i in range(6)]
    compare(make, names, reshard, change=change, steps=3, forward_only=[1])


@pytest.mark.parametrize("reshard", RESHARD)
def test_multi_forward_mixed_requires_grad(reshard):
    compare(Repeated, ["first", "frozen", "trained"], reshard)


# -- autograd --------------------------------------------------------------------------------------


@pytest.mark.parametrize("reshard", RESHARD)
def test_unused_forward_output_and_module(reshard):
    def loss(out, step):
        return (out[0] * out[1]).sum() if step < 3 else out[0].sum()

    compare(lambda: Pair(True), ["first"], reshard, loss=loss)
    compare(lambda: Pair(False), ["first", "second"], reshard)


@pytest.mark.parametrize("container", [list, tuple, dict, Named])
def test_nontensor_activations(container):
    def make():
        first = Inside(container, enter=True)
        return nn.Sequential(first, Inside(container), Inside(container, leave=True))

    compare(make, "012", True)


# -- clipping --------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", [2, 1, float("inf")])
@on_ranks(WORKERS)
def test_clip_grad_norm_1d(norm_type):
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16, 0.0) for _ in range(2)))
    clipped = []
    for by_torch in (False, True):
        sharded = mh.FSDP(nn.Sequential(*(mh.FSDP(copy.deepcopy(layer)) for layer in plain)))
        x = 100 * torch.randn(3, 2 * WORKERS, 8, generator=torch.Generator().manual_seed(1))
        own = x.chunk(WORKERS, 1)[dist.get_rank()]
        sharded(own).square().sum().backward()
        if by_torch:
            norm = nn.utils.clip_grad_norm_(sharded.parameters(), 1.0, norm_type)
        else:
            norm = sharded.clip_grad_norm_(1.0, norm_type)
        grads = [param.grad.full_tensor() for param in sharded.parameters()]
        clipped.append([norm, *grads])
    (plain(x).square().sum() / WORKERS).backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0, norm_type)
    expected = [norm, *(param.grad for param in plain.parameters())]
    assert norm > 1.0
    for found in clipped:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
