"""An optimizer that looks at whole tensors, for parameters that are sharded.

Each tensor has an *owner*, one of the ranks. A step, in order

    gradients    every rank sends its shard of a gradient to the tensor's owner
    step         `optim`, the optimizer that the user asked for, steps the tensors that it owns
    parameters   the owner sends every rank its shard of the new tensor

An owner keeps its tensors between steps, and the optimizer's state with them. If somebody else has
changed the shards, as a loaded checkpoint does, they are sent to the owners again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT, StateDict

from manyhands._optimizers.state_parts import (
    OptimizerStatePart,
    ReplicatedState,
    ShardedOptimizer,
    options_of,
)
from manyhands._optimizers.wrappers import ParamGroup
from manyhands._ranks.agreement import agree, run_on_all
from manyhands._ranks.ranks import RankGroup, rank_group_of
from manyhands._tensors.flat import DTensorShards, is_dtensor, local_shard
from manyhands.sharding._agreement import ADVICE, GroupLike, facts_of_groups, facts_of_options
from manyhands.sharding.zero._layout import deal_out
from manyhands.sharding.zero._slice_optimizer import (
    check_params_and_class,
    choose_layout,
    copy_options,
)

BUCKET = 2**24  # elements of tensors that travel together
TAG = 28_103  # of messages between pairs of ranks; far from the tags that users choose
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


class WholeTensorOptimizer(ShardedOptimizer):
    """An optimizer that looks at whole tensors, for parameters that `FSDP` has sharded.

    >>> import torch, manyhands as mh
    >>> model = mh.FSDP(torch.nn.Linear(4, 4, bias=False))
    >>> optimizer = mh.WholeTensorOptimizer(model.parameters(), optim=torch.optim.Muon, lr=0.02)
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> optimizer.step()

    Muon, Shampoo, LAMB and Adafactor compute other numbers from a slice of a matrix. Here each
    matrix has an owner, which gets the whole gradient, takes the step once for all ranks, and sends
    every rank its shard. The numbers are those of the plain optimizer. Give the parameters of
    element-wise optimizers, such as AdamW, to these themselves: they need nothing of all this.

    Each of N ranks keeps 1/N of the optimizer's state, and another 1/N of the parameters. Save it
    with `save`, and load it with `load`. What an optimizer estimates over all of its parameters
    (Prodigy) is estimated over those that a rank owns.

    Args:
        params: parameters of a model that is sharded already, or groups of them.
        optim: class of the optimizer.
        group: the ranks; by default those that the parameters are sharded over.
        **defaults: the optimizer's own arguments.

    Attributes:
        optim: the optimizer of the tensors that this rank owns.
        group: the ranks that hold one copy of the model; None: all.
    """

    def __init__(
        self,
        params: ParamsT,
        optim: type[Optimizer],
        group: GroupLike | None = None,
        **defaults: object,
    ) -> None:
        check_params_and_class(type(self).__name__, params, optim)
        self.optimizer_class = optim
        self.optimizer_arguments = dict(defaults)
        self._inner: Any = None  # an optimizer, once the constructor's groups are taken in
        super().__init__(params, {})
        given = [param for group in self.param_groups for param in group["params"]]
        self._ranks = _ranks_of_copy(given) or rank_group_of(given, group)
        self.group = self._ranks.group
        _check_sharded(given, self._ranks)
        self._owners = Owners(self._ranks)
        self._tensors: list[list[OwnedTensor]] = []  # by group
        if self._ranks.size > 1:  # raises if the optimizer looks at all parameters together
            options = [{**defaults, **options_of(group)} for group in self.param_groups]
            choose_layout(optim, None, options)
        facts = {"values of optim": optim.__name__, **facts_of_groups(self.param_groups)}
        agree(self._ranks, facts, ADVICE)
        groups = [self._take_in(group) for group in self.param_groups]
        make = partial(optim, groups, **self.optimizer_arguments)
        self._inner = run_on_all(self._ranks, make)
        self.defaults = self._inner.defaults
        # Options that were left out are known only from here on.
        copy_options(self._inner.param_groups, self.param_groups)
        agree(self._ranks, facts_of_options(self.param_groups, self.defaults), ADVICE)

    @property
    def optim(self) -> Any:
        """The optimizer of the tensors that this rank owns."""
        return self._inner

    @property
    def shards_state(self) -> bool:
        """Whether this rank has only a shard of the state, because there are other ranks."""
        return self._ranks.size > 1

    def __repr__(self) -> str:
        groups = super().__repr__().removeprefix(type(self).__name__)
        size = self._ranks.size
        workers = f"{size} worker{'s' if size > 1 else ''}"
        return f"{type(self).__name__} of {self.optimizer_class.__name__} ({workers}){groups}"

    # -- parameters --------------------------------------------------------------------------------

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add parameters, with their own options, as any optimizer does; on every rank."""
        super().add_param_group(param_group)
        if self._inner is None:  # the constructor's groups are taken in together
            return
        added = self.param_groups[-1:]
        number = len(self.param_groups) - 1
        try:
            _check_sharded(added[0]["params"], self._ranks)
            facts = facts_of_groups(added, first=number)
            agree(self._ranks, facts | facts_of_options(added, self.defaults, number), ADVICE)
            owned = self._take_in(added[0])
            # Constructors check what they take, and add_param_group need not: try it out.
            trial = partial(self.optimizer_class, [dict(owned)], **self.optimizer_arguments)
            run_on_all(self._ranks, trial)
            self._inner.add_param_group(owned)
        except Exception:
            self.param_groups.pop()
            del self._tensors[number:], self._inner.param_groups[number:]
            raise
        copy_options(self._inner.param_groups, self.param_groups)

    def _take_in(self, group: ParamGroup) -> ParamGroup:
        """Give parameters their owners; return the group with the tensors that this rank owns."""
        if self._ranks.size == 1:
            self._tensors.append([])
            return dict(group)
        tensors = self._owners.deal_out(group["params"])
        self._tensors.append(tensors)
        self._refresh(tensors)
        return {**options_of(group), "params": [p.whole for p in tensors if p.whole is not None]}

    # -- a step ------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], object] | None = None, **kwargs: Any) -> Any:
        """Step the tensors that this rank owns, and take this rank's shards of the others'.

        A `closure` is called once before, and its loss returned (on a single rank, as the optimizer
        does). Call it on every rank.
        """
        copy_options(self.param_groups, self._inner.param_groups)  # schedules change ours
        if self._ranks.size == 1:
            result = self._inner.step(*([] if closure is None else [closure]), **kwargs)
        else:
            result = None
            if closure is not None:
                with torch.enable_grad():
                    result = closure()
            self._step(**kwargs)
        copy_options(self._inner.param_groups, self.param_groups)
        return result

    @torch.no_grad()
    def _step(self, **kwargs: Any) -> None:
        """Send gradients to the tensors' owners, step there, and send the new rows back."""
        tensors = [tensor for group in self._tensors for tensor in group]
        trained, changed = self._agree_on(tensors)
        if changed:
            self._refresh(tensors)
        moved = [tensor for tensor, has in zip(tensors, trained, strict=True) if has]
        grads = [_local_gradient(tensor.param) for tensor in moved]
        for tensor, grad in zip(moved, self._owners.to_owners(moved, grads), strict=True):
            if tensor.whole is not None:
                tensor.whole.grad = grad
        try:
            self._inner.step(**kwargs)
        finally:
            for tensor in moved:
                if tensor.whole is not None:
                    tensor.whole.grad = None
            # Also if the step has failed here: the other ranks wait for these tensors.
            self._owners.to_shards(moved)

    def _agree_on(self, tensors: Sequence[OwnedTensor]) -> tuple[list[bool], bool]:
        """Return which have a gradient on any rank, and whether any was changed from outside."""
        changed = fingerprints([t.param for t in tensors]) != [t.seen for t in tensors]
        flags = [*(tensor.param.grad is not None for tensor in tensors), changed]
        device = self._ranks.any_device
        known = self._ranks.all_reduce(
            torch.tensor(flags, dtype=torch.uint8, device=device), largest=True
        )
        *trained, changed = map(bool, known.tolist())
        return trained, changed

    def _refresh(self, tensors: Sequence[OwnedTensor]) -> None:
        """Send all shards to the owners of their tensors."""
        with torch.no_grad():
            shards = [local_shard(tensor.param) for tensor in tensors]
            for tensor, whole in zip(tensors, self._owners.to_owners(tensors, shards), strict=True):
                if whole is None:
                    continue
                if tensor.whole is None:
                    tensor.whole = nn.Parameter(whole, requires_grad=tensor.param.requires_grad)
                else:
                    tensor.whole.copy_(whole)
            remember(tensors)

    # -- for checkpoints and scaling: `_optimizers/state_parts.py` ---------------------------------

    def join_in(self) -> None:
        """Do nothing: `FSDP` averages the gradients of all ranks in backward."""

    def prepare(self) -> None:
        """Do nothing: the owners see at the next step which shards have changed."""

    def save_parts(self, *, include_empty: bool) -> tuple[list[OptimizerStatePart], StateDict]:
        """Return the state of the tensors that this rank owns, and the state dict it is in."""
        packed = self._inner.state_dict()
        owned = [
            (index, tensor)
            for index, tensor in enumerate(tensor for group in self._tensors for tensor in group)
            if tensor.whole is not None
        ]
        parts = [
            OptimizerStatePart(
                tensor.param,
                packed["state"].get(number, {}),
                index=index,
                number=number,
                shard=tensor.whole,
            )
            for number, (index, tensor) in enumerate(owned)
        ]
        return [part for part in parts if include_empty or not part.empty], packed

    def load_parts(
        self, packed: StateDict, for_later: dict[int, dict[str, Any]], groups: Sequence[ParamGroup]
    ) -> None:
        """Load the state of the tensors that this rank owns."""
        self._inner.load_state_dict(packed)
        copy_options(groups, self.param_groups)

    def replicate_state(self, names: Sequence[str]) -> ReplicatedState:
        """Raise: no rank has these entries for all parameters, and none of their slices."""
        raise TypeError(
            "AdamScale needs no whole tensors: give Adam the parameters of "
            "FullyShardedDataParallel itself, without WholeTensorOptimizer."
        )

    def state_dict(self) -> StateDict:
        """Return the plain optimizer's state dict, with one rank. With several, use `save`."""
        if self._ranks.size > 1:
            raise RuntimeError("each rank has a part of the state. Save it with mh.save().")
        return super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the plain optimizer's state dict, with one rank. With several, use `load`."""
        if self._ranks.size > 1:
            raise RuntimeError("each rank has a part of the state. Load it with mh.load().")
        self._inner.load_state_dict(dict(state_dict))
        copy_options(self._inner.param_groups, self.param_groups)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("WholeTensorOptimizer is not copied or pickled. Save it with mh.save().")


# -- checks ----------------------------------------------------------------------------------------


def _ranks_of_copy(params: Sequence[Tensor]) -> RankGroup | None:
    """Return the ranks that hold one copy of the parameters, if a mesh has several copies."""
    meshes = {param.device_mesh for param in params if is_dtensor(param)}
    if len(meshes) != 1 or (mesh := meshes.pop()).ndim != 2:
        return None
    return RankGroup.of_mesh(mesh).shards


def _check_sharded(params: Sequence[Tensor], ranks: RankGroup) -> None:
    """Raise a TypeError unless these are sharded over the ranks by rows."""
    if ranks.size == 1:
        return
    for param in params:
        shards = DTensorShards.of(param) if is_dtensor(param) else None
        if shards is None or shards.mesh_dim != shards.mesh.ndim - 1 or shards.own.dim:
            raise TypeError(
                "WholeTensorOptimizer needs parameters that are sharded by rows over one dimension "
                f"of ranks, and one of shape {tuple(param.shape)} is not. Wrap the model first "
                "(mh.FSDP), or use mh.OSS, which divides whole parameters among the ranks."
            )


def _local_gradient(param: Tensor) -> Tensor:
    """Return this rank's shard of a gradient; zeros if other ranks have one and this has none."""
    shard = local_shard(param)
    grad = param.grad
    return torch.zeros_like(shard) if grad is None else local_shard(grad).to(shard.dtype)


# -- owners of tensors, and the messages from shards to them and back ----------------------------

# A shard is sent to one rank only: with N ranks, 1/N of the bytes of an all-gather. Tensors travel
# together, in buckets, in one message between each pair of ranks.


@dataclass
class OwnedTensor:
    """A sharded tensor with its owner, and the rows of it that each rank holds."""

    param: Tensor  # the DTensor
    owner: int
    # By rank: where its rows begin in the flat tensor, and where they end.
    cuts: tuple[tuple[int, int], ...]
    whole: nn.Parameter | None = None  # on the owner
    seen: int | None = None  # the fingerprint of the shard that the owner knows

    def elements(self, rank: int) -> int:
        """Return how many elements a rank holds."""
        start, stop = self.cuts[rank]
        return stop - start


def fingerprints(params: Sequence[Tensor]) -> list[int]:
    """Return a number for each shard, which changes with its bits."""
    # torch's counts of changes are not enough: it does not count those through `param.data`.
    if not params:
        return []
    return torch.stack([_fingerprint(local_shard(param).detach()) for param in params]).tolist()


def _fingerprint(shard: Tensor) -> Tensor:
    """Return a number that changes with a shard's bits, and if two rows are exchanged."""
    if not shard.numel():
        return torch.zeros((), dtype=torch.int64, device=shard.device)
    bits = shard.reshape(shard.size(0), -1).view(INTEGERS.get(shard.element_size(), torch.int64))
    rows = bits.sum(dim=1, dtype=torch.int64)
    weights = torch.arange(1, 2 * len(rows), 2, device=rows.device)
    return (rows * weights).sum()


def remember(tensors: Sequence[OwnedTensor]) -> None:
    """Note that the owners know the shards as they are now."""
    for tensor, seen in zip(tensors, fingerprints([t.param for t in tensors]), strict=True):
        tensor.seen = seen


class Owners:
    """The ranks that a model is sharded over, as owners of its tensors."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self._load = [0] * ranks.size  # elements that each rank owns

    def deal_out(self, params: Sequence[Tensor]) -> list[OwnedTensor]:
        """Give each tensor to the rank that owns the least so far."""
        owners = deal_out([(n, param.numel()) for n, param in enumerate(params)], self._load)
        tensors = []
        for number, param in enumerate(params):
            assert is_dtensor(param)
            row = param.numel() // param.size(0) if param.numel() else 0
            ranges = DTensorShards.of(param).ranges
            cuts = tuple((r.start * row, (r.start + r.length) * row) for r in ranges)
            tensors.append(OwnedTensor(param, owners[number], cuts))
        return tensors

    def to_owners(
        self, tensors: Sequence[OwnedTensor], shards: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Send this rank's shards to the owners; return the whole tensors that this rank owns."""
        own = self._ranks.rank
        result: list[Tensor | None] = []
        for bucket in _buckets(tensors):
            members = tensors[bucket]
            held = [shard.reshape(-1) for shard in shards[bucket]]
            for_owner = [
                [shard for tensor, shard in zip(members, held, strict=True) if tensor.owner == rank]
                for rank in range(self._ranks.size)
            ]
            mine = [tensor for tensor in members if tensor.owner == own]
            sizes = [[tensor.elements(rank) for tensor in mine] for rank in range(self._ranks.size)]
            pieces = self._exchange(for_owner, sizes, held[0])
            wholes = iter([torch.cat(rows) for rows in zip(*pieces, strict=True)])
            for tensor in members:
                owned = tensor.owner == own
                result.append(next(wholes).view(tensor.param.shape) if owned else None)
        return result

    def to_shards(self, tensors: Sequence[OwnedTensor]) -> None:
        """Send the rows of the tensors that this rank owns to the ranks that hold them."""
        own = self._ranks.rank
        for bucket in _buckets(tensors):
            members = tensors[bucket]
            flat = [(p, p.whole.detach().view(-1)) for p in members if p.whole is not None]
            for_rank = [
                [whole[slice(*tensor.cuts[rank])] for tensor, whole in flat]
                for rank in range(self._ranks.size)
            ]
            by_owner = [
                [tensor for tensor in members if tensor.owner == rank]
                for rank in range(self._ranks.size)
            ]
            sizes = [[tensor.elements(own) for tensor in theirs] for theirs in by_owner]
            arrived = self._exchange(for_rank, sizes, local_shard(members[0].param))
            for theirs, rows in zip(by_owner, arrived, strict=True):
                for tensor, values in zip(theirs, rows, strict=True):
                    shard = local_shard(tensor.param)
                    shard.copy_(values.view(shard.shape))
        remember(tensors)

    def _exchange(
        self, outgoing: Sequence[list[Tensor]], sizes: Sequence[Sequence[int]], like: Tensor
    ) -> list[list[Tensor]]:
        """Send each rank its flat tensors; return those from each rank, of `sizes` elements."""
        # What this rank has for itself comes back as it is.
        own = self._ranks.rank
        messages = []
        expected = []
        for rank, (tensors, numbers) in enumerate(zip(outgoing, sizes, strict=True)):
            message = torch.cat(tensors) if tensors and rank != own else like.new_empty(0)
            messages.append(message.view(torch.uint8))
            expected.append(0 if rank == own else sum(numbers) * like.element_size())
        arrived, works = self._ranks.all_to_all(messages, expected, TAG)
        for work in works:
            work.wait()
        return [
            outgoing[own] if rank == own else list(data.view(like.dtype).split(list(numbers)))
            for rank, (data, numbers) in enumerate(zip(arrived, sizes, strict=True))
        ]


def _buckets(tensors: Sequence[OwnedTensor]) -> list[slice]:
    return bucket_ranges([(tensor.param.dtype, tensor.param.numel()) for tensor in tensors])


def bucket_ranges(tensors: Sequence[tuple[Hashable, int]]) -> list[slice]:
    """Return ranges of consecutive tensors of one kind, of about `BUCKET` elements."""
    # A tensor is given as its kind and its elements.
    ranges = []
    start = 0
    total = 0
    for number, (kind, size) in enumerate(tensors):
        if number > start and (kind != tensors[start][0] or total + size > BUCKET):
            ranges.append(slice(start, number))
            start = number
            total = 0
        total += size
    return [*ranges, slice(start, len(tensors))] if tensors else []
