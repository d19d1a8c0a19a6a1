"""Measure gradients as Adam preconditions them, and rescale second moments for a new batch size.

**Norm.** The norm is |g / (sqrt(v) + eps)|, with the optimizer's bias-corrected second moments v.
On a CPU, blocks of elements go through a small scratch buffer, so that only g and v are read from
memory. torch's square root is slow there: 0.4 ns per element, 3 ns for zeros and 11 ns for denormal
numbers, while reading g and v takes 0.3 ns. Moments are therefore raised to the floor first. If eps
is small relative to every root, the squared norm is g . (g / (v + shift)), without roots.

On a GPU, each operation processes a batch of gradients (`TOGETHER`).

**Sharded second moments.** Each rank measures gradients before the averaging, with the second
moments of all parameters. A replica collects sharded moments after each step. This costs the memory
and communication volume of gathering the parameters, and reading step counts on the host.
`ReplicatedDTensorState` combines shards in messages:

    section   the concatenated shards of a rank; all sections have the length of the longest
    table     all ranks' sections, in rank order

**Change of the batch size.** Second moments are running means of g^2, and at scale S

    E g^2 = |true gradient|^2 + noise / S

Adam's memory is a thousand steps (beta2 = 0.999). If the batch grows from 1 to 32 in fifty steps,
Adam still divides by the root of a small batch's squares, which is too large by up to sqrt(32). (On
MNIST, with 180 steps, this costs 0.3 to 0.5 points of accuracy.) Therefore all elements are
multiplied by the ratio of E g^2 after the change to E g^2 before.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer, RMSprop

from manyhands._optimizers.state_parts import ReplicatedState, ShardedOptimizer, plain_optimizer
from manyhands._optimizers.wrappers import ParamGroup, params_of, unwrap
from manyhands._ranks.ranks import RankGroup
from manyhands._tensors.flat import DTensorShards, flatten, in_groups, is_dtensor, local_shard, norm
from manyhands._tensors.profiler import Range
from manyhands.scaling._hooks import TOGETHER, GradientSlice, Norm, PlainNorm

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


BLOCK = 262_144  # elements per pass through the scratch buffer
SINGLE = {torch.float32, torch.bfloat16, torch.float16}  # measured in float32
WIDE = {torch.float32, torch.float64}  # precise enough for operations on many tensors
# Upper bounds of eps relative to the smallest root m, for computations without roots. Each square's
# relative error is up to 1 %. With shift = 0, the error is 2 eps / m. With `SHIFT`, the error
# 2 eps (sqrt(v) - SHIFT m) / v is between -0.4 eps / m (at v = m^2) and 0.42 eps / m.
NEGLIGIBLE = 5e-3
SMALL = 2.4e-2
SHIFT = 1.2
MESSAGE = 4 * 2**20  # elements per rank and message

# entry name, mesh, sharded mesh dimension, dtype
_MessageKind: TypeAlias = "tuple[str, DeviceMesh, int | None, torch.dtype]"


class MomentFloor(NamedTuple):
    """The lower bound of a parameter's second moments, recomputed periodically."""

    period: int  # number of the period of `REFRESH` steps
    fraction: float  # of the mean second moment
    least: float
    any_below: bool


NO_FLOOR = MomentFloor(0, 0.0, 0.0, True)


class Quotient(NamedTuple):
    """A gradient on a device with its divisor, (sqrt(max(v, least)) + eps) * factor."""

    grad: Tensor
    second: Tensor
    least: float
    eps: float
    factor: float


def _whole(tensor: Tensor) -> Tensor:
    return tensor


class PreconditionedNorm(PlainNorm):
    """The norm of a gradient divided by Adam's or RMSprop's divisor.

    The first `WARM_STEPS` steps of an optimizer's state use the plain norm. Second moments below
    `floor` times their tensor's mean are raised to this value. Otherwise a rare gradient (of a rare
    letter, or an empty pixel) would be divided by almost zero, and dominate.
    """

    columns = 5  # an index, then the fields of a `MomentFloor`
    WARM_STEPS = 5
    REFRESH = 16  # steps between updates of a floor, which read all of v

    def __init__(self, optimizer: Optimizer, floor: float = 0.0) -> None:
        optimizer = unwrap(optimizer)[-1]
        plain = plain_optimizer(optimizer)
        if not isinstance(plain, Adam | RMSprop):
            name = type(plain).__name__
            raise TypeError(f"AdamScale is for Adam, AdamW and RMSprop, got {name}.")
        self._optimizer = optimizer
        self._replica: ReplicatedState | None = None
        names: set[str] = set()
        for group in optimizer.param_groups:
            names.update(_moment_names(group))
        if isinstance(optimizer, ShardedOptimizer) and optimizer.shards_state:
            self._replica = optimizer.replicate_state(sorted(names))
        elif any(map(is_dtensor, params_of(optimizer.param_groups))):
            self._replica = ReplicatedDTensorState(optimizer, sorted(names))
        self.floor = floor
        self._scratch: dict[torch.dtype, Tensor] = {}
        self._buffers: dict[tuple[torch.dtype, int], Tensor] = {}
        self.refresh()

    def refresh(self) -> None:
        groups = self._optimizer.param_groups
        self._params = [(group, param) for group in groups for param in group["params"]]
        self._last_warm = 0
        # parameter index -> step count on a device, its version after the last step, its value
        self._counts: dict[int, tuple[Tensor, int, float]] = {}
        self._floors: dict[int, MomentFloor] = {}
        # parameter index -> step count object at the time of the floor's computation
        self._floor_counts: dict[int, object] = {}
        self.moments_changed()

    def moments_changed(self) -> None:
        self._floors.clear()
        if self._replica is not None:
            self._replica.update()

    def optimizer_stepped(self) -> None:
        # Counts the step without reading from a device.
        if self._replica is not None:
            self._replica.update()
        # The optimizer's step increments a version once. Other changes have a different cause.
        for index, (step, version, count) in self._counts.items():
            if step._version != version:
                self._counts[index] = step, step._version, count + 1.0

    def to_state(self) -> list[list[float]]:
        return [[*map(float, (index, *floor))] for index, floor in self._floors.items()]

    def load_state(self, state: list[list[float]]) -> None:
        """Restore saved floors. Recomputed floors would belong to a later step."""
        self.refresh()
        for index, period, fraction, least, any_below in state:
            self._floors[int(index)] = MomentFloor(int(period), fraction, least, bool(any_below))

    @property
    def norm_kind(self) -> str:
        for index in (self._last_warm, *range(len(self._params))):
            if self._count(index) >= self.WARM_STEPS:
                self._last_warm = index
                return "preconditioned"
        return "plain"

    def _state_of(self, index: int) -> Mapping[str, Any]:
        holder = self._optimizer if self._replica is None else self._replica
        state: Mapping[str, Any] = holder.state.get(self._params[index][1], {})
        return state

    def _count(self, index: int) -> float:
        # Reading a fused optimizer's count synchronizes, so it is cached until code other than the
        # optimizer's step changes it.
        step = self._state_of(index).get("step", 0.0)
        if not isinstance(step, Tensor) or step.device.type == "cpu":
            return float(step)
        known, version, count = self._counts.get(index, (None, 0, 0.0))
        if known is not step or version != step._version:
            count = float(step)
            self._counts[index] = step, step._version, count
        return count

    def many(self, indices: Sequence[int], grads: Sequence[Tensor]) -> Sequence[Norm]:
        return self.slices([(i, grad, _whole) for i, grad in zip(indices, grads, strict=True)])

    def slices(self, slices: Sequence[GradientSlice]) -> Sequence[Norm]:
        norms: list[Norm] = []
        together: list[tuple[int, Quotient]] = []
        for index, grad, take_slice in slices:
            quotient = None
            if grad.device.type != "cpu":
                quotient = self._quotient(index, grad, take_slice)
            if quotient is None:
                norms.append(self.one(index, grad, take_slice))
            else:
                together.append((len(norms), quotient))
                norms.append(0.0)
        for chunk in in_groups(together, lambda each: each[1].grad.numel(), TOGETHER):
            measured = _norms_of([quotient for _, quotient in chunk])
            for (position, _), each in zip(chunk, measured, strict=True):
                norms[position] = each
        return norms

    def _quotient(
        self, index: int, grad: Tensor, take_slice: Callable[[Tensor], Tensor]
    ) -> Quotient | None:
        """Return a gradient with the divisor; None if it cannot be batched."""
        group, _ = self._params[index]
        state = self._state_of(index)
        count = self._count(index)
        if count < self.WARM_STEPS or grad.layout != torch.strided:
            return None
        whole, factor = _second_moment(group, state, count)
        if isinstance(factor, Tensor) or grad.dtype != whole.dtype or whole.dtype not in WIDE:
            return None
        least = self._floor_of(index, state, count).least
        return Quotient(grad, take_slice(whole), least, group["eps"] / factor, factor)

    def one(
        self, index: int, grad: Tensor, take_slice: Callable[[Tensor], Tensor] = _whole
    ) -> Norm:
        """Return the norm of a gradient or a slice.

        With `take_slice`, `grad` is already the slice. The floor is a fraction of the full tensor's
        mean.
        """
        group, _ = self._params[index]
        state = self._state_of(index)
        count = self._count(index)
        if count < self.WARM_STEPS:
            self._floors.pop(index, None)
            return norm(grad)
        second, factor = _second_moment(group, state, count)
        if grad.layout != torch.strided:
            grad = grad.to_dense()
        # |g / (sqrt(v) * factor + eps)| = |g / (sqrt(v) + eps / factor)| / factor
        eps = group["eps"] / factor
        if take_slice is not _whole:
            second = take_slice(second)
            if grad.is_contiguous():
                second = second.contiguous()
        if grad.is_complex():  # Adam squares the parts separately
            grad = torch.view_as_real(grad)
            second = torch.view_as_real(second)
        floor = self._floor_of(index, state, count)
        # With different strides, blocks in memory order would contain different elements.
        if grad.device.type != "cpu" or second.stride() != grad.stride():
            return norm(grad / second.clamp(min=floor.least).sqrt_().add_(eps)) / factor
        below = floor.least if floor.any_below else None
        pairs = zip(_split_into_blocks(grad), _split_into_blocks(second), strict=True)
        single = second.dtype == torch.float32 and grad.dtype in SINGLE
        smallest_root = math.sqrt(floor.least)
        if single and eps < SMALL * smallest_root:
            shift = 0.0
            if eps > NEGLIGIBLE * smallest_root:
                shift = eps * (2.0 * SHIFT * smallest_root + eps)
            square = sum(self._squares(pairs, below, shift))
        else:
            square = sum(self._squares_by_roots(pairs, below, eps))
        return (math.sqrt(square) if square >= 0.0 else math.nan) / factor

    def _floor_of(self, index: int, state: Mapping[str, Any], count: float) -> MomentFloor:
        if not self.floor:
            return NO_FLOOR
        if self._floor_is_stale(index, state, count):
            known = self._floors.get(index)
            if known is not None:  # keeps `any_below`
                self._floors[index] = known._replace(period=-1)
            self._find_floors()
        return self._floors[index]

    def _find_floors(self) -> None:
        stale: dict[int, tuple[Tensor, int]] = {}
        for index, (group, _) in enumerate(self._params):
            state = self._state_of(index)
            count = self._count(index)
            if count >= self.WARM_STEPS and self._floor_is_stale(index, state, count):
                second = _second_moment(group, state, count)[0]
                if second.is_complex():
                    second = torch.view_as_real(second)
                stale[index] = second, int(count) // self.REFRESH
        sums = _sums_of([second for second, _ in stale.values()])
        device = sums[0].device
        totals: list[float] = torch.stack([each.to(device) for each in sums]).tolist()
        for (index, (second, period)), total in zip(stale.items(), totals, strict=True):
            least = total / max(second.numel(), 1) * self.floor
            # Reading all of v again is only worthwhile if the lower bound may be unnecessary. Each
            # step multiplies v by beta, so elements can fall below the floor in the period.
            known = self._floors.get(index)
            any_below = second.device.type != "cpu" or (known is not None and known.any_below)
            any_below = any_below or bool(second.min() < 2.0 * least)
            self._floors[index] = MomentFloor(period, self.floor, least, any_below)

    def _floor_is_stale(self, index: int, state: Mapping[str, Any], count: float) -> bool:
        known = self._floors.get(index)
        replaced = self._state_was_replaced(index, state["step"])
        now = int(count) // self.REFRESH, self.floor
        return replaced or known is None or (known.period, known.fraction) != now

    def _state_was_replaced(self, index: int, step: Tensor | float) -> bool:
        """Return whether a state dict was loaded since the last call."""
        if self._replica is not None or not isinstance(step, Tensor):
            return False  # a replica creates a count in every step
        before = self._floor_counts.get(index)
        self._floor_counts[index] = step
        return before is not None and before is not step

    def _squares(
        self, pairs: Iterator[tuple[Tensor, Tensor]], least: float | None, shift: float
    ) -> Iterator[float]:
        """Yield g . (g / (max(v, least) + shift)) of each pair of blocks."""
        for block, second in pairs:
            grad = block.float()  # averaged gradients may be in half precision
            out = self._buffer(grad.dtype, grad.numel())
            divisor = second
            if least is not None:
                divisor = torch.clamp_min(divisor, least, out=out)
            if shift:
                divisor = torch.add(divisor, shift, out=out)
            torch.div(grad, divisor, out=out)
            yield float(torch.dot(grad, out))

    def _squares_by_roots(
        self, pairs: Iterator[tuple[Tensor, Tensor]], least: float | None, eps: float
    ) -> Iterator[float]:
        """Yield |g / (sqrt(max(v, least)) + eps)|^2 of each pair of blocks."""
        for grad, second in pairs:
            out = self._buffer(torch.promote_types(second.dtype, torch.float32), grad.numel())
            divisor = second
            if least is not None:
                normal = torch.finfo(out.dtype).tiny
                # clamp_min does not convert to the type of `out`.
                divisor = torch.clamp_min(divisor.to(out.dtype), max(least, normal), out=out)
            torch.div(grad, torch.sqrt(divisor, out=out).add_(eps), out=out)
            yield float(torch.dot(out, out))

    def _buffer(self, dtype: torch.dtype, size: int) -> Tensor:
        if (dtype, size) not in self._buffers:  # cached, because slicing costs an operation
            scratch = self._scratch.setdefault(dtype, torch.empty(BLOCK, dtype=dtype))
            self._buffers[dtype, size] = scratch[:size]
        return self._buffers[dtype, size]


def _norms_of(quotients: Sequence[Quotient]) -> Sequence[Tensor]:
    grads, seconds, leasts, eps, factors = map(list, zip(*quotients, strict=True))
    roots = torch._foreach_clamp_min(seconds, leasts)
    torch._foreach_sqrt_(roots)
    torch._foreach_add_(roots, eps)
    norms = torch._foreach_norm(torch._foreach_div(grads, roots))
    return torch._foreach_div(norms, factors)


def _sums_of(seconds: list[Tensor]) -> Sequence[Tensor]:
    if any(second.device.type != "cpu" for second in seconds):
        return torch._foreach_norm(seconds, 1)  # none is negative
    # On a CPU, the norm takes ten times as long as the sum.
    sums = []
    for second in seconds:
        sums.append(second.sum(dtype=torch.promote_types(second.dtype, torch.float32)))
    return sums


def _split_into_blocks(tensor: Tensor) -> Sequence[Tensor]:
    # Short tensors are frequent, and each operation is costly.
    flat = tensor if tensor.dim() == 1 and tensor.is_contiguous() else flatten(tensor)
    if flat.numel() <= BLOCK:
        return (flat,)
    return flat.split(BLOCK)


def _moment_names(group: ParamGroup) -> tuple[str, ...]:
    if "betas" in group:
        return ("max_exp_avg_sq",) if group.get("amsgrad") else ("exp_avg_sq",)
    return ("square_avg", "grad_avg") if group.get("centered") else ("square_avg",)


def _second_moment(
    group: ParamGroup, state: Mapping[str, Any], count: float
) -> tuple[Tensor, Tensor | float]:
    """Return the running mean of squares, and the root's bias correction."""
    second, *means = (state[name] for name in _moment_names(group))
    for mean in means:  # of a centered RMSprop
        second = torch.addcmul(second, mean, mean, value=-1)
    if "betas" not in group:
        return second, 1.0
    beta = group["betas"][1]
    if isinstance(beta, Tensor):  # possibly on a device: avoid a synchronization
        return second, torch.as_tensor(1.0 - beta**count).rsqrt()
    return second, _bias_correction(beta, count)


@lru_cache(maxsize=64)  # parameters of a group share it, and each is measured twice per step
def _bias_correction(beta: float, step: float) -> float:
    corrected = 1.0 - beta ** torch.tensor(step)  # float32, as in adaptdl
    return 1.0 / math.sqrt(float(corrected))


class ReplicatedDTensorState:
    """Full copies of sharded second moments, on every rank."""

    def __init__(self, optimizer: Optimizer, names: Sequence[str]) -> None:
        self._optimizer = optimizer
        self._names = list(names)
        self._memory: dict[tuple[Tensor, str], Tensor] = {}
        self._ranks: dict[tuple[DeviceMesh, int], RankGroup] = {}  # by mesh and dimension
        self.state: dict[Tensor, dict[str, Any]] = {}

    @torch.no_grad()
    def update(self) -> None:
        """Collect the current state. Called on every rank."""
        sharded_state = self._optimizer.state
        params = params_of(self._optimizer.param_groups)
        self.state = {}
        # The shards in a message have equal dtypes and groups of ranks.
        messages: dict[_MessageKind, list[tuple[Tensor, DTensorShards]]] = defaultdict(list)
        for param in params:
            if "step" not in sharded_state.get(param, {}):
                continue
            if not is_dtensor(param):
                self.state[param] = sharded_state[param]
                continue
            # Even a rank with an empty shard has made a step.
            self.state[param] = {"step": local_shard(sharded_state[param]["step"])}
            share = DTensorShards.of(param)
            for name in self._names:
                shard = local_shard(sharded_state[param][name])
                messages[name, share.mesh, share.mesh_dim, shard.dtype].append((param, share))
        for (name, *_), shares in messages.items():
            for message in in_groups(shares, lambda each: _numel(*each, 0), MESSAGE):
                self._collect(name, message)

    def _collect(self, name: str, shares: Sequence[tuple[Tensor, DTensorShards]]) -> None:
        own = [local_shard(self._optimizer.state[param][name]).reshape(-1) for param, _ in shares]
        ranks = self._ranks_of(shares[0][1])
        # Rank 0 has the longest shards, as in torch.chunk.
        section = sum(_numel(param, share, 0) for param, share in shares)
        table = own[0].new_zeros(ranks.size, section)
        torch.cat(own, out=table[ranks.rank, : sum(map(len, own))])
        stops = range(0, table.numel() + 1, section)
        works = ranks.all_gather_slices(table.view(-1), stops)
        with Range("manyhands::wait all_gather"):
            for work in works:
                work.wait()
        for rank, row in enumerate(table):
            start = 0
            for param, share in shares:
                size = _numel(param, share, rank)
                if (param, name) not in self._memory:
                    self._memory[param, name] = row.new_empty(param.shape)
                whole = self._memory[param, name]
                self.state[param][name] = whole
                # A view, because the shard may be cut in any dimension.
                target = share.of_rank(rank).narrow(whole)
                target.copy_(row[start : start + size].view(target.shape))
                start += size

    def _ranks_of(self, share: DTensorShards) -> RankGroup:
        if share.mesh_dim is None:
            return RankGroup()
        key = share.mesh, share.mesh_dim
        if key not in self._ranks:
            self._ranks[key] = RankGroup.of(share.mesh.get_group(share.mesh_dim))
        return self._ranks[key]


def _numel(param: Tensor, share: DTensorShards, rank: int) -> int:
    part = share.of_rank(rank)
    return param.numel() // max(param.size(part.dim), 1) * part.length


# -- when the batch changes ------------------------------------------------------------------------


@torch.no_grad()
def rescale_second_moments(optimizer: Optimizer, ratio: float) -> bool:
    """Multiply the second moments in an optimizer's state; return whether any exist.

    First moments are multiplied by the root of the ratio, which preserves the update m / sqrt(v).
    Otherwise, repeated increases of the batch would divide the noise of earlier batches by smaller
    and smaller roots, and updates would grow.
    """
    names = {"exp_avg_sq", "max_exp_avg_sq"}
    if isinstance(optimizer, RMSprop):
        names.add("square_avg")
    centered: set[int] = set()  # excluded: v must not fall below the square of the mean
    for group in optimizer.param_groups:
        if group.get("centered"):
            centered.update(map(id, group["params"]))
    found = False
    for param, state in optimizer.state.items():
        for name in names & state.keys():
            if isinstance(state[name], Tensor) and id(param) not in centered:
                state[name].mul_(ratio)
                found = True
        if "exp_avg_sq" in state and isinstance(state.get("exp_avg"), Tensor):
            state["exp_avg"].mul_(math.sqrt(ratio))
    return found
