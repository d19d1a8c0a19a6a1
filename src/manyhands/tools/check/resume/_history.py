"""Record each optimizer step of a script, in the script's precision and with noise."""

import time
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from manyhands.tools.check._batches import tensors_of
from manyhands.tools.check._loaders import copy_of
from manyhands.tools.check._machine import wrap, wrap_step
from manyhands.tools.check._recorder import name_others, without_wrappers
from manyhands.tools.check._records import SeenBatch, Tensors
from manyhands.tools.check.resume._averages import averages_of
from manyhands.tools.check.resume._records import RankHistory, RankStep, State
from manyhands.tools.check.resume._samples import GivenBatches
from manyhands.tools.check.resume._state import (
    digest_of,
    optimizer_digests,
    parameters_of,
    random_digests,
)

LEAST_PART = 0.45  # of the trained parameters' bytes; a script may save 16 bits
SCALER_STATE = ("scale", "_growth_tracker")
VALUES = 3  # steps after the checkpoint with recorded gradients


class HistoryRecorder:
    """Records the process, the state after the steps `states`, and tensors from a step on.

    Before each step, `stops` returns whether all ranks stop. Then the recorder calls `finish`,
    which does not return.
    """

    def __init__(
        self,
        states: tuple[int, ...],
        tensors_from: int,
        stops: Callable[["HistoryRecorder"], bool],
        finish: Callable[[], None],
    ) -> None:
        self.states = states
        self.tensors_from = tensors_from
        self.stops = stops
        self.finish = finish
        self.history = RankHistory()
        self.loaders = GivenBatches()
        self.depth = 0  # nested calls of modules
        self.stepping = False
        self.began = 0.0  # time of the first step
        self.begun = False  # a forward or backward pass since the latest step
        self.now = RankStep()  # the next step
        self.samples = SeenBatch()  # of the latest outermost module
        self.parameters: Tensors = {}  # by name
        self.buffers: Tensors = {}
        self.roots = 0  # number of outermost modules
        self.known: set[int] = set()  # ids of `parameters` and `buffers`
        self.optimizers: list[Optimizer] = []  # in order of creation
        self.schedules: list[LRScheduler] = []
        self.scalers: WeakSet[GradScaler] = WeakSet()

    @property
    def made(self) -> int:
        return len(self.history.steps)

    def patch(self) -> None:
        self.loaders.patch()
        wrap(torch.nn.Module, "__call__", self._call)
        wrap(torch.autograd, "backward", self._backward)
        wrap(Optimizer, "__init__", self._init_optimizer)
        wrap(LRScheduler, "__init__", self._init_schedule)
        wrap(GradScaler, "__init__", self._init_scaler)

    def least_size(self) -> int:
        size = 0
        for p in self.parameters.values():
            if p.requires_grad:
                size += p.numel() * p.element_size()
        return int(LEAST_PART * size)

    # Modules and passes.

    def _call(self, call: Any, module: Any, *args: Any, **named: Any) -> Any:
        if self.depth == 0 and torch.is_grad_enabled() and detect_fake_mode() is None:
            self._enter(module, tensors_of((args, named)))
        self.depth += 1
        try:
            return call(module, *args, **named)
        finally:
            self.depth -= 1

    def _enter(self, module: Any, given: list[Tensor]) -> None:
        if not any(p.requires_grad for p in module.parameters()):
            return
        if not self.known.issuperset(map(id, module.parameters())):
            self._add_root(module)
        self._begin_step()
        if given and not any(tensor.requires_grad for tensor in given):
            self.samples = self.loaders.find(given)

    def _add_root(self, module: Any) -> None:
        """Name the parameters and persistent buffers of an outermost module."""
        self.roots += 1
        for path, part in module.named_modules():
            for key, tensor in part.named_parameters(recurse=False):
                self._add(self.parameters, path, key, tensor)
            for key, tensor in part.named_buffers(recurse=False):
                if key not in part._non_persistent_buffers_set:
                    self._add(self.buffers, path, key, tensor)

    def _add(self, tensors: Tensors, path: str, key: str, tensor: Tensor) -> None:
        if id(tensor) in self.known:
            return
        name = ".".join(filter(None, [without_wrappers(path), key]))
        if name in tensors:
            name = f"model {self.roots}: {name}"
        tensors[name] = tensor
        self.known.add(id(tensor))

    def _backward(self, backward: Any, *args: Any, **named: Any) -> None:
        if detect_fake_mode() is None:
            self._begin_step()
            self.now.passes.append(self.samples)
        backward(*args, **named)

    # Steps.

    def _begin_step(self) -> None:
        if self.begun:
            return
        self.begun = True
        self.began = self.began or time.monotonic()
        self.history.grouped |= torch.distributed.is_initialized()
        stop = self.stops(self)
        if stop or self.made in self.states:
            self.history.states[self.made] = self._state()
        if stop:
            self.finish()

    def _state(self) -> State:
        names = {id(tensor): name for name, tensor in self.parameters.items()}
        # Before the first call of a model, parameters have only the optimizers' numbers.
        parameters = parameters_of(self.optimizers)
        numbered = set(map(id, parameters.values()))
        for name, p in self.parameters.items():
            if id(p) not in numbered:
                parameters[name] = p
        batches: list[Tensor] = []
        for _, tensors in self.loaders.recent:
            batches += tensors
        scaler = {}
        for each in self.scalers:
            for key, value in each.state_dict().items():
                if key in SCALER_STATE:
                    scaler[key] = value
        return State(
            parameters={key: digest_of(p) for key, p in parameters.items()},
            names={key: names[id(p)] for key, p in parameters.items() if id(p) in names},
            trained=[key for key, p in parameters.items() if p.requires_grad],
            buffers={name: digest_of(b) for name, b in self.buffers.items()},
            optimizer=optimizer_digests(self.optimizers),
            scaler=scaler,
            random=random_digests(),
            averages=averages_of([*parameters.values(), *self.buffers.values()], batches),
        )

    def _init_optimizer(self, begin: Any, optimizer: Any, *args: Any, **named: Any) -> None:
        begin(optimizer, *args, **named)
        self.optimizers.append(optimizer)
        wrap_step(optimizer, self._step)

    def _step(self, step: Any, optimizer: Any, *args: Any, **named: Any) -> Any:
        closure = args[0] if args else named.get("closure")
        # torch initializes the optimizer's state by a step with no pass.
        no_pass = not self.begun and closure is None
        if self.stepping or no_pass or detect_fake_mode() is not None:
            return step(optimizer, *args, **named)
        name_others(optimizer, self.parameters, self.known)
        now = self.now
        now.optimizer = self.optimizers.index(optimizer)
        now.rates = [float(group.get("lr", 0)) for group in optimizer.param_groups]
        now.schedules = [schedule.last_epoch for schedule in self.schedules]
        self.stepping = True
        result = step(optimizer, *args, **named)
        self.stepping = False
        self._record_tensors(now)
        self.history.steps.append(now)
        self.now = RankStep()
        self.begun = False
        return result

    def _record_tensors(self, now: RankStep) -> None:
        first = self.tensors_from
        if self.made < first:
            return
        for name, p in self.parameters.items():
            if not p.requires_grad:
                continue
            now.params[name] = digest_of(p)
            if p.grad is not None:
                now.grads[name] = digest_of(p.grad)
                if self.made < first + VALUES:
                    now.grad_values[name] = copy_of(p.grad)

    def _init_schedule(self, begin: Any, schedule: Any, *args: Any, **named: Any) -> None:
        self.schedules.append(schedule)
        begin(schedule, *args, **named)

    def _init_scaler(
        self, begin: Any, scaler: Any, device: str = "cuda", *args: Any, **named: Any
    ) -> None:
        begin(scaler, "cpu", *args, **named)  # without a GPU, "cuda" would disable the scaler
        self.scalers.add(scaler)
