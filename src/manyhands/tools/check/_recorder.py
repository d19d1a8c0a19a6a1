"""Record what a script does in each optimizer step, without a line in the script.

Methods of torch's classes are replaced: modules say what trains and what they are given, `backward`
what passes there are, `step` gradients and parameters, loaders batches; a `Feed` replaces these.
"""

import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy
import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from manyhands.scaling import ScalingRuleBase
from manyhands.tools.check._compare import Recording, SeenLoader, SeenStep
from manyhands.tools.check._feed import Feed, digest, map_tensors, row_hashes, size_of, tensors_of
from manyhands.tools.check._machine import FrozenNoise, wrap

WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_forward_module"}
OUTSIDE = ("site-packages", "dist-packages", "/lib/python", "manyhands/check", "<")
PATIENCE = 10  # times the wanted steps, in which every optimizer has to make one


class Recorder:
    """Watches one process, whose script is in a folder; `finish`, in the end, does not return."""

    def __init__(
        self, steps: int, float64: bool, folder: Path, feed: Feed | None, finish: Callable[[], None]
    ) -> None:
        self.wanted = steps
        self.float64 = float64
        self.folder = folder
        self.feed = feed
        self.finish = finish
        self.noise = FrozenNoise()
        self.record = Recording()
        self.now = SeenStep()
        self.given = iter(feed.ranks.steps if feed is not None and feed.plan.rates else [])
        self.theirs = next(self.given, SeenStep())  # of the ranks, whose rates and gains count
        self.source: dict[str, list[list[Any]]] = {"": [[]]}
        # by name, and their ids
        self.tensors = dict[str, Tensor]()
        self.known = set[int]()
        self.depth = 0
        self.stepping = 0
        self.passes = 0
        self.scheduled = 0
        self.roots = 0
        self.held = 0
        # samples of the latest outermost call, and times as many
        self.size = 0
        self.grown = 1.0
        self.latest = set[str]()  # loaders that gave a batch since a pass
        # of the latest outermost call
        self.hashes = list[str]()
        self.indices = list[int]()
        self.batch: tuple[list[str], list[int]] = [], []  # the same, of the latest batch
        self.data = dict[str, Dataset[Any]]()  # of each loader
        self.unused = WeakSet[torch.optim.Optimizer]()  # made no step yet
        self.stepped = set[int]()  # ids of parameters that an optimizer has stepped

    def patch(self) -> None:
        self.noise.patch()
        wrap(torch.nn.Module, "__call__", self._call)
        wrap(torch.autograd, "backward", self._backward)
        wrap(torch, "batch_norm", self._batch_norm)  # F.batch_norm would call its own replacement
        wrap(torch.optim.Optimizer, "__init__", self._new_optimizer)
        wrap(torch.optim.Optimizer, "zero_grad", self._zero_grad)
        wrap(LRScheduler, "step", self._schedule_step)
        wrap(ScalingRuleBase, "gain", self._gain)
        for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
            wrap(owner, "clip_grad_norm_", self._clip)
        wrap(DataLoader, "__init__", self._new_loader)
        wrap(DataLoader, "__iter__", self._iterate)
        wrap(_BaseDataLoaderIter, "_reset", self._reset)
        wrap(_BaseDataLoaderIter, "_next_index", self._next_index)
        wrap(DataLoader, "__len__", self._length)

    def place(self) -> str:
        """Return the file and line of the script's own code that is running now."""
        frame = sys._getframe(1)
        best = ""
        while frame is not None:
            name = frame.f_code.co_filename
            self.record.blocks |= "/manyhands/blocks/" in name  # of a step
            self.record.rule |= "/manyhands/scaling/" in name
            self.record.accelerate |= "/accelerate/scheduler" in name
            if not any(part in name for part in OUTSIDE):
                best = f"{Path(name).name}:{frame.f_lineno}"
                if name.startswith(str(self.folder)):
                    break
            frame = frame.f_back  # type: ignore[assignment]
        return best

    def _call(self, call: Any, module: Any, *args: Any, **named: Any) -> Any:
        if not self.depth and detect_fake_mode() is not None:  # a dry run, without values
            return call(module, *args, **named)
        outer = self.depth
        frozen = self.noise.frozen
        if not outer and torch.is_grad_enabled():
            args, named = self.enter(module, args, named)
        self.depth = outer + 1
        self.noise.frozen = 1
        try:
            return call(module, *args, **named)
        finally:
            self.depth = outer
            self.noise.frozen = frozen

    def enter(self, module: Any, args: Any, named: Any) -> tuple[Any, Any]:
        """Note the outermost call of a module, and exchange what it is given."""
        trains = [p for p in module.parameters() if p.requires_grad]
        if any(id(p) not in self.known for p in trains):
            self._add_root(module)
        args, named = map_tensors((args, named), self.cast)
        given = tensors_of((args, named))
        if any(t.requires_grad for t in given):  # made by another module
            return self.watch(args, named)
        if not given or not trains:
            return args, named
        self.size = size_of(given)
        self.hashes = [] if self.feed else row_hashes(given)
        self.indices = []
        if len(self.hashes) == len(self.batch[0]):  # a batch as it came from its loader
            self.hashes, self.indices = self.batch
        args, named = map_tensors((args, named), lambda t: self.exchange(t, {self.size}))
        self.grown = size_of((args, named)) / max(self.size, 1)
        return args, named

    def _add_root(self, module: Any) -> None:
        self.roots += 1
        prefix = f"model {self.roots}: " if self.roots > 1 else ""
        for name, p in [*module.named_parameters(), *module.named_buffers()]:
            short = prefix + ".".join(part for part in name.split(".") if part not in WRAPPERS)
            if id(p) not in self.known and self.tensors.setdefault(short, p) is p:
                self.known.add(id(p))
                if self.feed is not None and short in self.feed.ranks.start:
                    whole = p.to_local() if hasattr(p, "to_local") else p  # of the only process
                    whole.detach().copy_(self.feed.ranks.start[short])
                self.record.start[short] = full(p)
        for part in module.modules():
            if isinstance(part, torch.nn.RNNBase) and part.dropout:
                self.noise.used.add("dropout")
                part.dropout = 0.0

    def watch(self, args: Any, named: Any) -> tuple[Any, Any]:
        """Exchange targets: what the loop brings together with the model's output."""
        if self.depth or self.stepping or not self.size or not torch.is_grad_enabled():
            return args, named
        given = [t for t in tensors_of((args, named)) if t.dim()]
        made = {len(t) / self.grown for t in given if t.requires_grad}  # also rows of tokens
        if not made or all(t.requires_grad for t in given) or detect_fake_mode() is not None:
            return args, named
        return map_tensors((args, named), lambda t: self.exchange(t, {self.size, *made}))

    def cast(self, tensor: Tensor) -> Tensor:
        return tensor.double() if self.float64 and tensor.is_floating_point() else tensor

    def exchange(self, tensor: Tensor, sizes: set[float]) -> Tensor:
        """Record a tensor of samples; or give the ranks', in a replay."""
        if tensor.requires_grad or not tensor.dim() or len(tensor) not in sizes:
            return tensor
        if self.feed is not None:
            return self.feed.exchange(tensor, self.passes) if self.feed.plan.calls else tensor
        calls = self.source[""][0]
        calls += [[] for _ in range(self.passes + 1 - len(calls))]
        calls[self.passes].append(self.cast(tensor.detach().clone()))
        return tensor

    def _batch_norm(self, norm: Any, x: Tensor, weight: Any, bias: Any, *rest: Any) -> Tensor:
        mean, var, training, *others = rest
        self.record.norms = self.record.norms or training
        chunks = self.feed.chunks(x) if self.feed is not None and training else [x]
        outs = []
        for chunk in chunks:  # each rank's, with statistics of its own
            outs.append(norm(chunk, weight, bias, mean, var, training, *others))
            mean = None
            var = None
        return torch.cat(outs)

    def _backward(self, backward: Any, tensors: Any, *args: Any, **named: Any) -> None:
        if detect_fake_mode() is not None:
            return backward(tensors, *args, **named)
        if not self.now.passes:
            grads = [p.grad for p in self.trained().values() if p.grad is not None]
            self.now.carried = any(bool(full(g).any()) for g in grads)
        self.now.passes.append(self.place())
        while self.latest:
            self.record.loaders[self.latest.pop()].trains = True
        if self.feed is not None and self.feed.plan.how == "apart" and isinstance(tensors, Tensor):
            tensors = tensors / self.feed.plan.times  # as the ranks' gradients are averaged
        backward(tensors, *args, **named)
        self.passes += 1
        self.now.samples.append(self.hashes)
        self.now.indices.append(self.indices)

    def trained(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.tensors.items() if p.requires_grad}

    def gradients(self) -> dict[str, Tensor]:
        return {n: full(p.grad) for n, p in self.trained().items() if p.grad is not None}

    def waiting(self) -> bool:
        """Whether ranks' batches go one after the other, and the last is still to come."""
        return self.feed is not None and self.feed.waits(len(self.record.steps), self.passes)

    def _clip(self, clip: Any, parameters: Any, *args: Any, **named: Any) -> Tensor:
        if self.waiting():
            return torch.zeros(())
        self.now.before = self.now.before or self.gradients()
        return clip(parameters, *args, **named)

    def _zero_grad(self, clear: Any, optimizer: Any, *args: Any, **named: Any) -> None:
        if not (self.waiting() and self.now.passes):
            clear(optimizer, *args, **named)

    def _schedule_step(self, step: Any, *args: Any, **named: Any) -> None:
        if not self.held:  # it is called after the step
            self.scheduled += 1
            self.place()  # notes whether Accelerate steps it
            step(*args, **named)

    def _gain(self, read: Any, rule: Any, pg_idx: int | None = None) -> float:
        gain = read(rule, pg_idx)
        self.now.gains[pg_idx] = gain
        return self.theirs.gains.get(pg_idx, gain)

    def _new_optimizer(self, begin: Any, optimizer: Any, *args: Any, **named: Any) -> None:
        begin(optimizer, *args, **named)
        self.unused.add(optimizer)
        kind: Any = type(optimizer)
        if not hasattr(kind.step, "of_check"):
            wrap(kind, "step", self._step)
            # torch's hooks are inside already
            kind.step.of_check = True
            kind.step.hooked = True

    def _step(self, step: Any, optimizer: Any, *args: Any, **named: Any) -> Any:
        self.held = self.waiting()  # for batches of other ranks
        if self.held and not self.stepping:
            return None
        params = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self.unused.discard(optimizer)
        self.stepped |= params
        # An optimizer that steps before the first pass is on trial, on parameters of its own.
        on_trial = not self.passes and not params & self.known
        if self.stepping or on_trial or detect_fake_mode() is not None:
            return step(optimizer, *args, **named)
        now = self.now
        for g, group in enumerate(optimizer.param_groups):  # also those that belong to no module
            for i, p in enumerate(group["params"]):
                if id(p) not in self.known:
                    self.tensors.setdefault(f"parameter {i} of group {g}", p)
        for group, rate in zip(optimizer.param_groups, self.theirs.rates, strict=False):
            group["lr"] = rate
        now.optimizer = id(optimizer)
        now.place = self.place()
        now.schedules = self.scheduled
        if self.record.blocks and self.record.steps:  # which a sync round has changed since
            self.record.steps[-1].params = {n: full(p) for n, p in self.trained().items()}
        now.rates = [float(group.get("lr", 0)) for group in optimizer.param_groups]
        self.stepping += 1
        result = step(optimizer, *args, **named)
        self.stepping -= 1
        now.own = [name for name, p in self.tensors.items() if id(p) in params]
        now.grads = self.gradients()  # a step does not change them, and a closure makes them
        now.params = {name: full(p) for name, p in self.trained().items()}
        self.record.steps.append(now)
        self.now = SeenStep()
        self.theirs = next(self.given, SeenStep())
        self.noise.step += 1
        self.record.grouped |= torch.distributed.is_initialized()
        if self._is_done():
            self.record.complete = True
            self.finish()
        return result

    def _is_done(self) -> bool:
        """Whether every optimizer has made its steps, as far as one can wait for it."""
        steps = self.record.steps
        fewest = min(Counter(step.optimizer for step in steps).values())
        waiting = (p for o in self.unused for group in o.param_groups for p in group["params"])
        self.record.idle = any(p.requires_grad and id(p) not in self.stepped for p in waiting)
        late = len(steps) >= PATIENCE * self.wanted
        return fewest >= self.wanted and (late or not self.record.idle)

    def _new_loader(self, begin: Any, loader: Any, *args: Any, **named: Any) -> None:
        begin(loader, *args, **named)
        sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
        place = self.place()
        reshuffles = hasattr(sampler, "set_epoch") and getattr(sampler, "shuffle", False)
        repeats = getattr(sampler, "replacement", False)
        whole = type(sampler) is RandomSampler and not repeats
        loader.check_key = f"{place} {sum(x.place == place for x in self.record.loaders.values())}"
        self.record.loaders[loader.check_key] = SeenLoader(place, reshuffles, repeats, whole)
        self.data[loader.check_key] = loader.dataset

    def _reset(self, reset: Any, iterator: Any, *args: Any, **named: Any) -> None:
        iterator.check_drawn = deque()
        reset(iterator, *args, **named)

    def _next_index(self, draw: Any, iterator: Any) -> Any:
        drawn = draw(iterator)  # ahead of the batch, if there are worker processes
        iterator.__dict__.setdefault("check_drawn", deque()).append(drawn)
        return drawn

    def probe(self) -> None:
        """Note which data each loader has, by a few samples without noise; call it at the end."""
        # Not earlier: files that are opened before worker processes start may not be shared.
        self.noise.thaw()
        for key, data in self.data.items():
            seen = self.record.loaders[key]
            with suppress(Exception):  # it has no index or length: the batches' values are compared
                last = len(data) - 1  # type: ignore[arg-type]
                found = []  # type: ignore[arg-type]
                for index in (0, last // 2, last) if seen.trains else ():
                    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
                        seed(0)
                    found.append(repr(map_tensors(data[index], digest)))
                seen.data = f"{last + 1} {found}" if found else ""

    def _iterate(self, iterate: Any, loader: Any) -> Iterator[Any]:
        key = loader.check_key
        feed = self.feed
        fed = feed is not None and key in feed.loaders and not feed.plan.calls
        self.noise.thaw()
        batches = feed.iterate(key) if feed is not None and fed else iterate(loader)
        seen = self.record.loaders[key]
        seen.starts.append(self.passes)
        epochs: list[list[Any]] = [seen.epochs, seen.indices, self.source.setdefault(key, [])]
        for epoch in epochs:
            epoch.append([])
        while True:
            self.noise.thaw()
            batch = map_tensors(next(batches, self), self.cast)
            if batch is self:
                self.latest.discard(key)  # an evaluation that did not switch gradients off
                return
            if feed is None:
                rows = row_hashes(batch)
                indices = _indices(getattr(batches, "check_drawn", None))
                if torch.is_grad_enabled():
                    self.batch = rows, indices
                copy = map_tensors(batch, lambda t: t.detach().clone())
                for epoch, one in zip(epochs, (rows, indices, copy), strict=True):
                    epoch[-1].append(one)
            self.latest |= {key} if torch.is_grad_enabled() else set()
            self.noise.freeze()
            yield batch

    def _length(self, length: Any, loader: Any) -> int:
        found = length(loader)
        self.record.loaders[loader.check_key].length = found
        return found if self.feed is None else self.feed.length(loader.check_key, found)


def full(tensor: Any) -> Tensor:
    """Return a copy of a tensor, distributed or not."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()


def _indices(drawn: deque[Any] | None) -> list[int]:
    """Return the indices of the batch that was drawn first, if they are known."""
    first = drawn.popleft() if drawn else None
    indices: list[Any] = list(first) if isinstance(first, list | tuple) else [first]
    known = all(isinstance(index, int | numpy.integer) for index in indices)
    return [int(index) for index in indices] if known else []
