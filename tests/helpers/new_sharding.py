"""A sharding that the library does not know, with all that docs/extending.md asks of one.

Each rank steps every Nth parameter and sends it to the others; the module averages gradients, each
as soon as it is complete. Nothing overlaps: it is for reading, and for tests.
"""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from manyhands._optimizers.modules import ModuleWrapper
from manyhands._optimizers.state_parts import OptimizerStatePart, ShardedOptimizer, options_of


class Alternate(ShardedOptimizer):
    """Rank r of N steps every parameter whose number is r modulo N."""

    def __init__(self, params, optim, group=None, **options):
        self.optimizer_class, self.optimizer_arguments, self.group = optim, options, group
        self._inner: Any = None  # until torch's constructor has the parameters
        Optimizer.__init__(self, params, {})
        own = [param for i, param in enumerate(self.params) if self.owner(i) == dist.get_rank()]
        self._inner = optim(own, **options)
        self.param_groups[0].update(options_of(self._inner.param_groups[0]))

    @property
    def params(self):
        return self.param_groups[0]["params"]

    def owner(self, index):
        """The rank, of all processes, that steps a parameter."""
        ranks = dist.get_process_group_ranks(self.group or dist.group.WORLD)
        return ranks[index % len(ranks)]

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        # schedulers, rules and users change the options here
        self._inner.param_groups[0].update(options_of(self.param_groups[0]))
        self._inner.step()
        for i, param in enumerate(self.params):
            dist.broadcast(param, self.owner(i), self.group)
        return loss

    # -- what the other parts ask for ----------------------------------------------------------

    @property
    def optim(self):
        return self._inner

    @property
    def shards_state(self):
        return dist.get_world_size(self.group) > 1

    @property
    def state(self):
        return {} if self._inner is None else self._inner.state

    @state.setter
    def state(self, value):
        """Ignore the empty state that torch's constructor sets."""

    def join_in(self):
        """Nothing: the module averages in backward, where every rank takes part."""

    def prepare(self):
        """Nothing: a parameter keeps its owner."""

    def save_parts(self, *, include_empty):
        packed = self._inner.state_dict()
        index_of = {param: i for i, param in enumerate(self.params)}
        parts = [
            OptimizerStatePart(
                param, packed["state"].get(number, {}), index=index_of[param], number=number
            )
            for number, param in enumerate(self._inner.param_groups[0]["params"])
        ]
        return [part for part in parts if include_empty or not part.empty], packed

    def load_parts(self, packed):
        self._inner.load_state_dict(packed)
        self.param_groups[0].update(options_of(self._inner.param_groups[0]))

    def replicate_state(self, names):
        return Replica(self, names)


class Replica:
    """Entries of the state of all parameters, on every rank."""

    def __init__(self, optimizer, names):
        self.optimizer, self.names, self.state = optimizer, names, {}

    def update(self):
        optimizer = self.optimizer
        if not optimizer.state:  # on any rank: every parameter is trained
            return
        for i, param in enumerate(optimizer.params):
            mine = optimizer.state.get(param)
            held = self.state.setdefault(param, {})
            for name in ("step", *self.names):
                like = torch.zeros(()) if name == "step" else param
                value = torch.empty_like(like) if mine is None else mine[name].clone()
                dist.broadcast(value, optimizer.owner(i), optimizer.group)
                held[name] = value


class Around(ModuleWrapper):
    """The module around the model, which keeps it under another name than `module`."""

    inner_name = "model"
    averages_gradients = True

    def __init__(self, model, process_group=None):
        super().__init__()
        self.model = model
        # By these three, rules and blocks know which passes are averaged, and over which ranks.
        self.process_group, self.require_backward_grad_sync = process_group, True
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(self.average)

    @contextlib.contextmanager
    def no_sync(self):
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = True

    def average(self, param):
        if self.require_backward_grad_sync:
            dist.all_reduce(param.grad, group=self.process_group)
            param.grad /= dist.get_world_size(self.process_group)

    def forward(self, *inputs):
        return self.model(*inputs)
