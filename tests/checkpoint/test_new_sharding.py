"""A sharding that nobody knows: docs/architecture.md says what it needs, and that is enough."""

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW, Optimizer

import manyhands as mh
from helpers.ranks import run_ranks
from manyhands._core.modules import ModuleWrapper
from manyhands._core.state_parts import OptimizerStatePart, ShardedOptimizer, options_of


class Alternate(ShardedOptimizer):
    """Rank r steps every parameter whose number is r modulo 2, and sends it to the other rank."""

    group = None

    def __init__(self, params, lr):
        self.optimizer_class, self.optimizer_arguments = AdamW, {"lr": lr}
        self._inner, self._replica = None, None
        Optimizer.__init__(self, params, {})
        self._own = [p for i, p in enumerate(self.params) if i % 2 == dist.get_rank()]
        self._inner = AdamW(self._own, lr=lr)
        self.param_groups[0].update(options_of(self._inner.param_groups[0]))

    @property
    def params(self):
        return self.param_groups[0]["params"]

    @property
    def optim(self):
        return self._inner

    shards_state = True

    @property
    def state(self):
        return {} if self._inner is None else self._inner.state

    @state.setter
    def state(self, value):
        pass

    def join_in(self):
        for param in self.params:
            dist.all_reduce(param.grad)
            param.grad /= 2

    def step(self):
        self.join_in()
        self._inner.step()
        for i, param in enumerate(self.params):
            dist.broadcast(param.data, i % 2)

    def prepare(self):
        pass

    def save_parts(self, *, include_empty):
        packed = self._inner.state_dict()
        ids = [id(param) for param in self.params]
        parts = [
            OptimizerStatePart(
                param, packed["state"].get(number, {}), index=ids.index(id(param)), number=number
            )
            for number, param in enumerate(self._own)
        ]
        return [part for part in parts if include_empty or not part.empty], packed

    def load_parts(self, packed, for_later, groups):
        assert not for_later
        self._inner.load_state_dict(packed)


class Around(ModuleWrapper):
    """A module around the model, under another name than `module`."""

    inner_name = "model"

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *inputs):
        return self.model(*inputs)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def train(model, optimizer, steps):
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 3), 0.1 * step)).square().mean().backward()
        optimizer.step()


def test_a_run_of_a_new_sharding_goes_on_plain_and_the_other_way_round(tmp_path):
    def plain(steps, load=None, save=None):
        model = make_model()
        optimizer = AdamW(model.parameters(), lr=0.1)
        if load is not None:
            mh.load(load, model=model, optimizer=optimizer)
        train(model, optimizer, steps)
        if save is not None:
            mh.save(save, model=model, optimizer=optimizer)
        return list(model.parameters())

    def sharded(load=None, save=None):
        model = Around(make_model())
        optimizer = Alternate(model.parameters(), lr=0.1)
        if load is not None:
            mh.load(load, model=model, optimizer=optimizer)
        train(model, optimizer, 2)
        if save is not None:
            mh.save(save, model=model, optimizer=optimizer)
        return [param.detach() for param in model.parameters()]

    run_ranks(2, sharded, save=tmp_path / "sharded")
    saved = plain(2, save=tmp_path / "plain")
    (continued, _) = run_ranks(2, sharded, load=tmp_path / "plain")
    for start in (tmp_path / "sharded", tmp_path / "plain"):
        torch.testing.assert_close(plain(2, load=start), continued)
    assert not torch.equal(saved[0], continued[0])
