"""Sharded tensors: which part of a tensor is on this rank?

**DTensors** are torch's, as `fully_shard` makes parameters. A DTensor has the whole tensor's shape;
`to_local()` is this rank's shard. Its *mesh* arranges the ranks in one dimension, or in two (HSDP:
shards and their replicas). For each dimension of the mesh a *placement* says what its ranks do with
the tensor: `Shard(dim)` cuts it, `Replicate()` gives every rank the same. Importing
torch.distributed.tensor takes half a second. So it is looked up in `sys.modules` and not imported:
as long as nobody has imported it, there are no DTensors.

**A `ShardedGradient`** is what `param.grad` is after a sharded backward. It has the parameter's
shape and no memory of its own. Behind it are

    slices   this rank's elements of the mean gradient: flat tensors, one per bucket
    starts   where in the flat parameter each of them begins
    local    gradients of this rank that have not been averaged yet (after `no_sync()`, or
             while a backward adds to what an earlier one left)

Operations that act on each element alone act on the slices. Any other operation, such as a norm,
would be of this rank's shard and not of the gradient: it raises, and says what to call instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

aten = torch.ops.aten


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Return whether this is a DTensor, without importing torch.distributed.tensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_shard(tensor: Tensor) -> Tensor:
    """Return what this rank holds: a DTensor's shard, or the whole of any other tensor."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():  # or else to_local() is recorded by autograd
        return tensor.to_local()


@dataclass(frozen=True)
class DimRange:
    """Indices `start` to `start + length` of one dimension of a tensor."""

    dim: int
    start: int
    length: int

    def narrow(self, whole: Tensor) -> Tensor:
        """Return a view of this range of the whole tensor."""
        return whole.narrow(self.dim, self.start, self.length)

    def flat_start(self, whole: Tensor) -> int:
        """Return where the range begins in the flat tensor, if it is cut in its first dimension."""
        return self.start * (whole.numel() // whole.size(0)) if self.start and not self.dim else 0


@dataclass(frozen=True)
class DTensorShards:
    """Which rank holds what of a DTensor that is sharded in one dimension at most."""

    mesh: DeviceMesh
    mesh_dim: int | None  # the dimension whose ranks hold different shards; None: nothing is cut
    ranges: tuple[DimRange, ...]  # by rank in that dimension of the mesh
    rank: int
    first_replica: bool  # True on exactly one of the ranks that hold the same shard

    @classmethod
    def of(cls, tensor: DTensor) -> DTensorShards:
        """Read a DTensor's placements; raise a ValueError if they are not of the known kinds."""
        from torch.distributed.tensor import Replicate, Shard

        mesh, placements = tensor.device_mesh, tensor.placements
        # `type(...) is`: strided shards, of tensor parallelism, are a class derived from Shard.
        cutting = [(d, p) for d, p in enumerate(placements) if type(p) is Shard]
        others = [d for d, p in enumerate(placements) if type(p) is not Shard]
        if len(cutting) > 1 or any(type(placements[d]) is not Replicate for d in others):
            raise ValueError(
                f"gradients placed as {placements} are not measured. Scaling works over "
                "fully_shard on a mesh of one dimension, or two (shards and their replicas): "
                "parameters cut by one Shard placement, without tensor parallelism."
            )
        coordinate = mesh.get_coordinate()
        assert coordinate is not None  # a rank outside of the mesh has none, and no DTensor of it
        first = all(coordinate[d] == 0 for d in others)
        if not cutting:
            everything = DimRange(0, 0, tensor.size(0) if tensor.dim() else 1)
            return cls(mesh, None, (everything,), 0, first)
        mesh_dim, placement = cutting[0]
        dim, workers = placement.dim, mesh.size(mesh_dim)
        size = tensor.size(dim)
        step = -(-size // workers)  # as torch.chunk: the last shards are shorter, or empty
        starts = [min(rank * step, size) for rank in range(workers + 1)]
        ranges = [DimRange(dim, a, b - a) for a, b in pairwise(starts)]
        return cls(mesh, mesh_dim, tuple(ranges), coordinate[mesh_dim], first)

    @property
    def own(self) -> DimRange:
        """This rank's range."""
        return self.ranges[self.rank]


class ShardedGradient(Tensor):
    """Stands in `param.grad` for a gradient that is sharded over the ranks."""

    slices: tuple[Tensor, ...]
    starts: tuple[int, ...]
    local: Tensor | None
    zeroed: bool  # by `zero_grad(set_to_none=False)`, and not added to since

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        param: Tensor,
        pieces: Sequence[Tensor],
        starts: Sequence[int],
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> ShardedGradient:
        # A wrapper has a type, a shape and a version, and no storage.
        shell: ShardedGradient = Tensor._make_wrapper_subclass(
            cls,
            param.size(),
            strides=param.stride(),
            dtype=dtype or param.dtype,
            device=device or param.device,
        )
        shell.slices, shell.starts = tuple(pieces), tuple(starts)
        shell.local, shell.zeroed = None, False
        return shell

    def parts(self) -> list[Tensor]:
        """Return all tensors that this rank holds of the gradient."""
        return [*self.slices, *([] if self.local is None else [self.local])]

    def twin(
        self,
        change: Callable[[Tensor], Tensor],
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> ShardedGradient:
        """Return a copy with each tensor changed, perhaps to another dtype and device."""
        pieces = [change(piece) for piece in self.slices]
        other = ShardedGradient(self, pieces, self.starts, dtype, device)
        other.local = None if self.local is None else change(self.local)
        return other

    def __repr__(self) -> str:  # type: ignore[override]
        held = sum(piece.numel() for piece in self.slices)
        return f"ShardedGradient(shape={tuple(self.shape)}, {held} of {self.numel()} elements here)"

    def __deepcopy__(self, memo: dict[int, object]) -> ShardedGradient:
        memo[id(self)] = copied = self.twin(Tensor.clone)
        return copied

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        packet, kwargs = func.overloadpacket, kwargs or {}
        first = args[0] if args else None
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
            if packet is aten._to_copy:
                to = kwargs.get("dtype"), kwargs.get("device")
                return first.twin(lambda part: func(part, **kwargs), *to)
        if packet in FOREACH and not any(map(_is_large, args[1:])):
            _each(func, args, kwargs)
            return None
        raise RuntimeError(
            f"{packet.__name__} needs the whole gradient, and this one is sharded over the "
            "workers. To clip, call optimizer.clip_grad_norm(max_norm); for loss scaling, use "
            "ShardedGradScaler. This worker's elements are in grad.slices."
        )

    def _added(self, other: Tensor, alpha: object) -> ShardedGradient:
        """Add the next backward's gradient, as autograd does; it is averaged later."""
        self.zeroed = False
        if isinstance(other, ShardedGradient):
            if alpha != 1 or len(other.slices) != len(self.slices) or other.local is not None:
                raise RuntimeError("only whole sharded gradients of one parameter can be added.")
            for mine, theirs in zip(self.slices, other.slices, strict=True):
                mine.add_(theirs)
        elif other.shape != self.shape or alpha != 1:
            raise RuntimeError(
                "a number or another tensor cannot be added to a sharded gradient; change the "
                "gradient in a hook of the parameter, before it is averaged."
            )
        else:
            self.local = other if self.local is None else self.local + other
        return self


ADDING = {aten.add_, aten.add}
ELEMENTWISE = {
    *(aten.mul_, aten.div_, aten.zero_, aten.neg_, aten.nan_to_num_),
    *(aten.clamp_, aten.clamp_min_, aten.clamp_max_),
}
COPYING = {aten.detach, aten.clone, aten.alias}
FOREACH = {aten._foreach_zero_, aten._foreach_mul_, aten._foreach_div_, aten._foreach_neg_}


def _is_large(argument: object) -> bool:
    return isinstance(argument, Tensor) and argument.numel() > 1


def _each(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Apply a foreach operation; an argument that is a list has one element for each gradient."""
    lists = [a if isinstance(a, list | tuple) else None for a in args[1:]]
    for i, grad in enumerate(args[0]):
        own = [a if each is None else [each[i]] for a, each in zip(args[1:], lists, strict=True)]
        parts = grad.parts() if isinstance(grad, ShardedGradient) else [grad]
        for part in parts:
            func([part], *own, **kwargs)
        if isinstance(grad, ShardedGradient) and func.overloadpacket is aten._foreach_zero_:
            grad.zeroed = True


def local_parts(grad: Tensor) -> list[Tensor]:
    """Return the tensors with the elements of a gradient that this rank holds.

    They are slices of a `ShardedGradient`, the shard of a DTensor, or any other gradient itself.
    """
    if isinstance(grad, ShardedGradient):
        return [elements for elements in grad.slices if elements.numel()]
    return [local_shard(grad)]
