"""Save an optimizer's state by parameter name, and load it under any sharding.

`_format.OptimizerMeta` describes an optimizer in the commit. The names of stored tensors show the
entries of each parameter. An entry of the parameter's shape may be split into slices. Other entries
are written by the rank with the parameter's first element. Entries other than tensors are stored as
JSON in a tensor of bytes.

**Replicas.** Under data parallelism all ranks form a single replica with a complete or sharded
optimizer state. In blocks each replica (a rank, or the ranks of a machine) has a separate optimizer
state and scaling rule. With N saved replicas, replica r of a later run loads saved replica r modulo
N.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from manyhands._optimizers.state_parts import (
    BlocksParts,
    OptimizerLayers,
    OptimizerStatePart,
    SavedState,
    ShardedOptimizer,
    StatePart,
    common_state,
    is_elementwise,
    options_of,
    state_parts,
)
from manyhands._optimizers.wrappers import params_of, unwrap
from manyhands._tensors.flat import is_dtensor
from manyhands.checkpoint._commit import parse_json
from manyhands.checkpoint._format import (
    OWN,
    Contents,
    GroupMeta,
    StateMeta,
    memory_of,
)
from manyhands.checkpoint._model import ModelNames
from manyhands.checkpoint._tensor_parts import (
    ALONE,
    Holders,
    Savers,
    TensorParts,
    to_parts,
)
from manyhands.checkpoint._values import (
    GetTensor,
    Json,
    decode,
    encode,
    escape,
    unescape,
)

RESIDUAL = "residual"  # the only entry of blocks that differs between replicas


@dataclass(frozen=True)
class Replica:
    """The replica of this rank among the ranks that save or load together."""

    number: int = 0
    count: int = 1
    leads: bool = True  # whether this rank describes the replica's common state
    layout: tuple[object, ...] = ()  # of this rank's outer state

    @classmethod
    def of(cls, optimizer: Optimizer, savers: Savers) -> Replica:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}. Pass "
                "other objects under a different name: mh.save(path, scaler=scaler)."
            )
        blocks = OptimizerLayers.of(optimizer).blocks
        if blocks is None:
            return cls(leads=savers.rank == 0)
        own = savers.ranks[savers.rank]
        # One rank per replica: the ranks at this rank's place in their replicas.
        peers = [own]
        if savers.size > 1:
            averaging = set(blocks.peers)
            peers = [rank for rank in savers.ranks if rank in averaging]
        layout = (savers.size, savers.rank, *blocks.layout)
        return cls(peers.index(own), len(peers), savers.ranks[0] in peers, layout)

    def key_prefix(self, key: str) -> str:
        """Return the key prefix of tensors that differ between replicas."""
        # The first replica uses the prefix of a run without blocks, which can load it.
        return key if self.number == 0 else f"{key}/replica.{self.number}"


def to_bytes(value: object) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def from_bytes(tensor: Tensor) -> Any:
    return parse_json(memory_of(tensor))


def saved_state(
    tensors: Iterable[str], prefix: str, groups: Sequence[GroupMeta], get: GetTensor
) -> dict[str, dict[str, Json]]:
    state: dict[str, dict[str, Json]] = {}
    for group in groups:
        state |= {name: {} for name in group["names"]}
    for key in tensors:
        entry, _, name = key.removeprefix(f"{prefix}/").partition("/")
        if name not in state or not key.startswith(f"{prefix}/"):
            continue
        if entry.startswith("json."):
            state[name][unescape(entry.removeprefix("json."))] = from_bytes(get(key))
        elif "." not in entry:  # names of entries have no dots: `escape`
            state[name][unescape(entry)] = {"$": "tensor", "key": key}
    return state


def saved_options(groups: Sequence[GroupMeta], get: GetTensor) -> list[dict[str, Any]]:
    return [options_of(decode_dict("options of a group", each["options"], get)) for each in groups]


def saved_rule(meta: StateMeta, get: GetTensor) -> dict[str, Any]:
    state = decode_dict("state of a rule", meta["state"], get)
    if not isinstance(state.get("previous"), dict):
        raise ValueError("the saved state of a rule must have gradients by name.")
    return state


def decode_dict(what: str, meta: Json, get: GetTensor) -> dict[str, Any]:
    value = decode(meta, get)
    if not isinstance(value, dict):
        raise ValueError(f"the saved {what} must be a dict, got {value!r:.80}.")
    return value


def prepare_to_load(optimizers: Iterable[object]) -> None:
    """Let sharded optimizers follow moved or unfrozen parameters. Call it on every rank."""
    for each in optimizers:
        if isinstance(each, Optimizer):
            each = unwrap(each)[-1]
        if isinstance(each, ShardedOptimizer):
            each.prepare()


def group_names(optimizer: Optimizer, names: ModelNames | None) -> list[list[str]]:
    """Return the names of parameters by group, from the model or from the groups."""
    result = []
    for number, group in enumerate(optimizer.param_groups):
        # torch stores names if the optimizer was created from `named_parameters()`.
        members: Any = group.get("param_names")
        if names is not None:
            members = [names.by_id.get(id(param)) for param in group["params"]]
        elif members is None:
            raise ValueError("an optimizer's state needs the model's names. Also pass model=model.")
        if None in members:
            place = members.index(None)
            raise ValueError(
                f"parameter {place} of group {number}, of shape "
                f"{tuple(group['params'][place].shape)}, is not in the model. Create the optimizer "
                "after moving and sharding the model. If no module has the parameter, add it: "
                "model.register_parameter(name, parameter)."
            )
        result.append(members)
    return result


# -- save ------------------------------------------------------------------------------------------


def collect_optimizer(
    optimizer: Optimizer, names: ModelNames | None, number: int, contents: Contents
) -> dict[str, Any]:
    """Add this rank's tensors to the contents. Return the description of the optimizer."""
    savers = contents.savers
    replica = Replica.of(optimizer, savers)
    layers = OptimizerLayers.of(optimizer)
    inner = layers.inner
    groups = group_names(inner, names)
    flat_names = list(chain.from_iterable(groups))
    root = f"optimizer.{number}"
    prefix = replica.key_prefix(root)
    parts, packed = state_parts(inner)
    # Without blocks, all ranks have the state of an unsharded optimizer. If a subset of ranks
    # shards an optimizer, the other subsets have copies.
    everyone = savers if replica.count == 1 else ALONE
    copies = ALONE
    if layers.sharded is not None and everyone.size > 1:
        copies = savers.copies(dist.get_process_group_ranks(layers.sharded.group))
    for part in parts:
        name = flat_names[part.index]
        if layers.sharded is not None:
            # The range with the first element writes entries that belong to all ranges.
            _collect_part(part, name, prefix, contents, copies, not part.start, sharded=True)
        else:
            writes = replica.leads or everyone is savers
            _collect_part(part, name, prefix, contents, everyone, writes)
    blocks: Json = None
    if layers.blocks is not None:
        # Under `root`, not `prefix`: all replicas share the outer state.
        by_id = dict(zip(map(id, params_of(inner.param_groups)), flat_names, strict=True))
        blocks = collect_blocks(layers.blocks, by_id, root, replica, contents)
        contents.own[f"{OWN}layout.{number}"] = to_bytes(replica.layout)
    if not replica.leads:
        return {}
    metas = []
    for i, (members, group) in enumerate(zip(groups, inner.param_groups, strict=True)):
        options = encode(options_of(group), f"{prefix}/options.{i}", contents.put)
        metas.append({"names": members, "options": options})
    rule: Json = None
    if layers.rule is not None:
        state = layers.rule.scaling_state_dict()
        # By name, not position: groups and shardings may have different orders.
        by_name = dict(zip(flat_names, state["previous"], strict=False))
        state["previous"] = {name: grad for name, grad in by_name.items() if grad is not None}
        encoded = encode(state, f"{prefix}/rule", contents.put)
        rule = {"class": type(layers.rule).__name__, "state": encoded}
    other = encode(_other_state(packed, layers), f"{prefix}/other", contents.put)
    meta = {"groups": metas, "other": other, "rule": rule}
    if replica.number:
        contents.put(f"{prefix}/meta", to_bytes(meta))
    return {**meta, "class": layers.class_name, "blocks": blocks, "replicas": replica.count}


def _collect_part(
    part: OptimizerStatePart,
    name: str,
    prefix: str,
    contents: Contents,
    savers: Savers,
    writes: bool,
    sharded: bool = False,
) -> None:
    """Add the state of a parameter, or of a range. `writes`: also entries that are not split."""
    for entry, value in part.entries.items():
        key = f"{prefix}/{escape(entry)}/{name}"
        if not isinstance(value, Tensor):
            if writes:
                put = contents.put if savers.rank == 0 else no_put
                text = to_bytes(encode(value, key, put))
                contents.add(f"{prefix}/json.{escape(entry)}/{name}", to_parts(text, savers))
            continue
        elementwise = is_elementwise(entry, value, part.like)
        if writes or is_dtensor(value) or (sharded and elementwise):
            # For a DTensor, the mesh determines the holders of each shard.
            among = ALONE if sharded and is_dtensor(value) else savers
            if part.start is not None and elementwise:
                slices = TensorParts.from_flat(value, part.param, part.start, among.everyone)
            else:
                slices = to_parts(value, among)
            # A rank may have several ranges of a parameter, which share the key.
            contents.add(key, slices.merge(contents.tensors.pop(key, None)))


def no_put(path: str, _: Tensor) -> str:
    """Do not store the tensor: a different rank does."""
    return path


def _other_state(packed: SavedState, layers: OptimizerLayers) -> dict[str, object]:
    found = dict(packed)
    for ours in ("state", "param_groups", "manyhands"):
        found.pop(ours, None)
    common = common_state(packed)
    if common:
        found["state"] = common
    # The search for layers stops at a foreign wrapper with state. "other" would store the state of
    # layers inside from rank 0 only.
    inside = ""
    if "manyhands" in packed and layers.rule is None:
        inside = "a scaling rule"
    if "blocks" in packed:
        inside = "blocks"
    if inside:
        raise TypeError(
            f"this {type(layers.inner).__name__} contains {inside} and has additional state. Pass "
            "the inner optimizer as optimizer=, and the wrapper's state under a different name."
        )
    return found


# -- blocks ----------------------------------------------------------------------------------------
# All replicas share the outer state: anchor and memories. Each slice is saved once. A codec's
# residual belongs to ranks that round and average together. It loads if the rank's slices have not
# changed; otherwise it starts at zero.


def outer_slices(
    part: StatePart, name: str, root: str, replica: Replica
) -> Iterator[tuple[str, str, TensorParts]]:
    for entry, values in part.entries.items():
        prefix = replica.key_prefix(root) if entry == RESIDUAL else root
        slices = TensorParts.from_flat(values, part.param, part.start or 0)
        yield entry, f"{prefix}/blocks.{entry}/{name}", slices


def collect_blocks(
    blocks: BlocksParts, names: Mapping[int, str], root: str, replica: Replica, contents: Contents
) -> Json:
    """Add this rank's slices of the outer state. Return the common counters as JSON."""
    for part in blocks.outer_parts():
        for entry, key, slices in outer_slices(part, names[id(part.param)], root, replica):
            if entry != RESIDUAL:
                slices.holders = Holders(replica.count, replica.number, "replicas")
            contents.add(key, slices)
    meta = {**blocks.save_counters(), "memories": blocks.memories}
    return encode(meta, f"{root}/blocks", no_put)  # there are no tensors
