"""Coordinate the wraps of a root in forward and backward.

**Prefetching.** `PrefetchOrder` gives torch's engine the order of the last forward. The engine
starts gathering a wrap as soon as the previous wrap has its parameters. (In a backward the engine
does so by default.) A wrap that runs repeatedly in a forward has no successor.

If a forward deviates from this order, a wrap may be gathered and not run. Its parameters are freed
after the forward, because the next optimizer step makes them stale.

**Used parameters.** torch's engine averages zeros for a parameter that a rank did not use, even if
no rank used the parameter. An optimizer with momentum or weight decay would then change the
parameter, unlike on a single rank. Therefore `UsedParameters` records which parameters get a
gradient. After each averaged pass, a small all_reduce finds the parameters that no rank used, and
their gradients are removed.

The all_reduce also carries a checksum of the order of wraps. If ranks ran different wraps, the
means are wrong, and every rank raises an error.
"""

from __future__ import annotations

import weakref
import zlib
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from manyhands._optimizers.modules import check_has_memory
from manyhands._ranks.presence import explained
from manyhands._ranks.ranks import RankGroup
from manyhands.sharding.fsdp._collectives import ReduceQueue
from manyhands.sharding.fsdp._engine import Engine, eager
from manyhands.sharding.fsdp._places import Place, check_inner_groups, check_same_model
from manyhands.sharding.fsdp._transparent import Wrap, wraps_in


class Attendance:
    """Lets a forward without gradients start when all ranks are in such a forward.

    If a rank evaluates alone, collectives of different sizes meet, and gloo ends the process.
    Therefore ranks wait through the store, and after a long wait look there for ranks that train.
    """

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self._roll_call = ranks.roll_call()
        self._trained = 0  # forwards with gradients
        self._shown = range(0, ranks.size, -(-ranks.size // 64))  # up to 64 ranks that report

    def forward(self) -> None:
        if not torch.is_grad_enabled():
            self._roll_call.wait("a forward without gradients", self._find_training)
            return
        self._trained += 1
        if self._ranks.rank in self._shown:
            self._roll_call.box.put(f"/trained/{self._ranks.rank}", str(self._trained))

    def _find_training(self) -> str:
        """Return an error message if other ranks train, else ""."""
        ahead = []
        for rank in self._shown:
            if int(self._roll_call.box.read(f"/trained/{rank}") or 0) > self._trained:
                ahead.append(rank)
        if not ahead:
            return ""
        return (
            f"rank {self._ranks.rank} evaluates the model (a forward without gradients), and ranks "
            f"{ahead[:8]} continue training. Parameters are sharded: evaluate on every rank, with "
            "an equal number of batches, and run all layers on all ranks."
        )


class PrefetchOrder:
    """After each forward, `next` is the successor of each wrap; `not_run` was gathered in vain."""

    def __init__(self) -> None:
        self.next: dict[int, int] = {}
        self.not_run: list[int] = []
        self._ran: list[int] = []  # in the forward in progress

    @property
    def in_forward(self) -> bool:
        return bool(self._ran)

    def run(self, wrap: int) -> None:
        self._ran.append(wrap)

    def end(self) -> bool:
        """End the forward, and return whether the order has changed."""
        times = Counter(self._ran)
        successors = {}
        for wrap, successor in pairwise(self._ran):
            if times[wrap] == 1:
                successors[wrap] = successor
        last = {wrap: position for position, wrap in enumerate(self._ran)}
        self.not_run = []
        for wrap, successor in self.next.items():
            # The successor is gathered when `wrap` runs, so only a later run uses it.
            if wrap in last and last.get(successor, -1) < last[wrap]:
                self.not_run.append(successor)
        changed = successors != self.next
        self.next = successors
        self._ran.clear()
        return changed

    def forget(self) -> None:
        self._ran.clear()


class UsedParameters:
    """The parameters, over all wraps of a root, that got a gradient, by number."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._ranks = engines[0].ranks
        # Weak references avoid a cycle through the engines' hooks.
        self._engines = [weakref.proxy(engine) for engine in engines]
        self._used_here: set[int] = set()
        self._order = 0  # a checksum of the wraps that ran, in order
        self._had_gradient: list[bool] = []  # before the pass
        # The reference keeps the node alive.
        self._watched: dict[int, tuple[Tensor, Node, RemovableHandle]] = {}

    def watch(self, first: int, places: Sequence[Place]) -> None:
        """Note the gradients of the full parameters at these places, numbered from `first`."""
        # The engine reuses a full parameter's tensor object, so each gets a hook only once.
        self._order = zlib.crc32(first.to_bytes(4, "little"), self._order)
        reference = weakref.ref(self)
        for number, (module, name) in enumerate(places, first):
            param = getattr(module, name)
            known = self._watched.get(number)
            if param.requires_grad and (known is None or known[0] is not param):
                node = get_gradient_edge(param).node
                handle = node.register_prehook(partial(_note_used, reference, number))
                self._watched[number] = param, node, handle

    def forget(self) -> None:
        self._used_here.clear()
        self._order = 0

    def _params(self) -> list[Tensor]:
        return [param for engine in self._engines for param in engine.params]

    def begin(self) -> None:
        self._had_gradient = [param.grad is not None for param in self._params()]

    def end(self) -> None:
        """After all means have arrived, remove the gradients of parameters that no rank used."""
        # Imports DTensor, which `import manyhands` must not do.
        from manyhands.sharding.fsdp._gradient import use_our_class

        params = self._params()
        trained = [n for n, param in enumerate(params) if param.requires_grad]
        flags = torch.ones(len(params), dtype=torch.uint8)
        if len(self._used_here) < len(params):
            flags.zero_()
            flags[list(self._used_here)] = 1
        # For each byte b of the checksum, the all_reduce yields max b and 255 - min b, which match
        # only if b is equal on all ranks.
        order = torch.frombuffer(bytearray(self._order.to_bytes(4, "little")), dtype=torch.uint8)
        flags = torch.cat([flags, order, 255 - order]).to(params[0].device)
        with explained(self._ranks):
            self._ranks.all_reduce(flags, largest=True)
        self._order = 0
        some_unused = len(self._used_here) < len(trained)
        # Reading flags on a GPU synchronizes the host.
        readable = some_unused or flags.device.type == "cpu"
        if readable and not torch.equal(255 - flags[-4:], flags[-8:-4]):
            self.forget()
            raise RuntimeError(
                "ranks have run different wraps, or wraps in a different order, so gradients are "
                "wrong. Run the same wraps on every rank."
            )
        if some_unused:
            for number, used in zip(trained, flags[trained].tolist(), strict=True):
                # A gradient from an earlier pass stays: zeros were added.
                if not used and not self._had_gradient[number]:
                    params[number].grad = None
        self._used_here.clear()
        for number in trained:
            use_our_class(params[number])
        for engine in self._engines:
            engine.check_all_reduced()


def _note_used(
    owner: weakref.ref[UsedParameters], number: int, grads: Sequence[Tensor | None]
) -> None:
    used = owner()
    if used is not None and grads[0] is not None:
        used._used_here.add(number)


class RootState:
    def __init__(self, engines: Sequence[Engine]) -> None:
        ranks = engines[0].ranks
        self._engines = list(engines)
        self.used = UsedParameters(engines)
        self.reduce_queue = ReduceQueue(ranks, self.used.begin, self.used.end)
        self._attendance = Attendance(ranks)
        self._order = PrefetchOrder()
        # With NCCL the engine prefetches on separate streams.
        self._prefetches = all(engine.on_gloo and engine.overlap for engine in engines)
        first = 0
        for number, engine in enumerate(engines):
            engine.connect(
                self.reduce_queue,
                watch=partial(self.used.watch, first),
                run=partial(self._order.run, number),
            )
            first += len(engine.places)

    @eager
    def start_forward(self) -> None:
        self._attendance.forward()
        self.reduce_queue.forget()
        # After an error in a backward, the engine still expects the end of the backward.
        if self._engines[0].in_backward:
            self.used.forget()
            for engine in self._engines:
                engine.clear_unaveraged()
            self.recover()
        # Parameters may be stale if a backward never ran.
        self.reshard()

    @eager
    def end_forward(self) -> None:
        changed = self._order.end()
        if not (changed and self._prefetches):
            return
        for number, engine in enumerate(self._engines):
            modules = []
            if number in self._order.next:
                modules.append(self._engines[self._order.next[number]].module)
            engine.module.set_modules_to_forward_prefetch(modules)
        for number in self._order.not_run:
            # A collective must end before a buffer is freed.
            self._engines[number].module.unshard()
            self._engines[number].module.reshard()

    @eager
    def reshard(self) -> None:
        for engine in self._engines:
            engine.module.reshard()

    @eager
    def recover(self) -> None:
        module = self._engines[0].module
        # torch 2.13 awaits and frees in reset_iter_state.
        if self._order.in_forward and not hasattr(module, "reset_iter_state"):
            self.end_forward()
        self._order.forget()
        self._engines[0].recover()


def become_root(wrap: Wrap) -> RootState | None:
    """Make the first wrap that runs the root of all wraps inside; return their state."""
    # torch.compile must not trace this. A single rank skips `eager`, which would import dynamo.
    if wrap._engine is None:
        return _mark_root(wrap)
    return _mark_root_eagerly(wrap)


def _mark_root(wrap: Wrap) -> RootState | None:
    inside = wraps_in(wrap, Wrap)
    # Inner single-rank wraps do not communicate.
    members = [each for each in inside if each.world_size > 1 or each is wrap]
    check_inner_groups(wrap._ranks, [each._ranks for each in members])
    # The engine cannot change the root after the first forward.
    if wrap.world_size > 1 and any(each._is_root for each in members):
        raise RuntimeError("an inner wrap has already run alone. Run the outermost wrap first.")
    if wrap._engine is not None:
        facts = [(each._places, each._compared_options()) for each in members]
        check_same_model(wrap._ranks, facts)
    check_has_memory(wrap)
    for each in inside:
        each._is_root = each is wrap
    engines = [each._engine for each in members if each._engine is not None]
    return RootState(engines) if engines else None


_mark_root_eagerly = eager(_mark_root)
