"""`ShardedGradient`: a gradient in `param.grad` with slices on different ranks.

After a sharded backward, `param.grad` has the shape of the parameter and no memory, and refers to

    slices   this rank's elements of the mean gradient: flat tensors, one per bucket
    starts   start of each slice in the flat parameter
    local    gradients of this rank that are not averaged yet (after `no_sync()`, or while a
             backward adds to existing gradients)
    group    the ranks with the remaining slices

Elementwise operations apply to the slices. `all` and `any` are reduced over the ranks immediately.
Norms are `LocalNorm`s. Other operations raise an error that names the correct call.

A `LocalNorm` is the norm of this rank's slices. `torch.nn.utils.clip_grad_norm_` takes the norm of
each gradient, stacks these norms, and takes the norm of the stack. Only the final norm is reduced
over the ranks, where p is the order of the norm and n_i the norm on rank i:

    (sum of n_i^p over the ranks)^(1 / p)        the maximum, if p is infinite

The reduction is a small all_reduce. The result is a plain tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from manyhands._tensors.flat import local_shard

if TYPE_CHECKING:
    from torch._ops import OpOverload
import math
from typing import TypeGuard

import torch.distributed as dist

from manyhands._ranks.presence import RollCall
from manyhands._tensors.flat import norm

aten = torch.ops.aten
NOT_LIKE_IT = (
    "param.grad.data of a sharded gradient takes one that was made from it, such as "
    "param.grad * 2. Assign to param.grad itself to replace it."
)
# Functions that map local norms to local norms.
KEEP_LOCAL = {torch.stack, Tensor.to, Tensor.device.__get__, Tensor.dtype.__get__}  # type: ignore[attr-defined]


class LocalNorm(Tensor):
    """Norms of this rank's slices of gradients, before reduction over the ranks."""

    power: float
    group: Any  # None: this rank has all slices

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Return a local norm if possible; otherwise reduce the arguments."""
        kwargs = kwargs or {}
        norms = list(args[0] if func is torch.stack else args[:1])
        if _can_combine(norms):
            with torch._C.DisableTorchFunctionSubclass():
                if func in KEEP_LOCAL:
                    result = func(*args, **kwargs)
                    if isinstance(result, Tensor):
                        return _as_local_norm(result, norms[0].power, norms[0].group)
                    return result
                if func is torch.linalg.vector_norm and float((*args, 2)[1]) == norms[0].power:
                    # The norm of norms of equal order is the norm of all elements.
                    here = torch.linalg.vector_norm(*args, **kwargs)
                    return norms[0].reduce(here)
        with torch._C.DisableTorchFunctionSubclass():
            args = _reduce_all(args)
            kwargs = _reduce_all(kwargs)
            return func(*args, **kwargs)

    def reduce(self, here: Tensor) -> Tensor:
        """Return the norms over all ranks from the norms of this rank's slices."""
        plain = here.as_subclass(Tensor).clone()
        if self.group is None:
            return plain
        if math.isinf(self.power):
            # A maximum may lose NaN, so reduce a flag for NaN as well.
            is_nan = plain.isnan().to(plain.dtype)
            both = torch.stack([plain.nan_to_num(nan=0.0, posinf=math.inf), is_nan])
            dist.all_reduce(both, dist.ReduceOp.MAX, group=self.group)
            return torch.where(both[1] > 0, math.nan, both[0])
        # float64 avoids overflow and rounding of the power. mps does not support float64.
        wide = plain if plain.device.type == "mps" else plain.double()
        total = wide.pow(self.power)
        dist.all_reduce(total, group=self.group)
        return total.pow(1 / self.power).to(plain.dtype)


def norm_of_slices(slices: Sequence[Tensor], power: float, group: Any) -> LocalNorm:
    norms = [_norm_of_one(each, power) for each in slices]
    here = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), power)
    return _as_local_norm(here, power, group)


def _norm_of_one(elements: Tensor, power: float) -> Tensor:
    if power == 2:
        return norm(elements)  # reads the memory a single time
    if not elements.numel():  # the maximum norm would raise an error
        return elements.new_zeros(())
    return torch.linalg.vector_norm(elements, power)


def _as_local_norm(norms: Tensor, power: float, group: Any) -> LocalNorm:
    if isinstance(norms, FakeTensor):  # in a dry run; cannot become a subclass
        norms = torch.tensor(0.0, dtype=norms.dtype, device=norms.device)
    local_norm = norms.as_subclass(LocalNorm)
    local_norm.power = power
    local_norm.group = group
    return local_norm


def _can_combine(norms: list[Any]) -> TypeGuard[list[LocalNorm]]:
    """Return whether all arguments are norms of equal order and group."""
    for each in norms:
        if not isinstance(each, LocalNorm):
            return False
        if each.power != norms[0].power or each.group != norms[0].group:
            return False
    return bool(norms)


def _reduce_all(value: Any) -> Any:
    if isinstance(value, LocalNorm):
        return value.reduce(value)
    if isinstance(value, list | tuple):
        return type(value)(_reduce_all(v) for v in value)
    if isinstance(value, dict):
        return {k: _reduce_all(v) for k, v in value.items()}
    return value


class ShardedGradient(Tensor):
    """Represents a gradient in `param.grad` that is sharded over the ranks."""

    slices: tuple[Tensor, ...]
    starts: tuple[int, ...]
    local: Tensor | None
    group: Any  # None: this rank has all slices
    zeroed: bool  # by `zero_grad(set_to_none=False)`, without later additions

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        param: Tensor,
        pieces: Sequence[Tensor],
        starts: Sequence[int],
        group: Any,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> ShardedGradient:
        """Create a tensor of the parameter's shape that refers to slices, without memory."""
        shell: ShardedGradient = Tensor._make_wrapper_subclass(
            cls,
            param.size(),
            strides=param.stride(),
            dtype=dtype or param.dtype,
            device=device or param.device,
        )
        shell.slices = tuple(pieces)
        shell.starts = tuple(starts)
        shell.local = None
        shell.group = group
        shell.zeroed = False
        return shell

    @property
    def data(self) -> Tensor:
        """The detached gradient. Assigning a compatible sharded gradient replaces the slices."""
        return self.detach()

    @data.setter
    def data(self, other: Tensor) -> None:
        # torch would replace the memory of the wrapper and not the slices.
        if not (isinstance(other, ShardedGradient) and self.fits(other)) or (
            other.dtype != self.dtype
        ):
            raise RuntimeError(NOT_LIKE_IT)
        self.slices = other.slices
        self.local = other.local
        self.zeroed = other.zeroed

    def parts(self) -> list[Tensor]:
        parts = list(self.slices)
        if self.local is not None:
            parts.append(self.local)
        return parts

    def full_tensor(self) -> Tensor:
        """Return the full averaged gradient on every rank, like `DTensor.full_tensor`."""
        full = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        for start, piece in zip(self.starts, self.slices, strict=True):
            full.view(-1)[start : start + piece.numel()] = piece
        if self.group is not None:
            dist.all_reduce(full, group=self.group)
        return full

    def twin(
        self,
        change: Callable[[Tensor], Tensor],
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> ShardedGradient:
        """Return a copy with a function applied to each tensor."""
        pieces = list(map(change, self.slices))
        other = ShardedGradient(self, pieces, self.starts, self.group, dtype, device)
        if self.local is not None:
            other.local = change(self.local)
        return other

    def fits(self, other: object) -> bool:
        """Return whether an argument has equal slices or a single element."""
        if isinstance(other, ShardedGradient):
            same = other.shape == self.shape and other.starts == self.starts
            return same and len(other.parts()) == len(self.parts())
        return not _is_large(other)

    def mapped(self, func: Callable[..., Tensor], others: Sequence[Any]) -> ShardedGradient:
        done = []
        for number, part in enumerate(self.parts()):
            rest = [o.parts()[number] if isinstance(o, ShardedGradient) else o for o in others]
            done.append(func(part, *rest))
        if not done:  # compute the result's dtype, which must be equal on all ranks
            done = [func(*map(_empty_like, (self, *others)))]
        remaining = iter(done)
        return self.twin(lambda _: next(remaining), done[0].dtype)

    def quantified(self, quantifier: Callable[[Tensor], Tensor]) -> Tensor:
        """Return whether all or any elements are true, over all ranks. Call on every rank."""
        flags = [quantifier(torch.empty(0, device=self.device))]  # neutral element
        flags += map(quantifier, self.parts())
        flag = quantifier(torch.stack(flags))
        if self.group is None:
            return flag
        # Raises an error if a rank is missing.
        call = f"{quantifier.__name__}() of a sharded gradient"
        RollCall(self.group.get_group_store(), self.group.rank(), self.group.size()).wait(call)
        number = flag.to(torch.uint8)
        most = dist.ReduceOp.MIN if quantifier is aten.all else dist.ReduceOp.MAX
        dist.all_reduce(number, most, group=self.group)
        return number.to(torch.bool)

    def __repr__(self) -> str:  # type: ignore[override]
        held = sum(map(Tensor.numel, self.slices))
        return f"ShardedGradient(shape={tuple(self.shape)}, {held} of {self.numel()} elements here)"

    def __deepcopy__(self, memo: dict[int, object]) -> ShardedGradient:
        copied = self.twin(Tensor.clone)
        memo[id(self)] = copied
        return copied

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Run an operation on this rank's slices, or raise if the full gradient is needed."""
        packet = func.overloadpacket
        kwargs = kwargs or {}
        first = args[0] if args else None
        if packet in NORMS and len(args) <= 2 and not kwargs:  # no dim or dtype
            power = float((*args, 2.0)[1])
            if packet is aten.linalg_vector_norm:
                return _norm_of(args[0], power)
            return [_norm_of(each, power) for each in args[0]]
        if isinstance(first, ShardedGradient):
            if packet in ADDING and isinstance(args[1], Tensor):
                target = first if packet is aten.add_ else first.twin(Tensor.detach)
                return target._added(args[1].detach(), kwargs.get("alpha", 1))
            if packet in ELEMENTWISE and not any(map(_is_large, args[1:])):
                for part in first.parts():
                    func(part, *args[1:], **kwargs)
                first.zeroed = first.zeroed or packet is aten.zero_
                return first
            if packet in COPYING:
                return first.twin(lambda part: func(part, **kwargs))
            if packet in BY_ELEMENT and all(map(first.fits, args[1:])):
                return first.mapped(func, args[1:])
            if packet in QUANTIFIERS and len(args) == 1:  # no dim
                return first.quantified(packet)
            if packet is aten._to_copy:
                to = kwargs.get("dtype"), kwargs.get("device")
                return first.twin(lambda part: func(part, **kwargs), *to)
        if packet in FOREACH and not any(map(_is_large, args[1:])):
            _apply_foreach(func, args, kwargs)
            return None
        raise RuntimeError(
            f"{packet.__name__} needs the whole gradient, and this one is sharded over the "
            "workers. Step the optimizer that shard() returned, clip with "
            "torch.nn.utils.clip_grad_norm_, and scale with ShardedGradScaler."
        )

    def local_norm(self, power: float) -> LocalNorm:
        """Return the norm of this rank's slices, for later reduction over the ranks."""
        if self.local is not None:
            raise RuntimeError(
                "Run the last backward of the step outside no_sync(), and clip after it."
            )
        nothing = torch.empty(0, dtype=self.dtype, device=self.device)
        return norm_of_slices(self.slices or [nothing], power, self.group)

    def _added(self, other: Tensor, alpha: object) -> ShardedGradient:
        """Add the gradient of a later backward, like autograd, before averaging."""
        self.zeroed = False
        if isinstance(other, ShardedGradient):
            if alpha != 1 or len(other.slices) != len(self.slices) or other.local is not None:
                raise RuntimeError("only whole sharded gradients of one parameter can be added.")
            for own, added in zip(self.slices, other.slices, strict=True):
                own.add_(added)
        elif other.shape != self.shape or alpha != 1:
            raise RuntimeError("change a gradient in a hook, before it is averaged and sharded.")
        else:
            if self.local is not None:
                other = self.local + other
            self.local = other
        return self


ADDING = {aten.add_, aten.add}
ELEMENTWISE = {
    *(aten.mul_, aten.div_, aten.zero_, aten.neg_, aten.nan_to_num_),
    *(aten.clamp_, aten.clamp_min_, aten.clamp_max_),
}
BY_ELEMENT = {
    *(aten.abs, aten.isnan, aten.isinf, aten.mul, aten.bitwise_and, aten.bitwise_or),
    *(aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge, aten.logical_not, aten.bitwise_not),
}
QUANTIFIERS = {aten.all, aten.any}
COPYING = {aten.detach, aten.clone, aten.alias}
NORMS = {aten.linalg_vector_norm, aten._foreach_norm}
FOREACH = {aten._foreach_zero_, aten._foreach_mul_, aten._foreach_div_, aten._foreach_neg_}


def _norm_of(grad: Tensor, power: float) -> Tensor:
    if isinstance(grad, ShardedGradient):
        return grad.local_norm(power)
    plain: Tensor = torch.linalg.vector_norm(grad, power)
    return plain


def _empty_like(argument: object) -> Any:
    if isinstance(argument, ShardedGradient):
        return torch.empty(0, dtype=argument.dtype, device=argument.device)
    return argument


def _is_large(argument: object) -> bool:
    return isinstance(argument, Tensor) and argument.numel() > 1


def _apply_foreach(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for number, grad in enumerate(args[0]):
        own = [[a[number]] if isinstance(a, list | tuple) else a for a in args[1:]]
        parts = [grad]
        if isinstance(grad, ShardedGradient):
            parts = grad.parts()
            grad.zeroed = grad.zeroed or func.overloadpacket is aten._foreach_zero_
        for part in parts:
            func([part], *own, **kwargs)


def local_parts(grad: Tensor) -> list[Tensor]:
    if isinstance(grad, ShardedGradient):
        return [elements for elements in grad.slices if elements.numel()]
    return [local_shard(grad)]
