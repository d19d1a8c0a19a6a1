"""Step unsharded tensors of sharded parameters, each tensor on a single rank.

Each tensor has an *owner* rank. A step, in order

    gradients    every rank sends a shard of a gradient to the tensor's owner
    step         `optim`, an instance of the user's optimizer class, steps the tensors of this rank
    parameters   the owner sends a shard of the new tensor to every rank

Between steps, owners store tensors and optimizer state. If shards have changed otherwise, for
example by loading a checkpoint, ranks send them to the owners again.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT, StateDict

from manyhands._optimizers.optimizers import choose_layout
from manyhands._optimizers.state_parts import (
    OptimizerStatePart,
    ReplicatedState,
    options_of,
)
from manyhands._optimizers.wrappers import ParamGroup, params_of
from manyhands._ranks.agreement import agree
from manyhands._ranks.ranks import RankGroup, rank_group_of
from manyhands._tensors.flat import DTensorShards, deal_out, in_groups, is_dtensor, local_shard
from manyhands._tensors.profiler import Range
from manyhands.sharding._agreement import (
    ADVICE,
    GroupLike,
    facts_of_groups,
)
from manyhands.sharding._divided import DividedOptimizer, check_params_and_class

BUCKET = 2**24  # elements sent together
TAG = 28_103  # of messages between ranks; unlikely in users' code
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


class WholeTensorOptimizer(DividedOptimizer):
    """An optimizer for parameters sharded by `FSDP` that steps unsharded tensors.

    >>> import torch, manyhands as mh
    >>> model = mh.FSDP(torch.nn.Linear(4, 4, bias=False))
    >>> optimizer = mh.WholeTensorOptimizer(model.parameters(), optim=torch.optim.Muon, lr=0.02)
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> optimizer.step()

    Muon, Shampoo, LAMB and Adafactor give different results on slices of a matrix. Here each matrix
    has an owner rank, which receives the full gradient, takes the step, and sends shards to all
    ranks. Results equal the plain optimizer's. Elementwise optimizers, such as AdamW, do not need
    this class.

    Each of N ranks stores 1/N of the optimizer's state, with a second 1/N of the parameters. Use
    `save` and `load` for checkpoints. An optimizer with estimates over all parameters (Prodigy)
    only uses the parameters that a rank owns.

    Args:
        params: parameters, or parameter groups, of a sharded model.
        optim: class of the optimizer.
        group: the ranks; default: the ranks that the parameters are sharded over.
        **defaults: arguments of `optim`.

    Attributes:
        optim: the optimizer of the tensors that this rank owns.
        group: the ranks that share a copy of the model; None: all.
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
        self._inner: Any = None
        super().__init__(params, {})
        given = params_of(self.param_groups)
        self._workers = _ranks_of_copy(given) or rank_group_of(given, group)
        self.group = self._workers.group
        _check_sharded(given, self._workers)
        self._load = [0] * self._workers.size
        self._tensors: list[OwnedTensor] = []
        if self._workers.size > 1:  # raises if the optimizer combines all parameters
            options = [{**defaults, **options_of(group)} for group in self.param_groups]
            choose_layout(optim, None, options)
        facts = {"values of optim": optim.__name__, **facts_of_groups(self.param_groups)}
        agree(self._workers, facts, ADVICE)
        self._inner = self._make([self._take_in(group) for group in self.param_groups])
        self._adopt_options()

    @property
    def optim(self) -> Any:
        """The optimizer of the tensors that this rank owns."""
        return self._inner

    # -- parameters --------------------------------------------------------------------------------

    def _take_in_last_group(self) -> None:
        raise RuntimeError(
            "WholeTensorOptimizer has no add_param_group. Pass all parameter groups to the "
            "constructor, or make a second WholeTensorOptimizer."
        )

    def _take_in(self, group: ParamGroup) -> ParamGroup:
        """Assign owners; return the group with this rank's tensors."""
        if self._workers.size == 1:
            return dict(group)
        params = group["params"]
        owners = deal_out([(n, param.numel()) for n, param in enumerate(params)], self._load)
        tensors = []
        for number, param in enumerate(params):
            sizes = []
            if owners[number] == self._workers.rank:
                shards = DTensorShards.of(param)
                row = param.numel() // max(param.size(0), 1)
                sizes = [shards.of_rank(rank).length * row for rank in range(shards.workers)]
            tensors.append(OwnedTensor(param, owners[number], sizes))
        self._tensors += tensors
        self._refresh(tensors)
        return {**options_of(group), "params": [p.whole for p in tensors if p.whole is not None]}

    # -- a step ------------------------------------------------------------------------------------

    @torch.no_grad()
    def _step(self, **kwargs: Any) -> None:
        tensors = self._tensors
        # Whether each tensor has a gradient; the last flag: whether a shard was changed.
        flags = [tensor.param.grad is not None for tensor in tensors]
        seen = [tensor.seen for tensor in tensors]
        flags.append(fingerprints([tensor.param for tensor in tensors]) != seen)
        anywhere = torch.tensor(flags, dtype=torch.uint8, device=self._workers.any_device)
        *trained, changed = self._workers.all_reduce(anywhere, largest=True).tolist()
        if changed:
            self._refresh(tensors)
        moved = [tensor for tensor, has in zip(tensors, trained, strict=True) if has]
        grads = []
        for tensor in moved:
            grad = torch.zeros_like(local_shard(tensor.param))
            if tensor.param.grad is not None:
                grad = local_shard(tensor.param.grad).to(grad.dtype)
            grads.append(grad)
        for tensor, grad in self._to_owners(moved, grads):
            assert tensor.whole is not None
            tensor.whole.grad = grad
        try:
            self.optim.step(**kwargs)
        finally:
            for tensor in moved:
                if tensor.whole is not None:
                    tensor.whole.grad = None
            # Also after a failed step, because other ranks wait.
            self._to_shards(moved)

    @torch.no_grad()
    def _refresh(self, tensors: Sequence[OwnedTensor]) -> None:
        shards = [local_shard(tensor.param) for tensor in tensors]
        for tensor, whole in self._to_owners(tensors, shards):
            if tensor.whole is None:
                tensor.whole = nn.Parameter(whole, requires_grad=tensor.param.requires_grad)
            else:
                tensor.whole.copy_(whole)
        _remember(tensors)

    # Each shard is sent to a single rank: with N ranks, 1/N of the bytes of an all-gather.

    def _to_owners(
        self, tensors: Sequence[OwnedTensor], shards: Sequence[Tensor]
    ) -> list[tuple[OwnedTensor, Tensor]]:
        found = []
        for bucket in _buckets(tensors):
            outgoing: dict[int, list[Tensor]] = {}
            mine = []
            for tensor, shard in zip(tensors[bucket], shards[bucket], strict=True):
                outgoing.setdefault(tensor.owner, []).append(shard.reshape(-1))
                if tensor.owner == self._workers.rank:
                    mine.append(tensor)
            sizes: dict[int, list[int]] = {}
            if mine:
                for rank in range(self._workers.size):
                    sizes[rank] = [tensor.sizes[rank] for tensor in mine]
            pieces = self._exchange(outgoing, sizes, shards[bucket][0])
            for number, tensor in enumerate(mine):
                rows = [pieces[rank][number] for rank in range(self._workers.size)]
                found.append((tensor, torch.cat(rows).view(tensor.param.shape)))
        return found

    def _to_shards(self, tensors: Sequence[OwnedTensor]) -> None:
        for bucket in _buckets(tensors):
            outgoing: dict[int, list[Tensor]] = {}
            sizes: dict[int, list[int]] = {}
            for tensor in tensors[bucket]:
                like = local_shard(tensor.param)
                sizes.setdefault(tensor.owner, []).append(like.numel())
                if tensor.whole is not None:
                    parts = tensor.whole.detach().view(-1).split(tensor.sizes)
                    for rank, part in enumerate(parts):
                        outgoing.setdefault(rank, []).append(part)
            pieces = self._exchange(outgoing, sizes, like)
            arrived = {rank: iter(parts) for rank, parts in pieces.items()}
            for tensor in tensors[bucket]:
                shard = local_shard(tensor.param)
                shard.copy_(next(arrived[tensor.owner]).view(shard.shape))
        _remember(tensors)

    def _exchange(
        self, outgoing: Mapping[int, list[Tensor]], sizes: Mapping[int, list[int]], like: Tensor
    ) -> dict[int, list[Tensor]]:
        """Send flat tensors to each rank; return the tensors from each rank, of `sizes` elements.

        Tensors for the same rank are returned unchanged.
        """
        own = self._workers.rank
        nothing = torch.empty(0, dtype=torch.uint8, device=like.device)
        messages = [nothing] * self._workers.size
        for rank, tensors in outgoing.items():
            if rank != own:
                messages[rank] = torch.cat(tensors).view(torch.uint8)
        expected = [0] * self._workers.size
        for rank, elements in sizes.items():
            if rank != own:
                expected[rank] = sum(elements) * like.element_size()
        arrived, works = self._workers.all_to_all(messages, expected, TAG)
        with Range("manyhands::wait all_to_all"):
            for work in works:
                work.wait()
        pieces = {own: outgoing.get(own, [])}
        for rank, elements in sizes.items():
            if rank != own:
                pieces[rank] = list(arrived[rank].view(like.dtype).split(elements))
        return pieces

    # -- for checkpoints and scaling: `_optimizers/state_parts.py` ---------------------------------

    def join_in(self) -> None:
        """Do nothing: `FSDP` averages the gradients in backward."""

    def prepare(self) -> None:
        """Do nothing: the next step detects changed shards."""

    def save_parts(self, *, include_empty: bool) -> tuple[list[OptimizerStatePart], StateDict]:
        """Return the state of the tensors that this rank owns, and the state dict of `optim`."""
        packed = self.optim.state_dict()
        parts = []
        number = 0
        for index, tensor in enumerate(self._tensors):
            if tensor.whole is None:
                continue
            state = packed["state"].get(number, {})
            part = OptimizerStatePart(
                tensor.param, state, index=index, number=number, shard=tensor.whole
            )
            if include_empty or not part.empty:
                parts.append(part)
            number += 1
        return parts, packed

    def replicate_state(self, names: Sequence[str]) -> ReplicatedState:
        """Raise: no rank has these entries for all parameters, and no rank has slices."""
        raise TypeError(
            "AdamScale needs no whole tensors: pass the parameters of FullyShardedDataParallel "
            "directly to Adam, without WholeTensorOptimizer."
        )

    def state_dict(self) -> StateDict:
        """Return the plain optimizer's state dict, on a single rank. On several, use `save`."""
        if self._workers.size > 1:
            raise RuntimeError("each rank has a part of the state. Save it with mh.save().")
        return super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the plain optimizer's state dict, on a single rank. On several, use `load`."""
        if self._workers.size > 1:
            raise RuntimeError("each rank has a part of the state. Load it with mh.load().")
        self.load_parts(dict(state_dict))

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("WholeTensorOptimizer cannot be copied or pickled. Save with mh.save().")


# -- checks ----------------------------------------------------------------------------------------


def _ranks_of_copy(params: Sequence[Tensor]) -> RankGroup | None:
    meshes = {param.device_mesh for param in params if is_dtensor(param)}
    if len(meshes) != 1:
        return None
    mesh = meshes.pop()
    return RankGroup.of_mesh(mesh).shards if mesh.ndim == 2 else None


def _check_sharded(params: Sequence[Tensor], ranks: RankGroup) -> None:
    """Raise a TypeError unless the parameters are sharded over the ranks by rows."""
    if ranks.size == 1:
        return
    for param in params:
        shards = DTensorShards.of(param) if is_dtensor(param) else None
        if shards is None or shards.mesh_dim != shards.mesh.ndim - 1 or shards.own.dim:
            raise TypeError(
                "WholeTensorOptimizer needs parameters that are sharded by rows over one dimension "
                f"of ranks; a parameter of shape {tuple(param.shape)} is not. Wrap the model first "
                "(mh.FSDP), or use mh.OSS, which divides whole parameters among the ranks."
            )


@dataclass
class OwnedTensor:
    param: Tensor  # the DTensor
    owner: int
    sizes: Sequence[int]  # elements of each rank's shard; empty except on the owner
    whole: nn.Parameter | None = None  # on the owner
    seen: int | None = None  # fingerprint of the shard that the owner knows


def fingerprints(params: Sequence[Tensor]) -> list[int]:
    """Return a number for each shard, from the bits and the order of rows."""
    # torch's version counters ignore changes through `param.data`.
    if not params:
        return []
    found = []
    for param in params:
        shard = local_shard(param).detach()
        number = torch.zeros((), dtype=torch.int64, device=shard.device)
        if shard.numel():
            integers = INTEGERS.get(shard.element_size(), torch.int64)
            rows = shard.reshape(len(shard), -1).view(integers).sum(dim=1, dtype=torch.int64)
            number = (rows * torch.arange(1, 2 * len(rows), 2, device=rows.device)).sum()
        found.append(number)
    return torch.stack(found).tolist()


def _remember(tensors: Sequence[OwnedTensor]) -> None:
    for tensor, seen in zip(tensors, fingerprints([t.param for t in tensors]), strict=True):
        tensor.seen = seen


def _buckets(tensors: Sequence[OwnedTensor]) -> list[slice]:
    return bucket_ranges([(tensor.param.dtype, tensor.param.numel()) for tensor in tensors])


def bucket_ranges(tensors: Sequence[tuple[Hashable, int]]) -> list[slice]:
    """Return ranges of consecutive tensors of equal kind, with about `BUCKET` elements.

    A tensor is a pair: kind, number of elements.
    """
    ranges = []
    start = 0
    for _, alike in groupby(tensors, itemgetter(0)):
        for group in in_groups(alike, itemgetter(1), BUCKET):
            ranges.append(slice(start, start + len(group)))
            start += len(group)
    return ranges
