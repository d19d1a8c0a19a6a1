"""Record each optimizer step of an unmodified script.

The recorder replaces methods of torch's classes: calls of modules for parameters and samples,
`backward` for passes, `step` for gradients and parameters. In a replay, a `Feed` supplies the
ranks' samples and initial parameters.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from manyhands._tensors.flat import local_shard
from manyhands.scaling import ScalingRuleBase
from manyhands.tools.check._batches import map_tensors, row_hashes, size_of, tensors_of
from manyhands.tools.check._feed import NOISE, Feed
from manyhands.tools.check._job import CheckedScript
from manyhands.tools.check._loaders import LoaderRecorder, copy_of
from manyhands.tools.check._machine import Machine, wrap, wrap_step
from manyhands.tools.check._noise import FrozenNoise
from manyhands.tools.check._records import Recording, SeenBatch, SeenStep, Tensors
from manyhands.tools.check._state import StateWatch

WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_forward_module"}
OUTSIDE = ("site-packages", "dist-packages", "/lib/python", "manyhands/tools/check", "<")
PATIENCE = 10  # every optimizer must step within this multiple of the requested steps


class Recorder:
    """Records the process, and calls `finish` after the last step."""

    def __init__(self, job: CheckedScript, feed: Feed | None, finish: Callable[[], None]) -> None:
        self.wanted = job.steps
        self.float64 = job.float64
        self.folder = job.folder
        self.feed = feed
        self.finish = finish  # does not return
        self.noise = FrozenNoise(self._exchange_draw)
        self.record = Recording()
        self.now = SeenStep()  # the next step
        limit = math.ceil(job.steps / 2) if job.short else None  # two epochs in these steps
        self.state = StateWatch(self.place, self.name_of)
        self.loaders = LoaderRecorder(self.record, feed, self.noise, limit, self.take, self.place)
        # The ranks' steps, for rates and gains.
        self.rank_steps: Iterator[SeenStep] = iter(())
        if feed is not None and feed.plan.rates:
            self.rank_steps = iter(feed.ranks.steps)
        self.rank_step = next(self.rank_steps, SeenStep())
        # Modules.
        self.depth = 0  # nested calls of modules
        self.roots = 0  # number of outermost modules
        self.named: Tensors = {}  # parameters and buffers
        self.in_modules: set[int] = set()  # ids of tensors of modules
        self.inside = False  # in a module below the wrappers
        # Samples.
        self.inputs: list[list[Tensor]] = []  # of modules and losses, by pass
        self.draws: list[list[Tensor]] = []  # of the script's generators, by pass
        self.samples = SeenBatch()  # of the latest outermost module
        self.size = 0  # samples before a feed replaced the batch
        self.growth = 1.0  # samples after the replacement, relative to `size`
        # Optimizers.
        self.stepping = False
        self.held = False  # the latest step waits for another rank's batch
        self.scheduled = 0  # steps of all schedules
        self.unused: WeakSet[Optimizer] = WeakSet()  # made no step yet
        self.stepped: set[int] = set()  # ids of stepped parameters
        self.optimizers = False  # whether the script made an optimizer
        self.unmoved: Tensors = {}  # parameters after a pass, without optimizers

    def patch(self, mode: Machine) -> None:
        mode.watch = self.exchange_targets
        if self.feed is None:
            mode.note = self.note_call
        self.noise.patch()
        self.loaders.patch()
        wrap(torch.nn.Module, "__call__", self._call)
        wrap(torch.autograd, "backward", self._backward)
        wrap(torch, "batch_norm", self._batch_norm)  # F.batch_norm would call its replacement
        wrap(Optimizer, "__init__", self._init_optimizer)
        for kind in (Optimizer, torch.nn.Module):
            wrap(kind, "zero_grad", self._zero_grad)
        wrap(LRScheduler, "step", self._step_schedule)
        wrap(ScalingRuleBase, "gain", self._gain)
        for name in ("all_reduce", "all_gather", "all_gather_into_tensor"):
            wrap(torch.distributed, name, self._combine)
        for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
            wrap(owner, "clip_grad_norm_", self._clip)

    def finished_record(self) -> Recording:
        self._note_manual_step()
        self.record.noise = sorted(self.noise.used)
        if self.feed is None:
            self.loaders.describe_datasets()
        return self.record

    @property
    def source(self) -> dict[str, list[Any]]:
        """The samples and draws that a `Feed` reads."""
        return {"": self.inputs, NOISE: self.draws, **self.loaders.batches}

    def place(self) -> str:
        """Return the script's file and line, and note libraries on the stack."""
        frame = sys._getframe(1)
        best = ""
        while frame is not None:
            name = frame.f_code.co_filename
            self.record.blocks |= "/manyhands/blocks/" in name
            self.record.rule |= "/manyhands/scaling/" in name
            self.record.accelerate |= "/accelerate/scheduler" in name
            if not any(part in name for part in OUTSIDE):
                best = f"{Path(name).name}:{frame.f_lineno}"
                if name.startswith(str(self.folder)):
                    break
            frame = frame.f_back  # type: ignore[assignment]
        return best

    def name_of(self, module: Any) -> str:
        """Return the script's variable for a module, or the class name."""
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename.startswith(str(self.folder)):
                for name, value in [*frame.f_locals.items(), *frame.f_globals.items()]:
                    if value is module or getattr(value, "module", None) is module:
                        return name
            frame = frame.f_back  # type: ignore[assignment]
        return type(module).__name__

    # Modules and their inputs.

    def _call(self, call: Any, module: Any, *args: Any, **named: Any) -> Any:
        depth = self.depth
        frozen = self.noise.frozen
        if depth == 0:
            if detect_fake_mode() is not None:  # a dry run, without values
                return call(module, *args, **named)
            if torch.is_grad_enabled():
                self._note_manual_step()
                args, named = self._enter(module, args, named)
        inside = self.inside
        parts = list(module._modules)
        is_wrapper = len(parts) == 1 and parts[0] in WRAPPERS  # such as DistributedDataParallel
        if not inside and not is_wrapper:  # the wrappers have broadcast rank 0's buffers
            self.inside = True
            if self.feed is None:
                self.state.note_module(module)
        self.depth = depth + 1
        self.noise.frozen = True
        try:
            return call(module, *args, **named)
        finally:
            self.depth = depth
            self.inside = inside
            self.noise.frozen = frozen

    def _enter(self, module: Any, args: Any, named: Any) -> tuple[Any, Any]:
        """Note an outermost call, and exchange inputs."""
        trained = [p for p in module.parameters() if p.requires_grad]
        if not self.in_modules.issuperset(map(id, trained)):
            self._add_root(module)
        args, named = map_tensors((args, named), self.cast)
        given = tensors_of((args, named))
        self.state.note_samples(given)
        if any(t.requires_grad for t in given):  # results of other modules
            return self.exchange_targets(args, named)
        if not given or not trained:
            return args, named
        self.size = size_of(given)
        self.samples = SeenBatch()
        if self.feed is None:
            self.samples.hashes = row_hashes(given)
        if len(self.samples.hashes) == len(self.loaders.latest.hashes):  # the loader's batch
            self.samples = self.loaders.latest
        args, named = self._exchange((args, named), {self.size})
        self.growth = size_of((args, named)) / max(self.size, 1)
        return args, named

    def _add_root(self, module: Any) -> None:
        """Name the tensors of an outermost module. A replay sets the ranks' initial values."""
        self.roots += 1
        prefix = f"model {self.roots}: " if self.roots > 1 else ""
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            short = prefix + without_wrappers(name)
            if id(tensor) in self.in_modules or self.named.setdefault(short, tensor) is not tensor:
                continue
            self.in_modules.add(id(tensor))
            if self.feed is not None and short in self.feed.ranks.start:
                # In a single process, the local tensor is the full tensor.
                local_shard(tensor).detach().copy_(self.feed.ranks.start[short])
            self.record.start[short] = copy_of(tensor)
        for part in module.modules():
            if isinstance(part, torch.nn.RNNBase) and part.dropout:
                self.noise.used.add("dropout")
                part.dropout = 0.0

    def exchange_targets(self, args: Any, named: Any) -> tuple[Any, Any]:
        """Exchange tensors in operations on the model's output."""
        if self.depth or self.stepping or not self.size or not torch.is_grad_enabled():
            return args, named
        sizes: set[float] = set()
        targets = False
        for tensor in tensors_of((args, named)):
            if tensor.dim() and tensor.requires_grad:
                sizes.add(len(tensor) / self.growth)  # samples, or rows of tokens
            elif tensor.dim():
                targets = True
        if not sizes or not targets or detect_fake_mode() is not None:
            return args, named
        return self._exchange((args, named), {self.size, *sizes})

    def take(self, tensor: Tensor) -> Tensor:
        """Cast a tensor of a batch, and note that the tensor is a sample."""
        tensor = self.cast(tensor)
        self.state.note_samples(tensor)
        return tensor

    def cast(self, tensor: Tensor) -> Tensor:
        if self.float64 and tensor.is_floating_point():
            return tensor.double()
        return tensor

    def _exchange(self, value: Any, sizes: set[float]) -> Any:
        """Record tensors of certain sizes, or return the ranks' tensors."""
        number = self.record.backward_passes

        def exchange(tensor: Tensor) -> Tensor:
            if tensor.requires_grad or not tensor.dim() or len(tensor) not in sizes:
                return tensor
            self.state.note_samples(tensor)
            if self.feed is None:
                while len(self.inputs) <= number:
                    self.inputs.append([])
                self.inputs[number].append(copy_of(tensor))
            elif self.feed.plan.calls:
                return self.feed.exchange(tensor, number)
            return tensor

        return map_tensors(value, exchange)

    def _exchange_draw(self, drawn: Tensor) -> Tensor:
        """Record draws of the script's generators, or return the ranks' draws."""
        number = self.record.backward_passes
        if self.feed is not None:
            return self.feed.noise(drawn, number)
        while len(self.draws) <= number:
            self.draws.append([])
        self.draws[number].append(copy_of(drawn))
        return drawn

    def _batch_norm(self, norm: Any, x: Tensor, weight: Any, bias: Any, *rest: Any) -> Tensor:
        mean, var, training, *others = rest
        self.record.norms = self.record.norms or training
        if self.feed is None or not training:
            return norm(x, weight, bias, *rest)
        outs = []
        for chunk in self.feed.divide(x):  # each rank has separate statistics
            outs.append(norm(chunk, weight, bias, mean, var, training, *others))
            mean = None  # only rank 0 updates the running statistics
            var = None
        return torch.cat(outs)

    def _combine(self, combine: Any, *args: Any, **named: Any) -> Any:
        # After a step, a sum is for the log.
        fetched = self.loaders.since_pass or not self.loaders.loaders
        if fetched and not self.depth and not self.now.passes:
            self.record.sums = True
        return combine(*args, **named)

    # Passes and gradients.

    def _backward(self, backward: Any, tensors: Any, *args: Any, **named: Any) -> None:
        if detect_fake_mode() is not None:
            backward(tensors, *args, **named)
            return
        self._note_manual_step()
        if not self.now.passes:
            self.now.carried = any(bool(grad.any()) for grad in self.gradients().values())
        self.now.passes.append(self.place())
        self.loaders.note_pass()
        if self.feed is not None and self.feed.plan.how == "apart" and isinstance(tensors, Tensor):
            tensors = tensors / self.feed.plan.times  # like the average of the ranks' gradients
        backward(tensors, *args, **named)
        self.record.backward_passes += 1
        self.now.batches.append(self.samples)
        if not self.optimizers:
            self._name_leaves(tensors)
            self.unmoved = self.parameters()

    def note_call(self, arguments: Any, result: Any) -> None:
        if not self.stepping and detect_fake_mode() is None:
            self.state.note_call(arguments, result)

    def _name_leaves(self, tensors: Any) -> None:
        """Name the trained tensors outside modules."""
        nodes = [tensor.grad_fn for tensor in tensors_of([tensors]) if tensor.grad_fn is not None]
        seen = set(nodes)
        while nodes:
            node = nodes.pop()
            leaf = getattr(node, "variable", None)
            if leaf is not None and id(leaf) not in self.in_modules:
                self.in_modules.add(id(leaf))
                name = f"parameter {len(self.named)}"
                self.named[name] = leaf
                self.record.start[name] = copy_of(leaf)
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    nodes.append(following)

    def _note_manual_step(self) -> None:
        if self.optimizers or not self.unmoved:
            return
        now = self.parameters()
        if all(torch.equal(now[name], before) for name, before in self.unmoved.items()):
            return
        self.record.manual = True
        self.now.place = self.now.last_pass
        self.now.own = list(now)
        self.now.grads = {name: before - now[name] for name, before in self.unmoved.items()}
        self.now.params = now
        self.unmoved = {}
        self._end_step()

    def trained(self) -> Tensors:
        return {name: p for name, p in self.named.items() if p.requires_grad}

    def parameters(self) -> Tensors:
        return {name: copy_of(p) for name, p in self.trained().items()}

    def gradients(self) -> Tensors:
        return {n: copy_of(p.grad) for n, p in self.trained().items() if p.grad is not None}

    def waiting(self) -> bool:
        if self.feed is None:
            return False
        return self.feed.waits(len(self.record.steps), self.record.backward_passes)

    def _clip(self, clip: Any, parameters: Any, *args: Any, **named: Any) -> Tensor:
        if self.waiting():
            return torch.zeros(())
        if not self.now.before:
            self.now.before = self.gradients()
        return clip(parameters, *args, **named)

    def _zero_grad(self, clear: Any, owner: Any, *args: Any, **named: Any) -> None:
        if not (self.waiting() and self.now.passes):
            clear(owner, *args, **named)

    # Optimizers and schedules.

    def _step_schedule(self, step: Any, *args: Any, **named: Any) -> None:
        if not self.held:
            self.scheduled += 1
            self.place()  # notes whether Accelerate steps the schedule
            step(*args, **named)

    def _gain(self, read: Any, rule: Any, pg_idx: int | None = None) -> float:
        gain = read(rule, pg_idx)
        self.now.gains[pg_idx] = gain
        return self.rank_step.gains.get(pg_idx, gain)

    def _init_optimizer(self, begin: Any, optimizer: Any, *args: Any, **named: Any) -> None:
        begin(optimizer, *args, **named)
        self.optimizers = True
        self.unused.add(optimizer)
        wrap_step(optimizer, self._step)

    def _step(self, step: Any, optimizer: Any, *args: Any, **named: Any) -> Any:
        self.held = self.waiting()
        if self.held and not self.stepping:
            return None
        own: set[int] = set()
        for group in optimizer.param_groups:
            own.update(map(id, group["params"]))
        self.unused.discard(optimizer)
        self.stepped |= own
        # Before the first pass, a step outside modules tests the optimizer.
        on_trial = not self.record.backward_passes and not own & self.in_modules
        if self.stepping or on_trial or detect_fake_mode() is not None:
            return step(optimizer, *args, **named)
        now = self.now
        name_others(optimizer, self.named, self.in_modules)
        for group, rate in zip(optimizer.param_groups, self.rank_step.rates, strict=False):
            group["lr"] = rate
        now.optimizer = id(optimizer)
        now.place = self.place()
        now.schedules = self.scheduled
        if self.record.blocks and self.record.steps:  # a sync round has changed parameters
            self.record.steps[-1].params = self.parameters()
        now.rates = [float(group.get("lr", 0)) for group in optimizer.param_groups]
        self.stepping = True
        result = step(optimizer, *args, **named)
        self.stepping = False
        now.own = [name for name, p in self.named.items() if id(p) in own]
        now.grads = self.gradients()  # after the step, as a closure computes gradients
        now.params = self.parameters()
        self._end_step()
        return result

    def _end_step(self) -> None:
        self.now.state = self.state.take()
        self.record.steps.append(self.now)
        self.now = SeenStep()
        self.rank_step = next(self.rank_steps, SeenStep())
        self.noise.step += 1
        self.record.grouped |= torch.distributed.is_initialized()
        if self._is_done() and not self.record.complete:
            self.record.complete = True
            self.finish()

    def _is_done(self) -> bool:
        """Return whether every optimizer made the steps, or is idle."""
        steps = self.record.steps
        counts = Counter(step.optimizer for step in steps)
        self.record.idle = False
        for optimizer in self.unused:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    if p.requires_grad and id(p) not in self.stepped:
                        self.record.idle = True
        if min(counts.values()) < self.wanted:
            return False
        return not self.record.idle or len(steps) >= PATIENCE * self.wanted


def without_wrappers(path: str) -> str:
    return ".".join([part for part in path.split(".") if part not in WRAPPERS])


def name_others(optimizer: Optimizer, named: Tensors, known: set[int]) -> None:
    """Name an optimizer's parameters outside modules. `known` has the ids of tensors of modules."""
    for g, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            if id(p) not in known:
                named.setdefault(f"parameter {i} of group {g}", p)
