"""Convert state between the ranks' slices and the plain optimizer's dict.

An entry of a slice's state has one of three kinds:
    like     a tensor of the slice's shape; the parameter's tensor is joined from all slices
    small    a tensor of up to `SMALL` elements (a step count), equal for all slices
    value    a plain value
If each parameter has a single owner, any other tensor is sent unchanged.

Ranks send names, small tensors and values as text, and large tensors individually: the recipient
needs memory for the full state and an additional tensor.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from manyhands._optimizers.state_parts import (
    OptimizerStatePart,
    SavedState,
    common_state,
    is_elementwise,
    options_of,
)
from manyhands._optimizers.wrappers import params_of
from manyhands._ranks.agreement import run_on_all
from manyhands._tensors.flat import check_own_shards, flatten, unflatten
from manyhands._tensors.profiler import Range
from manyhands.sharding.zero._flat_params import FlatBuffer, ParamSlice, Shards

SMALL = 8  # elements

# An optimizer's entries for a parameter, by name: tensors and other values.
ParamState: TypeAlias = dict[str, Any]
Groups: TypeAlias = Sequence[dict[str, Any]]


def collect_state(shards: Shards, optim: Optimizer, recipient: int) -> dict[int, ParamState] | None:
    """Return the state of every parameter, by index, on the recipient (-1: on every rank)."""
    workers = shards.workers
    if not -1 <= recipient < workers.size:
        raise ValueError(f"recipient_rank must be one of {workers.size} ranks, or -1 for all.")
    if workers.size == 1:
        return None
    here = recipient in (-1, workers.rank)
    if not shards.params:
        return {} if here else None
    held = []
    for slices in shards.slices:
        held += [owned for owned in slices if owned.data in optim.state]
    texts = workers.all_gather_text(run_on_all(workers, partial(_describe, held, optim)))
    result: dict[Any, ParamState] = {}
    for rank, text in enumerate(texts):
        for number, (index, start, stop, entries) in enumerate(json.loads(text)):
            state = result.setdefault(index, {})
            for name, entry in entries.items():
                if "value" in entry:
                    value = entry["value"]
                    if "dtype" in entry:
                        value = torch.tensor(value, dtype=getattr(torch, entry["dtype"]))
                    state.setdefault(name, value)
                else:
                    own = None
                    if rank == workers.rank:
                        own = optim.state[held[number].data][name]
                    tensor = _send_tensor(shards, own, entry, rank, recipient)
                    if tensor is None:
                        continue
                    if not entry["like"]:
                        state[name] = tensor.cpu().clone()
                        continue
                    param = shards.params[index]
                    if name not in state:
                        state[name] = torch.empty_like(param, dtype=tensor.dtype, device="cpu")
                    flatten(state[name], param)[start:stop] = tensor.view(-1)
    if not here:
        return None
    ordered: dict[Any, ParamState] = {index: result[index] for index in sorted(result)}
    # State without a parameter is equal on all ranks.
    for key, value in optim.state.items():
        if not isinstance(key, Tensor):
            ordered[key] = copy.deepcopy(value)
    return ordered


def _send_tensor(
    shards: Shards, own: Tensor | None, entry: Mapping[str, Any], rank: int, recipient: int
) -> Tensor | None:
    """Send a tensor of rank `rank` to the recipient, flat if `like`."""
    workers = shards.workers
    here = recipient in (-1, workers.rank)
    device = shards.params[0].device
    if own is not None:
        tensor = (flatten(own) if entry["like"] else own).contiguous()
        if recipient == rank:
            return tensor
        tensor = tensor.to(device)
    elif here:
        dtype = getattr(torch, entry["dtype"])
        tensor = torch.empty(entry["shape"], dtype=dtype, device=device)
    else:
        return None
    workers.broadcast(tensor, rank, recipient)
    return tensor if here else None


def _describe(held: Sequence[ParamSlice], optim: Optimizer) -> str:
    """Describe the state of slices; for large tensors only dtype and shape."""
    described = []
    for owned in held:
        entries: dict[str, object] = {}
        for name, value in optim.state[owned.data].items():
            if isinstance(value, Tensor):
                entry: dict[str, object] = {"dtype": str(value.dtype).removeprefix("torch.")}
                if value.shape == owned.data.shape and value.dim() > 0:
                    entry |= {"shape": [value.numel()], "like": True}
                elif value.numel() <= SMALL:
                    entry["value"] = value.tolist()
                else:
                    entry |= {"shape": list(value.shape), "like": False}
                entries[name] = entry
            elif value is None or isinstance(value, bool | int | float | str):
                entries[name] = {"value": value}
            else:
                raise TypeError(
                    f"the state of parameter {owned.param} in {type(optim).__name__} has a "
                    f"{type(value).__name__} as {name!r}: only tensors, numbers and strings can "
                    "be collected."
                )
        described.append((owned.param, owned.start, owned.stop, entries))
    return json.dumps(described)


def cut_state_dict(state_dict: SavedState, groups: Groups, shards: Shards) -> StateDict:
    """Return this rank's shard.

    Raise a ValueError on every rank if the dict belongs to different parameters.
    """
    _check_plain_state_dict(state_dict, groups, shards)
    saved = state_dict["state"]
    keys = params_of(state_dict["param_groups"])
    if shards.workers.size == 1:
        return copy.deepcopy(dict(state_dict))
    state: dict[Any, ParamState] = copy.deepcopy(common_state(state_dict))
    inner_groups = []
    count = 0  # the inner optimizer numbers slices, the saved dict parameters
    for index, given in enumerate(state_dict["param_groups"]):
        members = []
        for i in param_indices(groups, index):
            for owned in shards.slices[i]:
                if saved.get(keys[i]):
                    state[count] = slice_state(saved[keys[i]], owned, shards.params[i])
                members.append(count)
                count += 1
        inner_groups.append({**options_of(given), "params": members})
    return {"state": state, "param_groups": inner_groups}


def plain_state_dict(
    collected: Mapping[int, ParamState] | None, groups: Groups, rank: int
) -> StateDict:
    if collected is None:
        raise RuntimeError(
            f"rank {rank} has only its shard of the optimizer's state. Save with "
            "mh.save(folder, model=model, optimizer=optimizer) on every rank. For torch.save, "
            "call consolidate_state_dict() on every rank first, or, if every rank calls "
            "state_dict(), pass gather_state=True to OSS or mh.shard. (With Accelerate, also "
            "use manyhands.integrations.accelerate.prepare.)"
        )
    packed = []
    for index, group in enumerate(groups):
        packed.append({**group, "params": list(param_indices(groups, index))})
    state = {key: copy.copy(entries) for key, entries in collected.items()}
    return {"state": state, "param_groups": packed}


def slice_state(entries: Mapping[str, object], owned: ParamSlice, param: Tensor) -> ParamState:
    state: ParamState = {}
    for name, value in entries.items():
        if isinstance(value, Tensor):
            if is_elementwise(name, value, param) and not owned.whole:
                value = flatten(value, param)[owned.start : owned.stop]
            value = value.clone()
        state[name] = value
    return state


def _check_plain_state_dict(state_dict: SavedState, groups: Groups, shards: Shards) -> None:
    check_own_shards(state_dict["state"], shards.params)
    given = [len(group["params"]) for group in state_dict["param_groups"]]
    needed = [len(group["params"]) for group in groups]
    if given != needed:
        raise ValueError(
            f"the state dict has parameter groups of {given} parameters, and the optimizer has "
            f"groups of {needed}. Build the optimizer from the same groups."
        )
    foreign = [key for key in common_state(state_dict) if str(key).isdigit()]
    if foreign:
        # JSON converts number keys to strings.
        raise ValueError(
            f"the state dict has state for {sorted(foreign, key=str)[:4]}, which is in none of its "
            "parameter groups. Pass the dict as it was saved."
        )
    cut = shards.even and shards.workers.size > 1
    numbers = params_of(state_dict["param_groups"])
    for number, param in zip(numbers, shards.params, strict=True):
        for name, value in state_dict["state"].get(number, {}).items():
            if not isinstance(value, Tensor) or value.shape == param.shape:
                continue
            if value.numel() > SMALL and (cut or value.numel() == param.numel()):
                raise ValueError(
                    f"the state {name!r} of parameter {number} has shape {tuple(value.shape)}, "
                    f"but the parameter has shape {tuple(param.shape)}: the state belongs to a "
                    "different model."
                )


def param_indices(groups: Groups, index: int) -> range:
    first = sum(len(group["params"]) for group in groups[:index])
    return range(first, first + len(groups[index]["params"]))


# -- interface for checkpoints and scaling ---------------------------------------------------------


def slice_parts(packed: SavedState, groups: Groups, shards: Shards) -> Iterator[OptimizerStatePart]:
    # `packed` is the inner optimizer's state dict.
    for index, packed_group in enumerate(packed["param_groups"]):
        slices: list[ParamSlice] = []
        for i in param_indices(groups, index):
            slices += shards.slices[i]
        for owned, number in zip(slices, packed_group["params"], strict=True):
            yield OptimizerStatePart(
                shards.params[owned.param],
                packed["state"].get(number, {}),
                start=None if owned.whole else owned.start,
                index=owned.param,
                number=number,
                shard=owned.data,
            )


class ReplicatedOSSState:
    """Named tensors and step counts from an OSS's state, for every parameter.

    Each name costs memory of the model's size on every rank, and an all_gather of this size. The
    step counts need a host synchronization.
    """

    def __init__(
        self,
        shards: Shards,
        inner_state: Callable[[], Mapping[Tensor, SavedState]],
        names: Sequence[str],
    ) -> None:
        self._shards = shards
        self._inner_state = inner_state
        self._names = list(names)
        # (number of a buffer, entry) -> flat tensor of the entry
        self._memory: dict[tuple[int, str], Tensor] = {}
        self.state: dict[Tensor, dict[str, Any]] = {}

    @torch.no_grad()
    def update(self) -> None:
        """Collect the current state. Call it on every rank."""
        shards = self._shards
        state = self._inner_state()
        # The maximum over ranks is the count.
        steps = torch.zeros(len(shards.params), dtype=torch.float32)
        for slices in shards.slices:
            for owned in slices:
                if owned.data in state:
                    steps[owned.param] = float(state[owned.data]["step"])
        device = shards.params[0].device
        steps = shards.workers.all_reduce(steps.to(device), largest=True).cpu()
        self.state = {p: {"step": n} for p, n in zip(shards.params, steps, strict=True) if n}
        if not self.state:
            return
        # Start all collectives before waiting.
        works: list[dist.Work] = []
        for number, buffer in enumerate(shards.buffers):
            if any(shards.params[i] in self.state for i in buffer.layout.starts):
                for name in self._names:
                    works += self._collect(number, buffer, name, state)
        with Range("manyhands::wait all_gather"):
            for work in works:
                work.wait()

    def _collect(
        self, number: int, buffer: FlatBuffer, name: str, state: Mapping[Tensor, SavedState]
    ) -> list[dist.Work]:
        shards = self._shards
        works: list[dist.Work] = []
        if (number, name) not in self._memory:
            self._memory[number, name] = torch.zeros_like(buffer.data)
        data = self._memory[number, name]
        for bucket in buffer.buckets:
            cuts = bucket.layout.cuts
            start = bucket.layout.start
            whole = data[start : start + bucket.layout.size]
            own = whole[cuts[shards.workers.rank] :]
            for owned, place in bucket.slices:
                if owned.data in state:
                    value = flatten(state[owned.data][name], owned.data)
                    own[place.offset : place.offset + place.size].copy_(value)
            works += shards.workers.all_gather_slices(whole, cuts)
        # Views of the flat memory, filled when the collectives end.
        for index, offset in buffer.layout.starts.items():
            param = shards.params[index]
            if param in self.state:
                self.state[param][name] = unflatten(data[offset : offset + param.numel()], param)
        return works
